"""Both kinds of layers by the papers' formulas in float64, with all that an export may change.

They are written apart from the package and take a place in its networks: a layer there is read for
its weights alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from moexport.graphs.layers.base import moe_layers
from moexport.graphs.layers.mumoe import FactorisedSpec, MuMoE
from moexport.graphs.layers.soft_moe import SoftMoE
from torch import Tensor, nn

Map = Callable[[Tensor], Tensor]


@dataclass
class Change:
    """What an export changes in a layer: its k, and what its experts give.

    `ablated` experts (of the first level) give nothing. `dropped` ones neither, and are never
    chosen. `rewritten` is an output, its mean coefficients by level and λ, `steered` an expert of
    the first level and its strength.
    """

    k: int | None = None
    ablated: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    rewritten: tuple[int, Sequence[Sequence[float]], float] | None = None
    steered: tuple[int, float] | None = None


@dataclass
class Margins:
    """By how much each input's experts were chosen, the least over layers and tokens, [b]."""

    least: Tensor | None = None

    def add(self, margin: Tensor) -> None:
        margin = margin.detach().flatten(1).amin(1)
        self.least = margin if self.least is None else torch.minimum(self.least, margin)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / sqrt(2))) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(sqrt(2 / torch.pi) * (x + 0.044715 * x**3)))


def entmax15(z: Tensor) -> Tensor:
    """Its threshold by bisection: p = max(z/2 − τ, 0)², Σp = 1."""
    z = z / 2
    low, high = z.amax(-1, keepdim=True) - 1, z.amax(-1, keepdim=True)
    for _ in range(80):
        middle = (low + high) / 2
        above = ((z - middle).clamp_min(0) ** 2).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (z - low).clamp_min(0) ** 2


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Which of [..., n] are among the k largest, and by how much the last of them is."""
    n = scores.shape[-1]
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :k], True)
    if k >= n:
        return kept, torch.full_like(scores[..., 0], torch.inf)
    ranked = scores.gather(-1, order)
    last, next_ = ranked[..., k - 1], ranked[..., k]
    # What is zero changes nothing, whether it is kept or not.
    gap = (last - next_) / last.clamp_min(1e-300)
    return kept, torch.where(next_ > 0, gap, torch.inf)


class SoftFormula(nn.Module):
    """A Soft MoE layer: phi [d, n, p] and n maps; `seen` is how tokens are normalised."""

    def __init__(
        self,
        phi: Tensor,
        experts: Sequence[Map],
        seen: Map,
        *,
        raw_slots: bool,
        change: Change,
        margins: Margins,
    ) -> None:
        super().__init__()
        self.phi, self.experts, self.seen, self.raw_slots = phi, experts, seen, raw_slots
        self.change, self.margins = change, margins

    def forward(self, x: Tensor) -> Tensor:
        n, change = len(self.experts), self.change
        seen = self.seen(x)
        logits = torch.einsum("bmd,dnp->bmnp", seen, self.phi)
        slots = torch.einsum("bmnp,bmd->bnpd", logits.softmax(1), x if self.raw_slots else seen)
        combine = logits.flatten(2).softmax(2).view_as(logits)
        scores = combine.sum((1, 3))
        scores[:, list(change.dropped)] = 0
        kept, margin = largest(scores, n if change.k is None else change.k)
        self.margins.add(margin[:, None])
        kept[:, [*change.dropped, *change.ablated]] = False
        outputs = torch.stack([f(slots[:, i]) for i, f in enumerate(self.experts)], 1)
        combine = combine * kept[:, None, :, None]
        return torch.einsum("bmnp,bnpo->bmo", combine, outputs)


class MuFormula(nn.Module):
    """A muMoE layer: a gate per level, and whole tensors [n_1, …, d, o] with a GELU between."""

    def __init__(
        self,
        gates: Sequence[Tensor],
        coefficients: Callable[[int, Tensor], Tensor],
        tensors: Sequence[tuple[Tensor, bool]],
        seen: Map,
        *,
        change: Change,
        margins: Margins,
    ) -> None:
        super().__init__()
        self.gates, self.coefficients, self.tensors = gates, coefficients, tensors
        self.seen, self.change, self.margins = seen, change, margins

    def forward(self, x: Tensor) -> Tensor:
        change = self.change
        x = x[:, None] if x.ndim == 2 else x
        if change.steered is not None:
            expert, strength = change.steered
            x = x + strength * self.gates[0][:, expert]
        kept = []
        for level, gate in enumerate(self.gates):
            a = self.coefficients(level, x @ gate)
            mask, margin = largest(a, a.shape[-1] if change.k is None else change.k)
            self.margins.add(margin)
            if level == 0:
                mask[..., list(change.ablated)] = False
            kept.append(a * mask)
        z = self.seen(x)
        for index, (tensor, bias) in enumerate(self.tensors):
            z = gelu(z) if index else z
            z = torch.cat((z, torch.ones_like(z[..., :1])), -1) if bias else z
            z = torch.einsum("bmi,...io->bm...o", z, tensor)
            for a in kept:
                z = torch.einsum("bmn,bmn...->bm...", a, z)
        if change.rewritten is not None:
            output, means, strength = change.rewritten
            added = torch.full_like(z[..., 0], strength)
            for a, mean in zip(kept, means, strict=True):
                added = added * (a @ a.new_tensor(mean))
            z[..., output] += added
        return z


def _soft(layer: SoftMoE, change: Change, margins: Margins) -> SoftFormula:
    spec = layer.spec

    def norm(x: Tensor) -> Tensor:
        match spec.norm:
            case "l2":
                x = x / x.norm(dim=-1, keepdim=True).clamp_min(spec.norm_eps)
            case "l2-plus":
                x = x / (x.norm(dim=-1, keepdim=True) + spec.norm_eps)
            case "l2-rsqrt":
                x = x / ((x * x).sum(-1, keepdim=True) + spec.norm_eps).sqrt()
            case "layernorm":
                x = x - x.mean(-1, keepdim=True)
                x = x / ((x * x).mean(-1, keepdim=True) + spec.norm_eps).sqrt()
        x = x if layer.gain is None else x * layer.gain
        return x if layer.shift is None else x + layer.shift

    def expert(i: int) -> Map:
        def of(x: Tensor) -> Tensor:
            x = x @ layer.w1[i] + (0 if layer.b1 is None else layer.b1[i])
            if layer.w2 is None:
                return x
            if spec.expert == "gated":
                value, gate = x.chunk(2, -1)
                x = value * gelu(gate)
            else:
                x = {"gelu": gelu, "gelu-tanh": gelu_tanh, "relu": torch.relu}[spec.activation](x)
            y: Tensor = x @ layer.w2[i] + (0 if layer.b2 is None else layer.b2[i])
            return y

        return of

    experts = [expert(i) for i in range(spec.experts)]
    raw = spec.slots_from == "raw"
    assert layer.phi is not None
    return SoftFormula(layer.phi, experts, norm, raw_slots=raw, change=change, margins=margins)


def _whole(spec: FactorisedSpec, factors: Sequence[Tensor]) -> Tensor:
    """The tensor that CP factors or the cores of a ring stand for; or the whole one itself."""
    if spec.form == "full":
        return factors[0]
    if spec.form == "cp":
        whole = factors[0]
        for factor in factors[1:-1]:
            whole = whole[..., None, :] * factor
        return whole @ factors[-1].T
    assert spec.form == "tr"
    whole = factors[0]
    for core in factors[1:]:
        whole = torch.tensordot(whole, core, 1)
    return torch.einsum("q...q->...", whole)


def _mu(layer: MuMoE, change: Change, margins: Margins) -> MuFormula:
    spec = layer.spec

    def coefficients(level: int, logits: Tensor) -> Tensor:
        if spec.norm == "bn":
            mean, variance = layer.statistics(level)
            logits = (logits - mean) / (variance + 1e-5).sqrt()
        else:
            logits = logits - logits.mean(-1, keepdim=True)
            logits = logits / ((logits * logits).mean(-1, keepdim=True) + 1e-5).sqrt()
        return logits.softmax(-1) if spec.activation == "softmax" else entmax15(logits)

    def norm(x: Tensor) -> Tensor:
        if layer.gain is None:
            return x
        x = x - x.mean(-1, keepdim=True)
        x = x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt() * layer.gain
        return x if layer.shift is None else x + layer.shift

    tensors = [
        (_whole(each, layer.factors(index)), each.bias) for index, each in enumerate(spec.tensors)
    ]
    gates = list(layer.projections)
    return MuFormula(gates, coefficients, tensors, norm, change=change, margins=margins)


def by_formulas(network: nn.Module, changes: Mapping[str, Change]) -> tuple[nn.Module, Margins]:
    """Returns a float64 copy of a network with the formulas in the places of its layers, by name.

    The margins are those of each call of it.
    """
    network, margins = copy.deepcopy(network).double(), Margins()
    paths = {module: path for path, module in network.named_modules()}
    for name, layer in moe_layers(network).items():
        change, path = changes[name], paths[layer]
        assert isinstance(layer, SoftMoE | MuMoE)
        if isinstance(layer, SoftMoE):
            formula: nn.Module = _soft(layer, change, margins)
        else:
            formula = _mu(layer, change, margins)
        if not path:
            return formula, margins
        parent, _, last = path.rpartition(".")
        setattr(network.get_submodule(parent), last, formula)
    return network, margins
