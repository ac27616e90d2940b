"""One expert in place of all of a muMoE layer: the start of a training that makes it fit.

Merging the experts of a trained mixture into one layer and training that on what the mixture gives
is known from Xue et al., One Student Knows All Experts Know (2022). A muMoE layer's experts are
slices of one tensor, so that their mean, weighted by the coefficients that tokens give them, is one
matrix for each tensor; least squares bring it nearer to what the tensor gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...graphs.layers.mumoe import FactorisedSpec, MuMoE, contract

WIDEST = 4096
"""Of wider inputs the mean is taken as it is."""

ROWS = 16
"""Tokens that a matrix is fitted to, for each of its rows."""

RIDGE = 1e-3
"""How strongly a matrix is drawn to the mean of the experts, beside what the inputs say."""


@torch.inference_mode()
def merged(layer: MuMoE, tokens: Iterable[Tensor]) -> tuple[np.ndarray, ...]:
    """Returns a matrix [d + 1, o] for each tensor of a layer, the bias last.

    `tokens` [b, m, d], in batches, are what the layer is given.
    """
    seen: list[tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor]]]] = []
    rows, wanted = 0, ROWS * (1 + max(each.dim for each in layer.spec.tensors))
    for x in tokens:
        seen.append(layer.products(x))
        rows += x.shape[0] * x.shape[1]
        if rows >= wanted:
            break
    levels = zip(*(coefficients for coefficients, _ in seen), strict=True)
    means = [torch.cat([a.flatten(0, 1) for a in level]).double().mean(dim=0) for level in levels]
    found = []
    for index, spec in enumerate(layer.spec.tensors):
        matrix = _mean(spec, layer.factors(index), means)
        if spec.dim <= WIDEST:
            products = [pairs[index] for _, pairs in seen]
            z, y = (
                torch.cat([pair[side].flatten(0, 1) for pair in products]).double()
                for side in (0, 1)
            )
            matrix = matrix + _fitted(z, y, matrix)
        found.append(matrix.float().numpy())
    return tuple(found)


def _mean(spec: FactorisedSpec, factors: Sequence[Tensor], means: list[Tensor]) -> Tensor:
    """The matrix [d + 1, o] of fixed coefficients, [n] of each level."""
    inputs = torch.cat((torch.eye(spec.dim), torch.zeros(1, spec.dim))).double()[None]
    rows = (1, spec.dim + 1)
    outputs = contract(
        spec,
        [factor.double() for factor in factors],
        tuple(mean.expand(*rows, -1) for mean in means),
        inputs,
    )[0]
    return torch.cat((outputs[:-1] - outputs[-1], outputs[-1:]))


def _fitted(z: Tensor, y: Tensor, matrix: Tensor) -> Tensor:
    """What to add to a matrix so that inputs z [r, d] give outputs nearer to y [r, o]."""
    z = torch.cat((z, torch.ones_like(z[:, :1])), dim=1)
    square = z.T @ z
    ridge = RIDGE * square.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    square.diagonal().add_(ridge)
    added: Tensor = torch.linalg.solve(square, z.T @ (y - z @ matrix))
    return added
