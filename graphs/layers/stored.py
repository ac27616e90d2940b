"""One layer to lower, and its weights as lowerings access them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import onnx_ir as ir

from ..builder import Builder
from ..precision.types import FP32, ComputeTypes
from ..targets import Target
from .base import MoESpec
from .soft_moe import SoftMoESpec

S = TypeVar("S", bound=MoESpec)


class LayerTensors(Protocol):
    """A layer's weights for lowerings: the same bytes in several shapes.

    Names for Soft MoE: `phi` [d, n·p] (normalised, scaled, gain folded in), `experts.w1` [n, d,
    inner], `experts.b1` [n, inner], `experts.w2` [n, h, o], `experts.b2` [n, o], `gain` and `shift`
    [d]. For muMoE see `graphs.layers.mumoe`; for types, and the scales of integers,
    `graphs.precision.weights`.
    """

    def has(self, name: str) -> bool:
        """Returns whether the layer has this weight."""
        ...

    def stacked(self, name: str, *, batched: bool = False) -> ir.TensorProtocol:
        """Returns the whole tensor or, if `batched`, the tensor as a batch of one, [1, …]."""
        ...

    def expert(self, name: str, index: int) -> ir.TensorProtocol:
        """Returns one expert's part of a tensor whose first axis is n, from the same bytes."""
        ...


@dataclass(frozen=True)  # no slots: calling an alias such as SoftMoELayer sets an attribute
class Layer(Generic[S]):
    """One node to lower: the layer, its weights, the number of kept experts, and the builder.

    `build` is the lowering's function: it adds the nodes for tokens x [b, m, d] and returns y. `k`
    is Algorithm 1's k: a number, or the graph input (int64, shape [1]). If k is None, `lower`
    creates that input. The traced node determines `tokens` (m, or None for a dynamic axis),
    `x_type` and `y_type` (the float types of the tokens in and out), and `routed` (the choice and
    its weights, if the choice is made outside the layer). `batch` is the usual number
    of inputs, which only affects speed: a graph can run any number. With `scores`, a lowering
    outputs the scores that determine the choice (`Builder.add_score`).
    """

    spec: S
    tensors: LayerTensors
    k: int | ir.Value | None
    build: Callable[[Builder, Layer[S], ir.Value], ir.Value]
    tokens: int | None = None
    renormalize: bool = False
    compute: ComputeTypes = FP32
    x_type: ir.DataType = ir.DataType.FLOAT
    y_type: ir.DataType = ir.DataType.FLOAT
    target: Target = "onnx"
    batch: int = 1
    routed: tuple[ir.Value, ...] = ()
    scores: bool = False

    @property
    def selects(self) -> bool:
        """Whether experts may be left out: False if k = n and nothing is dropped."""
        return self.spec.drops or not (isinstance(self.k, int) and self.k == self.spec.experts)

    def k_value(self, b: Builder) -> ir.Value:
        """Returns k as a value of the graph, int64 [1]: a constant or the graph input."""
        if isinstance(self.k, int):
            return b.ints(self.k)
        assert self.k is not None, "lower() creates the graph input"
        return self.k

    def stacked(self, b: Builder, name: str, *, batched: bool = False) -> ir.Value:
        """Returns the whole weight as an initializer, [1, …] if `batched`."""
        return b.weight(self.tensors.stacked(name, batched=batched), f"{self.spec.name}/{name}")

    def rows(self, b: Builder, name: str, new_name: str) -> ir.Value:
        """Adds a vector per expert, stored as [n, w], as an initializer [n, 1, w]."""
        tensor, full_name = self.tensors.stacked(name), f"{self.spec.name}/{new_name}"
        n, width = tensor.shape.numpy()
        shape = ir.Shape((n, 1, width))
        if isinstance(tensor, ir.ExternalTensor):
            tensor = ir.ExternalTensor(
                tensor.location,
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=shape,
                name=full_name,
                base_dir=tensor.base_dir,
            )
        else:
            tensor = ir.Tensor(tensor.numpy().reshape(n, 1, width), tensor.dtype, name=full_name)
        return b.weight(tensor, full_name)

    def optional(self, b: Builder, name: str) -> ir.Value | None:
        """Returns the whole weight as from `stacked`; None if the layer lacks it."""
        return self.stacked(b, name) if self.tensors.has(name) else None

    def expert(self, b: Builder, name: str, index: int) -> ir.Value:
        collection, weight = name.split(".", 1)  # `experts.w1` of expert 3 is `experts.3.w1`
        full_name = f"{self.spec.name}/{collection}.{index}.{weight}"
        return b.weight(self.tensors.expert(name, index), full_name)


SoftMoELayer = Layer[SoftMoESpec]
