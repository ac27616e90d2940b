"""Loads a plan file that is trusted (`trust.py`) and was built for this machine."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...common.documents import from_data, read_document
from ...common.text import parse_size
from ...errors import (
    BundleError,
    EngineError,
    ForeignEngineError,
    MissingExtraError,
    UntrustedEngineError,
)
from . import cuda
from .backends import first_gpu
from .build import OUT_OF_MEMORY
from .options import AUTO
from .trust import PlanFile, find_plan, trusted_content
from .worker import Product


def check_runs_here(plan: PlanFile) -> None:
    """Raises `ForeignEngineError` for an engine of another version or GPU, before it is loaded.

    Such an engine is intact; the message names the version or GPUs that run it.
    """
    gpu = first_gpu()
    if gpu is not None:
        plan.backend.check_serves(gpu)
    # The module's own version; a package's may differ from it (8.6.1.post1 contains 8.6.1).
    installed = str(plan.backend.load().__version__)
    record = plan.record
    if record is None:
        return
    if record.version != installed and not record.options.get("version_compatible"):
        raise ForeignEngineError(
            f"{plan.path} was built by {plan.backend.title} {record.version}, but {installed} is "
            "installed; an engine runs only in the version that built it",
            hint=f"build it again here with `moexport build {plan.path.parent}`, or in a "
            f"separate environment: {plan.backend.install_version(f'=={record.version}')}",
        )
    if gpu is None or record.options.get("hardware_compatible"):
        return
    # TensorRT's engines run on the GPU of their build, TensorRT-RTX's on all selected GPUs.
    if gpu.compute_capability not in record.compute_capabilities:
        option = "--compute-capability" if plan.backend.cards else "--hardware-compatible"
        raise ForeignEngineError(
            f"{plan.path} was built for {record.device or 'cards'} of compute capability "
            f"{', '.join(record.compute_capabilities)}, but this machine has {gpu.name} "
            f"({gpu.compute_capability})",
            hint=f"build it again here with `moexport build {plan.path.parent}`; {option} builds "
            "an engine for several GPUs",
        )


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why the runtime refuses an engine: its name in the runtime, a message, and a remedy.

    With `foreign`, the engine is intact and would run elsewhere.
    """

    flag: str
    meaning: str
    hint: str
    foreign: bool = False


REASONS = (
    Reason(
        "MALFORMED_ENGINE", "it is damaged, or not an engine", "copy it again, or build it again"
    ),
    Reason(
        "VERSION_MISMATCH", "another version built it", "build it again with this version", True
    ),
    Reason(
        "UNSUPPORTED_CC",
        "it is not for this GPU's compute capability",
        "build it again with this GPU's --compute-capability",
        True,
    ),
    Reason(
        "OLD_CUDA_DRIVER", "the NVIDIA driver is too old for it", f"update it: {cuda.NEEDED}", True
    ),
    Reason(
        "OLD_CUDA_RUNTIME",
        "the CUDA runtime is too old for it",
        f"install the wheels of the newer CUDA: {cuda.NEEDED}",
        True,
    ),
    Reason(
        "INSUFFICIENT_GPU_MEMORY",
        "the GPU has too little free memory for it",
        "free some of the GPU's memory, or build with a smaller MAX in --profile",
    ),
    Reason("CUDA_ERROR", "CUDA failed", "`moexport doctor` shows what is installed"),
)


def reason_of(trt: Any, diagnostics: int) -> Reason | None:
    """Returns the first reason in the runtime's diagnostics, which are bit flags."""
    for reason in REASONS:
        flag = getattr(trt.EngineInvalidityDiagnostics, reason.flag, None)
        if flag is not None and int(diagnostics) & int(flag):
            return reason
    return None


@functools.cache
def collecting_logger(trt: Any) -> Any:
    """Returns the logger that collects a backend's errors in `lines`.

    TensorRT keeps the first logger of a process, and uses it even after its engine is closed, so it
    is never released.
    """

    class Logger(trt.ILogger):  # type: ignore[misc]  # the package has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.lines.append(" ".join(message.split()))

    return Logger()


def load_engine(plan: PlanFile, *, host_weights: bool = False) -> tuple[Any, Any, Any]:
    """Returns the backend's module, its runtime and the engine, which the runtime must outlive.

    With `host_weights`, weights that are inputs of the engine stay off the GPU. Raises
    `ForeignEngineError` for an engine of another version or GPU, `UntrustedEngineError` for one
    that was built elsewhere, `MissingExtraError` if the backend is not installed, and `EngineError`
    for a damaged engine, without a GPU, or if TensorRT refuses the budget of streamed weights.
    """
    check_runs_here(plan)
    cuda.check_device()
    content = trusted_content(plan)
    trt = plan.backend.load()
    logger = collecting_logger(trt)
    logger.lines.clear()
    runtime = trt.Runtime(logger)
    if hasattr(runtime, "get_engine_validity"):
        validity, diagnostics = runtime.get_engine_validity(content)
        reason = reason_of(trt, diagnostics)
        if validity == trt.EngineValidity.INVALID and reason is not None:
            kind = ForeignEngineError if reason.foreign else EngineError
            raise kind(f"{plan.path}: cannot be loaded: {reason.meaning}", hint=reason.hint)
    # The lean runtime in a version-compatible plan is also code; a plan without a record is
    # trusted explicitly.
    if plan.record is None or plan.record.options.get("version_compatible"):
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise unloadable(plan, logger.lines)
    if plan.record is not None and plan.record.options.get("strip_plan"):
        _refit(plan, trt, logger, engine)
    if plan.record is not None and plan.record.options.get("weight_streaming"):
        bound = 0 if host_weights else sum(weight["nbytes"] for weight in plan.record.bound)
        _stream_weights(plan, engine, bound, logger.lines)
    return trt, runtime, engine


RESERVED_BYTES = 512 << 20
"""GPU memory that streamed weights leave free for inputs, outputs, kernels and CUDA graphs."""


def streaming_budget(streamable: int, free: int, context: int, bound: int = 0) -> int:
    """Returns how many of an engine's `streamable` bytes of weights fit on the GPU.

    With all weights streamed, `free` is the GPU's free memory and `context` the size of the
    execution context. `bound` is the size of the engine's bound weights on the GPU.
    """
    return min(streamable, max(0, free - context - bound - RESERVED_BYTES))


def _stream_weights(plan: PlanFile, engine: Any, bound: int, lines: Sequence[str]) -> None:
    """Sets how many bytes of weights are on the GPU; the engine must not have a context yet.

    TensorRT's own `get_weight_streaming_automatic_budget` fails above 2 GiB: its Python binding
    returns 32 bits. The setter ignores refusals, so the value is read back.
    """
    assert plan.record is not None
    setting = str(plan.record.options["weight_streaming"])
    if setting == AUTO:
        _set_budget(plan, engine, 0, lines)
        free, _ = cuda.call("cudaMemGetInfo")
        # The context's memory includes the buffer through which weights are streamed.
        context = int(engine.device_memory_size_v2)
        budget = streaming_budget(int(engine.streamable_weights_size), free, context, bound)
    else:
        budget = min(parse_size(setting, "weight_streaming"), int(engine.streamable_weights_size))
    _set_budget(plan, engine, budget, lines)


def _set_budget(plan: PlanFile, engine: Any, budget: int, lines: Sequence[str]) -> None:
    engine.weight_streaming_budget_v2 = budget
    actual = int(engine.weight_streaming_budget_v2)
    if actual != budget:
        detail = f": {lines[-1]}" if lines else ""
        raise EngineError(
            f"{plan.path}: {plan.backend.title} should keep {budget} bytes of weights on the "
            f"GPU, but it keeps {actual}{detail}",
            hint="build it again with fewer bytes in --weight-streaming, or free the GPU's memory",
        )


def unloadable(plan: PlanFile, lines: Sequence[str]) -> EngineError:
    detail = lines[0] if lines else "no reason was given"
    out_of_memory = any(re.search(rf"{OUT_OF_MEMORY}|cudaErrorMemory", line) for line in lines)
    return EngineError(
        f"{plan.path}: {plan.backend.title} cannot load it: {detail}",
        hint="free some of the GPU's memory (nvidia-smi), or build it with --weight-streaming auto"
        if out_of_memory
        else f"build it again here with `moexport build {plan.path.parent}`",
    )


def _refit(plan: PlanFile, trt: Any, logger: Any, engine: Any) -> None:
    """Loads the bundle's weights into an engine that was built without them."""
    assert plan.record is not None
    graph: Path = plan.path.parent / plan.record.graph
    if not graph.is_file():
        raise EngineError(
            f"{plan.path} was built with --strip-plan: its weights are in {graph.name}, which "
            "is missing from its folder",
            hint="keep the bundle together, or build without --strip-plan",
        )
    refitter = trt.Refitter(engine, logger)
    parsed = trt.OnnxParserRefitter(refitter, logger).refit_from_file(str(graph))
    if not parsed or not refitter.refit_cuda_engine():
        raise unloadable(plan, logger.lines)


def engine_facts(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Returns the facts of an engine as plain data.

    `read_from` is the source of the facts: the engine (which needs a GPU), its record, or the
    file's header. On a machine with a GPU, `not_loaded` tells why the engine was not loaded. Raises
    what `find_plan` raises, and `EngineError` for a damaged engine.
    """
    plan = find_plan(path, trust=trust)
    facts: dict[str, Any] = {
        "file": str(path),
        "flavour": plan.backend.name,
        "bytes": path.stat().st_size,
        "version": plan.version,
        "read_from": "header",
    }
    if plan.record is not None:
        facts |= asdict(plan.record) | {"file": str(path), "read_from": "record"}
        listed = _listing(path.parent / plan.record.layers)
        facts["layers"] = [asdict(layer) for layer in listed]
    if first_gpu() is not None:
        try:
            trt, _runtime, engine = load_engine(plan)
            report = engine.create_engine_inspector().get_engine_information(
                trt.LayerInformationFormat.JSON
            )
            facts |= {"inspector": json.loads(report), "read_from": "engine"}
        except (ForeignEngineError, MissingExtraError, UntrustedEngineError) as error:
            facts["not_loaded"] = error.message
    return facts


def _listing(path: Path) -> list[Product]:
    try:
        content = read_document(path, "json", BundleError)
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be read ({error})", hint="build the engine again"
        ) from error
    return from_data(_Listing, content, path, error=BundleError).layers


@dataclass(frozen=True, slots=True)
class _Listing:
    layers: list[Product]
