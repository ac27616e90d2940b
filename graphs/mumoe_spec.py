"""What a muMoE layer is: its factorised tensors and its gate.

A muMoE layer holds one weight tensor with a mode per level of experts, one for the input and one
for the output, and never writes it out. Letters: `b` batch, `m` tokens, `n` experts of a level,
`E` levels, `d` input width, `o` output width, `R` the CP rank, `r` the TR ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from .moe import Kind

Form = Literal["cp", "tr"]
"""`cp`: factors [n, R] …, [d, R], [o, R]; `tr`: cores [r1, n, r2] …, [r, d, r'], [r', o, r1]."""

GateNorm = Literal["bn", "ln"]
"""What stands before the gate's activation, over the experts and without gain or shift: batch
statistics recorded in training, or layer normalisation."""

GateActivation = Literal["entmax15", "sparsemax", "softmax"]

NORM_EPS = 1e-5
"""Of every normalisation in the published code."""


@dataclass(frozen=True, slots=True)
class FactorisedSpec:
    """One factorised tensor: y = W(a_1, …, a_E, z).

    `ranks` is (R,) for CP; for TR the rank before each core, (r1, …): the ring closes with r1. With
    `bias` the input mode has one more row, which a 1 appended to z meets.
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
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the factors or cores, as published."""
        if self.form == "cp":
            return tuple((size, self.ranks[0]) for size in self.modes)
        following = (*self.ranks[1:], self.ranks[0])
        return tuple(zip(self.ranks, self.modes, following, strict=True))

    @property
    def parameters(self) -> int:
        """Numbers in all factors or cores."""
        return sum(prod(shape) for shape in self.shapes)

    def macs(self) -> dict[str, int]:
        """Multiply-adds for one token: experts, input, output, and the products in between.

        A bias row counts as one more input, as in the papers' formulas; CP's elementwise products
        do not count, as there.
        """
        experts = [prod(shape) for shape in self.shapes[:-2]]
        between = 0
        if self.form == "tr":
            r = self.ranks
            # (r1 × r2)(r2 × r3) … : each product keeps the ring's first rank as its rows.
            between = sum(r[0] * r[i] * r[i + 1] for i in range(1, len(r) - 1))
        return {
            "expert modes": sum(experts),
            "input mode": prod(self.shapes[-2]),
            "ring": between,
            "output mode": prod(self.shapes[-1]),
        }


@dataclass(frozen=True, slots=True)
class MuMoESpec:
    """Sizes and behaviour of one muMoE layer: a gate, and one or two factorised tensors.

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
        """Multiply-adds for one input, by part: the same for every k.

        What a smaller k could save is `expert modes`, and a dense product of them with mostly zero
        coefficients is faster than gathering rows.
        """
        del kept
        parts = {"gate": self.gate_parameters}
        for tensor in self.tensors:
            for part, count in tensor.macs().items():
                parts[part] = parts.get(part, 0) + count
        return {part: tokens * count for part, count in parts.items()}

    def bytes_read(self, kept: int) -> int:
        """FP32 bytes of the factors: all are read for every k."""
        del kept
        return 4 * sum(tensor.parameters for tensor in self.tensors)

    def choices(self) -> dict[str, str]:
        """The kept coefficients of each level: `coefficients`, `coefficients_2` and so on."""
        return {
            "" if level == 0 else f"level {level + 1}": coefficients_name(level)
            for level in range(len(self.levels))
        }


def coefficients_name(level: int) -> str:
    """Returns what the kept coefficients of a level are called in a graph."""
    return "coefficients" if level == 0 else f"coefficients_{level + 1}"
