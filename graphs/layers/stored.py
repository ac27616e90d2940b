"""The constants of one layer as a lowering sees them, wherever their bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import onnx_ir as ir

from ..builder import Builder
from ..precision.types import FP32, ComputeTypes
from ..targets import Target
from .base import MoESpec
from .mumoe import MuMoESpec
from .soft_moe import SoftMoESpec

S = TypeVar("S", bound=MoESpec)


class LayerTensors(Protocol):
    """Where the lowerings find a layer's weights: one set of bytes in several shapes.

    Names for Soft MoE: `phi` [d, n·p] (normalised, scaled, gain folded in), `experts.w1`
    [n, d, inner], `experts.b1` [n, inner], `experts.w2` [n, h, o], `experts.b2` [n, o], `gain` and
    `shift` [d]. For muMoE see `graphs.layers.mumoe`; for the types, and the scales of integers,
    `graphs.precision.weights`.
    """

    def has(self, name: str) -> bool:
        """Whether the layer has this weight."""
        ...

    def stacked(self, name: str, *, batched: bool = False) -> ir.TensorProtocol:
        """The whole tensor; `batched` as a batch of one, [1, …]."""
        ...

    def expert(self, name: str, index: int) -> ir.TensorProtocol:
        """One expert's part of a tensor whose first axis is n, from the same bytes."""
        ...


@dataclass(frozen=True)  # no slots: calling an alias such as Layer sets an attribute
class LayerOf(Generic[S]):
    """One node to lower: the layer, its weights and how many experts it keeps.

    `k` is Algorithm 1's k: a number, or the graph input (int64, shape [1]) that carries it. `lower`
    makes that input where k is None, and takes from the traced node: `tokens`, which is m or None
    where the token axis is dynamic, `x_type` and `y_type`, the float types of the tokens in and
    out, and `routed`. `batch` is the usual number of inputs: a choice of speed alone,
    since every graph takes any. `routed` are the inputs beside the tokens: of a kind whose
    choice is made around the layer, what was chosen and with what weights.
    """

    spec: S
    tensors: LayerTensors
    k: int | ir.Value | None
    tokens: int | None = None
    renormalize: bool = False
    compute: ComputeTypes = FP32
    x_type: ir.DataType = ir.DataType.FLOAT
    y_type: ir.DataType = ir.DataType.FLOAT
    target: Target = "onnx"
    batch: int = 1
    routed: tuple[ir.Value, ...] = ()

    @property
    def selects(self) -> bool:
        """Whether any expert may be left out: False where k = n and nothing is dropped."""
        return self.spec.drops or not (isinstance(self.k, int) and self.k == self.spec.experts)

    def k_value(self, b: Builder) -> ir.Value:
        """K as a value of the graph, int64 [1]: a constant or the graph input."""
        if isinstance(self.k, int):
            return b.ints(self.k)
        assert self.k is not None, "lower() makes the graph input"
        return self.k

    def stacked(self, b: Builder, name: str, *, batched: bool = False) -> ir.Value:
        """The whole weight as an initializer of the graph; `batched` as a batch of one, [1, …]."""
        return b.weight(self.tensors.stacked(name, batched=batched), f"{self.spec.name}/{name}")

    def optional(self, b: Builder, name: str) -> ir.Value | None:
        """The whole weight as `stacked` gives it; None where the layer has none of that name."""
        return self.stacked(b, name) if self.tensors.has(name) else None

    def expert(self, b: Builder, name: str, index: int) -> ir.Value:
        """One expert's weight as an initializer of the graph."""
        return b.weight(
            self.tensors.expert(name, index), f"{self.spec.name}/{_singular(name, index)}"
        )


Layer = LayerOf[SoftMoESpec]
MuMoELayer = LayerOf[MuMoESpec]


def _singular(name: str, index: int) -> str:
    """`experts.w1` of expert 3 is `experts.3.w1`."""
    collection, weight = name.split(".", 1)
    return f"{collection}.{index}.{weight}"
