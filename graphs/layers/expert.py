"""Activations and normalisations of experts in PyTorch, for every kind of layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Literal["gelu", "gelu-tanh", "relu", "silu", "relu2", "softmax", "identity"]
"""`gelu` is the exact form, with erf; `gelu-tanh` the approximation that JAX uses by default;
`silu` is z·sigmoid(alpha·z); `relu2` is max(z, 0)²; `softmax` is over the channels, for experts
that are classifiers."""

PASSES: Mapping[Activation, int] = MappingProxyType(
    {"silu": 4, "gelu": 4, "gelu-tanh": 6, "relu": 1, "relu2": 2, "softmax": 6, "identity": 0}
)
"""The cost of an activation, in passes over its input."""

NORM_PASSES = 6
"""The cost of a normalisation, in passes over its input."""


def activated(z: Tensor, activation: Activation, alpha: float = 1.0) -> Tensor:
    """Returns an activation of z; `alpha` applies to `silu`."""
    match activation:
        case "silu":
            return z * torch.sigmoid(alpha * z)
        case "gelu":
            return F.gelu(z)
        case "gelu-tanh":
            return F.gelu(z, approximate="tanh")
        case "relu" | "relu2":
            positive = F.relu(z)
            return positive.square() if activation == "relu2" else positive
        case "softmax":
            return z.softmax(dim=-1)
        case "identity":
            return z


@dataclass(frozen=True, slots=True)
class ExpertNorm:
    """A normalisation over an expert's channels, with an optional gain and shift per expert."""

    kind: Literal["layernorm", "rmsnorm"]
    eps: float


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Gains and shifts [n, width] of the experts' normalisations; None for ones and zeros.

    The first two belong to the norm before the activation, the others to that of the outputs.
    """

    g1: Tensor | None = None
    s1: Tensor | None = None
    g2: Tensor | None = None
    s2: Tensor | None = None

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the existing ones by their names in a bundle."""
        for name in NORM_WEIGHTS:
            weight: Tensor | None = getattr(self, name)
            if weight is not None:
                yield name, weight


NORM_WEIGHTS = ("g1", "s1", "g2", "s2")


def normalised(z: Tensor, norm: ExpertNorm, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    """Returns z [..., width], normalised, then multiplied by `gain`, plus `shift`."""
    if norm.kind == "layernorm":
        z = F.layer_norm(z, z.shape[-1:], eps=norm.eps)
    else:
        z = z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + norm.eps)
    z = z if gain is None else z * gain
    return z if shift is None else z + shift


class AroundMaps(Protocol):
    """The parts of an expert around its linear maps, in the specs of all kinds.

    With two maps, y = out(second(act(norm(first(x))))), where out is `out_norm`, then
    `out_activation`; in a gated expert the activation is the gate's. With one, y = out(first(x)).
    `inner` is the width of the first map, `hidden` that after the activation, `out` the outputs'.
    """

    @property
    def activation(self) -> Activation: ...
    @property
    def alpha(self) -> float: ...
    @property
    def hidden_norm(self) -> ExpertNorm | None: ...
    @property
    def out_norm(self) -> ExpertNorm | None: ...
    @property
    def out_activation(self) -> Activation: ...
    @property
    def inner(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def out(self) -> int: ...
