"""Runs an exported graph in ONNX Runtime, on NumPy arrays or PyTorch tensors."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from math import inf
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..common.option import misfits, refuse, speaks_python
from ..common.registry import left_out
from ..errors import (
    BundleError,
    EngineError,
    FeedError,
    MissingExtraError,
    MoexportError,
    UsageError,
    install,
)
from ..graphs.names import K_INPUT
from ..graphs.targets import CPU_PROVIDER, CUDA_PROVIDER, Runtime, runtime_names
from .bundle.manifest import METADATA, GraphFacts, TensorSpec, nodes_in
from .inputs import INTEGERS, Inputs, by_name, check_array, check_k_given, completed, tensor_of

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

    from ..common.onnx_runtime import ort
    from .bundle.given_choices import GivenSession
    from .bundle.gpu_runs import GpuRuns
    from .tensorrt.cuda import Stream

CPU, CUDA = CPU_PROVIDER, CUDA_PROVIDER
TENSORRT = "TensorrtExecutionProvider"
PROVIDERS = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT}
"""Execution providers, by the names that the command line and results use."""

CUDA_MAJOR = 13
"""The CUDA version that onnxruntime-gpu needs from 1.31 on (`libcudart.so.13`)."""

NO_KLEIDIAI = ("mlas.disable_kleidiai", "1")
"""KleidiAI's INT4 products on ARM round activations by row instead of by block: errors are 2.5 to 5
times larger if some channels are large."""

AS_STORED = (
    ("session.disable_prepacking", "1"),
    ("optimization.constant_folding_max_output_size_in_bytes", str(1 << 20)),
    ("optimization.disable_specified_optimizers", "FuseFp16InitializerToFp32NodeTransformer"),
)
"""With these settings the runtime keeps no copies of weights: neither packed ones, nor FP32 ones of
FP16 weights that a graph casts."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a graph is run.

    `threads` run each operator (None: the runtime's choice). `prepack` lets the runtime keep a
    re-ordered copy of each constant weight, in FP32 if the graph casts it: faster, but the copy is
    private memory, while the original weights are pages of the mapped file. `plan_memory` lets the
    runtime decide at the start which values share a buffer, as by default. The time for this grows
    with the square of the number of nodes and dominates the opening of large graphs, so it is off
    for graphs that are only checked. `observe` names inner values to return in addition to the
    outputs, with their ONNX element type; `given` names choices of experts that become inputs
    (`given_choices`). `profile` is the prefix of the file to which the runtime
    writes the time of each node. `spin_ms` is how long the runtime's threads spin after a call
    (None: the default, about 35 ms): the next call finds them awake, but other threads in between
    wait for a core. `rounded` runs 16-bit graphs in FP32 with their own rounding, for checks only
    (`fp16_emulation`). With `cuda_graphs` the CUDA provider replays repeated work as CUDA graphs if
    possible (`bundle.gpu_runs`); `timed` runs it on a stream that can measure the GPU's time.

    `runtime` is the name of the runtime's record (`bundle.runtimes`), which lists the `OWN_OPTIONS`
    that it accepts. `provider` is ONNX Runtime's name of an execution provider, or a short one from
    `PROVIDERS`. `of_plugins` are the options of a plugin's runtime, by name; it accepts all of
    them. Other options that a runtime does not know are ignored.
    """

    provider: str = CPU
    runtime: Runtime = "onnxruntime"
    threads: int | None = None
    prepack: bool = True
    plan_memory: bool = True
    observe: Mapping[str, int] | None = None
    given: tuple[str, ...] = ()
    profile: Path | str | None = None
    spin_ms: float | None = None
    rounded: bool = False
    cuda_graphs: bool = True
    timed: bool = False
    of_plugins: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        threads: Any = self.threads
        spin_ms: Any = self.spin_ms
        if threads is not None and (not isinstance(threads, Integral) or threads < 1):
            raise UsageError(f"threads={threads!r}: not a number of threads", hint="threads=2")
        if self.runtime not in runtime_names():
            known = " or ".join(runtime_names()) + left_out()
            raise UsageError(f"runtime={self.runtime!r}: unknown runtime", hint=f"use {known}")
        if spin_ms is not None and not (isinstance(spin_ms, int | float) and 0 <= spin_ms < inf):
            raise UsageError(f"spin_ms={spin_ms!r}: not a time", hint="spin_ms=0 disables spinning")
        refuse(
            misfits(SessionOptions, {each.name: getattr(self, each.name) for each in fields(self)})
        )
        object.__setattr__(self, "provider", PROVIDERS.get(self.provider, self.provider))


OWN_OPTIONS = ("provider", "profile", "cuda_graphs")
"""The options that runtimes refuse if they do not have them."""


class GraphSession(Protocol):
    """Anything that runs a graph: a session of ONNX Runtime, or an engine."""

    input_name: str
    output_names: list[str]

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns outputs by name."""
        ...


class Session:
    """An exported graph, loaded in ONNX Runtime.

    Calling it with x returns y; `k` is needed if k is an input of the graph. If the graph has
    several inputs, x is the first, or a dict of arrays by name. Missing inputs get their defaults:
    a mask of ones, positions from that mask, an empty cache.

    The session of another runtime is a subclass. Its constructor sets `path` and `options` and
    calls `describe`; `provider` names the provider that runs the graph, and `call` runs it.
    """

    def __init__(self, path: Path | str, options: SessionOptions | None = None) -> None:
        self.path = path = Path(path)
        self.options = options or SessionOptions()
        if self.options.provider == CPU:
            self._on_cpu = _open(path, self.options)
        else:
            self._runs = _gpu_runs(path, self.options)
        text = self._session.get_modelmeta().custom_metadata_map.get(METADATA)
        self.describe(
            [(value.name, value.type, value.shape) for value in self._session.get_inputs()],
            [value.name for value in self._session.get_outputs()],
            None if text is None else GraphFacts.read(text, "the graph"),
        )

    def describe(
        self, graph_inputs: Sequence[Described], outputs: Sequence[str], facts: GraphFacts | None
    ) -> None:
        """Reads a graph's inputs and outputs; `BundleError` if moexport cannot run it."""
        inputs = {name: (dtype, shape) for name, dtype, shape in graph_inputs}
        self.takes_k = inputs.pop(K_INPUT, None) is not None
        has_facts = facts is not None
        facts = GraphFacts({}) if facts is None else facts
        experts = min((layer.n for layer in facts.layers.values()), default=None)
        self._experts = experts if self.takes_k else None
        defaults, limits = facts.defaults, facts.limits
        self._inputs = [
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
        required = [spec for spec in self._inputs if spec.default is None]
        # Without our metadata, it is unknown which of several inputs is the first.
        ambiguous = not required or (not has_facts and len(required) > 1)
        if len(self._inputs) != len(inputs) or ambiguous:
            found = ", ".join(f"{name} ({dtype})" for name, (dtype, _) in inputs.items())
            raise BundleError(
                f"{self.path.name} has {found or 'no inputs'}, but one numeric input is "
                "expected besides k",
                hint="run a graph that `moexport export` wrote",
            )
        self._sizes = facts.sizes
        self.input_name = required[0].name
        self._inputs.sort(key=lambda spec: spec is not required[0])
        self.output_names = list(outputs)

    _runs: GpuRuns | None = None
    """The object that runs the graph on a GPU."""

    @property
    def _session(self) -> ort.InferenceSession:
        return self._on_cpu if self._runs is None else self._runs.session

    @property
    def provider(self) -> str:
        """The execution provider that runs the graph."""
        return str(self._session.get_providers()[0])

    @property
    def recorded(self) -> bool | None:
        """Whether the last run was replayed as a CUDA graph; None if there is no GPU."""
        return None if self._runs is None else self._runs.replayed

    @property
    def no_cuda_graphs(self) -> str | None:
        """Why runs are not replayed as CUDA graphs; None if repeated runs are replayed."""
        return "it does not run on a GPU" if self._runs is None else self._runs.refused

    @property
    def computed_in(self) -> str | None:
        """The type in which the runtime reports computing matrix products; None if it does not."""
        return None

    @speaks_python
    def __call__(self, x: Any, k: int | None = None) -> Any:
        """Returns the graph's first output for a batch x, as `run` does."""
        return self.run(x, k, self.output_names[:1])[self.output_names[0]]

    @speaks_python
    def run(
        self, x: Any, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Returns outputs by name, all of them unless `outputs` lists some.

        If the first input is a NumPy array, they are NumPy arrays. For a PyTorch tensor, or
        anything else that supports DLPack, they are PyTorch tensors on its device: data on the GPU
        stay there. Raises `FeedError` if x does not fit the graph's input, `EngineError` if the run
        fails.
        """
        names = list(outputs) if outputs is not None else self.output_names
        first = x.get(self.input_name) if isinstance(x, Mapping) else x
        tensor = None if first is None else tensor_of(first)
        try:
            feeds = self.feeds(x, k)  # on a GPU, this copies
            if tensor is not None and tensor.is_cuda and self._runs is not None:
                values = self._runs.run(names, feeds, as_torch=True)
            else:
                values = self.call(names, feeds)
        except MoexportError:
            raise
        except self.errors() as error:
            raise self._run_error(error, 1 if first is None else len(first)) from error
        if tensor is not None and not tensor.is_cuda:
            import torch

            values = [torch.from_numpy(value) for value in values]
        return dict(zip(names, values, strict=True))

    def errors(self) -> tuple[type[Exception], ...]:
        """Returns the exceptions that the runtime raises if a run fails."""
        if type(self) is not Session:
            return (Exception,)
        from ..common.onnx_runtime import runtime_errors

        # Copies to and from a GPU raise exceptions other than the runtime's.
        return runtime_errors() if self._runs is None else (RuntimeError, *runtime_errors())

    def failure(self, error: Exception) -> tuple[str, str]:
        """Returns the name of the runtime, and its message for an error."""
        if type(self) is not Session:
            return self.options.runtime, f"{type(error).__name__}: {error}".splitlines()[0]
        from ..common.onnx_runtime import message_of

        return self.options.provider, message_of(error)

    def bound(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> Callable[[], list[np.ndarray]]:
        """Returns the runtime's own call for a batch x, by default of the first output, for timing.

        Inputs are checked once, here, but not in the call. Raises the errors of `run`.
        """
        return partial(self.call, list(outputs or self.output_names[:1]), self.feeds(x, k))

    def call(self, wanted: Sequence[str], feeds: Mapping[str, Any]) -> list[np.ndarray]:
        """Returns the values of outputs for inputs by name, which are not checked; for timing."""
        run = self._on_cpu.run if self._runs is None else self._runs.run
        values: list[np.ndarray] = run(wanted, feeds)
        return values

    def _run_error(self, error: Exception, batch: int) -> EngineError:
        """Returns the error for a run that failed although its inputs fit."""
        runtime, message = self.failure(error)
        if re.search("bad.alloc|[Ff]ailed to allocate memory|[Oo]ut of memory", message):
            return EngineError(
                f"{self.path.name}: memory ran out for a batch of {batch}",
                hint="run smaller batches: --batch-size",
            )
        return EngineError(
            f"{self.path.name}: the run failed in {runtime}: {message}",
            hint="`moexport verify` checks whether the bundle is damaged; another --lowering may "
            "run",
        )

    def gpu_ms(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> float | None:
        """Returns the GPU's time for a run without copies to and from it, by default of one output.

        None on a CPU or for a session opened without `SessionOptions.timed`.
        """
        wanted = list(outputs or self.output_names[:1])
        return None if self._runs is None else self._runs.gpu_ms(wanted, self.feeds(x, k))

    def bound_values(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> Callable[[], list[Any]]:
        """Returns the runtime's own call for a batch x, whose values stay with the runtime.

        It is for generating text: each call reuses the outputs of the previous one in place. Of the
        `outputs`, by default all, only the first is converted to NumPy. Raises the errors of `run`.
        """
        from ..common.onnx_runtime import ort

        wanted, feeds = list(outputs or self.output_names), self.feeds(x, k)
        device = "cpu" if self._runs is None else self._runs.device
        values = {
            name: ort.OrtValue.ortvalue_from_numpy(array, "cpu" if name == K_INPUT else device, 0)
            for name, array in feeds.items()
        }

        def call() -> list[Any]:
            if self._runs is None:
                results = self._on_cpu.run_with_ort_values(wanted, values)
            else:
                results = self._runs.run_values(wanted, values)
            return [results[0].numpy(), *results[1:]]

        return call

    def with_given_choices(self, values: Collection[str]) -> GivenSession | None:
        """Returns a session of the same graph whose choices are inputs; None if they cannot be."""
        from .bundle.given_choices import GivenSession, options_for

        options = options_for(self.options, self.path, values) if type(self) is Session else None
        return None if options is None else GivenSession(Session(self.path, options), values)

    def end_profile(self) -> Path:
        """Ends the profile of `SessionOptions.profile`; returns its file (JSON)."""
        return Path(self._session.end_profiling())

    def _array_to_check(self, name: str, tensor: Any) -> np.ndarray:
        """Returns the array to check for a tensor: zeros of its shape for floats on the GPU."""
        device = tensor.device
        own = "cpu" if self._runs is None else "cuda:0"
        if device.type not in ("cpu", "cuda") or (device.type == "cuda" and str(device) != own):
            raise FeedError(
                f"input '{name}' is on {device}, but the session is on {own}",
                hint=f"move it: x.to('{own}')",
            )
        steers = any(spec.name == name and spec.default == "zeros" for spec in self._inputs)
        if tensor.is_cuda and tensor.is_floating_point() and not steers:
            return np.broadcast_to(np.zeros((), np.float32), tuple(tensor.shape))
        array: np.ndarray = (tensor.float() if str(tensor.dtype) == BF16 else tensor).cpu().numpy()
        return array

    def feeds(self, x: Any, k: int | None) -> dict[str, Any]:
        """Returns a run's inputs by name, checked and completed; raises the errors of `run`."""
        check_k_given(k, takes_k=self.takes_k, what="graph")
        # The runtime returns zeros for k = 0, and only logs other invalid values.
        if k is not None and self._experts and not (k == int(k) and 1 <= k <= self._experts):
            raise UsageError(
                f"k = {k}: the model has {self._experts} experts",
                hint=f"use 1 ≤ k ≤ {self._experts}",
            )
        given = by_name(x, self._inputs)
        tensors = {n: t for n, value in given.items() if (t := tensor_of(value)) is not None}
        checked = {n: self._array_to_check(n, tensor) for n, tensor in tensors.items()}
        arrays = completed({**given, **checked}, self._inputs)
        feeds: dict[str, Any] = {}
        for spec in self._inputs:
            array = arrays[spec.name]
            check_array(array, spec)
            self._check_sizes(array, spec)
            tensor = tensors.get(spec.name)
            if tensor is not None and tensor.is_cuda and tensor.shape == array.shape:
                feeds[spec.name] = _cast(tensor, spec.dtype)
            else:
                feeds[spec.name] = np.asarray(array, dtype=spec.dtype, order="C")
        if k is not None:
            feeds[K_INPUT] = np.array([k], dtype=np.int64)
        return feeds

    def _check_sizes(self, x: np.ndarray, spec: TensorSpec) -> None:
        """Raises `FeedError` for sizes at which the network takes a different code path."""
        for axis, size in zip(spec.shape, x.shape, strict=True):
            if axis not in self._sizes:
                continue
            low, high = self._sizes[axis]
            if not low <= size <= (high or inf):
                valid = f"from {low} on" if high is None else f"from {low} to {high}"
                given = f"{size} tokens" if axis == "tokens" else f"a {axis} of {size}"
                raise FeedError(
                    f"input '{spec.name}' has {given}, but the graph is valid {valid}; "
                    "at other sizes, the network takes a different code path",
                    hint=f"export another graph with --{axis}",
                )


BF16 = "torch.bfloat16"  # which NumPy does not have


def _cast(tensor: Any, dtype: str) -> Any:
    import torch

    return tensor.to(getattr(torch, dtype)).contiguous()


_NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bool)": np.dtype(np.bool_),
    **{f"tensor({name})": np.dtype(name) for name in INTEGERS},
}


Described = tuple[str, str, Sequence[Any]]
"""A graph's input: its name, its type as ONNX Runtime calls it, and its shape."""


def described(model: ModelProto) -> list[Described]:
    """Returns the inputs of a graph, from its file; BF16 inputs are fed as FP32."""
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


def graph_call(
    path: Path, options: SessionOptions | None = None
) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """Returns a callable that runs a graph file on named arrays, whether from a bundle or not.

    It checks nothing: the caller must pass a valid graph and inputs.
    """
    session = _open(path, options or SessionOptions())
    names = [value.name for value in session.get_outputs()]

    def call(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))

    return call


def check_provider(provider: str) -> None:
    """Raises `UsageError` or `EngineError` if this machine cannot run a provider."""
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
    from .tensorrt.backends import first_gpu  # not needed for CPUs

    if first_gpu() is None:
        raise EngineError(
            f"{provider}: there is no NVIDIA GPU here, or no driver for it",
            hint="run it on the CPU, or on a machine with a GPU",
        )


def _settings(options: SessionOptions) -> ort.SessionOptions:
    from ..common.onnx_runtime import ort

    settings = ort.SessionOptions()
    # Errors are raised, and warnings about folding are noise. Why the libraries of a GPU cannot be
    # loaded is in ONNX Runtime's default log, which this does not change.
    settings.log_severity_level = 4
    # Graphs in Q/DQ form are for TensorRT. ONNX Runtime runs them as written; its fused ops are
    # wrong for stacked weights, and saturate in 16 bits on CPUs without VNNI.
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
    # Memory for casts in a check is returned to the system, because other graphs are open.
    settings.enable_cpu_mem_arena = options.plan_memory or options.prepack
    if options.profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile)
    return settings


def _gpu_runs(path: Path, options: SessionOptions) -> GpuRuns:
    """Returns the runner of a graph on a GPU, with the reason if repeated runs are not replayed."""
    from .bundle.gpu_runs import GpuRuns, capture_refused
    from .tensorrt.cuda import Stream

    check_provider(options.provider)
    refused: str | None = None
    if options.provider != CUDA:
        refused = f"{options.provider} has its own CUDA graphs"
    elif not options.cuda_graphs:
        refused = "switched off (cuda_graphs=False)"
    elif options.profile is not None:
        refused = "a replay has no nodes that a profile could time"
    else:
        refused = capture_refused(path)
    stream = None
    if options.timed:
        with contextlib.suppress(MissingExtraError):  # without it, GPU times are unknown
            stream = Stream()
    return GpuRuns(
        lambda graphs: _open(path, options, graphs=graphs, stream=stream), refused, stream=stream
    )


def _provider_options(
    path: Path, provider: str, *, graphs: bool, stream: Stream | None
) -> dict[str, str]:
    if provider == TENSORRT:
        # This import loads everything that builds engines.
        from .tensorrt.ort_provider import load_libraries, provider_options

        load_libraries()
        return provider_options(path)
    if provider != CUDA:
        return {}
    settings = {"use_tf32": "0"}  # by default, FP32 products are rounded to 10 bits of mantissa
    if graphs:
        settings["enable_cuda_graph"] = "1"
    if stream is not None:
        settings["user_compute_stream"] = str(stream.handle)
    return settings


def _open(
    path: Path, options: SessionOptions, *, graphs: bool = False, stream: Stream | None = None
) -> ort.InferenceSession:
    from google.protobuf.message import DecodeError

    from ..common.onnx_runtime import message_of, ort, runtime_errors

    on_cpu, settings = options.provider == CPU, _settings(options)
    check_provider(options.provider)
    if not on_cpu:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints which libraries are missing
            ort.preload_dlls()  # pip's CUDA and cuDNN, which the loader does not find
        # Records which nodes run on the CPU, in case a graph cannot be captured.
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    fallbacks = {CPU: [], TENSORRT: [CUDA, CPU]}.get(options.provider, [CPU])
    providers = [
        (name, _provider_options(path, name, graphs=graphs, stream=stream))
        for name in (options.provider, *fallbacks)
    ]
    try:
        content: str | bytes = str(path)
        if (model := _modified(path, options)) is not None:
            folder = "session.model_external_initializers_file_folder_path"
            settings.add_session_config_entry(folder, str(path.parent))
            content = model.SerializeToString()
        session = ort.InferenceSession(content, settings, providers, enable_fallback=0)
        _ = session.get_modelmeta().custom_metadata_map  # read here: it may be invalid text
    except (DecodeError, *runtime_errors()) as error:
        if not on_cpu:
            raise EngineError(
                f"{options.provider} cannot load {path.name}: {message_of(error)}",
                hint="another --lowering, or --provider cpu, may run it",
            ) from error
        raise BundleError(
            f"ONNX Runtime cannot load {path.name}: {message_of(error)}",
            hint="`moexport verify` checks whether the bundle is damaged",
        ) from error
    _check_started(session, options.provider)
    return session


def _check_started(session: ort.InferenceSession, provider: str) -> None:
    """Raises `EngineError` if another provider runs: none reports a failed start."""
    started = session.get_providers()[0]
    if started == provider:
        return
    from .tensorrt.cuda import DRIVERS  # not needed for CPUs

    raise EngineError(
        f"ONNX Runtime cannot start {provider} here and would run on {started} instead",
        hint=f"it needs CUDA {CUDA_MAJOR} with a driver of {DRIVERS[CUDA_MAJOR]} or newer, and "
        "cuDNN (pip install 'onnxruntime-gpu[cuda,cudnn]')"
        + (" and the TensorRT that it was built with" if provider == TENSORRT else "")
        + "; `moexport doctor` shows what is installed",
    )


def _check_nodes(graph: GraphProto, name: str) -> None:
    """Raises `BundleError` for a node that would end the process.

    ONNX Runtime 1.32 does not check for a negative `batch_dims` of GatherND, which is invalid.
    """
    for node in nodes_in(graph):
        for attribute in node.attribute:
            if attribute.name == "batch_dims" and attribute.i < 0:
                raise BundleError(
                    f"{name}: {node.name} ({node.op_type}) has {attribute.i} batch dimensions",
                    hint="the graph is damaged: export again",
                )


def _modified(path: Path, options: SessionOptions) -> ModelProto | None:
    """Returns a modified graph: with inner values as outputs, or emulated in FP32; otherwise None.

    A BF16 graph is emulated on a CPU, which has no kernels for it, and an FP16 one on request: CPUs
    with FP16 arithmetic sum it in FP16. Weights are not loaded.
    """
    if options.provider != CPU and not (options.observe or options.given):
        return None
    import onnx

    model = onnx.load(path, load_external_data=False)
    _check_nodes(model.graph, path.name)
    facts = GraphFacts.of(model, path.name)
    emulated = ("bf16", "fp16") if options.rounded else ("bf16",)
    is_emulated = options.provider == CPU and facts is not None and facts.floats in emulated
    if not (is_emulated or options.observe or options.given):
        return None
    if is_emulated:
        from .bundle.fp16_emulation import fp16_emulation

        model = fp16_emulation(model)
    if options.given:
        from .bundle.given_choices import with_given_choices

        with_given_choices(model.graph, options.given)
    outputs = {output.name for output in model.graph.output}
    for name, element_type in (options.observe or {}).items():
        if name not in outputs:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, element_type, None))
    return model
