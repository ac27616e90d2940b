"""Runs an engine on numpy or torch inputs, with outputs of the same kind.

One runner serves both TensorRTs. It allocates its buffers once, for the largest shapes of the
profiles, and has its own stream. Repeated work with equal shapes is recorded as a CUDA graph, by
the runner or by TensorRT-RTX itself. k and the batch size may change with every call. With numpy
arrays, neither PyTorch nor ONNX Runtime is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  adds the type bfloat16 to numpy
import numpy as np

from ...common.files import known_sha256
from ...errors import EngineError, FeedError
from ...graphs.names import K_INPUT
from ...graphs.sizes import AxisRange
from ..inputs import check_k_given, tensor_of
from . import cuda
from .backends import first_gpu
from .bindings import BoundWeight, PlacedWeight, check_weights, experts_of, place_weight
from .cache import engine_key, read_kernels, store_kernels
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
"""The names in numpy and torch of the types of an engine's inputs and outputs."""


Key = tuple[tuple[int, ...], int | None]


@dataclass(frozen=True, slots=True)
class AddressedArray:
    """A numpy array or torch tensor, and the address of its data."""

    array: Any
    address: int
    nbytes: int
    on_gpu: bool = False

    @staticmethod
    def of(array: Any) -> AddressedArray:
        """Wraps an array; anything that is not numpy's is a tensor."""
        if isinstance(array, np.ndarray):
            return AddressedArray(array=array, address=array.ctypes.data, nbytes=array.nbytes)
        return AddressedArray(
            array=array, address=array.data_ptr(), nbytes=array.nbytes, on_gpu=array.is_cuda
        )

    def wait_for_torch(self) -> None:
        """Waits until torch has finished its work on this memory."""
        if self.on_gpu:
            import torch

            torch.cuda.current_stream(self.array.device).synchronize()


class EngineSession:
    """An engine on the GPU, with the interface of `exporter.session.Session`.

    `capture` records repeated work as CUDA graphs. `eager` compiles kernels for a shape before its
    first result (TensorRT-RTX), which takes seconds and makes all runs equally fast. If experts'
    weights are inputs, `host_weights` leaves them in host memory, and `experts` is a bundle whose
    experts replace those of the engine. Raises what `find_plan` and `load_engine` raise. Only one
    thread at a time may call it. The GPU's memory is freed by `close`, or with the last reference.
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
        resources = ExitStack()
        resources.callback(self._loaded.close)
        self._free = cuda.closing_once(self, resources.close)
        self._capture = capture and not self._loaded.records_itself
        self._buffers: dict[str, int] = {}  # addresses of inputs and outputs
        self._captured: cuda.Captured | None = None
        self._prepared: Key | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._is_first_run = True
        self.profiles = self._loaded.profiles
        self.takes_k = self._loaded.takes_k
        self.input_name = self._loaded.input_name
        self.output_names = self._loaded.output_names
        try:
            self._device = int(cuda.call("cudaGetDevice"))
            self._stream = cuda.Stream()
            resources.callback(self._stream.close)
            self._loaded.bind_weights(experts, host=host_weights)
            self._allocate(resources)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def recorded(self) -> bool | None:
        """Whether the last run used a recording; None if the runtime records by itself."""
        return None if self._loaded.records_itself else self._captured is not None

    @property
    def bound_addresses(self) -> dict[str, int]:
        """The addresses of the weights that are inputs, equal for all engines of a bundle."""
        return self._loaded.bound_addresses

    def __call__(self, x: Any, k: int | None = None) -> Any:
        """Returns the engine's first output for a batch x; see `run`."""
        return self.run(x, k, self.output_names[:1])[self.output_names[0]]

    def run(
        self, x: Any, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Returns outputs by name, all of them by default.

        For numpy arrays, these are numpy arrays; for torch tensors, or anything else that supports
        DLPack, they are torch tensors on the same device. Raises `FeedError` for inputs and
        `UsageError` for a k outside the profiles.
        """
        wanted = list(outputs) if outputs is not None else self.output_names
        source = self._send(x, k)
        self._execute()
        results = {name: self._receive(name, source.array) for name in wanted}
        self._stream.synchronize()
        return {name: _widen(y, self._loaded.dtype(name)) for name, y in results.items()}

    def gpu_ms(self, x: Any, k: int | None = None) -> float:
        """Returns the GPU's time in ms for one run, without copies of the inputs and outputs."""
        self._send(x, k)
        self._record()
        return cuda.elapsed_ms(self._stream, self._execute)

    def close(self) -> None:
        """Frees the GPU's memory."""
        try:
            self._reset()
        finally:
            self._free()

    def _typed_input(self, x: Any) -> AddressedArray:
        """Converts the input to the engine's type, if only its width differs."""
        name, wanted = self.input_name, self._loaded.dtype(self.input_name)
        if isinstance(x, np.ma.MaskedArray):
            raise FeedError(
                f"input '{name}' is a masked array", hint="fill in its masked values: x.filled(0)"
            )
        source = _to_array(x, wanted) if isinstance(x, np.ndarray) else _to_tensor(x, wanted)
        if source is None:
            dtype = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
            raise FeedError(
                f"input '{name}' must be {wanted}, not {dtype}",
                hint="cast the array; `moexport inspect` shows the inputs that a model accepts",
            )
        if source.on_gpu and source.array.device.index != self._device:
            raise FeedError(
                f"input '{name}' is on {source.array.device}, but the engine is on "
                f"cuda:{self._device}",
                hint=f"move it: x.to('cuda:{self._device}')",
            )
        return source

    def _prepare(self, key: Key) -> None:
        """Prepares a run with these shapes, unless it is prepared already."""
        shape, k = key
        check_k_given(k, takes_k=self.takes_k, what="engine")
        if key == self._prepared:
            return
        index = choose(self.profiles, shape, k)
        self._reset()
        self._shapes = self._loaded.use(index, shape, k, self._stream.handle)
        self._stream.synchronize()  # setting a profile may start copies on this stream
        self._prepared = key

    def _send(self, x: Any, k: int | None) -> AddressedArray:
        """Prepares a run and, once pending work on the input is done, copies it into its buffer."""
        source = self._typed_input(x)
        self._prepare((tuple(source.array.shape), k))
        source.wait_for_torch()
        self._stream.copy(self._buffers[self.input_name], source.address, source.nbytes)
        return source

    def _receive(self, name: str, like: Any) -> Any:
        """Starts to copy an output to memory like that of the input."""
        shape, dtype = self._shapes[name], self._loaded.dtype(name)
        if isinstance(like, np.ndarray):
            output = AddressedArray.of(np.empty(shape, dtype))
        else:
            import torch

            output = AddressedArray.of(
                torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
            )
            output.wait_for_torch()  # the caller's earlier work may still use this memory
        self._stream.copy(output.address, self._buffers[name], output.nbytes)
        return output.array

    def _execute(self) -> None:
        """Runs the prepared work: directly the first time, and then from a recording.

        With new shapes, TensorRT needs one run before a recording, which is valid until the context
        runs anything else.
        """
        if not self._is_first_run:
            self._record()
        if self._captured is not None:
            self._captured.launch(self._stream)
        else:
            self._loaded.enqueue(self._stream.handle)
            self._is_first_run = False

    def _record(self) -> None:
        """Records the prepared work if it has run once and can be recorded."""
        if self._is_first_run or self._captured is not None or not self._capture:
            return
        self._stream.synchronize()
        self._capture = self._loaded.capturable(self._stream.handle)
        if self._capture:
            stream = self._stream
            try:
                self._captured = cuda.capture(stream, lambda: self._loaded.enqueue(stream.handle))
            except EngineError:  # without a recording, the work runs directly and reports faults
                self._capture = False

    def _reset(self) -> None:
        if self._captured is not None:
            self._captured.close()
        self._captured, self._prepared, self._is_first_run = None, None, True

    def _allocate(self, resources: ExitStack) -> None:
        """Allocates buffers for the largest shapes that the profiles allow."""
        sizes: dict[str, int] = {}
        for index, profile in enumerate(self.profiles):
            k = profile.k.max if profile.k is not None else 1 if self.takes_k else None
            shapes = self._loaded.use(index, profile.max, k, self._stream.handle)
            self._stream.synchronize()
            for name, shape in (shapes | {self.input_name: profile.max}).items():
                width = np.dtype(self._loaded.dtype(name)).itemsize
                sizes[name] = max(sizes.get(name, 1), int(np.prod(shape, dtype=np.int64)) * width)
        for name, nbytes in sizes.items():
            address = self._buffers[name] = int(cuda.call("cudaMalloc", nbytes))
            resources.callback(cuda.call, "cudaFree", address)
            self._loaded.bind(name, address)


class LoadedEngine:
    """A loaded engine with one execution context.

    `graphs` lets TensorRT-RTX record the work itself (for TensorRT, the caller does). `eager` makes
    it compile the kernels for a shape before the first run with this shape, instead of using
    general ones until they are ready. Raises what `load_engine` raises.
    """

    def __init__(
        self, plan: PlanFile, *, graphs: bool, eager: bool, host_weights: bool = False
    ) -> None:
        self.path = plan.path
        self._trt, self._runtime, self._engine = load_engine(plan, host_weights=host_weights)
        self.records_itself = plan.backend.records_itself
        recorded = {} if plan.record is None else plan.record.settings
        self._built_capturable = bool(recorded.get("capturable"))
        self._save_kernels: Callable[[], Any] | None = None
        self._runtime_cache: Any = None
        self._context = self._create_context(graphs, eager)
        if self._context is None:
            raise EngineError(
                f"{self.path}: the GPU has too little memory for the engine's activations",
                hint="build with a smaller MAX in --profile, or free some of the GPU's memory",
            )
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        # The layers' choices, `LAYER/selected`, come after the network's own outputs.
        own_first = sorted(names, key=lambda name: "/" in name)
        mode, output = self._engine.get_tensor_mode, self._trt.TensorIOMode.OUTPUT
        self.output_names = [name for name in own_first if mode(name) == output]
        self.takes_k = K_INPUT in names
        self._bound = [] if plan.record is None else [BoundWeight(**b) for b in plan.record.bound]
        self._graph = "" if plan.record is None else plan.record.graph
        self._placed: list[PlacedWeight] = []
        self.bound_addresses: dict[str, int] = {}
        others = {*self.output_names, K_INPUT, *(weight.name for weight in self._bound)}
        inputs = [name for name in names if name not in others]
        if len(inputs) != 1:
            raise EngineError(
                f"{self.path} has {', '.join(inputs) or 'no inputs'}; expected one input besides k",
                hint="keep the engine in its bundle, whose manifest describes its inputs",
            )
        (self.input_name,) = inputs
        self.profiles = plan.record.ranges if plan.record else self._read_profiles()
        self._profile = 0
        self._check_k()
        self._k = _aligned_number(np.dtype(self.dtype(K_INPUT))) if self.takes_k else None

    def _create_context(self, graphs: bool, eager: bool) -> Any:
        if not self.records_itself:
            return self._engine.create_execution_context()
        trt, settings = self._trt, self._engine.create_runtime_config()
        settings.set_runtime_cache(self._saved_kernels(settings))
        if graphs:
            settings.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        if eager:
            kernels = trt.DynamicShapesKernelSpecializationStrategy
            settings.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
        return self._engine.create_execution_context(settings)

    def _saved_kernels(self, settings: Any) -> Any:
        """Returns the kernels that TensorRT-RTX compiled here earlier; they are saved on closing.

        Without saved kernels, each start compiles them again (the page "Working with Runtime Cache"
        of TensorRT-RTX 1.7). The runtime refuses kernels of another GPU, driver or version, and
        then starts without them.
        """
        name = engine_key({"plan": known_sha256(self.path), "gpu": str(first_gpu())})
        runtime_cache = settings.create_runtime_cache()
        saved = read_kernels(name)
        if saved:
            runtime_cache.deserialize(saved)
        # This also saves the kernels if the process ends without closing its engine.
        self._save_kernels = weakref.finalize(self, _save_if_changed, name, runtime_cache, saved)
        self._runtime_cache = runtime_cache  # must outlive the context
        return runtime_cache

    def capturable(self, stream: int) -> bool:
        """Whether the prepared work can be recorded as a CUDA graph.

        Newer contexts report this (`is_stream_capturable`, TensorRT-RTX 1.2's release notes); with
        others, the network decides, which was read when the engine was built.
        """
        if hasattr(self._context, "is_stream_capturable"):
            return bool(self._context.is_stream_capturable(stream))
        return self._built_capturable

    def _check_k(self) -> None:
        """Raises `EngineError` unless k is read on the host, because it is the size of a tensor."""
        host = self._trt.TensorLocation.HOST
        if self.takes_k and self._engine.get_tensor_location(K_INPUT) != host:
            raise EngineError(
                f"{self.path} reads k on the GPU, so k does not determine the size of a tensor",
                hint="build an engine from a graph that `moexport export --k input` wrote",
            )

    def bind_weights(self, experts: Path | None, *, host: bool) -> None:
        """Binds the weights that are inputs, from the engine's bundle or the bundle `experts`."""
        folder, bound = self.path.parent, self._bound
        if (experts is not None or host) and not bound:
            raise EngineError(
                f"{self.path}: its experts' weights are in the plan, so others cannot be bound",
                hint="build the engine with --bind-weights",
            )
        if experts is not None:
            folder, bound = experts, experts_of(experts, self._graph, bound)
        if bound:
            check_weights(folder, bound)
        for weight in bound:
            self._placed.append(place_weight(folder, weight, host=host))
            self.bound_addresses[weight.name] = self._placed[-1].address
            self.bind(weight.name, self._placed[-1].address)

    def use(
        self, index: int, shape: tuple[int, ...], k: int | None, stream: int
    ) -> dict[str, tuple[int, ...]]:
        """Sets a profile, the input's shape and k; returns the outputs' shapes by name.

        Earlier work on the stream must have finished. Raises `EngineError` for a shape that the
        engine refuses despite its profile, and for an output with a data-dependent size.
        """
        if index != self._profile:
            self._request(
                lambda: self._context.set_optimization_profile_async(index, stream),
                f"profile {index}",
            )
            self._profile = index
        if self._k is not None:
            self._k[0] = k
            self.bind(K_INPUT, self._k.ctypes.data)
        self._request(
            lambda: self._context.set_input_shape(self.input_name, shape), f"the shape {shape}"
        )
        self._request(lambda: not self._context.infer_shapes(), f"the shape {shape}")
        shapes = {name: tuple(self._context.get_tensor_shape(name)) for name in self.output_names}
        for name, sizes in shapes.items():
            if any(size < 0 for size in sizes):
                raise EngineError(
                    f"{self.path}: the size of the output '{name}' depends on values: {sizes}",
                    hint="build an engine from a graph that `moexport export` wrote",
                )
        return shapes

    def bind(self, name: str, address: int) -> None:
        """Sets the address of a tensor: in host memory for k, on the GPU for all others."""
        self._request(
            lambda: self._context.set_tensor_address(name, address), f"the address of '{name}'"
        )

    def enqueue(self, stream: int) -> None:
        if not self._context.execute_async_v3(stream):
            raise EngineError(
                f"{self.path}: the run failed on the GPU",
                hint="build the engine again on this machine; `moexport verify` checks the bundle",
            )

    def dtype(self, name: str) -> str:
        """Returns a tensor's numpy type; `EngineError` if numpy has none."""
        dtype = self._engine.get_tensor_dtype(name).name
        if dtype not in TYPES:
            raise EngineError(f"{self.path}: '{name}' is {dtype}, which numpy does not support")
        return TYPES[dtype]

    def close(self) -> None:
        """Releases the engine's parts: first the context, then the engine, and last the runtime."""
        try:
            if self._save_kernels is not None:
                self._save_kernels()
        finally:
            self._context = None
            self._runtime_cache = None
            self._placed.clear()
            self._engine = None
            self._runtime = None

    def _request(self, request: Callable[[], Any], what: str) -> None:
        """Makes a request; raises `EngineError` if it returns False or raises an error."""
        with suppress(RuntimeError):
            if request():
                return
        raise EngineError(
            f"{self.path}: the engine rejects {what}",
            hint="build the engine again; `moexport inspect` shows its profiles",
        )

    def _read_profiles(self) -> list[Profile]:
        """Returns the profiles of an engine without a record, from the engine itself."""
        profiles = []
        for index in range(self._engine.num_optimization_profiles):
            shapes = self._engine.get_tensor_profile_shape(self.input_name, index)
            low, opt, high = (tuple(int(size) for size in shape) for shape in shapes)
            k = None
            if self.takes_k:
                # TensorRT raises if k determines no output's size; then the range is unknown.
                with suppress(RuntimeError):
                    # The index is the first parameter in every version, but its name differs.
                    values = self._engine.get_tensor_profile_values(index, K_INPUT)
                    k = (
                        AxisRange(*(int(value[0]) for value in values))
                        if len(values) == 3
                        else None
                    )
            profiles.append(Profile(input=self.input_name, min=low, opt=opt, max=high, k=k))
        return profiles


def _aligned_number(dtype: np.dtype[Any]) -> np.ndarray:
    """Returns an array of one number in host memory, at a multiple of `ALIGNMENT`."""
    buffer = np.zeros(2 * ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + dtype.itemsize].view(dtype)


def _save_if_changed(name: str, runtime_cache: Any, saved: bytes) -> None:
    with runtime_cache.serialize() as buffer:
        content = bytes(buffer)
    if content != saved:
        store_kernels(name, content)


KINDS = {"f": "real", "i": "whole", "u": "whole", "b": "whole"}
"""The kinds of types, real or whole numbers, within which casts are allowed."""


def _to_array(x: np.ndarray, wanted: str) -> AddressedArray | None:
    """Converts an array to a type; returns None for numbers of another kind."""
    target = np.dtype(wanted)
    if KINDS.get(x.dtype.kind) != KINDS["f" if wanted == BF16 else target.kind]:
        return None
    return AddressedArray.of(np.require(x, target, ["C"]))


def _widen(y: Any, dtype: str) -> Any:
    """Converts a BF16 output in numpy to FP32, without loss; returns others unchanged."""
    return y.astype(np.float32) if dtype == BF16 and isinstance(y, np.ndarray) else y


def _to_tensor(x: Any, wanted: str) -> AddressedArray | None:
    """Converts a tensor, from torch or DLPack, to a type; returns None for anything else."""
    tensor = tensor_of(x)
    if tensor is None:
        return None
    import torch

    dtype = getattr(torch, wanted)
    if tensor.is_complex() or tensor.is_floating_point() != dtype.is_floating_point:
        return None
    return AddressedArray.of(tensor.to(dtype).contiguous())
