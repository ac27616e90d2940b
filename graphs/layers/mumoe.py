"""The muMoE layer in PyTorch: the published formulation, with the k largest coefficients.

This is the reference that exported graphs are compared with, so it follows the papers: products
over factors as einsum, a column of ones for the bias, entmax and sparsemax by sorting. What is
exported is written independently, in `graphs.gating` and `graphs.lowerings.factorised`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Choice, MoELayer, StoredPart, frozen
from .mumoe_spec import NORM_EPS, FactorisedSpec, GateActivation, MuMoESpec


@dataclass(frozen=True, slots=True)
class MuMoEWeights:
    """The weights of one layer as published.

    `projections` [d, n] and the recorded `means` and `variances` [n] are one per level (none of the
    latter with layer normalisation); `tensors` holds the factors or cores of each tensor, as
    `FactorisedSpec.shapes` lists them. `gain` and `shift` [d] belong to the input normalisation.
    """

    projections: tuple[Tensor, ...]
    tensors: tuple[tuple[Tensor, ...], ...]
    means: tuple[Tensor, ...] = ()
    variances: tuple[Tensor, ...] = ()
    gain: Tensor | None = None
    shift: Tensor | None = None


class MuMoE(MoELayer):
    """One muMoE layer or block: (b, m, d) to (b, m, o); (b, d) to (b, 1, o), as published.

    `keep` is the number of coefficients kept per token and level; the others are zeroed and the
    kept ones stay as they are.
    """

    spec: MuMoESpec

    def __init__(self, spec: MuMoESpec, weights: MuMoEWeights) -> None:
        super().__init__()
        self.spec = spec
        self.projections = nn.ParameterList([frozen(p) for p in weights.projections])
        self.tensors = nn.ModuleList([_Factors(factors) for factors in weights.tensors])
        self.gain = None if weights.gain is None else frozen(weights.gain)
        self.shift = None if weights.shift is None else frozen(weights.shift)
        for level, (mean, variance) in enumerate(
            zip(weights.means, weights.variances, strict=True)
        ):
            self.register_buffer(f"mean_{level}", mean)
            self.register_buffer(f"variance_{level}", variance)

    def tokens(self, x: Tensor) -> Tensor:
        """A 2-D input (b, d) is one token per sample."""
        return x.unsqueeze(1) if x.ndim == 2 else x

    def coefficients(self, x: Tensor, keep: int | None = None) -> tuple[Tensor, ...]:
        """Returns the coefficients a_e [b, m, n] of each level, all but the `keep` largest zero."""
        return tuple(kept(a, keep) for a in self._activated(self.tokens(x)))

    def choices(self, x: Tensor) -> dict[str, Choice]:
        """Returns the kept coefficients of each level, and how clearly they were kept."""
        chosen = {}
        for name, a in zip(self.spec.choices(), self._activated(self.tokens(x)), strict=True):
            n = a.shape[-1]
            k = n if self.keep is None else min(self.keep, n)
            ranked = a.topk(min(k + 1, n), dim=-1).values
            last = ranked[..., k - 1]
            margin = torch.full_like(last, torch.inf)
            if k < n:  # nothing is left out where the first one dropped is zero already
                dropped = ranked[..., k]
                margin = torch.where(dropped > 0, (last - dropped) / last, margin)
            chosen[name] = Choice(kept(a, k), margin)
        return chosen

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens x [b, m, d] to [b, m, o]."""
        x = self.tokens(x)
        coefficients = self.coefficients(x, self.keep)
        if self.edits.ablated:
            coefficients = tuple(
                a * self.edits.present(level, a.shape[-1], a)
                for level, a in enumerate(coefficients)
            )
        if self.gain is not None:
            x = F.layer_norm(x, (self.spec.dim,), self.gain, self.shift, NORM_EPS)
        for index, (spec, factors) in enumerate(zip(self.spec.tensors, self.tensors, strict=True)):
            if index:
                x = F.gelu(x)
            assert isinstance(factors, _Factors)
            x = contract(spec, list(factors.factors), coefficients, x)
        for rewrite in self.edits.rewrites:
            added = torch.full_like(x[..., 0], rewrite.strength)
            for a, mean in zip(coefficients, rewrite.coefficients, strict=True):
                added = added * (a @ a.new_tensor(mean))
            x[..., rewrite.output] += added  # Eq. 5
        return x

    def stored(self) -> Iterator[StoredPart]:
        """Yields the weights as `graphs.folding` prepares them for a graph."""
        from .folding import folded

        return folded(self)

    def statistics(self, level: int) -> tuple[Tensor, Tensor]:
        """The recorded mean and variance [n] of a level's logits (batch normalisation)."""
        mean, variance = getattr(self, f"mean_{level}"), getattr(self, f"variance_{level}")
        assert isinstance(mean, Tensor) and isinstance(variance, Tensor)
        return mean, variance

    def _activated(self, x: Tensor) -> Iterator[Tensor]:
        """Each level's coefficients for tokens x [b, m, d]: activation(norm(x·P_e))."""
        for level, projection in enumerate(self.projections):
            logits = x @ projection
            if self.spec.norm == "bn":
                mean, variance = self.statistics(level)
                logits = (logits - mean) / torch.sqrt(variance + NORM_EPS)
            else:
                logits = F.layer_norm(logits, logits.shape[-1:], eps=NORM_EPS)
            yield activate(logits, self.spec.activation)


class _Factors(nn.Module):
    """The factors or cores of one tensor."""

    def __init__(self, factors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.factors = nn.ParameterList([frozen(factor) for factor in factors])


def contract(
    spec: FactorisedSpec, factors: list[Tensor], coefficients: tuple[Tensor, ...], z: Tensor
) -> Tensor:
    """Returns y [b, m, o] = W(a_1, …, a_E, z) for inputs z [b, m, d] (Eqs. 2 and 4)."""
    if spec.bias:
        z = torch.cat((z, torch.ones_like(z[..., :1])), dim=-1)
    vectors = (*coefficients, z)
    if spec.form == "full":
        return contract_whole(factors[0], vectors)
    if spec.form == "tucker":
        reduced = [
            torch.einsum("bmi,ir->bmr", vector, factor)
            for vector, factor in zip(vectors, factors[1:-1], strict=True)
        ]
        return torch.einsum("bmr,or->bmo", contract_whole(factors[0], reduced), factors[-1])
    if spec.form == "cp":
        product = z.new_ones(())
        for vector, factor in zip(vectors, factors, strict=False):
            product = product * torch.einsum("bmi,ir->bmr", vector, factor)
        return torch.einsum("bmr,or->bmo", product, factors[-1])
    train = torch.einsum("bmi,qir->bmqr", vectors[0], factors[0])
    for vector, core in zip(vectors[1:], factors[1:-1], strict=True):
        train = torch.einsum("bmqs,bmst->bmqt", train, torch.einsum("bmi,sit->bmst", vector, core))
    return torch.einsum("bmqs,soq->bmo", train, factors[-1])


def contract_whole(tensor: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """Returns W(a_1, …, a_E, z) [b, m, o] for a tensor [n_1, …, n_E, d, o], the input mode first.

    So the largest array in between is an output per combination of experts, not a matrix.
    """
    *gates, z = vectors
    y = torch.einsum("bmi,...io->bm...o", z, tensor)
    for gate in gates:
        y = torch.einsum("bmn,bmn...->bm...", gate, y)
    return y


def kept(a: Tensor, keep: int | None) -> Tensor:
    """Coefficients a [..., n] with all but the `keep` largest of each token zeroed."""
    if keep is None or keep >= a.shape[-1]:
        return a
    largest = a.topk(keep, dim=-1)
    return torch.zeros_like(a).scatter(-1, largest.indices, largest.values)


def activate(logits: Tensor, activation: GateActivation) -> Tensor:
    """Returns coefficients [..., n] that sum to one."""
    match activation:
        case "entmax15":
            return entmax15(logits)
        case "sparsemax":
            return sparsemax(logits)
        case "softmax":
            return logits.softmax(dim=-1)


def entmax15(logits: Tensor) -> Tensor:
    """P = [z/2 − τ]₊² with Σp = 1, by sorting (Peters, Niculae and Martins, 2019, Algorithm 2)."""
    z = (logits - logits.amax(dim=-1, keepdim=True)) / 2
    ranked = z.sort(dim=-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    mean = ranked.cumsum(-1) / count
    spread = ranked.square().cumsum(-1) - count * mean.square()  # Σ(z − mean)² of the first
    thresholds = mean - ((1 - spread) / count).clamp_min(0).sqrt()
    return (z - _last_valid(thresholds, thresholds <= ranked)).clamp_min(0).square()


def sparsemax(logits: Tensor) -> Tensor:
    """P = [z − τ]₊ with Σp = 1, by sorting (Martins and Astudillo, 2016)."""
    z = logits - logits.amax(dim=-1, keepdim=True)
    ranked = z.sort(dim=-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    thresholds = (ranked.cumsum(-1) - 1) / count
    return (z - _last_valid(thresholds, thresholds < ranked)).clamp_min(0)


def _last_valid(thresholds: Tensor, valid: Tensor) -> Tensor:
    """The threshold [..., 1] of the largest support that contains itself."""
    support = valid.sum(dim=-1, keepdim=True)
    return thresholds.gather(-1, support - 1)


def mumoe_layers(model: nn.Module) -> dict[str, MuMoE]:
    """Returns the muMoE layers of a model by module path, in module order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MuMoE)}
