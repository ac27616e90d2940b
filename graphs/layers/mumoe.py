"""The muMoE layer in PyTorch: the published formulation, with the k largest coefficients.

Exported graphs are compared with this reference, so it follows the papers: products over factors as
einsum, a column of ones for the bias, entmax and sparsemax by sorting. The exported form is written
independently, in `graphs.gating` and `graphs.lowerings.factorised`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import names
from ..edits import Edits, Steer
from .base import Kind, MoELayer, RoutingDecision, StoredPart, frozen, frozen_if_any

Form = Literal["cp", "tr", "tucker", "full", "matrix"]
"""`cp`: factors [n, R] …, [d, R], [o, R]; `tr`: cores [r1, n, r2] …, [r, d, r'], [r', o, r1];
`tucker`: a core [R_1, …, R_E, R_d, R_o], then factors [n, R_1] …, [d, R_d], [o, R_o]; `full`: the
unfactorised tensor, [n, …, d, o]; `matrix`: [d, o], for a layer without levels, whose experts are
merged."""

GateNorm = Literal["bn", "ln"]
"""The normalisation before the gate's activation, over the experts and without gain or shift: batch
statistics recorded in training, or layer normalisation."""

GateActivation = Literal["entmax15", "sparsemax", "softmax"]

NORM_EPS = 1e-5
"""ε of every normalisation in the published code."""


@dataclass(frozen=True, slots=True)
class FactorisedSpec:
    """One weight tensor and its factorisation: y = W(a_1, …, a_E, z).

    `ranks` is (R,) for CP; for TR the rank before each core, (r1, …), because the ring closes with
    r1; for Tucker the shape of the core; empty for the unfactorised tensor. With `bias` the input
    mode has one more row, for a 1 appended to z.
    """

    form: Form
    levels: tuple[int, ...]
    dim: int
    out: int
    ranks: tuple[int, ...]
    bias: bool

    @property
    def modes(self) -> tuple[int, ...]:
        """Sizes of the tensor's modes: the levels, the input with its bias row, the output."""
        return (*self.levels, self.dim + int(self.bias), self.out)

    @property
    def combinations(self) -> int:
        """N, the number of combinations of one expert per level."""
        return prod(self.levels)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the factors or cores as stored; Tucker's core comes first."""
        match self.form:
            case "cp":
                return tuple((size, self.ranks[0]) for size in self.modes)
            case "tr":
                following = (*self.ranks[1:], self.ranks[0])
                return tuple(zip(self.ranks, self.modes, following, strict=True))
            case "tucker":
                return (self.ranks, *zip(self.modes, self.ranks, strict=True))
            case "full" | "matrix":
                return (self.modes,)

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    @property
    def expert_rank(self) -> int:
        """The largest possible rank of an expert's matrix [d, o] (Table 5)."""
        full_rank = min(self.dim, self.out)
        match self.form:
            case "cp":
                return min(full_rank, self.ranks[0])
            case "tr":  # the rank before the output closes the ring of the experts' cores
                return min(full_rank, min(self.ranks[:-1]) * self.ranks[-1])
            case "tucker":
                return min(full_rank, *self.ranks[-2:])
            case "full" | "matrix":
                return full_rank

    @property
    def one_level(self) -> FactorisedSpec:
        """The tensor with the same number of experts in one level."""
        ranks, count = self.ranks, len(self.levels)
        if self.form == "tr":
            ranks = (ranks[0], *ranks[count:])
        elif self.form == "tucker":
            ranks = (prod(ranks[:count]), *ranks[count:])
        return replace(self, levels=(self.combinations,), ranks=ranks)

    def macs(self, kept: Sequence[int]) -> dict[str, int]:
        """Returns the multiply-adds for one token with `kept` experts per level, by part.

        A bias row counts as one more input, but elementwise products do not count (as published).
        Only the unfactorised tensor has parts that a smaller k saves.
        """
        if self.form == "full":
            width = self.modes[-2] * self.out
            return {"experts": prod(kept) * width, "mix": prod(kept) * self.out}
        if self.form == "matrix":
            return {"input mode": self.parameters}
        shapes = self.shapes if self.form != "tucker" else self.shapes[1:]
        parts = {
            "expert modes": sum(prod(shape) for shape in shapes[:-2]),
            "input mode": prod(shapes[-2]),
        }
        if self.form == "tr":
            r = self.ranks
            # (r1 × r2)(r2 × r3) … : each product keeps the ring's first rank as rows.
            parts["ring"] = sum(r[0] * r[i] * r[i + 1] for i in range(1, len(r) - 1))
        if self.form == "tucker":
            parts["core"] = prod(self.ranks)
            parts["mix"] = prod(self.ranks[:-2]) * self.ranks[-1]
        return parts | {"output mode": prod(shapes[-1])}

    def numbers_read(self, kept: Sequence[int]) -> int:
        """Returns the number of weights in the factors, or in the kept unfactorised experts.

        The latter is for one token: other tokens may keep different experts.
        """
        if self.form == "full":
            return prod(kept) * self.modes[-2] * self.out
        return self.parameters


@dataclass(frozen=True, slots=True)
class MuMoESpec:
    """Sizes and behaviour of one muMoE layer: a gate, and one or two tensors of one form.

    Between two tensors there is an exact GELU, and both use the same coefficients. `input_norm` is
    a layer normalisation of the tensors' input; the gate reads the raw input. Every token has its
    own coefficients (so there is one slot), which no published model renormalises; outputs can be
    rewritten with them (Eq. 5). With `external_routing` the surrounding network computes them, and
    there is no gate. `kept` bounds the k of each level, if a share of each was requested.
    """

    kind: ClassVar[Kind] = "mumoe"
    op_type: ClassVar[str] = "MuMoE"
    slots: ClassVar[int] = 1
    renormalizable: ClassVar[bool] = False
    chooses_sets: ClassVar[bool] = False
    routes_tokens: ClassVar[bool] = True
    drops: ClassVar[bool] = False
    dynamic_int8: ClassVar[bool] = False
    typical_tokens: ClassVar[tuple[int, ...]] = ()
    flat: ClassVar[bool] = False
    quantized_parts: ClassVar[frozenset[str]] = frozenset({"input mode", "core", "output mode"})

    name: str
    tensors: tuple[FactorisedSpec, ...]
    norm: GateNorm = "bn"
    activation: GateActivation = "entmax15"
    input_norm: bool = False
    external_routing: bool = False
    kept: tuple[int, ...] = ()

    def k_by_level(self, k: int) -> tuple[int, ...]:
        """Returns the number of coefficients that each level keeps: k, or all if it has fewer.

        If k is below n, `kept` also limits it.
        """
        limits = self.kept if self.kept and k < self.experts else self.levels
        return tuple(min(k, n) for n in limits)

    @property
    def rewritable(self) -> bool:
        """Whether the layer computes its coefficients from the tokens."""
        return not self.external_routing

    @property
    def form(self) -> Form:
        return self.tensors[0].form

    @property
    def trained_k(self) -> int:
        return self.experts

    @property
    def levels(self) -> tuple[int, ...]:
        return self.tensors[0].levels

    @property
    def experts(self) -> int:
        """The size of the largest level: k keeps min(k, n) of each. 1 if experts are merged."""
        return max(self.levels, default=1)

    @property
    def dim(self) -> int:
        return self.tensors[0].dim

    @property
    def hidden(self) -> int:
        """The width between two tensors; 0 if there is only one."""
        return self.tensors[0].out if len(self.tensors) > 1 else 0

    @property
    def out(self) -> int:
        return self.tensors[-1].out

    @property
    def one_level(self) -> MuMoESpec:
        """The layer with all its combinations as experts of one level (Table 10)."""
        return replace(self, tensors=tuple(t.one_level for t in self.tensors), kept=())

    @property
    def dense(self) -> MuMoESpec:
        """The layer with one level and an unfactorised matrix per expert (Table 4)."""
        tensors = (replace(t.one_level, form="full", ranks=()) for t in self.tensors)
        return replace(self, tensors=tuple(tensors), kept=())

    @property
    def gate_parameters(self) -> int:
        return 0 if self.external_routing else self.dim * sum(self.levels)

    @property
    def parameters(self) -> int:
        """The number of weights of gate and tensors, as in Table 4 (no input normalisation)."""
        return self.gate_parameters + sum(tensor.parameters for tensor in self.tensors)

    def macs(self, tokens: int, k: int) -> dict[str, int]:
        """Returns multiply-adds for one input, by part: equal for every k unless `form` is `full`.

        In a factorised layer a smaller k could only save `expert modes`, for which a dense product
        with mostly zero coefficients is faster than gathering rows.
        """
        parts, kept = {"gate": self.gate_parameters}, self.k_by_level(k)
        for tensor in self.tensors:
            for part, count in tensor.macs(kept).items():
                parts[part] = parts.get(part, 0) + count
        return {part: tokens * count for part, count in parts.items()}

    def bytes_read(self, k: int) -> int:
        """Returns the FP32 bytes of the factors, at any k, or of the kept experts' matrices."""
        return 4 * sum(tensor.numbers_read(self.k_by_level(k)) for tensor in self.tensors)

    def quantized_bytes(self, k: int) -> int:
        """Returns the FP32 bytes of the factors in `quantized_parts`.

        Each number of a factor takes part in one multiply-add per token.
        """
        return 4 * sum(self.macs(1, k).get(part, 0) for part in self.quantized_parts)

    def choices(self) -> dict[str, str]:
        """Returns each level's kept coefficients: `coefficients`, `coefficients_2` and so on."""
        return {
            "" if level == 0 else f"level {level + 1}": names.coefficients(level)
            for level in range(len(self.levels))
        }


@dataclass(frozen=True, slots=True)
class MuMoEWeights:
    """The weights of one layer as published.

    `projections` [d, n] and the recorded `means` and `variances` [n] are one per level (the latter
    only with batch normalisation); `tensors` has the factors or cores of each tensor, as
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

    `keep` is the number of coefficients kept per token and level; the others are zeroed, and the
    kept ones are not rescaled.
    """

    spec: MuMoESpec

    def __init__(self, spec: MuMoESpec, weights: MuMoEWeights) -> None:
        super().__init__()
        self.spec = spec
        self.projections = nn.ParameterList([frozen(p) for p in weights.projections])
        self.tensors = nn.ModuleList([_Factors(factors) for factors in weights.tensors])
        self.gain = frozen_if_any(weights.gain)
        self.shift = frozen_if_any(weights.shift)
        for level, (mean, variance) in enumerate(
            zip(weights.means, weights.variances, strict=True)
        ):
            self.register_buffer(f"mean_{level}", mean)
            self.register_buffer(f"variance_{level}", variance)

    def tokens(self, x: Tensor) -> Tensor:
        """Returns tokens [b, m, d]; a 2-D input (b, d) has one token per sample."""
        return x.unsqueeze(1) if x.ndim == 2 else x

    def coefficients(
        self, x: Tensor, keep: int | None = None, outside: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Returns the coefficients a_e [b, m, n] of each level, limited to the `keep` largest."""
        levels = self._all_coefficients(x, outside)
        if keep is None:
            return tuple(levels)
        return tuple(map(keep_largest, levels, self.spec.k_by_level(keep)))

    def _all_coefficients(self, x: Tensor, outside: Sequence[Tensor]) -> list[Tensor]:
        """Returns the coefficients of each level, activation(norm(x·P_e)) or from outside."""
        if self.spec.external_routing:
            return list(outside[: len(self.spec.levels)])
        x, coefficients = self._steer_tokens(x), []
        for level, projection in enumerate(self.projections):
            logits = x @ projection
            if self.spec.norm == "bn":
                mean, variance = self.statistics(level)
                logits = (logits - mean) / torch.sqrt(variance + NORM_EPS)
            else:
                logits = F.layer_norm(logits, logits.shape[-1:], eps=NORM_EPS)
            coefficients.append(activate(logits, self.spec.activation))
        return coefficients

    def choices(self, x: Tensor, *outside: Tensor) -> dict[str, RoutingDecision]:
        """Returns the kept coefficients of each level, and their margins."""
        chosen = {}
        levels = self._all_coefficients(x, outside)
        ks = self.spec.levels if self.keep is None else self.spec.k_by_level(self.keep)
        for name, a, k in zip(self.spec.choices(), levels, ks, strict=True):
            n = a.shape[-1]
            ranked = a.topk(min(k + 1, n), dim=-1).values
            last = ranked[..., k - 1]
            margin = torch.full_like(last, torch.inf)
            if k < n:  # an exact zero is dropped without loss
                dropped = ranked[..., k]
                margin = torch.where(dropped > 0, (last - dropped) / last, margin)
            chosen[name] = RoutingDecision(keep_largest(a, k), margin)
        return chosen

    def forward(self, x: Tensor, *outside: Tensor) -> Tensor:
        """Maps tokens x [b, m, d] to [b, m, o]; coefficients [b, m, n] may come from outside."""
        coefficients, products = self.products(x, outside)
        y = products[-1][1]
        for rewrite in self.edits.rewrites:
            term = torch.full_like(y[..., 0], rewrite.strength)
            for a, mean in zip(coefficients, rewrite.coefficients, strict=True):
                term = term * (a @ a.new_tensor(mean))
            y[..., rewrite.output] += term  # Eq. 5
        return y

    def products(
        self, x: Tensor, outside: Sequence[Tensor] = ()
    ) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor]]]:
        """Returns each level's coefficients [b, m, n], and the input and output of each tensor.

        The latter are [b, m, d] and [b, m, o].
        """
        coefficients = self.coefficients(x, self.keep, outside)
        x = self._steer_tokens(x)
        if self.edits.ablations:
            coefficients = tuple(
                _ablate(self.edits, level, -1, a) for level, a in enumerate(coefficients)
            )
        if self.gain is not None:
            x = F.layer_norm(x, (self.spec.dim,), self.gain, self.shift, NORM_EPS)
        products: list[tuple[Tensor, Tensor]] = []
        for index, spec in enumerate(self.spec.tensors):
            z = F.gelu(products[-1][1]) if products else x
            selects = self.keep is not None and self.keep < self.spec.experts
            y = contract(spec, self.factors(index), coefficients, z, selects)
            for combination in self.edits.combinations:
                isolated = tuple(map(_isolate_expert, coefficients, combination.experts))
                y = y - contract(spec, self.factors(index), isolated, z, selects)
            products.append((z, y))
        return coefficients, products

    def factors(self, index: int) -> list[nn.Parameter]:
        """Returns the factors or cores of a tensor, as `FactorisedSpec.shapes` lists them."""
        module = self.tensors[index]
        assert isinstance(module, _Factors)
        return list(module.factors)

    def merged(self, matrices: Sequence[Tensor]) -> MuMoE:
        """Returns the layer with one matrix [d + 1, o], the bias last, in place of each tensor."""
        tensors = tuple(
            FactorisedSpec(
                form="matrix", levels=(), dim=tensor.dim, out=tensor.out, ranks=(), bias=True
            )
            for tensor in self.spec.tensors
        )
        weights = MuMoEWeights(
            (), tuple((matrix,) for matrix in matrices), gain=self.gain, shift=self.shift
        )
        return MuMoE(replace(self.spec, tensors=tensors), weights).eval()

    def _steer_tokens(self, x: Tensor) -> Tensor:
        """Returns the tokens [b, m, d] for gate and tensors, moved towards experts' centres."""
        x = self.tokens(x)
        for steer in self.edits.steers:
            if steer.strength is not None:
                strength = x.new_full((1,), steer.strength)
            elif self.strengths is None:
                strength = x.new_zeros(1)
            else:
                strength = self.strengths[:, self.edits.at_run_time.index(steer)]
            x = x + strength[:, None, None] * _centre(self, steer)
        return x

    def stored(self) -> Iterator[StoredPart]:
        """Yields the weights for the muMoE lowerings.

        Per level: `gate.{e}.weight` [d, n] and, with batch normalisation, `gate.{e}.bias` [n];
        `gain` and `shift` [d] of the input normalisation; per tensor t and level e:
        `tensor.{t}.expert.{e}`, `tensor.{t}.input`, `tensor.{t}.bias` and `tensor.{t}.output`, as
        matrices:

        CP [n, R], [d, R], [R], [R, o]; TR [n, r·r'], [d, r·r'], [r·r'], [r1·r', o]; Tucker [n,
        R_e], [d, R_d], [R_d], [R_o, o] and `tensor.{t}.core` [R_d, ΠR_e·R_o]; for a matrix
        `tensor.{t}.input` [d, o] and `tensor.{t}.bias` [o]. An unfactorised tensor is
        `tensor.{t}.experts` [N, o, d], a contiguous matrix per combination of experts, so that
        single ones can be gathered, and `tensor.{t}.biases` [N, o].

        `steer` [d] is added to every token, and `steer.centres` [s, d] times the s strengths of a
        run. An ablated expert's rows are zero. For P ablated combinations, `ablate.{e}` [n, P]
        selects the experts of level e, and `tensor.{t}.ablated` [P, ·] is their product over the
        expert modes: [P, R] for CP, [P, r1·r] for TR, [P, ΠR_e] for Tucker. Rewritten outputs are
        `rewrite.0` [n, o] in a layer with one level; with several, `rewrite.{e}` [n, rewrites] and
        `rewrite.output` [rewrites, o].
        """
        spec = self.spec
        for level, projection in enumerate(self.projections):
            weight, bias = projection.double(), None
            if spec.norm == "bn":
                mean, variance = (t.double() for t in self.statistics(level))
                scale = logit_scale(spec) / torch.sqrt(variance + NORM_EPS)
                weight, bias = weight * scale, -mean * scale
            yield _part(f"gate.{level}.weight", weight)
            if bias is not None:
                yield _part(f"gate.{level}.bias", bias)
        if self.gain is not None and self.shift is not None:
            yield _part("gain", self.gain)
            yield _part("shift", self.shift)
        yield from _stored_steerings(self)
        if self.edits.combinations and spec.form in JOINT_FACTORS:
            for level, n in enumerate(spec.levels):
                experts = torch.tensor([edit.experts[level] for edit in self.edits.combinations])
                yield _part(f"ablate.{level}", F.one_hot(experts, n).T)
        for index, tensor in enumerate(spec.tensors):
            yield from _stored_tensor(f"tensor.{index}", tensor, self.factors(index), self.edits)
        if self.edits.rewrites:
            yield from _stored_rewrites(spec, self.edits)

    def statistics(self, level: int) -> tuple[Tensor, Tensor]:
        """Returns the recorded mean and variance [n] of a level's logits (batch normalisation)."""
        mean, variance = getattr(self, f"mean_{level}"), getattr(self, f"variance_{level}")
        assert isinstance(mean, Tensor) and isinstance(variance, Tensor)
        return mean, variance


class _Factors(nn.Module):
    """The factors or cores of one tensor, under names that are part of a model's fingerprint."""

    def __init__(self, factors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.factors = nn.ParameterList([frozen(factor) for factor in factors])


def contract(
    spec: FactorisedSpec,
    factors: Sequence[Tensor],
    coefficients: tuple[Tensor, ...],
    z: Tensor,
    selects: bool = False,
) -> Tensor:
    """Returns y [b, m, o] = W(a_1, …, a_E, z) for inputs z [b, m, d] (Eqs. 2 and 4).

    With `selects`, experts of an unfactorised tensor whose coefficient is zero are excluded even if
    their output is infinite.
    """
    if spec.bias:
        z = torch.cat((z, torch.ones_like(z[..., :1])), dim=-1)
    vectors = (*coefficients, z)
    if spec.form in ("full", "matrix"):
        return contract_tensor(factors[0], vectors, selects)
    if spec.form == "tucker":
        reduced = [
            torch.einsum("bmi,ir->bmr", vector, factor)
            for vector, factor in zip(vectors, factors[1:-1], strict=True)
        ]
        return torch.einsum("bmr,or->bmo", contract_tensor(factors[0], reduced), factors[-1])
    if spec.form == "cp":
        product = z.new_ones(())
        for vector, factor in zip(vectors, factors, strict=False):
            product = product * torch.einsum("bmi,ir->bmr", vector, factor)
        return torch.einsum("bmr,or->bmo", product, factors[-1])
    train = torch.einsum("bmi,qir->bmqr", vectors[0], factors[0])
    for vector, core in zip(vectors[1:], factors[1:-1], strict=True):
        train = torch.einsum("bmqs,bmst->bmqt", train, torch.einsum("bmi,sit->bmst", vector, core))
    return torch.einsum("bmqs,soq->bmo", train, factors[-1])


def _isolate_expert(a: Tensor, expert: int) -> Tensor:
    """Returns coefficients a [..., n], zero except for that of one expert."""
    return torch.zeros_like(a).index_copy(-1, torch.tensor([expert]), a[..., [expert]])


def contract_tensor(tensor: Tensor, vectors: Sequence[Tensor], selects: bool = False) -> Tensor:
    """Returns W(a_1, …, a_E, z) [b, m, o] for a tensor [n_1, …, n_E, d, o], the input mode first.

    The largest intermediate result is thus one output, not one matrix, per combination of experts.
    For `selects`, see `contract`.
    """
    *gates, z = vectors
    y = torch.einsum("bmi,...io->bm...o", z, tensor)
    for gate in gates:
        if selects:
            y = y.masked_fill(gate.reshape(*gate.shape, *[1] * (y.ndim - gate.ndim)) == 0, 0.0)
        y = torch.einsum("bmn,bmn...->bm...", gate, y)
    return y


def keep_largest(a: Tensor, keep: int) -> Tensor:
    """Returns coefficients a [..., n], zero except for the `keep` largest of each token."""
    if keep >= a.shape[-1]:
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
    """Returns [z/2 − τ]₊² with sum 1, by sorting (Peters et al., 2019, Algorithm 2)."""
    z = (logits - logits.amax(dim=-1, keepdim=True)) / 2
    ranked = z.sort(dim=-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    mean = ranked.cumsum(-1) / count
    spread = ranked.square().cumsum(-1) - count * mean.square()  # Σ(z − mean)² up to each index
    thresholds = mean - ((1 - spread) / count).clamp_min(0).sqrt()
    return (z - _last_valid(thresholds, thresholds <= ranked)).clamp_min(0).square()


def sparsemax(logits: Tensor) -> Tensor:
    """Returns [z − τ]₊ with sum 1, by sorting (Martins and Astudillo, 2016)."""
    z = logits - logits.amax(dim=-1, keepdim=True)
    ranked = z.sort(dim=-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    thresholds = (ranked.cumsum(-1) - 1) / count
    return (z - _last_valid(thresholds, thresholds < ranked)).clamp_min(0)


def _last_valid(thresholds: Tensor, valid: Tensor) -> Tensor:
    """Returns the threshold [..., 1] of the largest valid support."""
    support = valid.sum(dim=-1, keepdim=True)
    return thresholds.gather(-1, support - 1)


def logit_scale(spec: MuMoESpec) -> float:
    """Returns the factor on the logits before the activation: entmax15 works on halves."""
    return 0.5 if spec.activation == "entmax15" else 1.0


def _stored_tensor(
    prefix: str, spec: FactorisedSpec, factors: Sequence[Tensor], edits: Edits
) -> Iterator[StoredPart]:
    if spec.form == "full":
        tensor = factors[0]
        for level in range(len(spec.levels)):
            tensor = _ablate(edits, level, level, tensor)
        if edits.combinations:
            tensor = tensor.clone()
            for combination in edits.combinations:
                tensor[combination.experts] = 0.0
        experts = tensor.flatten(0, -3).mT  # [N, o, d + 1]
        weights = experts[:, :, : spec.dim]
        yield StoredPart(f"{prefix}.experts", tuple(weights.shape), map(_array, weights))
        if spec.bias:
            yield _part(f"{prefix}.biases", experts[:, :, spec.dim])
        return
    if spec.form == "matrix":
        yield _part(f"{prefix}.input", factors[0][: spec.dim])
        yield _part(f"{prefix}.bias", factors[0][spec.dim])
        return
    if spec.form == "tucker":
        core, *factors = factors
        yield _part(f"{prefix}.core", core.movedim(-2, 0).flatten(1))
    for level, factor in enumerate(factors[:-2]):
        yield _part(f"{prefix}.expert.{level}", _ablate(edits, level, 0, _by_mode(spec, factor)))
    if edits.combinations:
        present = [_ablate(edits, e, int(spec.form == "tr"), f) for e, f in enumerate(factors[:-2])]
        removed = [
            JOINT_FACTORS[spec.form]([f.select(int(spec.form == "tr"), e) for f, e in pairs])
            for pairs in (zip(present, edit.experts, strict=True) for edit in edits.combinations)
        ]
        yield _part(f"{prefix}.ablated", torch.stack(removed))
    inputs = _by_mode(spec, factors[-2])
    yield _part(f"{prefix}.input", inputs[: spec.dim])
    if spec.bias:
        yield _part(f"{prefix}.bias", inputs[spec.dim])
    last = factors[-1]  # [o, R], or [r', o, r1]
    last = last.permute(2, 0, 1).flatten(0, 1) if spec.form == "tr" else last.T
    yield _part(f"{prefix}.output", last)


JOINT_FACTORS: Mapping[Form, Callable[[Sequence[Tensor]], Tensor]] = {
    "cp": lambda rows: reduce(torch.mul, (row.double() for row in rows)),
    "tr": lambda cores: reduce(torch.matmul, (core.double() for core in cores)).flatten(),
    "tucker": lambda rows: reduce(torch.kron, (row.double() for row in rows)),
}
"""The joint factor of one expert per level: [R], [r1·r] or [ΠR_e]."""


def _ablate(edits: Edits, level: int, axis: int, tensor: Tensor) -> Tensor:
    """Returns a tensor with the slices of a level's ablated experts, along an axis, zeroed."""
    ablated = edits.ablated_in(level)
    return tensor.index_fill(axis, torch.tensor(ablated), 0.0) if ablated else tensor


def _stored_rewrites(spec: MuMoESpec, edits: Edits) -> Iterator[StoredPart]:
    """Yields Eq. 5 for all rewritten outputs: y += Π_e(a_e·M_e)·Λ, multiplied out for one level."""
    strengths = torch.zeros(len(edits.rewrites), spec.out, dtype=torch.float64)
    for index, rewrite in enumerate(edits.rewrites):
        strengths[index, rewrite.output] = rewrite.strength
    means = []
    for level in range(len(spec.levels)):
        columns = torch.tensor(
            [rewrite.coefficients[level] for rewrite in edits.rewrites], dtype=torch.float64
        ).T
        means.append(_ablate(edits, level, 0, columns))
    if len(means) == 1:
        yield _part("rewrite.0", means[0] @ strengths)
        return
    for level, mean in enumerate(means):
        yield _part(f"rewrite.{level}", mean)
    yield _part("rewrite.output", strengths)


def _stored_steerings(layer: MuMoE) -> Iterator[StoredPart]:
    """Yields the sum of the steering vectors or, for strengths at run time, a row for each."""
    if not layer.edits.steers:
        return
    at_run_time = layer.edits.at_run_time
    fixed = torch.zeros(layer.spec.dim, dtype=torch.float64)
    centres = torch.zeros(len(at_run_time), layer.spec.dim)
    for steer in layer.edits.steers:
        if steer.strength is None:  # the rows of other layers' experts are zero
            centres[at_run_time.index(steer)] = _centre(layer, steer)
        else:
            fixed += steer.strength * _centre(layer, steer).double()
    yield _part(names.STEER_CENTRES, centres) if len(centres) else _part(names.STEER_INPUT, fixed)


def _centre(layer: MuMoE, steer: Steer) -> Tensor:
    """Returns an expert's cluster centre [d]: its column of the gating matrix."""
    centre: Tensor = layer.projections[(steer.level or 1) - 1][:, steer.expert]
    return centre


def _by_mode(spec: FactorisedSpec, factor: Tensor) -> Tensor:
    """Returns a factor as a matrix with the mode as rows: a core [r, n, r'] as [n, r·r']."""
    return factor.transpose(0, 1).flatten(1) if spec.form == "tr" else factor


def _part(name: str, tensor: Tensor) -> StoredPart:
    array = _array(tensor)
    return StoredPart(name, array.shape, (array,))


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.to(torch.float32).numpy())
