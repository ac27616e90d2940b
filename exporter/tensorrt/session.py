"""Runs an engine: numpy or torch in, the same out.

One runner serves both TensorRTs. Its buffers are allocated once, for the largest shapes of the
profiles; it has a stream of its own; and work that comes back with the same shapes is recorded as a
CUDA graph and sent as one, by the runner or by TensorRT-RTX itself. k and the batch size may change
with every call. Arrays of numpy need neither PyTorch nor ONNX Runtime.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...common.files import known_sha256
from ...errors import EngineError, FeedError
from ...graphs.names import K_INPUT
from ..inputs import AxisRange, check_given
from . import cuda
from .backends import first_gpu
from .bindings import BoundWeight, PlacedWeight, checked, experts_of, placed
from .cache import engine_key, keep_kernels, read_kernels
from .plan_file import load_engine
from .profiles import Profile, choose
from .trust import PlanFile, find_plan

ALIGNMENT = 256

BF16 = "bfloat16"

TYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": BF16,
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}
"""The types of an engine's inputs and outputs, by the names that numpy and torch have for them."""


Key = tuple[tuple[int, ...], int | None]


@dataclass(frozen=True, slots=True)
class AddressedArray:
    """An array of numpy or a tensor of torch, and where its numbers lie."""

    array: Any
    address: int
    nbytes: int
    on_gpu: bool = False

    @staticmethod
    def of(array: Any) -> AddressedArray:
        """Returns what holds an array; a tensor is one that is not numpy's."""
        if isinstance(array, np.ndarray):
            return AddressedArray(array=array, address=array.ctypes.data, nbytes=array.nbytes)
        return AddressedArray(
            array=array, address=array.data_ptr(), nbytes=array.nbytes, on_gpu=array.is_cuda
        )

    def settle(self) -> None:
        """Waits until what torch sent to the GPU for this memory is done."""
        if self.on_gpu:
            import torch

            torch.cuda.current_stream(self.array.device).synchronize()


class EngineSession:
    """An engine on the GPU, with the calls of `exporter.session.Session`.

    `capture` records repeated work as CUDA graphs. `eager` compiles for each shape before its first
    answer (TensorRT-RTX), which takes seconds and makes all answers equally fast. Of an engine that
    takes its experts' weights as inputs, `host_weights` leaves them in the machine's memory, and
    `experts` is another bundle whose experts take the place of its own. Raises what `find_plan` and
    `load_engine` raise. One thread at a time may call it. What nothing holds any more gives the
    GPU's memory back as `close` does.
    """

    def __init__(
        self,
        path: Path,
        *,
        trust: bool = False,
        capture: bool = True,
        eager: bool = False,
        host_weights: bool = False,
        experts: Path | None = None,
    ) -> None:
        plan = find_plan(path, trust=trust)
        self.path = path
        self.provider = plan.backend.name
        self.record = plan.record
        self._loaded = LoadedEngine(plan, graphs=capture, eager=eager, host_weights=host_weights)
        held = ExitStack()
        held.callback(self._loaded.close)
        self._give_back = cuda.given_back(self, held.close)
        self._capture = capture and not self._loaded.records_itself
        self._buffers: dict[str, cuda.DeviceBuffer] = {}
        self._captured: cuda.Captured | None = None
        self._ready: Key | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._fresh = True
        self.profiles = self._loaded.profiles
        self.takes_k = self._loaded.takes_k
        self.input_name = self._loaded.input_name
        self.output_names = self._loaded.output_names
        try:
            self._device = int(cuda.call("cudaGetDevice"))
            self._stream = cuda.Stream()
            held.callback(self._stream.close)
            self._loaded.bind_weights(experts, host=host_weights)
            self._allocate(held)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def recorded(self) -> bool | None:
        """Whether the last work was a recording; None where the runtime records by itself."""
        return None if self._loaded.records_itself else self._captured is not None

    @property
    def bound_addresses(self) -> dict[str, int]:
        """Where the weights lie that are inputs, by name: the same for all engines of a bundle."""
        return self._loaded.bound_addresses

    def __call__(self, x: Any, k: int | None = None) -> Any:
        """Returns the engine's first output for a batch x, as `run` does."""
        return self.run(x, k, self.output_names[:1])[self.output_names[0]]

    def run(
        self, x: Any, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Returns outputs by name, all of them unless `outputs` says which.

        A numpy array gives numpy arrays. A torch tensor, or anything else that speaks DLPack, gives
        torch tensors where it lies: what is on the GPU stays there. Raises `FeedError` for inputs
        and `UsageError` for a k outside the profiles.
        """
        wanted = list(outputs) if outputs is not None else self.output_names
        source = self._typed_input(x)
        self._prepare((tuple(source.array.shape), k))
        self._send(source)
        self._execute()
        results = {name: self._receive(name, source.array) for name in wanted}
        self._stream.synchronize()
        return {name: _widened(y, self._loaded.dtype(name)) for name, y in results.items()}

    def gpu_ms(self, x: Any, k: int | None = None) -> float:
        """Returns the GPU's time for one run, copies to and from it left out."""
        source = self._typed_input(x)
        self._prepare((tuple(source.array.shape), k))
        self._send(source)
        self._record()
        watch = cuda.Stopwatch()
        try:
            watch.begin(self._stream)
            self._execute()
            return watch.end(self._stream)
        finally:
            watch.close()

    def close(self) -> None:
        """Gives the GPU's memory back."""
        try:
            self._forget()
        finally:
            self._give_back()

    def _typed_input(self, x: Any) -> AddressedArray:
        """The input in the engine's type, where only its width differs."""
        name, wanted = self.input_name, self._loaded.dtype(self.input_name)
        if isinstance(x, np.ma.MaskedArray):
            raise FeedError(
                f"input '{name}' is a masked array",
                hint="say what its hidden values are: x.filled(0)",
            )
        source = _array(x, wanted) if isinstance(x, np.ndarray) else _tensor(x, wanted)
        if source is None:
            dtype = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
            raise FeedError(
                f"input '{name}' takes {wanted}, not {dtype}",
                hint="cast the array; `moexport inspect` shows what a model takes",
            )
        if source.on_gpu and source.array.device.index != self._device:
            raise FeedError(
                f"input '{name}' lies on {source.array.device}, and the engine on "
                f"cuda:{self._device}",
                hint=f"move it: x.to('cuda:{self._device}')",
            )
        return source

    def _prepare(self, key: Key) -> None:
        """Sets what a run of these shapes needs, unless it is set already."""
        shape, k = key
        check_given(k, takes_k=self.takes_k, what="engine")
        if key == self._ready:
            return
        index = choose(self.profiles, shape, k)
        self._forget()
        self._shapes = self._loaded.use(index, shape, k, self._stream.handle)
        self._stream.synchronize()  # a profile may be set by copies that this stream makes
        self._ready = key

    def _send(self, source: AddressedArray) -> None:
        """Copies the input into its buffer, when it is complete there where it lies."""
        source.settle()
        self._stream.copy(self._buffers[self.input_name].address, source.address, source.nbytes)

    def _receive(self, name: str, like: Any) -> Any:
        """Begins to copy an output out of its buffer, into what lies where the input does."""
        shape, dtype = self._shapes[name], self._loaded.dtype(name)
        if isinstance(like, np.ndarray):
            output = AddressedArray.of(np.empty(shape, np.uint16 if dtype == BF16 else dtype))
        else:
            import torch

            array = AddressedArray.of(
                torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
            )
            array.settle()  # its memory may still be in use by what the caller sent before
        self._stream.copy(output.address, self._buffers[name].address, output.nbytes)
        return output.array

    def _execute(self) -> None:
        """Runs what is set up: directly the first time, recorded the second, replayed from then.

        TensorRT wants one run between new shapes and their recording, and a recording is good until
        the context runs anything else.
        """
        if not self._fresh:
            self._record()
        if self._captured is not None:
            self._captured.launch(self._stream)
        else:
            self._loaded.enqueue(self._stream.handle)
            self._fresh = False

    def _record(self) -> None:
        """Records the work that is set up, if it has run once and can be recorded."""
        if self._fresh or self._captured is not None or not self._capture:
            return
        self._stream.synchronize()
        self._capture = self._loaded.capturable(self._stream.handle)
        if self._capture:
            stream = self._stream
            try:
                self._captured = cuda.captured(stream, lambda: self._loaded.enqueue(stream.handle))
            except EngineError:  # it runs directly instead, which tells what is wrong beside that
                self._capture = False

    def _forget(self) -> None:
        """Drops the recording and what is set up."""
        if self._captured is not None:
            self._captured.close()
        self._captured, self._ready, self._fresh = None, None, True

    def _allocate(self, held: ExitStack) -> None:
        """Makes room for the largest shapes that the profiles allow."""
        sizes: dict[str, int] = {}
        for index, profile in enumerate(self.profiles):
            k = profile.k.max if profile.k is not None else 1 if self.takes_k else None
            shapes = self._loaded.use(index, profile.max, k, self._stream.handle)
            self._stream.synchronize()
            for name, shape in (shapes | {self.input_name: profile.max}).items():
                dtype = self._loaded.dtype(name)
                width = 2 if dtype == BF16 else np.dtype(dtype).itemsize
                sizes[name] = max(sizes.get(name, 1), int(np.prod(shape, dtype=np.int64)) * width)
        for name, nbytes in sizes.items():
            self._buffers[name] = cuda.DeviceBuffer(nbytes)
            held.callback(self._buffers[name].free)
            self._loaded.bind(name, self._buffers[name].address)


class LoadedEngine:
    """An engine that is loaded, with one execution context.

    `graphs` lets TensorRT-RTX record the work by itself (TensorRT leaves that to the caller);
    `eager` makes it compile the kernels of a shape before the first run with it, where otherwise
    general ones serve until the shape's own are ready. Raises what `load_engine` raises.
    """

    def __init__(
        self, plan: PlanFile, *, graphs: bool, eager: bool, host_weights: bool = False
    ) -> None:
        self.path = plan.path
        self._trt, self._runtime, self._engine = load_engine(plan, host_weights=host_weights)
        self.records_itself = plan.backend.records_itself
        recorded = {} if plan.record is None else plan.record.settings
        self._built_capturable = bool(recorded.get("capturable"))
        self._kernels: Callable[[], Any] | None = None
        self._runtime_cache: Any = None
        self._context = self._create(graphs, eager)
        if self._context is None:
            raise EngineError(
                f"{self.path}: the GPU has no memory for its activations",
                hint="build with a smaller MAX in --profile, or free some of the GPU's memory",
            )
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        # What layers choose, `LAYER/selected`, comes after the network's own outputs.
        own_first = sorted(names, key=lambda name: "/" in name)
        self.output_names = [name for name in own_first if self._is_output(name)]
        self.takes_k = K_INPUT in names
        self._bound = [] if plan.record is None else [BoundWeight(**b) for b in plan.record.bound]
        self._graph = "" if plan.record is None else plan.record.graph
        self._placed: list[PlacedWeight] = []
        self.bound_addresses: dict[str, int] = {}
        others = {*self.output_names, K_INPUT, *(weight.name for weight in self._bound)}
        inputs = [name for name in names if name not in others]
        if len(inputs) != 1:
            raise EngineError(
                f"{self.path}: takes {', '.join(inputs) or 'no inputs'}; one is expected, beside k",
                hint="keep the engine in its bundle, whose manifest says what its inputs are",
            )
        (self.input_name,) = inputs
        self.profiles = plan.record.ranges if plan.record else self._read_profiles()
        self._profile = 0
        self._check_k()
        self._k = _aligned(np.dtype(self.dtype(K_INPUT))) if self.takes_k else None

    def _create(self, graphs: bool, eager: bool) -> Any:
        if not self.records_itself:
            return self._engine.create_execution_context()
        trt, settings = self._trt, self._engine.create_runtime_config()
        settings.set_runtime_cache(self._compiled(settings))
        if graphs:
            settings.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        if eager:
            kernels = trt.DynamicShapesKernelSpecializationStrategy
            settings.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
        return self._engine.create_execution_context(settings)

    def _compiled(self, settings: Any) -> Any:
        """The kernels that TensorRT-RTX compiled for this engine here before, kept when it closes.

        Without them each start compiles them again: the page "Working with Runtime Cache" of
        TensorRT-RTX 1.7. Those of another GPU, driver or version are refused by the runtime, and
        then it begins with none.
        """
        name = engine_key({"plan": known_sha256(self.path), "gpu": str(first_gpu())})
        runtime_cache = settings.create_runtime_cache()
        before = read_kernels(name)
        if before:
            runtime_cache.deserialize(before)
        # Also at the end of a process that never closes its engine.
        self._kernels = weakref.finalize(self, _keep_kernels, name, runtime_cache, before)
        self._runtime_cache = runtime_cache  # which has to outlive the context
        return runtime_cache

    def capturable(self, stream: int) -> bool:
        """Whether the work that is set up can be recorded as a CUDA graph.

        The context tells it where its version can (`is_stream_capturable`, TensorRT-RTX 1.2's
        release notes); otherwise what was read from the network when the engine was built.
        """
        if hasattr(self._context, "is_stream_capturable"):
            return bool(self._context.is_stream_capturable(stream))
        return self._built_capturable

    def _check_k(self) -> None:
        """K is the size of something, so it is read on the host."""
        host = self._trt.TensorLocation.HOST
        if self.takes_k and self._engine.get_tensor_location(K_INPUT) != host:
            raise EngineError(
                f"{self.path}: takes k on the GPU, where it decides no size",
                hint="build an engine from a graph that `moexport export --k input` wrote",
            )

    def bind_weights(self, experts: Path | None, *, host: bool) -> None:
        """Binds the weights that are inputs, of the engine's bundle or of another one's experts."""
        folder, bound = self.path.parent, self._bound
        if (experts is not None or host) and not bound:
            raise EngineError(
                f"{self.path}: its experts' weights are in the plan, and cannot lie elsewhere",
                hint="build the engine with --bind-weights",
            )
        if experts is not None:
            folder, bound = experts, experts_of(experts, self._graph, bound)
        if bound:
            checked(folder, bound)
        for weight in bound:
            self._placed.append(placed(folder, weight, host=host))
            self.bound_addresses[weight.name] = self._placed[-1].address
            self.bind(weight.name, self._placed[-1].address)

    def use(
        self, index: int, shape: tuple[int, ...], k: int | None, stream: int
    ) -> dict[str, tuple[int, ...]]:
        """Sets a profile, the input's shape and k; returns the outputs' shapes by name.

        What was sent to the stream before must be done. Raises `EngineError` for a shape that the
        engine does not take after all, and for an output whose size depends on values.
        """
        if index != self._profile:
            self._must(
                lambda: self._context.set_optimization_profile_async(index, stream),
                f"profile {index}",
            )
            self._profile = index
        if self._k is not None:
            self._k[0] = k
            self.bind(K_INPUT, self._k.ctypes.data)
        self._must(
            lambda: self._context.set_input_shape(self.input_name, shape), f"the shape {shape}"
        )
        self._must(lambda: not self._context.infer_shapes(), f"the shape {shape}")
        shapes = {name: tuple(self._context.get_tensor_shape(name)) for name in self.output_names}
        for name, sizes in shapes.items():
            if any(size < 0 for size in sizes):
                raise EngineError(
                    f"{self.path}: the size of its output '{name}' depends on values: {sizes}",
                    hint="build an engine from a graph that `moexport export` wrote",
                )
        return shapes

    def bind(self, name: str, address: int) -> None:
        """Says where a tensor lies: k in host memory, every other on the GPU."""
        self._must(
            lambda: self._context.set_tensor_address(name, address), f"the address of '{name}'"
        )

    def enqueue(self, stream: int) -> None:
        """Sends the work to a stream."""
        if not self._context.execute_async_v3(stream):
            raise EngineError(
                f"{self.path}: the run failed on the GPU",
                hint="build the engine again on this machine; `moexport verify` checks the bundle",
            )

    def dtype(self, name: str) -> str:
        """Returns a tensor's type as numpy calls it; `EngineError` for one that has no name."""
        dtype = self._engine.get_tensor_dtype(name).name
        if dtype not in TYPES:
            raise EngineError(f"{self.path}: '{name}' is {dtype}, which numpy does not have")
        return TYPES[dtype]

    def close(self) -> None:
        """Gives back what the engine holds: the context before the engine, the runtime last."""
        try:
            if self._kernels is not None:
                self._kernels()
        finally:
            self._context = None
            self._runtime_cache = None
            self._placed.clear()
            self._engine = None
            self._runtime = None

    def _must(self, request: Callable[[], Any], what: str) -> None:
        """Raises `EngineError` for a request that is refused: by False, or by an exception."""
        with suppress(RuntimeError):
            if request():
                return
        raise EngineError(
            f"{self.path}: the engine does not take {what}",
            hint="build the engine again; `moexport inspect` shows its profiles",
        )

    def _is_output(self, name: str) -> bool:
        return bool(self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.OUTPUT)

    def _read_profiles(self) -> list[Profile]:
        """The profiles of an engine without a record, as the engine itself tells them."""
        profiles = []
        for index in range(self._engine.num_optimization_profiles):
            shapes = self._engine.get_tensor_profile_shape(self.input_name, index)
            low, opt, high = (tuple(int(size) for size in shape) for shape in shapes)
            k = None
            if self.takes_k:
                # It raises where k decides no output's size: then its range is not told.
                with suppress(RuntimeError):
                    # The index comes first in every version, whatever its signature calls it.
                    values = self._engine.get_tensor_profile_values(index, K_INPUT)
                    k = (
                        AxisRange(*(int(value[0]) for value in values))
                        if len(values) == 3
                        else None
                    )
            profiles.append(Profile(input=self.input_name, min=low, opt=opt, max=high, k=k))
        return profiles


def _aligned(dtype: np.dtype[Any]) -> np.ndarray:
    """One number in host memory whose address is a multiple of `ALIGNMENT`."""
    room = np.zeros(2 * ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + dtype.itemsize].view(dtype)


def _keep_kernels(name: str, runtime_cache: Any, before: bytes) -> None:
    """Writes down what was compiled, where anything was."""
    with runtime_cache.serialize() as buffer:
        content = bytes(buffer)
    if content != before:
        keep_kernels(name, content)


KINDS = {"f": "real", "i": "whole", "u": "whole", "b": "whole"}
"""What may be cast to what: real numbers, and whole ones."""


def _array(x: np.ndarray, wanted: str) -> AddressedArray | None:
    """The array in a type, as it lies in memory; None for numbers of another kind."""
    target = np.dtype(np.float32 if wanted == BF16 else wanted)
    if KINDS.get(x.dtype.kind) != KINDS[target.kind]:
        return None
    converted = np.require(x, target, ["C"])
    return AddressedArray.of(_bf16(converted) if wanted == BF16 else converted)


def _bf16(x: np.ndarray) -> np.ndarray:
    """The upper halves of FP32 numbers, rounded to the nearest; numpy has no BF16."""
    bits = x.view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    halves: np.ndarray = (np.where(np.isnan(x), bits | 0x400000, rounded) >> 16).astype(np.uint16)
    return halves


def _widened(y: Any, dtype: str) -> Any:
    """The output as it is; of BF16 in numpy as FP32, which loses nothing."""
    if dtype != BF16 or not isinstance(y, np.ndarray):
        return y
    return (y.astype(np.uint32) << 16).view(np.float32)


def _tensor(x: Any, wanted: str) -> AddressedArray | None:
    """The tensor in a type, from torch or through DLPack; None for what cannot be one."""
    try:
        import torch

        if not isinstance(x, torch.Tensor):
            x = torch.utils.dlpack.from_dlpack(x)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, BufferError):
        return None
    dtype = getattr(torch, wanted)
    if x.is_complex() or x.is_floating_point() != dtype.is_floating_point:
        return None
    return AddressedArray.of(x.detach().to(dtype).contiguous())
