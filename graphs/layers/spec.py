"""What a Soft MoE layer is: its sizes and the choices in which published codes differ.

Letters: `b` batch, `m` tokens, `n` experts, `p` slots per expert, `d` width, `h` hidden,
`o` output width, `k` experts kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import Kind

ExpertKind = Literal["mlp", "geglu", "linear"]
"""`mlp`: act(x·w1 + b1)·w2 + b2; `geglu`: (u · gelu(v))·w2 + b2 with [u, v] = x·w1 + b1; `linear`:
x·w1 + b1."""

Activation = Literal["gelu", "gelu-tanh", "relu"]
"""`gelu` is the exact form, with erf; `gelu-tanh` the approximation that JAX takes by default."""

NormKind = Literal["none", "l2", "l2-plus", "l2-rsqrt", "layernorm"]
"""How a token x is normalised before it meets phi; r is the factor that x is multiplied by.

`l2`: r = 1 / max(‖x‖, eps); `l2-plus`: r = 1 / (‖x‖ + eps); `l2-rsqrt`: r = 1 / √(‖x‖² + eps);
`layernorm`: (x − mean) / √(var + eps). A gain and a shift of width d may follow (RMSNorm is `l2`
with gain √d·γ).
"""

SlotSource = Literal["normalised", "raw"]
"""Whether the slots average the normalised tokens or the tokens as they came."""


@dataclass(frozen=True, slots=True)
class SoftMoESpec:
    """Sizes and behaviour of one Soft MoE layer, without its weights.

    `hidden` is h, the width between an expert's two matmuls (0 for `linear` experts); a `geglu`
    expert's first matrix is [d, 2h]. `out` is o.
    """

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

    @property
    def kind(self) -> Kind:
        """`soft-moe`."""
        return "soft-moe"

    @property
    def op_type(self) -> str:
        """The node's op type in a traced graph."""
        return "SoftMoE"

    @property
    def levels(self) -> tuple[int, ...]:
        """One level of n experts."""
        return (self.experts,)

    @property
    def renormalizable(self) -> bool:
        """True: C can be divided by its sum over the kept experts."""
        return True

    @property
    def inner(self) -> int:
        """Columns of an expert's first matrix: h, 2h for `geglu`, o for `linear`."""
        if self.expert == "linear":
            return self.out
        return 2 * self.hidden if self.expert == "geglu" else self.hidden

    @property
    def parameters_per_expert(self) -> int:
        """Weights of one expert, biases not counted."""
        second = 0 if self.expert == "linear" else self.hidden * self.out
        return self.dim * self.inner + second

    def macs(self, tokens: int, kept: int) -> dict[str, int]:
        """Multiply-adds for one input of `tokens` tokens with `kept` experts, by part.

        Router mdnp, dispatch mdkp, experts kp(d·inner + ho), combine mkpo: the router never
        shrinks with k.
        """
        m, p = tokens, self.slots
        return {
            "router": m * self.dim * self.experts * p,
            "dispatch": m * self.dim * kept * p,
            "experts": kept * p * self.parameters_per_expert,
            "combine": m * kept * p * self.out,
        }

    def bytes_read(self, kept: int) -> int:
        """FP32 bytes of the weights of `kept` experts."""
        return 4 * kept * self.parameters_per_expert

    def choices(self) -> dict[str, str]:
        """The chosen experts, `selected` [b, k]."""
        return {"": "selected"}
