"""Experts of one or two linear maps in PyTorch, for every kind of layer that has them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..names import SELECTED
from .base import MoELayer, MoESpec, StoredPart, frozen_if_any, frozen_matrices

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


def apply_activation(z: Tensor, activation: Activation, alpha: float = 1.0) -> Tensor:
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


NORM_WEIGHTS = ("g1", "s1", "g2", "s2")
"""The names of the `NormWeights` in a bundle."""


def normalise(z: Tensor, norm: ExpertNorm, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    """Returns z [..., width], normalised, then multiplied by `gain`, plus `shift`."""
    if norm.kind == "layernorm":
        z = F.layer_norm(z, z.shape[-1:], eps=norm.eps)
    else:
        z = z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + norm.eps)
    z = z if gain is None else z * gain
    return z if shift is None else z + shift


class ExpertMapsSpec(MoESpec, Protocol):
    """The parts of an expert besides its linear maps, and `inner`, the width of the first map.

    With two maps, y = out(second(act(norm(first(x))))), where out is `out_norm`, then
    `out_activation`; in a gated expert the activation is the gate's. With one, y = out(first(x)).
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
    def parameters_per_expert(self) -> int: ...


class ExpertMapsMixin:
    """The properties that specs of experts with linear maps share."""

    __slots__ = ()

    rewritable: ClassVar[bool] = False
    quantized_parts: ClassVar[frozenset[str]] = frozenset({"experts"})

    @property
    def levels(self: ExpertMapsSpec) -> tuple[int, ...]:
        return (self.experts,)

    @property
    def parameters_per_expert(self: ExpertMapsSpec) -> int:
        """The number of weights of one expert, without biases."""
        return self.dim * self.inner + self.hidden * self.out

    def bytes_read(self: ExpertMapsSpec, k: int) -> int:
        """Returns the FP32 bytes of the weights of k experts."""
        return 4 * k * self.parameters_per_expert

    def quantized_bytes(self: ExpertMapsSpec, k: int) -> int:
        """Returns `bytes_read`, because INT8 covers both matrices of an expert."""
        return self.bytes_read(k)

    def choices(self) -> dict[str, str]:
        """Returns the name of the chosen experts, int64 [b, k] or [t, k]."""
        return {"": SELECTED}


class ExpertMaps(MoELayer):
    """A layer whose experts are one or two linear maps each, with the parts of `ExpertMapsSpec`."""

    spec: ExpertMapsSpec

    def __init__(self, weights: Any) -> None:
        """Reads the maps `w1` and `w2`, their biases `b1` and `b2`, and `norms` from `weights`."""
        super().__init__()
        self.w1 = frozen_matrices(weights.w1)
        self.w2 = None if weights.w2 is None else frozen_matrices(weights.w2)
        self.b1, self.b2 = frozen_if_any(weights.b1), frozen_if_any(weights.b2)
        self.g1, self.s1 = frozen_if_any(weights.norms.g1), frozen_if_any(weights.norms.s1)
        self.g2, self.s2 = frozen_if_any(weights.norms.g2), frozen_if_any(weights.norms.s2)

    @abstractmethod
    def gated(self, hidden: Tensor) -> Tensor:
        """Computes the activation, with a gate if there is one: [..., inner] to [..., h]."""

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """Computes expert `index` on rows [..., d]; returns [..., o]."""

        def linear(x: Tensor, maps: nn.Parameter | nn.ParameterList, bias: Tensor | None) -> Tensor:
            expert_bias = None if bias is None else bias[index].to(x.dtype)
            return F.linear(x, maps[index].to(x.dtype).T, expert_bias)

        outputs = linear(rows, self.w1, self.b1)
        if self.w2 is not None:
            outputs = linear(self.activate(outputs, index), self.w2, self.b2)
        return self._outputs(outputs, index)

    def activate(self, hidden: Tensor, index: int | None = None) -> Tensor:
        """Computes the part between the maps: [..., inner] to [..., h]; all experts if no index."""
        if self.spec.hidden_norm is not None:
            gain, shift = (self._affine(weight, index, hidden) for weight in (self.g1, self.s1))
            hidden = normalise(hidden, self.spec.hidden_norm, gain, shift)
        return self.gated(hidden)

    def _outputs(self, outputs: Tensor, index: int | None) -> Tensor:
        """Computes the parts after the last map: [..., o] to [..., o]."""
        if self.spec.out_norm is not None:
            gain, shift = (self._affine(weight, index, outputs) for weight in (self.g2, self.s2))
            outputs = normalise(outputs, self.spec.out_norm, gain, shift)
        return apply_activation(outputs, self.spec.out_activation)

    @staticmethod
    def _affine(weight: Tensor | None, index: int | None, rows: Tensor) -> Tensor | None:
        """Returns an expert's gain or shift; [n, 1, ·] of all experts if the index is None."""
        if weight is None:
            return None
        return (weight[:, None] if index is None else weight[index]).to(rows.dtype)

    def stored_experts(self) -> Iterator[StoredPart]:
        """Yields the experts' weights, one expert at a time.

        A transposed or memory-mapped source is never loaded whole.
        """
        spec, ablated = self.spec, self.edits.ablated_in(0)
        inner, out = (spec.inner,), (spec.out,)
        sizes = {"w1": (spec.dim, *inner), "b1": inner, "w2": (spec.hidden, *out), "b2": out}
        sizes |= {"g1": inner, "s1": inner, "g2": out, "s2": out}
        # An expert whose last map is zero contributes nothing at the same cost. If the first map is
        # also zero, nothing before the last can overflow.
        zeroed = {"g2", "s2", "w2", "b2"}
        any_left = len(ablated) < spec.experts  # if all rows are zero, they have no range
        if self.w2 is None or (spec.hidden_norm is None and any_left):
            zeroed |= {"w1", "b1"}
        for key, size in sizes.items():
            weight: nn.Parameter | nn.ParameterList | None = getattr(self, key)
            if weight is not None:
                arrays = self._arrays(key, weight, ablated if key in zeroed else ())
                yield StoredPart(f"experts.{key}", (spec.experts, *size), arrays)

    def _arrays(
        self, key: str, weight: nn.Parameter | nn.ParameterList, zeroed: Collection[int]
    ) -> Iterator[np.ndarray]:
        for e in range(self.spec.experts):
            array = self.as_stored(key, weight[e].float()).numpy()  # numpy has no bfloat16
            yield np.zeros_like(array) if e in zeroed else array

    def as_stored(self, key: str, weight: Tensor) -> Tensor:
        """Returns one expert's weight in the form that the kind's lowerings expect."""
        return weight
