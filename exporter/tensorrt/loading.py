"""From a plan file to an engine on the GPU; what cannot be loaded is told apart by its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import EngineError, ForeignEngineError
from . import cuda
from .plan_file import Plan, check_runs_here


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the runtime will not load an engine: its own name for it, our words, and a way out.

    `foreign` says that the engine is sound and would run elsewhere.
    """

    flag: str
    meaning: str
    hint: str
    foreign: bool = False


REASONS = (
    Reason("MALFORMED_ENGINE", "it is damaged, or no engine", "copy it again, or build it again"),
    Reason(
        "VERSION_MISMATCH", "another version built it", "build it again with this version", True
    ),
    Reason(
        "UNSUPPORTED_CC",
        "it is not for this GPU's compute capability",
        "build it again with this GPU's --compute-capability",
        True,
    ),
    Reason("OLD_CUDA_DRIVER", "the NVIDIA driver is too old for it", "update the driver", True),
    Reason("OLD_CUDA_RUNTIME", "the CUDA runtime is too old for it", "install a newer CUDA", True),
    Reason(
        "INSUFFICIENT_GPU_MEMORY",
        "the GPU has too little free memory for it",
        "free some of the GPU's memory, or build with a smaller MAX in --profile",
    ),
    Reason("CUDA_ERROR", "CUDA failed", "`moexport doctor` says what is here"),
)


def reason_of(trt: Any, diagnostics: int) -> Reason | None:
    """Returns the first reason in the runtime's diagnostics, which are bits."""
    for reason in REASONS:
        flag = getattr(trt.EngineInvalidityDiagnostics, reason.flag, None)
        if flag is not None and int(diagnostics) & int(flag):
            return reason
    return None


def collecting_logger(trt: Any) -> Any:
    """Returns a logger that keeps what the runtime reports as errors, in `lines`."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the package carries no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.lines.append(" ".join(message.split()))

    return Logger()


def load_engine(plan: Plan) -> tuple[Any, Any, Any]:
    """Returns the flavour's module, its runtime and the engine; they must live as long as it.

    Raises `ForeignEngineError` for an engine of another version or GPU, `EngineError` for a damaged
    one and where there is no GPU; `MissingExtraError` where the flavour is not installed.
    """
    check_runs_here(plan)
    cuda.check_device()
    trt = plan.flavour.load()
    logger = collecting_logger(trt)
    runtime = trt.Runtime(logger)
    content = plan.path.read_bytes()
    if hasattr(runtime, "get_engine_validity"):
        _check_validity(plan, trt, runtime, content)
    # The lean runtime inside such a plan is code, too; a plan without a record was called trusted.
    if plan.record is None or plan.record.options.get("version_compatible"):
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise unloadable(plan, logger.lines)
    if plan.record is not None and plan.record.options.get("strip_plan"):
        _refit(plan, trt, logger, engine)
    return trt, runtime, engine


def _check_validity(plan: Plan, trt: Any, runtime: Any, content: bytes) -> None:
    validity, diagnostics = runtime.get_engine_validity(content)
    if validity != trt.EngineValidity.INVALID:
        return
    found = reason_of(trt, diagnostics)
    if found is not None:
        kind = ForeignEngineError if found.foreign else EngineError
        raise kind(f"{plan.path}: cannot be loaded: {found.meaning}", hint=found.hint)


def unloadable(plan: Plan, lines: Sequence[str]) -> EngineError:
    """Returns the error for an engine that the runtime does not load, in its words."""
    said = lines[0] if lines else "it did not say why"
    return EngineError(
        f"{plan.path}: {plan.flavour.title} cannot load it: {said}",
        hint=f"build it again here with `moexport build {plan.path.parent}`",
    )


def _refit(plan: Plan, trt: Any, logger: Any, engine: Any) -> None:
    """Puts the bundle's weights into an engine that was built without them."""
    assert plan.record is not None
    graph: Path = plan.path.parent / plan.record.graph
    if not graph.is_file():
        raise EngineError(
            f"{plan.path}: built with --strip-plan: its weights are in {graph.name}, which is not "
            "beside it",
            hint="keep the bundle together, or build without --strip-plan",
        )
    refitter = trt.Refitter(engine, logger)
    parsed = trt.OnnxParserRefitter(refitter, logger).refit_from_file(str(graph))
    if not parsed or not refitter.refit_cuda_engine():
        raise unloadable(plan, logger.lines)
