"""Runs an exported graph in OpenVINO, and checks what its devices support."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.environment import cpu_instructions, versions
from ...common.libraries import without_telemetry
from ...errors import EngineError, MissingExtraError, UsageError, install
from ...exporter.bundle.manifest import GraphFacts, Manifest
from ...exporter.inputs import Inputs
from ...exporter.session import Session, SessionOptions, described
from ...graphs.targets import Precision, Target, runtime_of
from .request import OpenVinoOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import openvino

OPENVINO = "openvino"

OLDEST = (2026, 0)
"""The first version that was tested."""

DEVICES = {"cpu": "CPU", "gpu": "GPU", "npu": "NPU"}
"""OpenVINO's devices by the names that the command line uses."""

CAPABILITIES: Mapping[str, str] = {"bf16": "BF16", "fp16": "FP16"}
"""The capability that a device needs for each precision."""

PRODUCTS = ("FullyConnected", "MatMul", "Convolution", "GatherMatmul")
"""OpenVINO's names for the layers of a compiled graph that compute matrix products."""


class OpenVinoSession(Session):
    """An exported graph, compiled by OpenVINO for a device.

    It computes in the types of the graph, whereas OpenVINO's default computes FP32, even the choice
    of experts, in BF16 if the CPU supports it. With the option `streams`, calls from several
    threads run in parallel.
    """

    def __init__(self, path: Path | str, options: SessionOptions | None = None) -> None:
        import onnx
        from google.protobuf.message import DecodeError

        self.path = path = Path(path)
        self.options = options or SessionOptions(runtime=OPENVINO)
        try:
            graph = onnx.load(path, load_external_data=False)
        except (DecodeError, OSError) as error:
            raise EngineError(
                f"OpenVINO cannot load {path.name}: it is not an ONNX graph ({error})",
                hint="`moexport verify` checks whether the bundle is damaged",
            ) from error
        self._compiled = _compile(path, self.options)
        outputs = dict.fromkeys(value.name for value in graph.graph.output)
        outputs |= dict.fromkeys(self.options.observe or ())
        self.describe(described(graph), [*outputs], GraphFacts.of(graph, path.name))
        self._idle: SimpleQueue[openvino.InferRequest] = SimpleQueue()

    @property
    def provider(self) -> str:
        """The name of OpenVINO and the device that runs the graph."""
        return f"OpenVINO {self._compiled.get_property('EXECUTION_DEVICES')[0]}"

    @property
    def computed_in(self) -> str:
        """The types in which the compiled graph computes matrix products: `f32`, or `f32, u8`."""
        types = {kind for _, kind in self.products()}
        return ", ".join(sorted(types)) or "f32"

    def products(self) -> list[tuple[str, str]]:
        """Returns the nodes and the type of each matrix product in the compiled graph."""
        infos = (op.get_rt_info() for op in self._compiled.get_runtime_model().get_ordered_ops())
        return [
            (str(info["originalLayersNames"].value), str(info["runtimePrecision"].value).lower())
            for info in infos
            if str(info["layerType"].value) in PRODUCTS
        ]

    def call(self, wanted: Sequence[str], feeds: Mapping[str, Any]) -> list[np.ndarray]:
        """Returns the values of outputs, as in `Session.call`."""
        with self._request() as request:
            return _infer(request, feeds, wanted)

    def errors(self) -> tuple[type[Exception], ...]:
        """Returns the exceptions that the runtime raises if a run fails."""
        return (RuntimeError,)

    def failure(self, error: Exception) -> tuple[str, str]:
        """Returns the name of the runtime and the message of its error."""
        return "OpenVINO", _message(error)

    def bound(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> Callable[[], list[np.ndarray]]:
        """Returns the runtime's own call with a batch x bound, as `Session.bound` does."""
        return partial(_infer, self._compiled.create_infer_request(), self.feeds(x, k), outputs)

    def bound_values(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> Callable[[], list[Any]]:
        """Returns the runtime's own call, whose results are not copied."""
        request, feeds = self._compiled.create_infer_request(), self.feeds(x, k)
        return partial(_infer, request, feeds, outputs or self.output_names, shared=True)

    @contextmanager
    def _request(self) -> Iterator[openvino.InferRequest]:
        """Yields a request that no other thread uses."""
        try:
            request = self._idle.get_nowait()
        except Empty:
            request = self._compiled.create_infer_request()
        try:
            yield request
        finally:
            self._idle.put(request)


def _infer(
    request: openvino.InferRequest,
    feeds: Mapping[str, np.ndarray],
    outputs: Sequence[str] | None,
    *,
    shared: bool = False,
) -> list[np.ndarray]:
    results = request.infer(feeds, share_inputs=True, share_outputs=shared)
    return [results[0]] if outputs is None else [results[name] for name in outputs]


MIN_BYTES = 20_000_000
"""For weights of at least this size, BF16 in OpenVINO is predicted to be faster than FP32 in ONNX
Runtime: calls of OpenVINO have about 0.07 ms more overhead, but products of that size gain more
(docs/performance.md). In the same precision, neither runtime is predicted to be faster."""


def advice(target: str, precision: str, weights_bytes: int) -> str | None:
    """Returns advice to use OpenVINO if it is installed and likely faster than a target."""
    bf16 = _instruction(_FOR_BF16)
    applies = target in ("onnx", "ort-cpu") and precision == "fp32" and bf16 is not None
    if not applies or weights_bytes < MIN_BYTES or importlib.util.find_spec("openvino") is None:
        return None
    return (
        f"OpenVINO is installed and this CPU has {bf16}: --target openvino --precision bf16 is "
        "likely faster for a graph of this size; `moexport tune --target ort-cpu,openvino` "
        "measures both"
    )


def check_graphs(manifest: Manifest, where: Path) -> None:
    """Raises `UsageError` for a bundle whose graphs OpenVINO computes wrongly."""
    if runtime_of(manifest.target) != OPENVINO and manifest.target != "onnx":
        raise UsageError(
            f"{where} was exported for {manifest.target}, not for OpenVINO",
            hint="export with --target openvino",
        )


def check_device(device: str) -> None:
    """Raises `MissingExtraError` or `UsageError` if OpenVINO or its device is missing."""
    runtime = openvino_package()
    available = {name.partition(".")[0] for name in runtime.Core().available_devices}
    if DEVICES.get(device, device) not in available:
        listed = ", ".join(sorted(name.lower() for name in available))
        raise UsageError(
            f"--device {device}: OpenVINO finds no such device on this machine",
            hint=f"it finds {listed}; an Intel GPU or NPU needs its driver",
        )


def check_computes(precision: Precision, target: Target) -> None:
    """Raises `MissingExtraError` or `UsageError` if no local device computes in a precision."""
    check_device("cpu")
    wanted = CAPABILITIES.get(precision)
    if wanted is None:
        return
    if wanted not in openvino_package().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise UsageError(
            f"--precision {precision} for --target {target}: OpenVINO's CPU computes it in "
            "FP32 on this machine",
            hint="int8 is fast on every CPU; --no-verify writes the graph for another machine",
        )


def openvino_package() -> Any:
    """Returns the package; raises `MissingExtraError` if it is missing or too old."""
    check_package()
    with without_telemetry("openvino_telemetry"):
        import openvino

    return openvino


def check_package() -> None:
    """Raises `MissingExtraError` if OpenVINO is missing or too old; does not import it."""
    if importlib.util.find_spec("openvino") is None:
        raise MissingExtraError("OpenVINO is not installed", hint=install("openvino"))
    version = versions(("openvino",)).get("openvino", "")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingExtraError(
            f"OpenVINO {version} is too old: {oldest} is the oldest supported version",
            hint=install("openvino"),
        )


def instructions() -> str:
    """Describes what this CPU's instructions mean for the choice of a precision."""
    bf16, int8 = _instruction(_FOR_BF16), _instruction(_FOR_INT8)
    words = [
        f"{bf16}: bf16 is faster than fp32" if bf16 else "no BF16 instructions: bf16 is no faster",
        f"{int8}: int8 is fastest" if int8 else "no VNNI: int8 gains little",
    ]
    return "; ".join(words)


def _instruction(titles: Mapping[str, str]) -> str | None:
    """Returns the title of the first of these instructions that this CPU has, or None."""
    flags = cpu_instructions()
    return next((title for flag, title in titles.items() if flag in flags), None)


_FOR_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "bf16": "BF16"}
_FOR_INT8 = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "i8mm": "I8MM",
}


def _compile(path: Path, options: SessionOptions) -> openvino.CompiledModel:
    runtime = openvino_package()
    own = OpenVinoOptions(**options.of_plugins)
    check_device(own.device)
    device = DEVICES[own.device]
    settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "EXECUTION_MODE_HINT": "ACCURACY"}
    if device == "CPU":
        settings["INFERENCE_PRECISION_HINT"] = "f32"  # BF16 and INT8 nodes keep their types
        if options.threads is not None:
            settings["INFERENCE_NUM_THREADS"] = int(options.threads)
    if own.streams is not None:
        settings["NUM_STREAMS"] = int(own.streams)
    if own.cache is not None:
        settings["CACHE_DIR"] = str(own.cache)
    core = runtime.Core()
    try:
        graph = core.read_model(path)
        if graph.is_dynamic():
            if any(op.get_type_name() == "If" for op in graph.get_ops()):
                raise EngineError(
                    f"{path.name}: OpenVINO computes `If` wrongly if the batch is dynamic",
                    hint="use a --lowering other than conditional, or export with a fixed --batch",
                )
            if device == "NPU":
                raise EngineError(
                    f"{path.name}: OpenVINO's NPU supports only graphs of fixed sizes",
                    hint="export with a fixed --batch (and --tokens), and --lowering dense",
                )
        graph = _with_float_io(graph)
        present = {name for output in graph.outputs for name in output.names}
        graph.add_outputs([value for value in options.observe or () if value not in present])
        return core.compile_model(graph, device, settings)
    except RuntimeError as error:
        raise EngineError(
            f"OpenVINO cannot load {path.name}: {_message(error)}",
            hint="try another --lowering; `dense` needs the fewest operators",
        ) from error


def _with_float_io(graph: openvino.Model) -> openvino.Model:
    """Replaces BF16 inputs and outputs by FP32, because numpy has no BF16."""
    values_of = {"input": graph.inputs, "output": graph.outputs}
    bf16 = [
        (kind, index)
        for kind, values in values_of.items()
        for index, value in enumerate(values)
        if value.element_type == openvino_package().Type.bf16
    ]
    if not bf16:
        return graph
    changed = openvino_package().preprocess.PrePostProcessor(graph)
    for kind, index in bf16:
        getattr(changed, kind)(index).tensor().set_element_type(openvino_package().Type.f32)
    return changed.build()


def _message(error: Exception) -> str:
    """Returns the message of OpenVINO's error, without locations in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    messages = [s for s in lines if not re.match(r"(Exception from|Check .* failed at) ", s)]
    return " ".join(messages) or (lines or [type(error).__name__])[-1]
