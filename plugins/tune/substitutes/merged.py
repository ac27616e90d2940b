"""Merges all experts of a muMoE layer into one, which is then trained.

Xue et al., One Student Knows All Experts Know (2022), merge the experts of a trained mixture into
one layer and train it on the mixture's outputs. A muMoE layer's experts are slices of a tensor, so
their mean, weighted by the tokens' coefficients, is one matrix for each tensor; least squares bring
the matrix's outputs closer to the tensor's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ....graphs.layers.mumoe import FactorisedSpec, MuMoE, contract
from .constants import ridge_solution

MAX_DIM = 4096
"""For wider inputs, the mean is used without least squares."""

ROWS = 16
"""The number of tokens per row of a matrix to fit the matrix to."""


@torch.inference_mode()
def merged_matrices(layer: MuMoE, tokens: Iterable[Tensor]) -> tuple[np.ndarray, ...]:
    """Returns a matrix [d + 1, o] for each tensor of a layer; the last row is the bias.

    `tokens` are the layer's inputs in batches, [b, m, d].
    """
    specs = layer.spec.tensors
    totals = [torch.zeros(n, dtype=torch.float64) for n in layer.spec.levels]
    # For inputs z [r, d + 1], whose last column is 1, and outputs y [r, o]: zᵀz and zᵀy.
    sums = {
        index: [torch.zeros(spec.dim + 1, n, dtype=torch.float64) for n in (spec.dim + 1, spec.out)]
        for index, spec in enumerate(specs)
        if spec.dim <= MAX_DIM
    }
    rows, enough = 0, ROWS * (1 + max((specs[index].dim for index in sums), default=0))
    for x in tokens:
        coefficients, products = layer.products(x)
        added = (a.flatten(0, 1).double().sum(dim=0) for a in coefficients)
        totals = [total + part for total, part in zip(totals, added, strict=True)]
        for index, (square, product) in sums.items():
            z, y = (part.flatten(0, 1).double() for part in products[index])
            z = torch.cat((z, torch.ones_like(z[:, :1])), dim=1)
            square.add_(z.T @ z)
            product.add_(z.T @ y)
        rows += x.shape[0] * x.shape[1]
        if rows >= enough:
            break
    matrices = []
    for index, spec in enumerate(specs):
        matrix = _mean(spec, layer.factors(index), [total / rows for total in totals])
        if index in sums:
            square, product = sums[index]
            matrix = matrix + ridge_solution(square, product - square @ matrix)
        matrices.append(matrix.float().numpy())
    return tuple(matrices)


def _mean(spec: FactorisedSpec, factors: Sequence[Tensor], means: list[Tensor]) -> Tensor:
    """Returns the matrix [d + 1, o] for fixed coefficients, `means` [n] for each level."""
    inputs = torch.cat((torch.eye(spec.dim), torch.zeros(1, spec.dim))).double()[None]
    shape = (1, spec.dim + 1)
    outputs = contract(
        spec,
        [factor.double() for factor in factors],
        tuple(mean.expand(*shape, -1) for mean in means),
        inputs,
    )[0]
    return torch.cat((outputs[:-1] - outputs[-1], outputs[-1:]))
