"""Experts stored one by one, each a pair of linear layers: their shapes and their matrices."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ...graphs.layers.soft_moe import Matrices, SoftMoEWeights
from ...graphs.layers.spec import SoftMoESpec
from .base import Shape, Tensors


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Names of the experts' two linear layers, such as `experts.{}.fc1` and `experts.{}.fc2`.

    `kernel` follows a weight's [out, in]: (1, 1) where the experts are 1x1 convolutions. `gated`
    experts have 2h rows in their first weight (GEGLU).
    """

    first: str
    second: str
    kernel: Shape = ()
    gated: bool = False

    def any_of(self, tensors: Tensors, which: str, kind: str) -> Tensor | None:
        """The first tensor found under one of the names, whichever expert it is of."""
        pattern = re.compile(re.escape(which).replace(r"\{\}", r"\d+") + re.escape(f".{kind}"))
        return next((t for key, t in tensors.items() if pattern.fullmatch(key)), None)

    def hidden(self, tensors: Tensors) -> int:
        """h, from whichever expert is there; 0 when none is."""
        weight = self.any_of(tensors, self.first, "weight")
        if weight is None or weight.ndim < 2:
            return 0
        return weight.shape[0] // 2 if self.gated else weight.shape[0]

    def shapes(self, tensors: Tensors, n: int, d: int) -> dict[str, Shape]:
        """Names and shapes of n experts of width d; biases where any expert has them."""
        h = self.hidden(tensors)
        inner = 2 * h if self.gated else h
        expected: dict[str, Shape] = {}
        for name, rows, columns in ((self.first, inner, d), (self.second, d, h)):
            has_bias = self.any_of(tensors, name, "bias") is not None
            for e in range(n):
                expected[f"{name.format(e)}.weight"] = (rows, columns, *self.kernel)
                if has_bias:
                    expected[f"{name.format(e)}.bias"] = (rows,)
        return expected

    def matrices(
        self, tensors: Tensors, n: int
    ) -> tuple[Matrices, Tensor | None, Matrices, Tensor | None]:
        """w1, b1, w2, b2 of n experts; the matrices are transposed views, one per expert."""
        pairs = []
        for name in (self.first, self.second):
            weights = tuple(tensors[f"{name.format(e)}.weight"].flatten(1).T for e in range(n))
            biases = [tensors.get(f"{name.format(e)}.bias") for e in range(n)]
            present = [bias for bias in biases if bias is not None]
            pairs.append((weights, torch.stack(present) if present else None))
        (w1, b1), (w2, b2) = pairs
        return w1, b1, w2, b2


def unit_phi(phi: Tensor, scale: Tensor | None, *, eps: float, kind: str = "l2") -> Tensor:
    """Phi [d, n, p] with columns of length one over d, times `scale`: float64 inside, float32 out.

    `kind` places eps as `spec.NormKind` does: `l2` clamps the length, `l2-plus` adds to it,
    `l2-rsqrt` adds to its square.
    """
    phi = phi.double()
    length = phi.square().sum(dim=0, keepdim=True)
    match kind:
        case "l2":
            length = length.sqrt().clamp_min(eps)
        case "l2-plus":
            length = length.sqrt() + eps
        case "l2-rsqrt":
            length = (length + eps).sqrt()
    phi = phi / length
    if scale is not None:
        phi = phi * scale.double()
    return phi.float()


def cosine_layer(
    name: str,
    tensors: Tensors,
    matrices: tuple[Matrices, Tensor | None, Matrices, Tensor | None],
    hidden: int,
) -> tuple[SoftMoESpec, SoftMoEWeights]:
    """The layer of bwconrad/soft-moe and its forks around experts w1, b1, w2, b2.

    x and phi are normalised and a scale is learnt, unless the layer was built with
    normalize=False and has no `scale`.
    """
    d, n, p = tensors["phi"].shape
    scale = tensors.get("scale")
    spec = SoftMoESpec(
        name,
        experts=n,
        slots=p,
        dim=d,
        hidden=hidden,
        out=d,
        norm="none" if scale is None else "l2",
        norm_eps=0.0 if scale is None else COSINE_EPS,
    )
    phi = tensors["phi"]
    if scale is not None:
        phi = unit_phi(phi, scale, eps=COSINE_EPS)
    return spec, SoftMoEWeights(phi, *matrices)


COSINE_EPS = 1e-12
"""F.normalize's: a vector is divided by its length, or by this if it is shorter."""
