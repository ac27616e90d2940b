"""The process that compiles an engine via Polygraphy's loaders, which support both TensorRTs.

It reads a request from stdin and writes events to stdout. If TensorRT crashes or memory runs out,
only this process ends. The network is always strongly typed: its precision is that of the graph.
TF32 is off unless requested. Options are read back from the builder's configuration, because some
versions silently drop an option or lower its value.

An engine without weights is built with `REFIT_IDENTICAL`, never `REFIT`: NVIDIA's page on refitting
(TensorRT 11.3.0, "Refitting an Engine") states that `REFIT` may drop the bias of a matrix product,
but `REFIT_IDENTICAL` does not; `STRIP_PLAN` implies the latter (`BuilderFlag`, 1.7.1).
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ...common.environment import peak_memory_bytes
from .backends import BACKENDS

PER_MILLE = 1000


def main() -> None:
    # Native code's output on stdout must not mix with the events.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(kind: str, **content: Any) -> None:
        print(json.dumps({"event": kind, **content}), file=events, flush=True)

    request = json.loads(sys.stdin.readline())
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if request["flavour"] == "tensorrt-rtx" else "0"
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    errors = ErrorLines()
    try:
        compiled = _build(request, send, errors, stop)
    except MemoryError:
        send("failed", lines=[*errors.lines, "MemoryError"])
    except Exception as error:  # noqa: BLE001  the parent explains every failure
        lines = [*errors.lines, " ".join(f"{type(error).__name__}: {error}".split())]
        send("failed", lines=lines)
    else:
        send("built", **asdict(compiled))


def _build(
    request: dict[str, Any], send: Callable[..., None], errors: ErrorLines, stop: threading.Event
) -> Compiled:
    """Compiles the engine and writes it to the requested file; returns the facts of the build."""
    started = time.monotonic()
    import polygraphy.backend.trt as loaders
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.WARNING
    G_LOGGER.use_python_logging_system = True
    G_LOGGER.python_logger.addHandler(errors)
    G_LOGGER.python_logger.propagate = False
    parent = os.getppid()

    def on_step(per_mille: int) -> bool:
        """Reports the progress; returns False after an interrupt, or if the parent has ended."""
        send("step", done=per_mille)
        return not stop.is_set() and os.getppid() == parent

    plan, compiled = compile_engine(loaders, request, on_step)
    with Path(request["output"]).open("wb") as file:
        file.write(memoryview(plan))
    seconds = round(time.monotonic() - started, 3)
    return replace(compiled, seconds=seconds, peak_memory_bytes=peak_memory_bytes())


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product or convolution of a network, and the type in which it is computed."""

    name: str
    kind: str
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The facts of a build: the builder's settings, the network's products, time and memory.

    `inspector` is TensorRT's own report on the engine, or None if no GPU here can load the engine.
    """

    version: str
    settings: dict[str, Any]
    layers: list[Product]
    inspector: dict[str, Any] | None
    seconds: float = 0.0
    peak_memory_bytes: int = 0

    @property
    def precision(self) -> dict[str, int]:
        """The number of layers that compute in each type."""
        return dict(sorted(Counter(product.precision for product in self.layers).items()))


class OptionNotAppliedError(RuntimeError):
    """An option that the builder did not apply."""


def compile_engine(
    loaders: ModuleType, request: Mapping[str, Any], on_step: Callable[[int], bool]
) -> tuple[Any, Compiled]:
    """Returns an engine's bytes, in TensorRT's own buffer, and the facts of its build.

    `on_step` receives the progress in per mille, and returns whether to continue. Raises
    Polygraphy's errors, and `OptionNotAppliedError`.
    """
    trt = importlib.import_module(BACKENDS[request["flavour"]].module)
    network = _network(loaders, trt, request)
    read_back: dict[str, Any] = {}
    if "timing_cache" in request["options"]:
        check_timing_cache(network[0], Path(request["options"]["timing_cache"]))
    config = loaders.PostprocessConfig(
        loaders.CreateConfig(
            profiles=_profiles(loaders, request["profiles"]),
            progress_monitor=_monitor(trt, on_step),
            **config_arguments(trt, request["options"]),
        ),
        lambda builder, network, config: _finish_config(trt, request, config, read_back),
    )
    products = network_products(network[1])
    read_back["outputs"] = [network[1].get_output(i).name for i in range(network[1].num_outputs)]
    read_back["capturable"] = not any(layer.type.name in UNCAPTURABLE for layer in network[1])
    plan = loaders.engine_bytes_from_network(
        network, config, save_timing_cache=request["options"].get("timing_cache")
    )
    return plan, Compiled(
        version=str(trt.__version__),
        settings=read_back,
        layers=products,
        inspector=inspect_plan(trt, plan, loaders.get_trt_logger()) if request["gpu"] else None,
    )


def _network(loaders: ModuleType, trt: Any, request: Mapping[str, Any]) -> Any:
    """Returns the parsed graph; a rewritten one uses the weights file of the original graph."""
    if not request["model"]:
        return loaders.network_from_onnx_path(request["graph"], strongly_typed=True)
    builder, network = loaders.create_network(strongly_typed=True)
    parser = trt.OnnxParser(network, loaders.get_trt_logger())
    if not parser.parse(Path(request["model"]).read_bytes(), request["graph"]):
        errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise RuntimeError(f"Failed to parse ONNX: {'; '.join(errors)}")
    return builder, network, parser


def config_arguments(trt: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of Polygraphy's `CreateConfig` for the given options."""
    arguments: dict[str, Any] = {}
    # Only at this level does the engine inspector show types and ONNX nodes.
    arguments["profiling_verbosity"] = trt.ProfilingVerbosity.DETAILED
    if "workspace" in options:
        arguments["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: options["workspace"]}
    if "optimization_level" in options:
        arguments["builder_optimization_level"] = options["optimization_level"]
    if "timing_cache" in options:
        arguments["load_timing_cache"] = options["timing_cache"]
    if "hardware_compatible" in options:
        level = HARDWARE[options["hardware_compatible"]]
        arguments["hardware_compatibility_level"] = getattr(trt.HardwareCompatibilityLevel, level)
    return arguments


HARDWARE = {"ampere-plus": "AMPERE_PLUS", "same-compute-capability": "SAME_COMPUTE_CAPABILITY"}


def _profiles(loaders: ModuleType, records: list[dict[str, Any]]) -> list[Any]:
    profiles = []
    for record in records:
        profile = loaders.Profile()
        for name, sizes in record.items():  # k is a shape tensor with one element
            profile.add(name, *(tuple(n) if isinstance(n, list) else (n,) for n in sizes))
        profiles.append(profile)
    return profiles


def _monitor(trt: Any, on_step: Callable[[int], bool]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the package has no types
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.progress = BuildProgress()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.progress.start(phase_name, parent_phase, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            self.progress.finish(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return on_step(self.progress.step(phase_name, step))

    return Monitor()


FLAGS = {
    "TF32": "tf32",
    "STRIP_PLAN": "strip_plan",
    "REFIT_IDENTICAL": "strip_plan",
    "VERSION_COMPATIBLE": "version_compatible",
    "WEIGHT_STREAMING": "weight_streaming",
}
"""The builder's flags, each with the option that sets or clears it."""


def _finish_config(
    trt: Any, request: Mapping[str, Any], config: Any, read_back: dict[str, Any]
) -> None:
    """Sets the target GPUs and the flags, and then reads back and compares all settings."""
    options = request["options"]
    wanted = ["CURRENT" if c == "current" else f"SM{c.replace('.', '')}" for c in request["cards"]]
    if wanted:
        config.num_compute_capabilities = len(wanted)
        for index, name in enumerate(wanted):
            config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
        named = [config.get_compute_capability(index).name for index in range(len(wanted))]
        read_back["compute_capabilities"] = named
        _check("compute_capabilities", wanted, named)
    for name, option in FLAGS.items():
        flag, wanted_flag = getattr(trt.BuilderFlag, name), bool(options.get(option))
        (config.set_flag if wanted_flag else config.clear_flag)(flag)
        read_back[name.lower()] = bool(config.get_flag(flag))
        _check(option, wanted_flag, read_back[name.lower()])
    read_back["workspace"] = int(config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE))
    if "workspace" in options and read_back["workspace"] > options["workspace"]:
        _check("workspace", options["workspace"], read_back["workspace"])
    read_back["optimization_level"] = int(config.builder_optimization_level)
    if "optimization_level" in options:
        _check("optimization_level", options["optimization_level"], read_back["optimization_level"])
    if "hardware_compatible" in options:
        level = config.hardware_compatibility_level.name
        read_back["hardware_compatible"] = level
        _check("hardware_compatible", HARDWARE[options["hardware_compatible"]], level)
    read_back["profiles"] = int(config.num_optimization_profiles)
    _check("profiles", len(request["profiles"]), read_back["profiles"])


def _check(name: str, wanted: Any, got: Any) -> None:
    if wanted != got:
        raise OptionNotAppliedError(f"{name}: requested {wanted}, got {got}")


def check_timing_cache(builder: Any, file: Path) -> None:
    """Raises `OptionNotAppliedError` for a file that TensorRT would ignore and overwrite.

    TensorRT treats an unreadable file as an empty one, with a warning.
    """
    from polygraphy import util

    config = builder.create_builder_config()
    with util.LockFile(str(file)):
        content = file.read_bytes() if file.is_file() else b""
    empty = _serialized(config.create_timing_cache(b""))
    timing_cache = config.create_timing_cache(content)
    accepted = timing_cache is not None and config.set_timing_cache(timing_cache, False)
    if not accepted or (content not in (b"", empty) and _serialized(timing_cache) == empty):
        raise OptionNotAppliedError(
            f"timing_cache: {file} is damaged, or was made for another GPU or TensorRT version"
        )


def _serialized(timing_cache: Any) -> bytes:
    with timing_cache.serialize() as buffer:
        return bytes(buffer)


UNCAPTURABLE = ("CONDITION", "TRIP_LIMIT", "NON_ZERO", "NMS")
"""Layers whose work cannot be recorded as a CUDA graph: control flow, and data-dependent sizes
(NVIDIA's release notes of TensorRT-RTX 1.2 on `isStreamCapturable`)."""

COMPUTING = ("MATRIX_MULTIPLY", "CONVOLUTION", "DECONVOLUTION", "EINSUM", "ATTENTION_INPUT")
"""Layers whose types are reported as a network's precision."""

MOVING = ("SHUFFLE", "GATHER", "SLICE", "CONDITIONAL_INPUT", "IDENTITY")
"""Layers that move values without changing them."""

PRECISIONS = {
    "FLOAT": "fp32",
    "HALF": "fp16",
    "BF16": "bf16",
    "INT8": "int8",
    "FP8": "fp8",
    "INT4": "int4",
    "INT32": "int32",
    "INT64": "int64",
}


def network_products(network: Any) -> list[Product]:
    """Returns the network's products and convolutions, each with the type in which it is computed.

    The network is strongly typed, so these are the engine's types: a builder may fuse layers, but
    not change their types. A product of dequantised values has their stored type as its type; with
    a Gather in between, only the inspector on a GPU shows whether its kernel multiplies integers.
    """
    stored = {}  # the type from which each tensor was dequantised
    for layer in network:
        if layer.type.name == "DEQUANTIZE":
            name = layer.get_input(0).dtype.name
            stored[layer.get_output(0).name] = PRECISIONS.get(name, name.lower())
    for layer in network:  # then the layers that only move dequantised values
        if layer.type.name in MOVING and layer.get_input(0).name in stored:
            origin = stored[layer.get_input(0).name]
            stored.update({layer.get_output(i).name: origin for i in range(layer.num_outputs)})
    products = []
    for layer in network:
        if layer.type.name not in COMPUTING:
            continue
        inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
        inputs = [tensor for tensor in inputs if tensor is not None]
        types = {PRECISIONS.get(t.dtype.name, t.dtype.name.lower()) for t in inputs[:2]}
        sources = {stored.get(t.name) for t in inputs[:2]}
        # 4-bit weights are multiplied by floats; with 8 bits, both factors have the same type.
        source = "int4" if "int4" in sources else sources.pop() if len(sources) == 1 else None
        precision = source or "+".join(sorted(types))
        products.append(Product(name=layer.name, kind=layer.type.name.lower(), precision=precision))
    return products


def inspect_plan(trt: Any, plan: Any, logger: Any) -> dict[str, Any] | None:
    """Returns the inspector's report on an engine; None if the engine is for other GPUs.

    The result is empty if the report is not JSON, as the network's types also prove the precision.
    """
    runtime = trt.Runtime(logger)  # the builder's logger, which collects the messages
    if hasattr(runtime, "get_engine_validity"):
        validity, _ = runtime.get_engine_validity(plan)
        if validity == trt.EngineValidity.INVALID:
            return None
    runtime.engine_host_code_allowed = True  # for version-compatible engines; it was built here
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise RuntimeError("the engine that was just built cannot be loaded")
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return parse_report(text)


def parse_report(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


class BuildProgress:
    """The finished part of a tree of phases, in per mille; it never decreases."""

    def __init__(self) -> None:
        self._phases: dict[str, list[Any]] = {}  # name: parent, steps, steps done
        self._highest = 0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Begins a phase of `steps` steps, within the current step of its parent."""
        self._phases[name] = [parent, max(1, steps), 0]

    def step(self, name: str, step: int) -> int:
        """Finishes a step of a phase; returns the finished part of the tree."""
        if name in self._phases:
            self._phases[name][2] = step + 1
        self._highest = max(self._highest, int(PER_MILLE * min(1.0, self._done(name))))
        return self._highest

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)

    def _done(self, name: str, inner: float = 0.0) -> float:
        if name not in self._phases:
            return 0.0
        parent, steps, done = self._phases[name]
        share = min(1.0, (done + inner) / steps)
        return share if parent is None else self._done(parent, share)


NOISE = ("Thread context has not been set",)
"""Harmless messages that TensorRT logs as errors."""


class ErrorLines(logging.Handler):
    """Collects the errors of TensorRT and Polygraphy."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if not any(words in text for words in NOISE):
            self.lines.append(text)


if __name__ == "__main__":
    main()
