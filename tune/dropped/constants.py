"""What takes the places of experts: of a Soft MoE layer's constants, and which experts go first.

A dropped expert leaves a constant expert (Jin et al., MoE++, 2024): each of its slots gives one
vector, whatever it is given. The vectors are those with which the layer's outputs on the search's
half differ least from what they were (least squares). As C is unchanged, a token still gets of them
what the router says. A muMoE layer's experts are merged into one (`tune.dropped.merged`). For a
whole model all of these are then trained (`tune.dropped.distill`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from ...bench.runners.pytorch import PyTorch
from ...common.files import sha256
from ...common.writing import make_folder, whole_file
from ...exporter.edits import Edits, MergedExperts
from ...exporter.model import Model, edited
from ...graphs.layers.base import algorithm_1
from ...graphs.layers.mumoe import MuMoE
from ...graphs.layers.soft_moe import SoftMoE
from ..space import Choice, Point, edits_of
from .distill import Samples, distil
from .merged import merged

Arrays = dict[str, np.ndarray]

FOLDER = "constants"
"""In a search's folder: what was trained."""

RANKED = 64
"""Inputs by which experts are ranked. Constants are fitted to at least so many."""

ROWS = 16
"""Tokens that constants are fitted to, for each of the layer's slots."""

MOST_SLOTS = 4096
"""Of so many slots the constants are fitted together; of more, each alone."""

RIDGE = 1e-3
"""How strongly constants are drawn to those of each slot alone, beside what the inputs say."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a model was seen to do on some inputs, in batches: to fit constants to.

    `tokens` [b, m, d] are what each layer is given; `samples` the inputs with the untouched model's
    outputs, which are class scores or not.
    """

    tokens: Mapping[str, Sequence[Tensor]]
    samples: Samples
    scores: bool


class Constants:
    """What takes the places of a layer's experts, fitted when it is first asked for.

    What was trained is kept in the search's `folder`, so that a search that goes on has the same.
    `seconds` is how long the training for one point may take now.
    """

    def __init__(
        self, model: Model, seen: Seen, folder: Path, seconds: Callable[[], float]
    ) -> None:
        self._model, self._seen, self._seconds = model, seen, seconds
        self._folder = folder / FOLDER
        self._orders: dict[str, tuple[int, ...]] = {}
        self._alone: dict[str, Tensor] = {}
        self._fitted: dict[tuple[str, tuple[int, ...]], Arrays] = {}
        self._last: tuple[Path, Arrays] | None = None

    def subset(self, name: str, size: int) -> tuple[int, ...]:
        """Returns the experts of a layer that stay where so many do, ascending."""
        if name not in self._orders:
            alone = self._of_slots(name)
            self._orders[name] = given_up(self._products(name, alone))[::-1]
        return tuple(sorted(self._orders[name][:size]))

    def fitted(self, name: str, choice: Choice) -> Arrays:
        """Returns what takes the places of a layer's experts, by least squares (`Edits.constants`).

        Nothing where all of them stay.
        """
        if not choice.fewer:
            return {}
        key = name, choice.experts
        if key not in self._fitted:
            self._fitted[key] = (
                self._merged(name) if choice.merged else self._constant(name, choice.experts)
            )
        return self._fitted[key]

    def fitted_to(self, point: Point) -> Arrays:
        """Returns what takes the places of the experts of a whole model, by least squares."""
        each = (self.fitted(name, choice) for name, choice in point.layers)
        return {name: array for arrays in each for name, array in arrays.items()}

    def trained_for(self, point: Point) -> Arrays:
        """Returns what takes the places of the experts of a whole model, trained for it."""
        if not point.fewer:
            return {}
        path = self._place(point)
        if self._last is None or self._last[0] != path:  # of large layers not all are held
            self._last = path, self._read(path) or self._kept(path, self._train(point))
        return self._last[1]

    def _read(self, path: Path) -> Arrays:
        """What was trained before; nothing where the file is not there, or damaged."""
        try:
            return load_file(path)
        except (SafetensorError, OSError):
            return {}

    def _kept(self, path: Path, found: Arrays) -> Arrays:
        """Writes what was trained."""
        make_folder(self._folder)
        with whole_file(path) as place:
            save_file(found, place)
        return found

    def digest(self, point: Point) -> str:
        """Returns the SHA-256 of what was trained for a point; empty where nothing was."""
        path = self._place(point)
        return sha256(path) if path.is_file() else ""

    def _place(self, point: Point) -> Path:
        layers = [(name, each.k, each.experts, each.merged) for name, each in point.layers]
        key = json.dumps(layers)
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"

    def _train(self, point: Point) -> Arrays:
        # Copies: what is trained in place must not be where the next training starts.
        start = {name: array.copy() for name, array in self.fitted_to(point).items()}
        edits = edits_of(point).with_constants(start)
        changed = edited(self._model, edits)
        constants = _trained(changed, edits)
        model = PyTorch(changed.module, changed.inputs)
        seen, seconds = self._seen, self._seconds()
        k = {name: choice.k for name, choice in point.layers}
        with algorithm_1(changed.module, k):
            return distil(model, constants, seen.samples, scores=seen.scores, seconds=seconds)

    def _merged(self, name: str) -> Arrays:
        layer = self._model.layers[name]
        assert isinstance(layer, MuMoE), "only the experts of those are merged"
        matrices = merged(layer, self._seen.tokens[name])
        return Edits(merged=(MergedExperts(name, matrices),)).constants

    def _constant(self, name: str, experts: tuple[int, ...]) -> Arrays:
        """What the slots of the other experts give: [n − e, p, o]."""
        return {name: self._least_squares(name, experts)}

    @torch.inference_mode()
    def _least_squares(self, name: str, experts: tuple[int, ...]) -> np.ndarray:
        spec = self._layer(name).spec
        dropped = [e for e in range(spec.experts) if e not in {*experts}]
        alone = self._of_slots(name)
        found = alone[dropped].flatten(0, 1)
        if len(found) <= MOST_SLOTS:
            square = torch.zeros(len(found), len(found), dtype=torch.float64)
            missing = torch.zeros(len(found), spec.out, dtype=torch.float64)
            for outputs, combine in self._batches(name):
                shares = combine[:, :, dropped].flatten(2).flatten(0, 1).double()  # [b·m, d·p]
                apart = (outputs - alone.to(outputs.dtype))[:, dropped].flatten(1, 2)
                added = combine[:, :, dropped].flatten(2) @ apart  # [b, m, o]
                square += shares.T @ shares
                missing += shares.T @ added.flatten(0, 1).double()
            ridge = RIDGE * square.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
            square.diagonal().add_(ridge)
            found = found + torch.linalg.solve(square, missing)
        return found.view(len(dropped), spec.slots, spec.out).float().numpy()

    @torch.inference_mode()
    def _of_slots(self, name: str) -> Tensor:
        """The best constant of each slot if it alone had one, [n, p, o] float64.

        It is the mean of what it gives, each input weighted by the squares of its column of C.
        """
        if name not in self._alone:
            spec = self._layer(name).spec
            total = torch.zeros(spec.experts, spec.slots, spec.out, dtype=torch.float64)
            weights = torch.full((spec.experts, spec.slots), 1e-300, dtype=torch.float64)
            for outputs, combine in self._batches(name):
                squares = combine.double().square().sum(dim=1)  # [b, n, p]
                total += torch.einsum("bnpo,bnp->npo", outputs.double(), squares)
                weights += squares.sum(dim=0)
            self._alone[name] = total / weights[..., None]
        return self._alone[name]

    @torch.inference_mode()
    def _products(self, name: str, alone: Tensor) -> Tensor:
        """Products [n, n] of what goes missing with each expert when its constants take over.

        Outputs are sums over experts, so that they say what goes missing with a set of them.
        """
        n = self._layer(name).spec.experts
        products, left = torch.zeros(n, n, dtype=torch.float64), RANKED
        for outputs, combine in self._batches(name):
            for one, shares in zip(outputs[:left], combine[:left], strict=True):
                apart = one - alone.to(one.dtype)
                added = torch.einsum("npo,mnp->nmo", apart, shares).flatten(1)  # [n, m·o]
                products += (added @ added.T).double()
            left = max(0, left - len(outputs))
        return products

    def _batches(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields what all experts give, [b, n, p, o], and C, [b, m, n, p], of enough inputs."""
        layer = self._layer(name)
        inputs = rows = 0
        for x in self._seen.tokens[name]:
            yield layer.computed(x)
            inputs, rows = inputs + x.shape[0], rows + x.shape[0] * x.shape[1]
            if inputs >= RANKED and rows >= ROWS * layer.spec.experts * layer.spec.slots:
                return

    def _layer(self, name: str) -> SoftMoE:
        layer = self._model.layers[name]
        assert isinstance(layer, SoftMoE), "only those have experts to drop"
        return layer


def _trained(model: Model, edits: Edits) -> dict[str, nn.Parameter]:
    """What takes the places of experts in a model, by the names of `Edits.constants`."""
    layers, found = model.layers, {}
    for kept in edits.kept:
        layer = layers[kept.layer]
        assert isinstance(layer, SoftMoE) and layer.constants is not None, "it was given some"
        found[kept.layer] = layer.constants
    for each in edits.merged:
        layer = layers[each.layer]
        assert isinstance(layer, MuMoE), "only the experts of those are merged"
        for index in range(len(layer.spec.tensors)):
            (found[each.key(index)],) = layer.factors(index)
    return found


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
