"""Which experts of a Soft MoE layer go first, and the constants that take their places.

A dropped expert leaves a constant expert (Jin et al., MoE++, 2024): each of its slots gives one
vector, whatever it is given. The vectors are those with which the layer's outputs on the search's
half differ least from what they were (least squares). As C is unchanged, a token still gets of them
what the router says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ....graphs.layers.soft_moe import SoftMoE

RANKED = 64
"""Inputs by which experts are ranked. Constants are fitted to at least so many."""

ROWS = 16
"""Tokens that constants are fitted to, for each of the layer's slots."""

MOST_SLOTS = 4096
"""Of so many slots the constants are fitted together; of more, each alone."""

RIDGE = 1e-3
"""How strongly constants are drawn to those of each slot alone, beside what the inputs say."""


class ConstantExperts:
    """The constants of a layer's experts, whichever of them stay.

    `tokens` [b, m, d], in batches, are what the layer is given.
    """

    def __init__(self, layer: SoftMoE, tokens: Sequence[Tensor]) -> None:
        self._layer, self._tokens = layer, tokens
        self._order: tuple[int, ...] = ()
        self._alone: Tensor | None = None

    def kept(self, size: int) -> tuple[int, ...]:
        """Returns the experts that stay where so many do, ascending."""
        if not self._order:
            self._order = given_up(self._products(self._of_slots()))[::-1]
        return tuple(sorted(self._order[:size]))

    @torch.inference_mode()
    def fitted(self, experts: tuple[int, ...]) -> np.ndarray:
        """Returns what the slots of the others give, [n − e, p, o], where some experts stay."""
        spec = self._layer.spec
        dropped = [e for e in range(spec.experts) if e not in {*experts}]
        alone = self._of_slots()
        constants = alone[dropped].flatten(0, 1)
        if len(constants) <= MOST_SLOTS:
            square = torch.zeros(len(constants), len(constants), dtype=torch.float64)
            missing = torch.zeros(len(constants), spec.out, dtype=torch.float64)
            for outputs, combine in self._batches():
                shares = combine[:, :, dropped].flatten(2).flatten(0, 1).double()  # [b·m, d·p]
                apart = (outputs - alone.to(outputs.dtype))[:, dropped].flatten(1, 2)
                added = combine[:, :, dropped].flatten(2) @ apart  # [b, m, o]
                square += shares.T @ shares
                missing += shares.T @ added.flatten(0, 1).double()
            ridge = RIDGE * square.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
            square.diagonal().add_(ridge)
            constants = constants + torch.linalg.solve(square, missing)
        return constants.view(len(dropped), spec.slots, spec.out).float().numpy()

    @torch.inference_mode()
    def _of_slots(self) -> Tensor:
        """The best constant of each slot if it alone had one, [n, p, o] float64.

        It is the mean of what it gives, each input weighted by the squares of its column of C.
        """
        if self._alone is None:
            spec = self._layer.spec
            total = torch.zeros(spec.experts, spec.slots, spec.out, dtype=torch.float64)
            weights = torch.full((spec.experts, spec.slots), 1e-300, dtype=torch.float64)
            for outputs, combine in self._batches():
                squares = combine.double().square().sum(dim=1)  # [b, n, p]
                total += torch.einsum("bnpo,bnp->npo", outputs.double(), squares)
                weights += squares.sum(dim=0)
            self._alone = total / weights[..., None]
        return self._alone

    @torch.inference_mode()
    def _products(self, alone: Tensor) -> Tensor:
        """Products [n, n] of what goes missing with each expert when its constants take over.

        Outputs are sums over experts, so that they say what goes missing with a set of them.
        """
        n = self._layer.spec.experts
        products, left = torch.zeros(n, n, dtype=torch.float64), RANKED
        for outputs, combine in self._batches():
            for one, shares in zip(outputs[:left], combine[:left], strict=True):
                apart = one - alone.to(one.dtype)
                added = torch.einsum("npo,mnp->nmo", apart, shares).flatten(1)  # [n, m·o]
                products += (added @ added.T).double()
            left = max(0, left - len(outputs))
        return products

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields what all experts give, [b, n, p, o], and C, [b, m, n, p], of enough inputs."""
        spec = self._layer.spec
        inputs = rows = 0
        for x in self._tokens:
            yield self._layer.computed(x)
            inputs, rows = inputs + x.shape[0], rows + x.shape[0] * x.shape[1]
            if inputs >= RANKED and rows >= ROWS * spec.experts * spec.slots:
                return


def given_up(products: Tensor) -> tuple[int, ...]:
    """The order in which experts go: at each step the one that adds least to what is missing.

    `products` [n, n] are those of what goes missing with each expert; without a set R of them it is
    Σ products[R, R].
    """
    left = list(range(len(products)))
    crossed = torch.zeros(len(products), dtype=products.dtype)  # Σ over R of products[e, R]
    order = []
    while left:
        costs = [float(products[e, e] + 2 * crossed[e]) for e in left]
        gone = left.pop(int(np.argmin(costs)))
        crossed += products[gone]
        order.append(gone)
    return tuple(order)
