"""What takes the places of experts: fitted for each layer, then trained for a whole model.

Dropped experts of a Soft MoE layer leave constants (`constants.py`), those of a muMoE layer are
merged into one (`merged.py`). Least squares bring a layer's own outputs near what they were;
the training (`distill.py`) looks at what the whole model says. What was trained is kept in a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from ....bench.runners.pytorch import PyTorch
from ....common.files import sha256
from ....common.writing import make_folder, whole_file
from ....exporter.edits import Edits, MergedExperts
from ....exporter.model import Model, edited
from ....graphs.layers.base import algorithm_1
from ....graphs.layers.mumoe import MuMoE
from ....graphs.layers.soft_moe import SoftMoE
from ..recipe import LayerRecipe
from ..space import Point, edits_of
from .constants import ConstantExperts
from .distill import Samples, distil
from .merged import merged_matrices

FOLDER = "substitutes"
"""In a search's folder: what was trained."""

NamedArrays = dict[str, np.ndarray]
"""By the names of `Edits.substitutes`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a model was seen to do on some inputs, in batches: to fit to.

    `tokens` [b, m, d] are what each layer is given; `samples` the inputs with the untouched model's
    outputs, which are class scores or not.
    """

    tokens: Mapping[str, Sequence[Tensor]]
    samples: Samples
    scores: bool


class Substitutes:
    """What takes the places of a model's experts, fitted when it is first asked for.

    What was trained is kept in the search's `folder`, so that a search that goes on has the same;
    the training for another model goes on from it where that is nearer. `seconds` is how long the
    training for one point may take now.
    """

    def __init__(
        self, model: Model, seen: Seen, folder: Path, seconds: Callable[[], float]
    ) -> None:
        self._model, self._seen, self._seconds = model, seen, seconds
        self._folder = folder / FOLDER
        self._constants: dict[str, ConstantExperts] = {}
        self._fitted: dict[tuple[str, tuple[int, ...]], NamedArrays] = {}
        self._last: tuple[Path, NamedArrays] | None = None
        self._trained: dict[tuple[str, tuple[int, ...]], Path] = {}

    def kept(self, name: str, size: int) -> tuple[int, ...]:
        """Returns the experts of a Soft MoE layer that stay where so many do, ascending."""
        return self._of_soft_moe(name).kept(size)

    def fitted(self, name: str, choice: LayerRecipe) -> NamedArrays:
        """Returns what takes the places of a layer's experts, by least squares.

        Nothing where all of them stay.
        """
        if not choice.fewer:
            return {}
        key = name, choice.experts
        if key not in self._fitted:
            self._fitted[key] = self._fit(name, choice)
        return self._fitted[key]

    def fitted_to(self, point: Point) -> NamedArrays:
        """Returns what takes the places of the experts of a whole model, by least squares."""
        fits = (self.fitted(name, choice) for name, choice in point.layers)
        return {name: array for arrays in fits for name, array in arrays.items()}

    def trained_for(self, point: Point) -> NamedArrays:
        """Returns what takes the places of the experts of a whole model, trained for it."""
        if not point.fewer:
            return {}
        path = self._place(point)
        if self._last is None or self._last[0] != path:  # of large layers not all are held
            arrays = _read(path)
            if not arrays:
                elsewhere = self._trained_elsewhere(point)
                arrays = self._written(path, self._train(point, elsewhere, self._seconds()))
            self._last = path, arrays
        return self._last[1]

    def train_further(self, point: Point, seconds: float) -> bool:
        """Goes on with the training for a point; returns whether that has helped."""
        before = self.trained_for(point)
        after = self._train(point, before, seconds)
        if all(np.array_equal(after[name], before[name]) for name in before):
            return False
        path = self._place(point)
        self._last = path, self._written(path, after)
        return True

    def shared(self, point: Point, other: Point) -> bool:
        """Whether two points have what was trained in common: they differ in precision alone."""
        return self._place(point) == self._place(other)

    def digest(self, point: Point) -> str:
        """Returns the SHA-256 of what was trained for a point; empty where nothing was."""
        path = self._place(point)
        return sha256(path) if path.is_file() else ""

    def _fit(self, name: str, choice: LayerRecipe) -> NamedArrays:
        if not choice.merged:
            return {name: self._of_soft_moe(name).fitted(choice.experts)}
        layer = self._model.layers[name]
        assert isinstance(layer, MuMoE), "only the experts of those are merged"
        matrices = merged_matrices(layer, self._seen.tokens[name])
        return Edits(merged=(MergedExperts(name, matrices),)).substitutes

    def _of_soft_moe(self, name: str) -> ConstantExperts:
        if name not in self._constants:
            layer = self._model.layers[name]
            assert isinstance(layer, SoftMoE), "only those have experts to drop"
            self._constants[name] = ConstantExperts(layer, self._seen.tokens[name])
        return self._constants[name]

    def _train(self, point: Point, before: NamedArrays, seconds: float) -> NamedArrays:
        """Trains from the fit, or from what was trained `before` where that does better."""
        # Copies: what is trained in place must not be where the next training starts.
        start = {name: array.copy() for name, array in self.fitted_to(point).items()}
        edits = edits_of(point).with_substitutes(start)
        changed = edited(self._model, edits)
        model = PyTorch(changed.module, changed.inputs)
        seen = self._seen
        with algorithm_1(changed.module, point.k):
            trained = _parameters(changed, edits)
            arrays = distil(
                model,
                trained,
                seen.samples,
                scores=seen.scores,
                seconds=seconds,
                other=start | before if before else None,
            )
        path = self._place(point)
        self._trained |= {(n, c.experts): path for n, c in point.layers if c.fewer}
        return arrays

    def _trained_elsewhere(self, point: Point) -> NamedArrays:
        """What was last trained for each layer as it is here, in another model."""
        arrays: NamedArrays = {}
        for name, choice in point.layers:
            path = self._trained.get((name, choice.experts)) if choice.fewer else None
            before = {} if path is None else _read(path)
            arrays |= {key: before[key] for key in self.fitted(name, choice) if key in before}
        return arrays

    def _place(self, point: Point) -> Path:
        layers = [(name, layer.k, layer.experts, layer.merged) for name, layer in point.layers]
        key = json.dumps(layers)
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"

    def _written(self, path: Path, arrays: NamedArrays) -> NamedArrays:
        make_folder(self._folder)
        with whole_file(path) as place:
            save_file(arrays, place)
        return arrays


def _read(path: Path) -> NamedArrays:
    """What was trained before; nothing where the file is not there, or damaged."""
    try:
        return load_file(path)
    except (SafetensorError, OSError):
        return {}


def _parameters(model: Model, edits: Edits) -> dict[str, nn.Parameter]:
    """What takes the places of experts in a model, by the names of `Edits.substitutes`."""
    layers, parameters = model.layers, {}
    for kept in edits.kept:
        layer = layers[kept.layer]
        assert isinstance(layer, SoftMoE) and layer.constants is not None, "it was given some"
        parameters[kept.layer] = layer.constants
    for merged in edits.merged:
        layer = layers[merged.layer]
        assert isinstance(layer, MuMoE), "only the experts of those are merged"
        for index in range(len(layer.spec.tensors)):
            (parameters[merged.key(index)],) = layer.factors(index)
    return parameters
