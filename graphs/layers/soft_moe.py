"""The Soft MoE layer in PyTorch: the published formulation, and Algorithm 1.

Exported graphs are compared with this reference, so it keeps the plain form of the papers rather
than being fast: tokens are normalised first, both softmaxes cover everything, and nothing is
fused. The exported form is written independently, in `graphs.routing` and `graphs.lowerings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..names import CONSTANTS
from .base import Kind, Matrices, RoutingDecision, StoredPart, frozen_if_any, to_bfloat16
from .expert import (
    NORM_WEIGHTS,
    Activation,
    ExpertMaps,
    ExpertMapsMixin,
    ExpertNorm,
    NormWeights,
    apply_activation,
)

ExpertKind = Literal["mlp", "gated", "linear"]
"""`mlp`: act(x·w1 + b1)·w2 + b2; `gated`: (u · act(v))·w2 + b2 with [u, v] = x·w1 + b1; `linear`:
x·w1 + b1."""

NormKind = Literal["none", "l2", "l2-plus", "l2-rsqrt", "layernorm"]
"""The normalisation of a token x for the product with phi; r is the factor on x.

`l2`: r = 1 / max(‖x‖, eps); `l2-plus`: r = 1 / (‖x‖ + eps); `l2-rsqrt`: r = 1 / √(‖x‖² + eps);
`layernorm`: (x − mean) / √(var + eps). A gain and a shift of width d may follow (RMSNorm is `l2`
with gain √d·γ).
"""

SlotSource = Literal["normalised", "raw"]
"""Whether the slots average the normalised tokens or the raw ones."""


@dataclass(frozen=True, slots=True)
class SoftMoESpec(ExpertMapsMixin):
    """Sizes and behaviour of one Soft MoE layer, without its weights.

    `hidden` is h, the width between an expert's two matmuls (0 for `linear` experts); a `gated`
    expert's first matrix is [d, 2h]. `out` is o. C can be divided by its sum over the kept experts
    (`renormalizable`), and each input chooses a set of them. `dropped` counts the experts that were
    removed permanently: they have no weights, but stay in the softmax of C. With `constants`, each
    of their slots returns a fixed vector for every input: the constant experts of Jin et al.,
    MoE++, 2024. Otherwise they return nothing. With `rounded`, tokens are rounded to BF16
    before the slots average them, and the experts' outputs before they are combined, as in
    google-research/vmoe.

    With `gate_first`, v comes before u in a `gated` expert's first matrix. `biased` adds a number
    per slot to L. With `external_routing` there is no router: the surrounding network computes the
    slots and C, from which Algorithm 1 chooses. `ExpertMapsSpec` describes the other parts.
    """

    kind: ClassVar[Kind] = "soft-moe"
    op_type: ClassVar[str] = "SoftMoE"
    chooses_sets: ClassVar[bool] = True
    routes_tokens: ClassVar[bool] = False
    drops: ClassVar[bool] = False
    dynamic_int8: ClassVar[bool] = False
    typical_tokens: ClassVar[tuple[int, ...]] = ()
    flat: ClassVar[bool] = False

    name: str
    experts: int
    slots: int
    dim: int
    hidden: int
    out: int
    expert: ExpertKind = "mlp"
    activation: Activation = "gelu"
    norm: NormKind = "none"
    norm_eps: float = 0.0
    slots_from: SlotSource = "normalised"
    dropped: int = 0
    constants: bool = False
    biased: bool = False
    external_routing: bool = False
    gate_first: bool = False
    alpha: float = 1.0
    hidden_norm: ExpertNorm | None = None
    out_norm: ExpertNorm | None = None
    out_activation: Activation = "identity"
    rounded: bool = False

    @property
    def renormalizable(self) -> bool:
        """Whether C is known to be a softmax."""
        return not self.external_routing

    @property
    def routed(self) -> int:
        """The number of experts in the router, including dropped ones."""
        return self.experts + self.dropped

    @property
    def trained_k(self) -> int:
        return self.experts

    @property
    def inner(self) -> int:
        """The width of an expert's first matrix: h, 2h for `gated`, o for `linear`."""
        if self.expert == "linear":
            return self.out
        return 2 * self.hidden if self.expert == "gated" else self.hidden

    def macs(self, tokens: int, k: int) -> dict[str, int]:
        """Returns the multiply-adds for one input of `tokens` tokens with k experts, by part.

        Router mdnp, dispatch mdkp, experts kp(d·inner + ho), combine mkpo: the router's cost does
        not shrink with k. Constant experts are also combined.
        """
        m, p = tokens, self.slots
        combined = k + (self.dropped if self.constants else 0)
        return {
            "router": 0 if self.external_routing else m * self.dim * self.routed * p,
            "dispatch": 0 if self.external_routing else m * self.dim * k * p,
            "experts": k * p * self.parameters_per_expert,
            "combine": m * combined * p * self.out,
        }


Chooser = Callable[[Tensor, int], Tensor]
"""Chooses k experts per input: scores s [b, n] and k to indices [b, k], ascending."""


@dataclass(frozen=True, slots=True)
class SoftMoEWeights:
    """The weights of one layer, in canonical orientation.

    `phi` [d, n, p] is already normalised and scaled; the columns of dropped experts follow those of
    the n experts. It is None with external routing. `bias` [n, p] is added to L. `w1` has n
    matrices [d, inner], `w2` n matrices [h, o] (None for linear experts); `b1` [n, inner] and `b2`
    [n, o] may be None. `gain` and `shift` [d] follow the normalisation of x in some families.
    `constants` [dropped, p, o] are the outputs of the dropped experts' slots, if any.
    """

    phi: Tensor | None
    w1: Matrices
    b1: Tensor | None
    w2: Matrices | None
    b2: Tensor | None
    gain: Tensor | None = None
    shift: Tensor | None = None
    constants: Tensor | None = None
    bias: Tensor | None = None
    norms: NormWeights = NormWeights()


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's results for a batch.

    `logits`, `combine` and `dispatch` are L, C and D, [b, m, n, p]; `combine_dropped` has the
    columns of C of dropped experts, [b, m, dropped, p]; `scores` [b, n] is s, the column sums of C;
    `selected` [b, k] has the indices of the k largest, ascending. With external routing, L and D
    are unknown, and C replaces them.
    """

    logits: Tensor
    combine: Tensor
    combine_dropped: Tensor
    dispatch: Tensor
    scores: Tensor
    selected: Tensor


class SoftMoE(ExpertMaps):
    """One Soft MoE layer: (b, m, d) to (b, m, o).

    `keep` is Algorithm 1's k; None computes all experts, as in the trained model. C is a softmax
    over all experts and slots, and is not renormalised after the selection unless `renormalize`.
    `chooser` replaces Algorithm 1's choice, to study other choices, and `unchosen` are experts that
    are never chosen and return the constants [e, p, o]; neither is ever exported.
    """

    spec: SoftMoESpec
    chooser: Chooser | None = None
    unchosen: tuple[Sequence[int], Tensor] | None = None

    def __init__(self, spec: SoftMoESpec, weights: SoftMoEWeights) -> None:
        super().__init__(weights)
        self.spec = spec
        self.phi = frozen_if_any(weights.phi)
        self.bias = frozen_if_any(weights.bias)
        self.gain = frozen_if_any(weights.gain)
        self.shift = frozen_if_any(weights.shift)
        self.constants = frozen_if_any(weights.constants)

    def normalise(self, x: Tensor) -> Tensor:
        """Returns x̂ [b, m, d], the tokens for the product with phi."""
        spec = self.spec
        match spec.norm:
            case "l2":
                x = F.normalize(x, dim=-1, eps=spec.norm_eps)
            case "l2-plus":
                x = x / (x.norm(dim=-1, keepdim=True) + spec.norm_eps)
            case "l2-rsqrt":
                x = x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + spec.norm_eps)
            case "layernorm":
                x = F.layer_norm(x, (spec.dim,), eps=spec.norm_eps)
        if self.gain is not None:
            x = x * self.gain
        if self.shift is not None:
            x = x + self.shift
        return x

    def route(self, x: Tensor) -> Routing:
        """Returns C, D, the scores and the selection for tokens x [b, m, d] (Algorithm 1).

        With external routing, x is C itself, [b, m, n·p].
        """
        n = self.spec.experts
        if self.phi is None:
            combine = x.view(*x.shape[:-1], n, self.spec.slots)
            logits = dispatch = combine
            dropped = combine[:, :, :0]
        else:
            logits = torch.einsum("bmd,dnp->bmnp", self.normalise(x), self.phi)
            logits = logits if self.bias is None else logits + self.bias
            combine, dropped = _softmax_over_slots(logits).tensor_split([n], dim=2)
            logits = logits[:, :, :n]
            dispatch = logits.softmax(dim=1)
        scores = combine.sum(dim=(1, 3))
        k = n if self.keep is None else self.keep
        ranked = scores.topk(min(k + 1, n), dim=1)
        if self.chooser is None:
            selected = ranked.indices[:, :k].sort(dim=1).values
        else:
            selected = self.chooser(scores, k)
        return Routing(
            logits=logits,
            combine=combine,
            combine_dropped=dropped,
            dispatch=dispatch,
            scores=scores,
            selected=selected,
        )

    def choices(self, x: Tensor, slots: Tensor | None = None) -> dict[str, RoutingDecision]:
        """Returns the chosen experts, with the margin relative to the k-th score."""
        routing = self.route(x)
        k = routing.selected.shape[1]
        ranked = routing.scores.sort(dim=1, descending=True).values
        kth = ranked[:, k - 1]
        margin = torch.full_like(kth, torch.inf)
        if k < self.spec.experts:  # scores that underflow are ties: 0, not 0 / 0
            margin = (kth - ranked[:, k]) / kth.clamp_min(torch.finfo(kth.dtype).tiny)
        return {"": RoutingDecision(routing.selected, margin, routing.scores)}

    def stored(self) -> Iterator[StoredPart]:
        """Yields phi, bias, gain, shift, the constants and the experts."""
        spec = self.spec
        if self.phi is not None:
            phi = self.phi.double().flatten(1)
            if self.gain is not None and spec.norm != "layernorm":  # else an op applies the gain
                phi = phi * self.gain.double()[:, None]
            yield StoredPart("phi", tuple(phi.shape), [phi.to(torch.float32).numpy()])
        if self.bias is not None:
            yield StoredPart("bias", (spec.routed * spec.slots,), [self.bias.flatten().numpy()])
        for key, vector in (("gain", self.gain), ("shift", self.shift)):
            if vector is not None:
                yield StoredPart(key, (spec.dim,), [vector.numpy()])
        if self.constants is not None:
            shape = (spec.dropped * spec.slots, spec.out)
            yield StoredPart(CONSTANTS, shape, [self.constants.flatten(0, 1).numpy()])
        yield from self.stored_experts()

    def with_experts(
        self, experts: Sequence[int], constants: np.ndarray | None = None
    ) -> SoftMoE | None:
        """Returns the layer with some of its experts; the others stay in the softmax of C.

        The others return nothing, or the `constants` [n − e, p, o], in their order. Experts that
        are separate tensors are shared; stacked ones are copied. None with external routing.
        """
        if self.phi is None:
            return None
        kept = list(experts)
        others = [e for e in range(self.spec.routed) if e not in set(kept)]

        def select_kept(matrices: nn.Parameter | nn.ParameterList) -> Matrices:
            if isinstance(matrices, nn.ParameterList):
                return tuple(matrices[e] for e in kept)
            return matrices[kept]

        norms = {name: getattr(self, name) for name in NORM_WEIGHTS}
        weights = SoftMoEWeights(
            phi=self.phi[:, [*kept, *others]],
            w1=select_kept(self.w1),
            b1=None if self.b1 is None else self.b1[kept],
            w2=None if self.w2 is None else select_kept(self.w2),
            b2=None if self.b2 is None else self.b2[kept],
            gain=self.gain,
            shift=self.shift,
            constants=None if constants is None else torch.from_numpy(constants),
            bias=None if self.bias is None else self.bias[[*kept, *others]],
            norms=NormWeights(**{n: w if w is None else w[kept] for n, w in norms.items()}),
        )
        spec = replace(
            self.spec, experts=len(kept), dropped=len(others), constants=constants is not None
        )
        return SoftMoE(spec, weights).eval()

    def outputs_and_combine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns every expert's output for tokens x, [b, n, p, o], and C, [b, m, n, p]."""
        routing = self.route(x)
        return self._all_experts(self._slots(x, routing)), routing.combine

    def _slots(self, x: Tensor, routing: Routing) -> Tensor:
        """Returns the inputs of the experts, [b, n, p, d]."""
        source = self.normalise(x) if self.spec.slots_from == "normalised" else x
        if self.spec.rounded:
            source = to_bfloat16(source)
        return torch.einsum("bmd,bmnp->bnpd", source, routing.dispatch)

    def forward(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """Maps tokens x [b, m, d], or C [b, m, n·p] and slots [b, n·p, d], to [b, m, o]."""
        routing = self.route(x)
        if slots is None:
            slots = self._slots(x, routing)
        else:
            slots = slots.reshape(len(x), self.spec.experts, self.spec.slots, -1)
        combine = routing.combine
        chosen: Tensor | None = None
        if self.keep is not None and self.keep < self.spec.experts:
            chosen = torch.zeros_like(routing.scores, dtype=torch.bool)
            chosen.scatter_(1, routing.selected, True)
            others = ~chosen[:, None, :, None]
            if self.renormalize:  # C[S] / ΣC[S], which would be 0 / 0 if C[S] underflows
                combine = _softmax_over_slots(routing.logits.masked_fill(others, -torch.inf))
            else:
                combine = combine.masked_fill(others, 0.0)
        if chosen is not None and self.algorithm == "selected":
            outputs = self._selected_experts(slots, chosen)
        else:
            outputs = self._all_experts(slots)
            if chosen is not None:  # excluded outputs may be infinite
                outputs = outputs.masked_fill(~chosen[..., None, None], 0.0)
        if self.edits.ablations:  # ablated outputs may be infinite
            outputs = outputs.index_fill(1, torch.tensor(self.edits.ablated_in(0)), 0.0)
        if self.spec.rounded:
            outputs = to_bfloat16(outputs)
        y = torch.einsum("bnpo,bmnp->bmo", outputs, combine)
        if self.constants is not None:
            y = y + torch.einsum("npo,bmnp->bmo", self.constants, routing.combine_dropped)
        if self.unchosen is not None:
            experts, constants = self.unchosen
            y = y + torch.einsum("npo,bmnp->bmo", constants, routing.combine[:, :, experts])
        return y

    def _all_experts(self, slots: Tensor) -> Tensor:
        """Computes every expert on its slots: [b, n, p, d] to [b, n, p, o], batched if stacked."""
        if isinstance(self.w1, nn.ParameterList):
            return torch.stack(
                [self.expert(e, slots[:, e]) for e in range(self.spec.experts)], dim=1
            )
        hidden = torch.einsum("bnpd,ndh->bnph", slots, self.w1)
        hidden = hidden if self.b1 is None else hidden + self.b1[:, None]
        if self.w2 is not None:
            hidden = torch.einsum("bnph,nho->bnpo", self.activate(hidden), self.w2)
            hidden = hidden if self.b2 is None else hidden + self.b2[:, None]
        return self._outputs(hidden, None)

    def _selected_experts(self, slots: Tensor, chosen: Tensor) -> Tensor:
        """Computes each expert on inputs that selected it, zeros elsewhere; `chosen` is [b, n]."""
        outputs = slots.new_zeros(*slots.shape[:3], self.spec.out)
        for e in chosen.any(dim=0).nonzero().flatten().tolist():
            rows = chosen[:, e]
            outputs[rows, e] = self.expert(e, slots[rows, e])
        return outputs

    def gated(self, hidden: Tensor) -> Tensor:
        """Computes the activation, with a gate if there is one: [..., inner] to [..., h]."""
        spec = self.spec
        if spec.expert == "gated":
            value, gate = hidden.chunk(2, dim=-1)[:: -1 if spec.gate_first else 1]
            return value * apply_activation(gate, spec.activation, spec.alpha)
        return apply_activation(hidden, spec.activation, spec.alpha)


def _softmax_over_slots(logits: Tensor) -> Tensor:
    """Returns each token's softmax of L [b, m, n, p] over all slots of all experts."""
    return logits.flatten(2).softmax(dim=2).view_as(logits)


def soft_moe_layers(model: nn.Module) -> dict[str, SoftMoE]:
    """Returns the Soft MoE layers of a model by module path, in module order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, SoftMoE)}
