"""Token-routed experts in PyTorch: what is computed after the surrounding graph chose experts.

A router gives each token k experts and a weight for each; this layer computes y_t = Σ_j weights[t,
j] · expert_{index[t, j]}(x_t). It loops over the experts and is the reference for exported graphs,
whose form is written independently, in `plugins.token_routed.lowerings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ....graphs.layers.base import (
    Kind,
    Matrices,
    RoutingDecision,
    StoredPart,
    frozen_if_any,
    to_bfloat16,
)
from ....graphs.layers.expert import (
    Activation,
    ExpertMaps,
    ExpertMapsMixin,
    ExpertNorm,
    NormWeights,
    apply_activation,
)

Gate = Literal["none", "concatenated", "interleaved"]
"""`none`: act(x·w1 + b1). Otherwise act(gate)·up, where the columns of x·w1 + b1 are [gate, up] or
interleaved: gate, up, gate, up, …"""

WeightsOn = Literal["output", "input"]
"""Whether a weight multiplies an expert's output or its input."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec(ExpertMapsMixin):
    """Sizes and behaviour of the experts of one layer, without their weights.

    `experts` is n, and `k` the number of experts of a token in training. For experts of one map
    `hidden` is 0. See `ExpertMapsSpec` for what surrounds the maps. With a gate, `limit` bounds the
    gate from above and the other half to −limit … limit before the activation, and `up_offset` is
    added to that half. With `post_norm` an expert's output is multiplied by a scale [o] and then
    divided by its root mean square.

    If experts have a capacity, tokens come in groups of `group`, and an expert computes at most
    `capacities[k - 1]` tokens of each. A dropped choice has the index expert + n and weight 0. With
    `rounded` the experts' inputs and outputs are rounded to BF16.
    """

    kind: ClassVar[Kind] = "experts"
    op_type: ClassVar[str] = "Experts"
    renormalizable: ClassVar[bool] = False
    chooses_sets: ClassVar[bool] = False
    routes_tokens: ClassVar[bool] = True
    dynamic_int8: ClassVar[bool] = True
    typical_tokens: ClassVar[tuple[int, ...]] = (1, 512)  # a decoding step, a prompt
    flat: ClassVar[bool] = True
    slots: ClassVar[int] = 1

    name: str
    experts: int
    k: int
    dim: int
    hidden: int
    out: int
    activation: Activation = "silu"
    gate: Gate = "concatenated"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    post_norm: bool = False
    post_norm_eps: float = 1e-6
    weights_on: WeightsOn = "output"
    hidden_norm: ExpertNorm | None = None
    out_norm: ExpertNorm | None = None
    out_activation: Activation = "identity"
    group: int | None = None
    capacities: tuple[int, ...] = ()
    rounded: bool = False

    @property
    def linear(self) -> bool:
        """Whether an expert is one map."""
        return self.hidden == 0

    @property
    def drops(self) -> bool:
        return bool(self.capacities)

    @property
    def trained_k(self) -> int:
        return self.k

    @property
    def inner(self) -> int:
        """The columns of an expert's first matrix: h, 2h with a gate, o if it has one matrix."""
        if self.linear:
            return self.out
        return self.hidden if self.gate == "none" else 2 * self.hidden

    def macs(self, tokens: int, k: int) -> dict[str, int]:
        """Returns the multiply-adds for `tokens` tokens with k experts each, by part."""
        return {
            "experts": tokens * k * self.parameters_per_expert,
            "combine": tokens * k * self.out,
        }


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """The weights of one layer, in canonical orientation.

    `w1` has n matrices [d, inner] and `w2` n matrices [h, o], or None; they may be transposed
    views of a checkpoint's tensors, of any float type. `b1` [n, inner] and `b2` [n, o] may be None.
    With a gate the columns of `w1` and `b1` are in the order of the spec's `gate`. `scale` [o]
    belongs to `post_norm`.
    """

    w1: Matrices
    w2: Matrices | None
    b1: Tensor | None = None
    b2: Tensor | None = None
    scale: Tensor | None = None
    norms: NormWeights = NormWeights()


class Experts(ExpertMaps):
    """The experts of one layer: x [t, d], index [t, k] and weights [t, k] to [t, o].

    A smaller k is a narrower index from the router; `keep` has no effect here.
    """

    spec: ExpertsSpec

    def __init__(self, spec: ExpertsSpec, weights: ExpertsWeights) -> None:
        super().__init__(weights)
        self.spec = spec
        self.scale = frozen_if_any(weights.scale)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Maps tokens x [t, d] to [t, o]."""
        y = x.new_zeros(x.shape[0], self.spec.out)
        if self.spec.rounded:
            x = to_bfloat16(x)
        for expert in torch.unique(index).tolist():
            dropped = expert >= self.spec.experts
            if dropped or expert in self.edits.ablated_in(0):
                continue
            token, choice = torch.where(index == expert)
            weight = weights[token, choice, None].to(x.dtype)
            if self.spec.weights_on == "input":
                outputs = self.expert(expert, x[token] * weight)
            else:
                outputs = self.expert(expert, x[token])
                outputs = (to_bfloat16(outputs) if self.spec.rounded else outputs) * weight
            y.index_add_(0, token, outputs)
        return y

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """Computes expert `index` on rows [r, d]; returns [r, o]."""
        outputs = super().expert(index, rows)
        if not self.spec.post_norm:
            return outputs
        if self.scale is not None:
            outputs = outputs * self.scale.to(rows.dtype)
        square = outputs.square().mean(dim=-1, keepdim=True)
        return outputs * torch.rsqrt(square + self.spec.post_norm_eps)

    def gated(self, hidden: Tensor) -> Tensor:
        """Computes the activation, with a gate if there is one: [r, inner] to [r, h]."""
        spec = self.spec
        if spec.gate == "none":
            return apply_activation(hidden, spec.activation, spec.alpha)
        if spec.gate == "concatenated":
            gate, up = hidden.chunk(2, dim=-1)
        else:
            gate, up = hidden[..., ::2], hidden[..., 1::2]
        if spec.limit is not None:
            gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        return apply_activation(gate, spec.activation, spec.alpha) * (up + spec.up_offset)

    def choices(self, x: Tensor, index: Tensor, weights: Tensor) -> dict[str, RoutingDecision]:
        """Returns the layer's index in ascending order.

        The margin is infinite, because only the router knows it.
        """
        del x, weights
        margin = torch.full(index.shape[:1], torch.inf)
        return {"": RoutingDecision(index.sort(dim=-1).values, margin)}

    def stored(self) -> Iterator[StoredPart]:
        """Yields the experts' weights; gate and up are concatenated.

        The scale before a post-norm is part of the second matrix and its bias.
        """
        return self.stored_experts()

    def as_stored(self, key: str, weight: Tensor) -> Tensor:
        """Returns one expert's weight in the form that the lowerings expect."""
        if key in ("w1", "b1", "g1", "s1") and self.spec.gate == "interleaved":
            return torch.cat([weight[..., ::2], weight[..., 1::2]], dim=-1)
        if key in ("w2", "b2") and self.scale is not None:
            return weight * self.scale.float()
        return weight
