"""Finds the order in which to remove experts of a Soft MoE layer, and constants to replace them.

A removed expert becomes a constant expert (Jin et al., MoE++, 2024): each of its slots returns one
vector for all inputs. Least squares finds the vectors that change the layer's outputs least on the
search half of the data. C is unchanged, so tokens still combine the slots as the router decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ....graphs.layers.soft_moe import SoftMoE

RANKING_INPUTS = 64
"""The number of inputs to rank experts by. Constants are fitted to at least as many."""

TOKENS_PER_SLOT = 16
"""Constants are fitted to at least this many tokens per slot."""

MAX_SLOTS = 4096
"""Up to this many slots, all constants are fitted together, otherwise each alone."""

RIDGE = 1e-3
"""The ridge penalty for least squares, relative to the mean of the diagonal."""


class ConstantExperts:
    """Fits the constants that replace a layer's experts outside a subset.

    `tokens` are the layer's inputs in batches, [b, m, d].
    """

    def __init__(self, layer: SoftMoE, tokens: Sequence[Tensor]) -> None:
        self._layer, self._tokens = layer, tokens
        self._order: tuple[int, ...] = ()
        self._separate: Tensor | None = None

    def kept(self, size: int) -> tuple[int, ...]:
        """Returns the experts that stay in a subset of `size`, ascending."""
        if not self._order:
            self._order = removal_order(self._products(self._slot_constants()))[::-1]
        return tuple(sorted(self._order[:size]))

    @torch.inference_mode()
    def fitted(self, experts: tuple[int, ...]) -> np.ndarray:
        """Returns the outputs of the removed experts' slots, [n − e, p, o]."""
        spec = self._layer.spec
        dropped = [e for e in range(spec.experts) if e not in {*experts}]
        separate = self._slot_constants()
        constants = separate[dropped].flatten(0, 1)
        if len(constants) <= MAX_SLOTS:
            square = torch.zeros(len(constants), len(constants), dtype=torch.float64)
            missing = torch.zeros(len(constants), spec.out, dtype=torch.float64)
            for outputs, combine in self._batches():
                shares = combine[:, :, dropped].flatten(2).flatten(0, 1).double()  # [b·m, d·p]
                errors = (outputs - separate.to(outputs.dtype))[:, dropped].flatten(1, 2)
                added = combine[:, :, dropped].flatten(2) @ errors  # [b, m, o]
                square += shares.T @ shares
                missing += shares.T @ added.flatten(0, 1).double()
            constants = constants + ridge_solution(square, missing)
        return constants.view(len(dropped), spec.slots, spec.out).float().numpy()

    @torch.inference_mode()
    def _slot_constants(self) -> Tensor:
        """Returns each slot's best constant if only that slot had one, [n, p, o] float64.

        This is the mean of the slot's outputs, weighted by the squares in each input's column of C.
        """
        if self._separate is None:
            spec = self._layer.spec
            total = torch.zeros(spec.experts, spec.slots, spec.out, dtype=torch.float64)
            weights = torch.full((spec.experts, spec.slots), 1e-300, dtype=torch.float64)
            for outputs, combine in self._batches():
                squares = combine.double().square().sum(dim=1)  # [b, n, p]
                total += torch.einsum("bnpo,bnp->npo", outputs.double(), squares)
                weights += squares.sum(dim=0)
            self._separate = total / weights[..., None]
        return self._separate

    @torch.inference_mode()
    def _products(self, separate: Tensor) -> Tensor:
        """Returns inner products [n, n] of the errors if each expert is replaced by its constants.

        Outputs are sums over experts, so the error of any set of experts follows from these.
        """
        n = self._layer.spec.experts
        products, remaining = torch.zeros(n, n, dtype=torch.float64), RANKING_INPUTS
        for outputs, combine in self._batches():
            for y, shares in zip(outputs[:remaining], combine[:remaining], strict=True):
                errors = y - separate.to(y.dtype)
                added = torch.einsum("npo,mnp->nmo", errors, shares).flatten(1)  # [n, m·o]
                products += (added @ added.T).double()
            remaining = max(0, remaining - len(outputs))
        return products

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all experts' outputs, [b, n, p, o], and C, [b, m, n, p], for enough inputs."""
        spec = self._layer.spec
        inputs = rows = 0
        for x in self._tokens:
            yield self._layer.outputs_and_combine(x)
            inputs, rows = inputs + x.shape[0], rows + x.shape[0] * x.shape[1]
            if inputs >= RANKING_INPUTS and rows >= TOKENS_PER_SLOT * spec.experts * spec.slots:
                return


def ridge_solution(square: Tensor, product: Tensor) -> Tensor:
    """Solves `square` · X = `product` (zᵀz and zᵀy) for X, with a ridge penalty."""
    square = square.clone()
    ridge = RIDGE * square.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    square.diagonal().add_(ridge)
    solution: Tensor = torch.linalg.solve(square, product)
    return solution


def removal_order(products: Tensor) -> tuple[int, ...]:
    """Returns the order of removal: at each step the expert that adds least to the error.

    `products` [n, n] are the errors' inner products: removing a set R of experts causes the error
    Σ products[R, R].
    """
    remaining = list(range(len(products)))
    cross_terms = torch.zeros(len(products), dtype=products.dtype)  # Σ over R of products[e, R]
    order = []
    while remaining:
        costs = [float(products[e, e] + 2 * cross_terms[e]) for e in remaining]
        removed = remaining.pop(int(np.argmin(costs)))
        cross_terms += products[removed]
        order.append(removed)
    return tuple(order)
