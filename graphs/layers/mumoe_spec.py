"""What a muMoE layer is: its weight tensors, in factors or whole, and its gate.

A muMoE layer's weight tensor has a mode per level of experts, one for the input and one for the
output. All forms but `full` hold it in factors and never write it out. Letters: `b` batch, `m`
tokens, `n` experts of a level, `E` levels, `N` combinations of experts (the product of the levels),
`d` input width, `o` output width, `R` the CP rank or the Tucker ranks, `r` the TR ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from .base import Kind

Form = Literal["cp", "tr", "tucker", "full"]
"""`cp`: factors [n, R] …, [d, R], [o, R]; `tr`: cores [r1, n, r2] …, [r, d, r'], [r', o, r1];
`tucker`: a core [R_1, …, R_E, R_d, R_o], then factors [n, R_1] …, [d, R_d], [o, R_o]; `full`: the
unfactorised tensor itself, [n, …, d, o]."""

GateNorm = Literal["bn", "ln"]
"""What stands before the gate's activation, over the experts and without gain or shift: batch
statistics recorded in training, or layer normalisation."""

GateActivation = Literal["entmax15", "sparsemax", "softmax"]

NORM_EPS = 1e-5
"""Of every normalisation in the published code."""


@dataclass(frozen=True, slots=True)
class FactorisedSpec:
    """One weight tensor and how it is held: y = W(a_1, …, a_E, z).

    `ranks` is (R,) for CP; for TR the rank before each core, (r1, …): the ring closes with r1; for
    Tucker the shape of the core; empty for the unfactorised tensor. With `bias` the input mode has
    one more row, which a 1 appended to z meets.
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
        """N: ways to take one expert of each level."""
        return prod(self.levels)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the factors or cores as they are stored; Tucker's core comes first."""
        match self.form:
            case "cp":
                return tuple((size, self.ranks[0]) for size in self.modes)
            case "tr":
                following = (*self.ranks[1:], self.ranks[0])
                return tuple(zip(self.ranks, self.modes, following, strict=True))
            case "tucker":
                return (self.ranks, *zip(self.modes, self.ranks, strict=True))
            case "full":
                return (self.modes,)

    @property
    def parameters(self) -> int:
        """Numbers in all factors or cores."""
        return sum(prod(shape) for shape in self.shapes)

    def kept(self, k: int) -> int:
        """Combinations of experts of which every one is among the k kept of its level."""
        return prod(min(k, n) for n in self.levels)

    def macs(self, k: int) -> dict[str, int]:
        """Multiply-adds for one token that keeps k coefficients of each level, by part.

        A bias row counts as one more input, as in the papers' formulas; elementwise products do not
        count, as there. Only the unfactorised tensor has parts that a smaller k leaves out.
        """
        if self.form == "full":
            width = self.modes[-2] * self.out
            return {"experts": self.kept(k) * width, "mix": self.kept(k) * self.out}
        shapes = self.shapes if self.form != "tucker" else self.shapes[1:]
        parts = {
            "expert modes": sum(prod(shape) for shape in shapes[:-2]),
            "input mode": prod(shapes[-2]),
        }
        if self.form == "tr":
            r = self.ranks
            # (r1 × r2)(r2 × r3) … : each product keeps the ring's first rank as its rows.
            parts["ring"] = sum(r[0] * r[i] * r[i + 1] for i in range(1, len(r) - 1))
        if self.form == "tucker":
            parts["core"] = prod(self.ranks)
            parts["mix"] = prod(self.ranks[:-2]) * self.ranks[-1]
        return parts | {"output mode": prod(shapes[-1])}

    def numbers_read(self, k: int) -> int:
        """Numbers in the factors, or in the k·…·k experts of an unfactorised tensor that are kept.

        The latter is for one token: others keep others.
        """
        if self.form == "full":
            return self.kept(k) * self.modes[-2] * self.out
        return self.parameters


@dataclass(frozen=True, slots=True)
class MuMoESpec:
    """Sizes and behaviour of one muMoE layer: a gate, and one or two tensors of one form.

    With two there is an exact GELU between them, and both take the same coefficients. `input_norm`
    is a layer normalisation of what the tensors see; the gate sees the raw input.
    """

    name: str
    tensors: tuple[FactorisedSpec, ...]
    norm: GateNorm = "bn"
    activation: GateActivation = "entmax15"
    input_norm: bool = False

    @property
    def kind(self) -> Kind:
        """`mumoe`."""
        return "mumoe"

    @property
    def op_type(self) -> str:
        """The node's op type in a traced graph."""
        return "MuMoE"

    @property
    def form(self) -> Form:
        """How the layer's tensors are held."""
        return self.tensors[0].form

    @property
    def levels(self) -> tuple[int, ...]:
        """Experts of each level."""
        return self.tensors[0].levels

    @property
    def experts(self) -> int:
        """The largest level: k keeps min(k, n) of each."""
        return max(self.levels)

    @property
    def slots(self) -> int:
        """1: every token has coefficients of its own."""
        return 1

    @property
    def dim(self) -> int:
        """Input width d."""
        return self.tensors[0].dim

    @property
    def hidden(self) -> int:
        """Width between two tensors, 0 for one."""
        return self.tensors[0].out if len(self.tensors) > 1 else 0

    @property
    def out(self) -> int:
        """Output width o."""
        return self.tensors[-1].out

    @property
    def renormalizable(self) -> bool:
        """False: no published model renormalises its coefficients."""
        return False

    @property
    def gate_parameters(self) -> int:
        """Weights of the gating projections."""
        return self.dim * sum(self.levels)

    @property
    def parameters(self) -> int:
        """Weights of the gate and the tensors, as in Table 4 (no input normalisation)."""
        return self.gate_parameters + sum(tensor.parameters for tensor in self.tensors)

    def macs(self, tokens: int, kept: int) -> dict[str, int]:
        """Multiply-adds for one input, by part: the same for every k, unless the form is `full`.

        What a smaller k could save of a factorised layer is `expert modes`, and a dense product of
        them with mostly zero coefficients is faster than gathering rows.
        """
        parts = {"gate": self.gate_parameters}
        for tensor in self.tensors:
            for part, count in tensor.macs(kept).items():
                parts[part] = parts.get(part, 0) + count
        return {part: tokens * count for part, count in parts.items()}

    def bytes_read(self, kept: int) -> int:
        """FP32 bytes of the factors, which are read for every k, or of the whole matrices kept."""
        return 4 * sum(tensor.numbers_read(kept) for tensor in self.tensors)

    def choices(self) -> dict[str, str]:
        """The kept coefficients of each level: `coefficients`, `coefficients_2` and so on."""
        return {
            "" if level == 0 else f"level {level + 1}": coefficients_name(level)
            for level in range(len(self.levels))
        }


def coefficients_name(level: int) -> str:
    """Returns what the kept coefficients of a level are called in a graph."""
    return "coefficients" if level == 0 else f"coefficients_{level + 1}"
