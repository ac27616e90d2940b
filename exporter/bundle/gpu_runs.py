"""Runs an ONNX Runtime session with data on a GPU, and replays repeated runs as CUDA graphs.

A run launches hundreds of kernels, which take about 4 µs each. A run that is repeated with the same
shapes and k is captured as a CUDA graph, and from then on replayed by one launch: the run option
`gpu_graph_id` names the graph. Limits of ONNX Runtime determine the design of this file:

- a graph reads and writes fixed addresses, so inputs are copied into its own buffers;
- k is read on the CPU during the capture, so each k has its own graph;
- a graph belongs to the thread that captured it, and is never released;
- during a capture, no other thread may use CUDA;
- a session with control flow, or with nodes on the CPU, captures nothing.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock, get_ident
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ...errors import EngineError
from ...graphs.names import K_INPUT

if TYPE_CHECKING:
    from ...common.onnx_runtime import ort
    from ..tensorrt.cuda import Stream

GRAPHS = 32
"""The largest number of graphs per session: each keeps its kernels, inputs and outputs."""

REMEMBERED = 256
"""The largest number of shapes to remember after their first run."""

GRAPH_ID = "gpu_graph_id"
PLAIN = "-1"
"""The `gpu_graph_id` of a run that is neither captured nor replayed."""

CONTROL_FLOW = ("If", "Loop", "Scan")
DATA_SIZES = ("NonZero", "Unique", "Compress", "NonMaxSuppression")
"""Ops with a data-dependent output size, for which the CPU waits."""

UNCAPTURED = ("conditional", "grouped")
"""The lowerings with control flow or such ops, which cannot be captured."""

T = TypeVar("T")

Feeds = Mapping[str, Any]
"""Inputs by name: numpy arrays, and torch tensors on the GPU."""

GraphKey = tuple[object, ...]

FIRST, OTHERS = "first", "others"
"""The two threads that run a session with graphs: the first caller's, and one for all others."""


def why_refused(message: str) -> str | None:
    """Returns why ONNX Runtime refused to capture, from its message; None for other errors."""
    if not re.search(r"(cuda graph|graph capture) feature", message, re.IGNORECASE):
        return None
    if "control flow" in message:
        return "the graph has control flow, which waits for the CPU"
    return "ONNX Runtime runs nodes of the graph on the CPU"


def nodes_on_cpu(session: ort.InferenceSession) -> str:
    """Returns the ops that a session runs on the CPU, as text; empty if unknown."""
    try:
        parts = session.get_provider_graph_assignment_info()
    except Exception:  # noqa: BLE001  a version or build without such a record
        return ""
    on_cpu = [part for part in parts if part.ep_name == "CPUExecutionProvider"]
    ops = sorted({node.op_type for part in on_cpu for node in part.get_nodes()})
    return f": {', '.join(ops)}" if ops else ""


class CaptureLock:
    """Allows concurrent runs, or one capture alone."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._running = 0
        self._capturing = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the lock for a run; waits for a capture to end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the lock for a capture; waits for running calls to end, and blocks others."""
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._capturing = True
            self._changed.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            with self._changed:
                self._capturing = False
                self._changed.notify_all()


CAPTURING = CaptureLock()
"""The lock of all sessions on GPUs in this process."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured graph: its bound values, and the run option that replays it."""

    binding: ort.IOBinding
    options: ort.RunOptions
    inputs: Mapping[str, ort.OrtValue]
    outputs: Sequence[ort.OrtValue]


class GpuRuns:
    """Runs a session with its values on a device; `refused` is why it captures no graphs.

    `open_session` opens the session, with or without graphs. Any number of threads may call: a
    session with graphs runs one call at a time. The first calling thread runs its own calls; those
    of all others run in one additional thread, since a graph belongs to a thread. `device` is the
    CPU in tests only; `stream` is the one on which calls can be timed.
    """

    def __init__(
        self,
        open_session: Callable[[bool], ort.InferenceSession],
        refused: str | None,
        *,
        device: str = "cuda",
        stream: Stream | None = None,
    ) -> None:
        self._open_session, self.device, self._stream = open_session, device, stream
        self.refused = refused
        self.replayed = False
        self._lock, self._opening = Lock(), Lock()
        self._first: int | None = None
        self._others: ThreadPoolExecutor | None = None
        self._graphs: dict[GraphKey, _Graph] = {}
        self._run_once: OrderedDict[GraphKey, list[tuple[list[int], int]]] = OrderedDict()
        """The outputs (shape, element type) of runs that happened once."""
        self._session: ort.InferenceSession | None = None
        with CAPTURING.shared():
            self._session = self._open()

    @property
    def session(self) -> ort.InferenceSession:
        """The open session, which is replaced after a failed capture."""
        with self._opening:
            if self._session is None:
                self._session = self._open()
            return self._session

    def run(self, wanted: Sequence[str], feeds: Feeds, *, as_torch: bool = False) -> list[Any]:
        """Returns outputs: numpy arrays, or with `as_torch` torch tensors on the device."""
        return self._in_turn(lambda thread: self._run(thread, wanted, feeds, as_torch=as_torch))

    def run_values(
        self, wanted: Sequence[str], values: Mapping[str, ort.OrtValue]
    ) -> list[ort.OrtValue]:
        """Returns outputs as values of the runtime, on their device; never captured."""

        def call(_: object) -> list[ort.OrtValue]:
            with CAPTURING.shared():
                binding = self.session.io_binding()
                for name, value in values.items():
                    binding.bind_ortvalue_input(name, value)
                return self._outputs(binding, wanted)

        return self._in_turn(call)

    def gpu_ms(self, wanted: Sequence[str], feeds: Feeds) -> float | None:
        """Returns the GPU's time for a run, replayed if possible; None without a stream.

        Copies of inputs and outputs are excluded.
        """
        if self._stream is None:
            return None
        stream = self._stream
        return self._in_turn(lambda thread: self._time(thread, wanted, feeds, stream))

    def _in_turn(self, call: Callable[[object], T]) -> T:
        """Makes a call in a thread that may run graphs, or in this one if the session has none."""
        if self.refused is not None:
            return call(get_ident())
        with self._lock:
            self._first = self._first or get_ident()
            if get_ident() == self._first:
                return call(FIRST)
            if self._others is None:
                self._others = ThreadPoolExecutor(1, thread_name_prefix="moexport-gpu")
            others = self._others

        def locked() -> T:
            with self._lock:
                return call(OTHERS)

        return others.submit(locked).result()

    def _run(
        self, thread: object, wanted: Sequence[str], feeds: Feeds, *, as_torch: bool
    ) -> list[Any]:
        key = _key(thread, wanted, feeds)
        graph = self._graphs.get(key)
        if graph is None and key in self._run_once and len(self._graphs) < GRAPHS:
            graph = self._capture(key, wanted, feeds)
        elif graph is not None:
            with CAPTURING.shared():
                self._fill(graph, feeds)
                self.session.run_with_iobinding(graph.binding, graph.options)
        with CAPTURING.shared():
            if graph is None:
                return self._run_plain(key, wanted, feeds, as_torch=as_torch)
            self.replayed = True
            return [_copy(value, as_torch=as_torch) for value in graph.outputs]

    def _run_plain(
        self, key: GraphKey, wanted: Sequence[str], feeds: Feeds, *, as_torch: bool
    ) -> list[Any]:
        """Runs without a capture, and records the outputs under the key."""
        binding, bound = self.session.io_binding(), []
        for name, value in feeds.items():
            bound.append(self._bind(binding, name, value))
        outputs = self._outputs(binding, wanted)
        self.replayed = False
        if self.refused is None:
            self._run_once[key] = [(y.shape(), y.element_type()) for y in outputs]
            if len(self._run_once) > REMEMBERED:
                self._run_once.popitem(last=False)
        return [_torch_view(y) if as_torch else y.numpy() for y in outputs]

    def _outputs(self, binding: ort.IOBinding, wanted: Sequence[str]) -> list[ort.OrtValue]:
        for name in wanted:
            binding.bind_output(name, self.device, 0)
        self.session.run_with_iobinding(binding, self._options(PLAIN))
        found: list[ort.OrtValue] = binding.get_outputs()
        return found

    def _bind(self, binding: ort.IOBinding, name: str, value: Any) -> Any:
        """Binds an input (k on the CPU), and returns the object to keep alive."""
        from ...common.onnx_runtime import ort

        if name == K_INPUT:
            binding.bind_cpu_input(name, value)
        elif isinstance(value, np.ndarray):
            value = ort.OrtValue.ortvalue_from_numpy(value, self.device, 0)
            binding.bind_ortvalue_input(name, value)
        else:
            _wait_for(value)
            shape, dtype = tuple(value.shape), _numpy_type(value)
            binding.bind_input(name, self.device, 0, dtype, shape, value.data_ptr())
        return value

    def _capture(self, key: GraphKey, wanted: Sequence[str], feeds: Feeds) -> _Graph | None:
        """Captures a repeated run; on failure returns None, and stops capturing for good."""
        from ...common.onnx_runtime import message_of, runtime_errors

        failures: tuple[type[Exception], ...] = (RuntimeError, *runtime_errors())
        try:
            with CAPTURING.exclusive():
                graph = self._prepare(str(len(self._graphs) + 1), key, wanted, feeds)
                # This makes three runs: two plain ones, which allocate all memory, and the capture.
                self.session.run_with_iobinding(graph.binding, graph.options)
        except failures as error:
            self._give_up(message_of(error))
            return None
        self._graphs[key] = graph
        del self._run_once[key]
        return graph

    def _prepare(self, name: str, key: GraphKey, wanted: Sequence[str], feeds: Feeds) -> _Graph:
        """Returns a graph with the `gpu_graph_id` `name`, bound to buffers with these inputs."""
        from ...common.onnx_runtime import ort

        def buffer(shape: Sequence[int], element: Any) -> ort.OrtValue:
            return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), element, self.device, 0)

        binding = self.session.io_binding()
        inputs = {
            n: buffer(value.shape, _numpy_type(value)) for n, value in feeds.items() if n != K_INPUT
        }
        outputs = [buffer(shape, element) for shape, element in self._run_once[key]]
        for n, value in inputs.items():
            binding.bind_ortvalue_input(n, value)
        for n, value in zip(wanted, outputs, strict=True):
            binding.bind_ortvalue_output(n, value)
        if K_INPUT in feeds:
            binding.bind_cpu_input(K_INPUT, feeds[K_INPUT].copy())
        graph = _Graph(binding, self._options(name), inputs, outputs)
        self._fill(graph, feeds)
        return graph

    def _fill(self, graph: _Graph, feeds: Feeds) -> None:
        """Copies inputs into a graph's buffers."""
        for name, buffer in graph.inputs.items():
            value = feeds[name]
            if isinstance(value, np.ndarray):
                buffer.update_inplace(value)
            else:
                view = _torch_view(buffer)
                view.copy_(value)
                _wait_for(view)

    def _time(self, thread: object, wanted: Sequence[str], feeds: Feeds, stream: Stream) -> float:
        from ..tensorrt.cuda import elapsed_ms

        key = _key(thread, wanted, feeds)
        for _ in range(2):  # the second is the capture
            if self.refused is None and key not in self._graphs:
                self._run(thread, wanted, feeds, as_torch=False)
        graph = self._graphs.get(key)
        with CAPTURING.shared():
            if graph is None:
                binding = self.session.io_binding()
                bound = [self._bind(binding, name, value) for name, value in feeds.items()]
                for name in wanted:
                    binding.bind_output(name, self.device, 0)
                options = self._options(PLAIN)
            else:
                self._fill(graph, feeds)
                name = str(graph.options.get_run_config_entry(GRAPH_ID))
                binding, options, bound = graph.binding, self._options(name), []
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            try:
                return elapsed_ms(stream, lambda: self.session.run_with_iobinding(binding, options))
            finally:
                stream.synchronize()
                bound.clear()  # the run has read these inputs

    def _options(self, graph: str) -> ort.RunOptions:
        from ...common.onnx_runtime import ort

        options = ort.RunOptions()
        options.add_run_config_entry(GRAPH_ID, graph)
        return options

    def _open(self) -> ort.InferenceSession:
        if self.refused is not None:
            return self._open_session(False)
        try:
            session = self._open_session(True)
        except EngineError as error:
            self.refused = why_refused(str(error))
            if self.refused is None:
                raise
            session = self._open_session(False)
            self.refused += nodes_on_cpu(session)
            return session
        self.refused = _why_not_replayed(session) if self.device != "cpu" else None
        return session if self.refused is None else self._open_session(False)

    def _give_up(self, message: str) -> None:
        """Stops capturing and drops the session: after a failed capture its state is undefined."""
        self.refused = f"capturing a CUDA graph failed: {message}"
        self._graphs.clear()
        self._run_once.clear()
        self._session = None  # frees its memory before another one is opened
        warnings.warn(
            f"{self.refused}; the session runs kernel by kernel from now on",
            RuntimeWarning,
            stacklevel=2,
        )


def _key(thread: object, wanted: Sequence[str], feeds: Feeds) -> GraphKey:
    """Returns the key of a graph: the thread, the outputs, every input's shape, and k."""
    shapes = tuple((name, tuple(value.shape)) for name, value in feeds.items() if name != K_INPUT)
    k = int(feeds[K_INPUT][0]) if K_INPUT in feeds else None
    return (thread, tuple(wanted), shapes, k)


def _why_not_replayed(session: ort.InferenceSession) -> str | None:
    """Returns why a replay would ignore an input: one other than k is read on the CPU."""
    inputs = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    for value, memory in inputs:
        if value.name != K_INPUT and memory.name in ("Cpu", "CudaPinned"):
            return f"its input '{value.name}' is read on the CPU"
    return None


def _numpy_type(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype
    return np.dtype(str(value.dtype).removeprefix("torch."))


def _wait_for(tensor: Any) -> None:
    """Waits until torch's work on the GPU for a tensor is done."""
    if tensor.is_cuda:
        import torch

        torch.cuda.current_stream(tensor.device).synchronize()


def _torch_view(value: ort.OrtValue) -> Any:
    """Returns a torch tensor that shares a value's memory."""
    import torch

    tensor = torch.utils.dlpack.from_dlpack(value)
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor


def _copy(value: ort.OrtValue, *, as_torch: bool) -> Any:
    """Returns a copy of a graph's output, which the next replay overwrites."""
    if as_torch:
        tensor = _torch_view(value).clone()
        _wait_for(tensor)
        return tensor
    array: np.ndarray = value.numpy()
    return array if array.flags.owndata else array.copy()


def capture_refused(path: Path) -> str | None:
    """Returns why the graph in a file cannot be captured, judging by its nodes; None if it can."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        nodes = onnx.load(path, load_external_data=False).graph.node
    except (DecodeError, OSError):  # opening it reports the fault
        return None
    ops = {node.op_type for node in nodes}
    for op in sorted(ops.intersection(CONTROL_FLOW)):
        return f"the graph has control flow ({op}), which waits for the CPU"
    for op in sorted(ops.intersection(DATA_SIZES)):
        return f"the size of an output of {op} depends on values, and the CPU waits for it"
    return None
