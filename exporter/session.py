"""Runs an exported graph in ONNX Runtime: numpy in, numpy out."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..common.registry import left_out
from ..errors import BundleError, EngineError, FeedError, UsageError, install
from ..graphs.names import K_INPUT
from ..graphs.targets import CPU_PROVIDER, CUDA_PROVIDER, Runtime, runtime_names
from .bundle.manifest import METADATA, GraphFacts, TensorSpec
from .inputs import WHOLE, Inputs, check_array, check_given, completed

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from ..common.onnx_runtime import ort

CPU, CUDA = CPU_PROVIDER, CUDA_PROVIDER

TENSORRT = "TensorrtExecutionProvider"

PROVIDERS = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT}
"""Execution providers by the names that the command line and results use."""

CUDA_MAJOR = 13
"""What onnxruntime-gpu is linked with from 1.31 on (`libcudart.so.13` in its CUDA provider)."""

NO_KLEIDIAI = ("mlas.disable_kleidiai", "1")
"""On ARM its products of INT4 weights round what they multiply row by row, not block by block: 2.5
to 5 times the error where some channels are large."""

AS_STORED = (
    ("session.disable_prepacking", "1"),
    ("optimization.constant_folding_max_output_size_in_bytes", str(1 << 20)),
    ("optimization.disable_specified_optimizers", "FuseFp16InitializerToFp32NodeTransformer"),
)
"""The runtime keeps no copy of weights: neither packed ones, nor those in FP32 of a graph that
casts FP16 ones to it."""

PROVIDER_OPTIONS = {CUDA: {"use_tf32": "0"}}
"""FP32 is FP32: the provider would round products to 10 bits of mantissa by itself."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a graph is run.

    `threads` within an operator (None: the runtime's choice). `prepack` lets the runtime keep a
    re-ordered copy of each constant weight, in FP32 of those that are cast to it: faster, but the
    copy is private memory, where weights read as they lie stay pages of the mapped file.
    `plan_memory` lets the runtime decide at the start which values share a buffer, as it does by
    default: the time grows with the square of the nodes, and for thousands of them is most of what
    opening takes, so graphs that are only checked go without. `observe` names inner values to
    return beside the outputs, with their ONNX element type. `profile` makes the runtime time every
    node, into a file whose name begins with it. `spin_ms` is how long the runtime's threads spin
    after a call (None: some 35 ms, as they do by default): the next call finds them awake, but
    whatever else runs in between waits for a core. `rounded` runs 16-bit graphs in FP32 with their
    own rounding (`fp16_emulation`): to check them, not to be fast.

    `runtime` says who runs it, by the name of its record (`bundle.runtimes`), which says what of
    `OWN_OPTIONS` it takes: `provider` is ONNX Runtime's name for what computes, `device` where
    another runtime computes, `streams` how many calls at a time share the threads, and `cache` a
    folder for what was compiled, from which it starts again. `of_plugins` are what plugins' options
    of `run` say, by name: it takes all of them. What else a runtime does not know, it goes without.
    """

    provider: str = CPU
    runtime: Runtime = "onnxruntime"
    device: str = "cpu"
    streams: int | None = None
    cache: Path | None = None
    threads: int | None = None
    prepack: bool = True
    plan_memory: bool = True
    observe: Mapping[str, int] | None = None
    profile: Path | None = None
    spin_ms: float | None = None
    rounded: bool = False
    of_plugins: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `UsageError` for what cannot be a number of threads or a time."""
        threads: Any = self.threads
        spin_ms: Any = self.spin_ms
        if threads is not None and (not isinstance(threads, Integral) or threads < 1):
            raise UsageError(f"threads={threads!r}: not a number of threads", hint="threads=2")
        streams: Any = self.streams
        if streams is not None and (not isinstance(streams, Integral) or streams < 1):
            raise UsageError(f"streams={streams!r}: not a number of calls", hint="streams=2")
        if self.runtime not in runtime_names():
            known = " or ".join(runtime_names()) + left_out()
            raise UsageError(f"runtime={self.runtime!r}: unknown runtime", hint=f"use {known}")
        if spin_ms is not None and not (isinstance(spin_ms, int | float) and 0 <= spin_ms < inf):
            raise UsageError(f"spin_ms={spin_ms!r}: not a time", hint="spin_ms=0 lets them rest")


OWN_OPTIONS = ("provider", "device", "streams", "cache", "profile")
"""The options that some runtimes do not have, and then refuse."""


class GraphSession(Protocol):
    """Anything that runs a graph: a session of ONNX Runtime, or an engine."""

    input_name: str
    output_names: list[str]
    takes_k: bool

    @property
    def provider(self) -> str:
        """Who runs the graph."""
        ...

    def __call__(self, x: Inputs, k: int | None = None) -> np.ndarray:
        """Returns the first output for a batch x."""
        ...

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns outputs by name."""
        ...


class Session:
    """An exported graph, loaded in ONNX Runtime.

    Calling it with x returns y; with a graph whose k is an input, `k` must be given too. Of a graph
    with several inputs x is the first, or a dict of arrays by name: those that are left out take
    their defaults, a mask of ones, positions by that mask, an empty cache.
    """

    def __init__(self, path: Path | str, options: SessionOptions | None = None) -> None:
        self.path = path = Path(path)
        self.options = options or SessionOptions()
        self._session = _open(path, self.options)
        self._describe(
            [(value.name, value.type, value.shape) for value in self._session.get_inputs()],
            [value.name for value in self._session.get_outputs()],
            _facts(self._session),
        )

    def _describe(
        self, ports: Sequence[Described], outputs: Sequence[str], facts: GraphFacts | None
    ) -> None:
        """Takes what a graph says of its inputs and outputs; `BundleError` for one not as ours."""
        inputs = {name: (dtype, shape) for name, dtype, shape in ports}
        self.takes_k = inputs.pop(K_INPUT, None) is not None
        ours = facts is not None
        facts = GraphFacts({}) if facts is None else facts
        experts = min((layer.n for layer in facts.layers.values()), default=None)
        self._experts = experts if self.takes_k else None
        defaults, limits = facts.defaults, facts.limits
        self._ports = [
            TensorSpec(
                name,
                _NUMPY_TYPES[dtype].name,
                tuple(shape),
                default=defaults.get(name),
                limits={} if name in defaults else limits,
                groups_of=facts.groups_of,
            )
            for name, (dtype, shape) in inputs.items()
            if dtype in _NUMPY_TYPES
        ]
        given_ports = [port for port in self._ports if port.default is None]
        # Without a record of ours several inputs say nothing of which is the first.
        unclear = not given_ports or (not ours and len(given_ports) > 1)
        if len(self._ports) != len(inputs) or unclear:
            taken = ", ".join(f"{name} ({dtype})" for name, (dtype, _) in inputs.items())
            raise BundleError(
                f"{self.path.name}: takes {taken or 'no inputs'}; one of numbers is expected, "
                "beside k",
                hint="run a graph that `moexport export` wrote",
            )
        self._sizes = facts.sizes
        self.input_name = given_ports[0].name
        self._ports.sort(key=lambda port: port is not given_ports[0])
        self.output_names = list(outputs)

    @property
    def provider(self) -> str:
        """The execution provider that serves the graph."""
        return str(self._session.get_providers()[0])

    @property
    def computed_in(self) -> str | None:
        """What the runtime says that it computes matrix products in; None where it does not."""
        return None

    def __call__(self, x: Inputs, k: int | None = None) -> np.ndarray:
        """Returns the graph's first output for a batch x."""
        return self.run(x, k, self.output_names[:1])[self.output_names[0]]

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns outputs by name, all of them unless `outputs` says which.

        Raises `FeedError` when x does not fit the graph's input, `EngineError` where the run fails.
        """
        wanted = list(outputs) if outputs is not None else self.output_names
        feeds = self._feeds(x, k)
        try:
            return dict(zip(wanted, self._call(wanted, feeds), strict=True))
        except self._errors() as error:
            who, said = self._told(error)
            raise _failed(self.path, who, len(feeds[self.input_name]), said) from error

    def _errors(self) -> tuple[type[Exception], ...]:
        """What the runtime raises where a run fails."""
        return _errors()

    def _told(self, error: Exception) -> tuple[str, str]:
        """Who failed, and what it says of an error."""
        return self.options.provider, _words(error)

    def bound(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> Callable[[], list[np.ndarray]]:
        """Returns the runtime's own call for a batch x, by default its first output's: to time it.

        Inputs are checked here, once, and not by the call. Raises what `run` raises.
        """
        return partial(self._call, list(outputs or self.output_names[:1]), self._feeds(x, k))

    @property
    def _call(self) -> Callable[..., list[np.ndarray]]:
        """The runtime's own call, of the names of outputs and of inputs by name."""
        call: Callable[..., list[np.ndarray]] = self._run_bound
        if self.options.provider == CPU:
            call = self._session.run
        return call

    def _run_bound(
        self, wanted: Sequence[str], feeds: Mapping[str, np.ndarray]
    ) -> list[np.ndarray]:
        """Runs with inputs and outputs bound to the GPU: one copy each way, none between.

        k stays on the CPU, where the runtime reads it as a size.
        """
        from ..common.onnx_runtime import ort

        binding = self._session.io_binding()
        for name, array in feeds.items():
            if name == K_INPUT:
                binding.bind_cpu_input(name, array)
            else:
                value = ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0)
                binding.bind_ortvalue_input(name, value)
        for name in wanted:
            binding.bind_output(name, "cuda")
        self._session.run_with_iobinding(binding)
        results: list[np.ndarray] = binding.copy_outputs_to_cpu()
        return results

    def bound_values(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> Callable[[], list[Any]]:
        """Returns the runtime's own call for a batch x whose values stay with the runtime.

        So a text is generated: a call takes what the one before returned, where it is. Of the
        outputs, by default all, the first is handed to numpy. Raises what `run` raises.
        """
        from ..common.onnx_runtime import ort

        wanted, feeds = list(outputs or self.output_names), self._feeds(x, k)
        device = "cpu" if self.options.provider == CPU else "cuda"
        values = {
            name: ort.OrtValue.ortvalue_from_numpy(array, "cpu" if name == K_INPUT else device, 0)
            for name, array in feeds.items()
        }

        def call() -> list[Any]:
            if device == "cpu":
                results = self._session.run_with_ort_values(wanted, values)
            else:
                binding = self._session.io_binding()
                for name, value in values.items():
                    binding.bind_ortvalue_input(name, value)
                for name in wanted:
                    binding.bind_output(name, device)
                self._session.run_with_iobinding(binding)
                results = binding.get_outputs()
            return [results[0].numpy(), *results[1:]]

        return call

    def end_profile(self) -> Path:
        """Ends the profile that `SessionOptions.profile` asked for; returns its file (JSON)."""
        return Path(self._session.end_profiling())

    def _feeds(self, x: Inputs, k: int | None) -> dict[str, np.ndarray]:
        check_given(k, takes_k=self.takes_k, what="graph")
        # The runtime takes 0 for an answer of zeros, and logs what else it does not take.
        if k is not None and self._experts and not (k == int(k) and 1 <= k <= self._experts):
            raise UsageError(
                f"k = {k}: the model has {self._experts} experts",
                hint=f"use 1 ≤ k ≤ {self._experts}",
            )
        arrays = completed(x, self._ports)
        feeds = {}
        for port in self._ports:
            check_array(arrays[port.name], port)
            self._check_sizes(arrays[port.name], port)
            feeds[port.name] = np.asarray(arrays[port.name], dtype=port.dtype, order="C")
        if k is not None:
            feeds[K_INPUT] = np.array([k], dtype=np.int64)
        return feeds

    def _check_sizes(self, x: np.ndarray, port: TensorSpec) -> None:
        """Raises `FeedError` for sizes at which the network computes something else."""
        for axis, size in zip(port.shape, x.shape, strict=True):
            if axis not in self._sizes:
                continue
            low, high = self._sizes[axis]
            if not low <= size <= (high or inf):
                held = f"from {low} on" if high is None else f"from {low} to {high}"
                given = f"{size} tokens" if axis == "tokens" else f"a {axis} of {size}"
                raise FeedError(
                    f"input '{port.name}': {given}, and the graph holds {held}: beyond that the "
                    "network computes something else",
                    hint=f"export another graph for it, with --{axis}",
                )


_NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bool)": np.dtype(np.bool_),
    **{f"tensor({name})": np.dtype(name) for name in WHOLE},
}


Described = tuple[str, str, Sequence[Any]]
"""A graph's input: its name, its type as ONNX Runtime calls it, and its shape."""


def described(model: ModelProto) -> list[Described]:
    """Returns the inputs of a graph as its file tells them; those of BF16 are fed as FP32."""
    import onnx

    names = {
        onnx.helper.np_dtype_to_tensor_dtype(dtype): name for name, dtype in _NUMPY_TYPES.items()
    }
    names[onnx.TensorProto.BFLOAT16] = "tensor(float)"
    stored = {tensor.name for tensor in model.graph.initializer}
    return [
        (
            value.name,
            names.get(tensor.elem_type, f"type {tensor.elem_type}"),
            [size.dim_param or size.dim_value or None for size in tensor.shape.dim],
        )
        for value in model.graph.input
        if value.name not in stored
        for tensor in [value.type.tensor_type]
    ]


def _facts(session: ort.InferenceSession) -> GraphFacts | None:
    """What a graph's own metadata tell of it; None of one that is not ours."""
    text = session.get_modelmeta().custom_metadata_map.get(METADATA)
    return None if text is None else GraphFacts.read(text, "the graph")


def check_provider(provider: str) -> None:
    """Raises `UsageError` or `EngineError` where this machine cannot run a provider."""
    from ..common.onnx_runtime import ort

    available = ort.get_available_providers()
    if provider not in available:
        raise UsageError(
            f"ONNX Runtime has no {provider} on this machine",
            hint=f"available: {', '.join(available)}; for CUDA, {install('gpu')}; "
            "`moexport doctor` shows what is installed",
        )
    if provider == CPU:
        return
    from .tensorrt.backends import first_gpu  # no CPU needs it

    if first_gpu() is None:
        raise EngineError(
            f"{provider}: there is no NVIDIA GPU here, or no driver for it",
            hint="run it on the CPU, or on the machine with the GPU",
        )


def _settings(options: SessionOptions) -> ort.SessionOptions:
    """The options as ONNX Runtime has them."""
    from ..common.onnx_runtime import ort

    settings = ort.SessionOptions()
    # Errors are raised, and warnings about folding are noise; only why a GPU's libraries cannot be
    # loaded is told by the log alone.
    settings.log_severity_level = 4 if options.provider == CPU else 3
    # Graphs in Q/DQ form are TensorRT's. ONNX Runtime runs them as written, but what it fuses them
    # to is wrong for stacked weights and saturates in 16 bits on CPUs without VNNI.
    settings.add_session_config_entry("session.disable_quant_qdq", "1")
    settings.add_session_config_entry(*NO_KLEIDIAI)
    if options.threads is not None:
        settings.intra_op_num_threads = int(options.threads)
    if options.spin_ms == 0:
        settings.add_session_config_entry("session.force_spinning_stop", "1")
    elif options.spin_ms is not None:
        us = str(round(1e3 * options.spin_ms))
        settings.add_session_config_entry("session.intra_op.spin_duration_us", us)
    if not options.prepack:
        for entry in AS_STORED:
            settings.add_session_config_entry(*entry)
    settings.enable_mem_reuse = options.plan_memory
    # What a check casts on the way goes back to the system, where another graph is open, too.
    settings.enable_cpu_mem_arena = options.plan_memory or options.prepack
    if options.profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile)
    return settings


def _open(path: Path, options: SessionOptions) -> ort.InferenceSession:
    from google.protobuf.message import DecodeError

    from ..common.onnx_runtime import ort

    on_cpu, settings = options.provider == CPU, _settings(options)
    check_provider(options.provider)
    if not on_cpu:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
            ort.preload_dlls()  # CUDA and cuDNN as pip installs them, which no loader knows of
    fallbacks = {CPU: [], TENSORRT: [CUDA, CPU]}.get(options.provider, [CPU])
    providers = [
        (name, _tensorrt_options(path) if name == TENSORRT else PROVIDER_OPTIONS.get(name, {}))
        for name in (options.provider, *fallbacks)
    ]
    try:
        content: str | bytes = str(path)
        if (model := _changed(path, options)) is not None:
            folder = "session.model_external_initializers_file_folder_path"
            settings.add_session_config_entry(folder, str(path.parent))
            content = model.SerializeToString()
        session = ort.InferenceSession(content, settings, providers, enable_fallback=0)
        _ = session.get_modelmeta().custom_metadata_map  # read here, where it may be no text
    except (DecodeError, *_errors()) as error:
        if not on_cpu:
            raise EngineError(
                f"{options.provider} cannot load {path.name}: {_words(error)}",
                hint="another --lowering, or --provider cpu, may run it",
            ) from error
        raise BundleError(
            f"ONNX Runtime cannot load {path.name}: {_words(error)}",
            hint="`moexport verify` tells whether the bundle is damaged",
        ) from error
    started = session.get_providers()[0]
    if started != options.provider:  # one that does not start is left out silently
        from .tensorrt.cuda import DRIVERS  # no CPU needs it

        raise EngineError(
            f"ONNX Runtime cannot start {options.provider} here and would run on {started} instead",
            hint=f"it needs CUDA {CUDA_MAJOR} with a driver of {DRIVERS[CUDA_MAJOR]} or newer, and "
            "cuDNN (pip install 'onnxruntime-gpu[cuda,cudnn]')"
            + (" and the TensorRT that it was built with" if options.provider == TENSORRT else "")
            + "; `moexport doctor` shows what is installed",
        )
    return session


def _tensorrt_options(path: Path) -> dict[str, str]:
    # Which loads all that builds engines.
    from .tensorrt.ort_provider import load_libraries, provider_options

    load_libraries()
    return provider_options(path)


def _failed(path: Path, who: str, batch: int, said: str) -> EngineError:
    """The error for a run that failed though its inputs fit."""
    if re.search("bad.alloc|[Ff]ailed to allocate memory|[Oo]ut of memory", said):
        return EngineError(
            f"{path.name}: memory ran out for a batch of {batch}",
            hint="run smaller batches: --batch-size",
        )
    return EngineError(
        f"{path.name}: the run failed in {who}: {said}",
        hint="`moexport verify` tells whether the bundle is damaged; another --lowering may run",
    )


def _words(error: Exception) -> str:
    """What ONNX Runtime says of an error, without the places in its sources."""
    last = (str(error).splitlines() or [""])[0].rsplit("[ONNXRuntimeError] : ", 1)[-1]
    return re.sub(r"^\d+ : \w+ : |/onnxruntime_src/\S+ (.*\) )?", "", last)


@cache
def _errors() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises."""
    from ..common.onnx_runtime import ort

    state = ort.capi.onnxruntime_pybind11_state
    return (
        *(state.Fail, state.InvalidGraph, state.InvalidProtobuf, state.InvalidArgument),
        *(state.NoSuchFile, state.NotImplemented, state.RuntimeException),
        UnicodeDecodeError,  # of names in a damaged graph, in its messages too
    )


def _check_nodes(nodes: Iterable[NodeProto], name: str) -> None:
    """Raises `BundleError` for a node that ends the process where ONNX Runtime 1.32 runs it.

    It takes a negative `batch_dims` of GatherND, which the standard has not, as it is.
    """
    for node in nodes:
        for attribute in node.attribute:
            _check_nodes(attribute.g.node, name)
            if attribute.name == "batch_dims" and attribute.i < 0:
                raise BundleError(
                    f"{name}: {node.name} of {node.op_type} has {attribute.i} batch dimensions",
                    hint="the graph is damaged: export again",
                )


def _changed(path: Path, options: SessionOptions) -> ModelProto | None:
    """The graph with inner values as outputs, or in FP32 with its own rounding; None as it is.

    A BF16 graph is emulated on a CPU, which has no kernels for it, and an FP16 one where asked:
    CPUs with FP16 arithmetic sum it in FP16.
    Weights stay where they are.
    """
    if options.provider != CPU and not options.observe:
        return None
    import onnx

    model = onnx.load(path, load_external_data=False)
    _check_nodes(model.graph.node, path.name)
    facts = GraphFacts.of(model, path.name)
    emulated = ("bf16", "fp16") if options.rounded else ("bf16",)
    twin = options.provider == CPU and facts is not None and facts.floats in emulated
    if not twin and not options.observe:
        return None
    if twin:
        from .bundle.fp16_emulation import fp16_emulation

        model = fp16_emulation(model)
    known = {output.name for output in model.graph.output}
    for name, element_type in (options.observe or {}).items():
        if name not in known:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, element_type, None))
    return model
