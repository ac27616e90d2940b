"""An engine's execution context: its tensors, shapes, profile and addresses.

What the interface of TensorRT asks of a caller is here, after the documentation of
`IExecutionContext` (10.16, 11.4 and TensorRT-RTX 1.7): a new profile invalidates the shapes; the
value of a shape tensor lies in host memory and is read when the work is enqueued; addresses are
multiples of 256 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ...errors import EngineError
from ...graphs.names import K_INPUT
from ..ranges import AxisRange
from .loading import load_engine
from .plan_file import Plan
from .profiles import Profile

ALIGNMENT = 256

TYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}
"""The types of an engine's inputs and outputs, by the names that torch has for them."""


class Context:
    """An engine that is loaded, with one execution context.

    `graphs` lets TensorRT-RTX record the work by itself (TensorRT leaves that to the caller);
    `eager` makes it compile the kernels of a shape before the first run with it, where otherwise
    general ones serve until the shape's own are ready. Raises what `load_engine` raises.
    """

    def __init__(self, plan: Plan, *, graphs: bool, eager: bool) -> None:
        self.path = plan.path
        self._trt, self._runtime, self._engine = load_engine(plan)
        self.records_itself = plan.flavour.records_itself
        self._context = self._create(graphs, eager)
        if self._context is None:
            raise EngineError(
                f"{self.path}: the GPU has no memory for its activations",
                hint="build with a smaller MAX in --profile, or free some of the GPU's memory",
            )
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self.output_names = [name for name in names if self._is_output(name)]
        self.takes_k = K_INPUT in names
        (self.input_name,) = (n for n in names if n not in (*self.output_names, K_INPUT))
        self.profiles = plan.record.ranges if plan.record else self._read_profiles()
        self._profile = 0
        self._check_k()
        self._k = _aligned(K_TYPES[self.dtype(K_INPUT)]) if self.takes_k else None

    def _create(self, graphs: bool, eager: bool) -> Any:
        if not self.records_itself:
            return self._engine.create_execution_context()
        trt, settings = self._trt, self._engine.create_runtime_config()
        if graphs:
            settings.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        if eager:
            kernels = trt.DynamicShapesKernelSpecializationStrategy
            settings.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
        return self._engine.create_execution_context(settings)

    def _check_k(self) -> None:
        """K is the size of something, so it is read on the host."""
        host = self._trt.TensorLocation.HOST
        if self.takes_k and self._engine.get_tensor_location(K_INPUT) != host:
            raise EngineError(
                f"{self.path}: takes k on the GPU, where it decides no size",
                hint="build an engine from a graph that `moexport export --k input` wrote",
            )

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
        found = {name: tuple(self._context.get_tensor_shape(name)) for name in self.output_names}
        for name, sizes in found.items():
            if any(size < 0 for size in sizes):
                raise EngineError(
                    f"{self.path}: the size of its output '{name}' depends on values: {sizes}",
                    hint="build an engine from a graph that `moexport export` wrote",
                )
        return found

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
        """Returns a tensor's type as torch calls it; `EngineError` for one that torch lacks."""
        told = self._engine.get_tensor_dtype(name).name
        if told not in TYPES:
            raise EngineError(f"{self.path}: '{name}' is {told}, which PyTorch does not have")
        return TYPES[told]

    def close(self) -> None:
        """Gives back what the engine holds: the context before the engine, the runtime last."""
        self._context = None
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
        found = []
        for index in range(self._engine.num_optimization_profiles):
            shapes = self._engine.get_tensor_profile_shape(self.input_name, index)
            low, opt, high = (tuple(int(size) for size in shape) for shape in shapes)
            k = None
            if self.takes_k:
                # The index comes first in every version, whatever its signature calls it.
                values = self._engine.get_tensor_profile_values(index, K_INPUT)
                k = AxisRange(*(int(each[0]) for each in values)) if len(values) == 3 else None
            found.append(Profile(self.input_name, low, opt, high, k))
        return found


K_TYPES: Mapping[str, np.dtype[Any]] = {
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
}


def _aligned(dtype: np.dtype[Any]) -> np.ndarray:
    """One number in host memory whose address is a multiple of `ALIGNMENT`."""
    room = np.zeros(2 * ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + dtype.itemsize].view(dtype)
