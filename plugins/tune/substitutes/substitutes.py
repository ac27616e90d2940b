"""Provides the arrays that replace experts: fitted by layer, then trained for a whole model.

Removed experts of a Soft MoE layer become constants (`constants.py`); those of a muMoE layer are
merged into one (`merged.py`). Least squares bring a layer's outputs close to the original ones; the
training (`distill.py`) uses the whole model's output. Trained arrays are stored in files.
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
from ....exporter.model import Model, edited
from ....graphs.edits import Edits, MergedExperts
from ....graphs.layers.base import algorithm_1
from ....graphs.layers.mumoe import MuMoE
from ....graphs.layers.soft_moe import SoftMoE
from ..recipe import LayerRecipe, edits_of
from ..space import Point
from .constants import ConstantExperts
from .distill import Samples, distil
from .merged import merged_matrices

FOLDER = "substitutes"
"""The folder for trained arrays, in the search's folder."""

NamedArrays = dict[str, np.ndarray]
"""Arrays by the names of `Edits.substitutes`."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded inputs and outputs of a model, in batches, to which substitutes are fitted.

    `tokens` [b, m, d] are each layer's inputs, `samples` the model's inputs with the untouched
    model's outputs; `scores` is whether these are class scores.
    """

    tokens: Mapping[str, Sequence[Tensor]]
    samples: Samples
    scores: bool


class Substitutes:
    """The arrays that replace a model's experts, fitted on first use.

    Trained arrays are stored in the search's `folder`, so a resumed search has the same ones; the
    training for another point starts from them if their loss is smaller. `seconds` returns how long
    the training for one point may currently take.
    """

    def __init__(
        self, model: Model, recording: Recording, folder: Path, seconds: Callable[[], float]
    ) -> None:
        self._model, self._recording, self._seconds = model, recording, seconds
        self._folder = folder / FOLDER
        self._constants: dict[str, ConstantExperts] = {}
        self._fitted: dict[tuple[str, tuple[int, ...]], NamedArrays] = {}
        self._last: tuple[Path, NamedArrays] | None = None
        self._trained: dict[tuple[str, tuple[int, ...]], Path] = {}

    def kept(self, name: str, size: int) -> tuple[int, ...]:
        """Returns the experts of a Soft MoE layer that stay in a subset of `size`, ascending."""
        return self._constant_experts(name).kept(size)

    def fitted(self, name: str, choice: LayerRecipe) -> NamedArrays:
        """Returns the arrays for a layer, fitted by least squares; empty if all experts stay."""
        if not choice.is_reduced:
            return {}
        key = name, choice.experts
        if key not in self._fitted:
            self._fitted[key] = self._fit(name, choice)
        return self._fitted[key]

    def fitted_to(self, point: Point) -> NamedArrays:
        """Returns the arrays for a whole model, fitted by least squares."""
        fits = (self.fitted(name, choice) for name, choice in point.layers)
        return {name: array for arrays in fits for name, array in arrays.items()}

    def trained_for(self, point: Point) -> NamedArrays:
        """Returns the arrays for a whole model, trained for it."""
        if not point.is_reduced:
            return {}
        path = self._path(point)
        # only the latest arrays are kept in memory, because those of large layers are large
        if self._last is None or self._last[0] != path:
            arrays = _read(path)
            if not arrays:
                before = self._trained_for_others(point)
                arrays = self._stored(path, self._train(point, before, self._seconds()))
            self._last = path, arrays
        return self._last[1]

    def train_further(self, point: Point, seconds: float) -> bool:
        """Continues the training for a point; returns whether that helped."""
        before = self.trained_for(point)
        after = self._train(point, before, seconds)
        if all(np.array_equal(after[name], before[name]) for name in before):
            return False
        path = self._path(point)
        self._last = path, self._stored(path, after)
        return True

    def shared(self, point: Point, other: Point) -> bool:
        """Returns whether two points share trained arrays, since only their precisions differ."""
        return self._path(point) == self._path(other)

    def digest(self, point: Point) -> str:
        """Returns the SHA-256 of a point's trained arrays; empty if there are none."""
        path = self._path(point)
        return sha256(path) if path.is_file() else ""

    def _fit(self, name: str, choice: LayerRecipe) -> NamedArrays:
        if not choice.merged:
            return {name: self._constant_experts(name).fitted(choice.experts)}
        layer = self._model.layers[name]
        assert isinstance(layer, MuMoE), "only muMoE experts can be merged"
        matrices = merged_matrices(layer, self._recording.tokens[name])
        return Edits((MergedExperts(name, matrices),)).substitutes

    def _constant_experts(self, name: str) -> ConstantExperts:
        if name not in self._constants:
            layer = self._model.layers[name]
            assert isinstance(layer, SoftMoE), "only Soft MoE experts can be removed"
            self._constants[name] = ConstantExperts(layer, self._recording.tokens[name])
        return self._constants[name]

    def _train(self, point: Point, before: NamedArrays, seconds: float) -> NamedArrays:
        """Trains the fitted arrays, or those trained `before` if they are better."""
        # Copies, because training changes arrays in place, but the next one starts from the fit.
        start = {name: array.copy() for name, array in self.fitted_to(point).items()}
        edits = edits_of(point.choices).with_substitutes(start)
        changed = edited(self._model, edits)
        model = PyTorch(changed.module, changed.inputs)
        recording = self._recording
        with algorithm_1(changed.module, point.k):
            trained = _parameters(changed, edits)
            arrays = distil(
                model,
                trained,
                recording.samples,
                scores=recording.scores,
                seconds=seconds,
                other=start | before if before else None,
            )
        path = self._path(point)
        self._trained |= {(n, c.experts): path for n, c in point.layers if c.is_reduced}
        return arrays

    def _trained_for_others(self, point: Point) -> NamedArrays:
        """Returns the arrays last trained for each of the point's layers in another point."""
        arrays: NamedArrays = {}
        for name, choice in point.layers:
            path = self._trained.get((name, choice.experts)) if choice.is_reduced else None
            before = {} if path is None else _read(path)
            arrays |= {key: before[key] for key in self.fitted(name, choice) if key in before}
        return arrays

    def _path(self, point: Point) -> Path:
        layers = [(name, layer.k, layer.experts, layer.merged) for name, layer in point.layers]
        key = json.dumps(layers)
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"

    def _stored(self, path: Path, arrays: NamedArrays) -> NamedArrays:
        make_folder(self._folder)
        with whole_file(path) as partial:
            save_file(arrays, partial)
        return arrays


def _read(path: Path) -> NamedArrays:
    """Returns the trained arrays; empty if the file is missing or damaged."""
    try:
        return load_file(path)
    except (SafetensorError, OSError):
        return {}


def _parameters(model: Model, edits: Edits) -> dict[str, nn.Parameter]:
    """Returns the model's parameters that replace experts, by the names of `Edits.substitutes`."""
    layers, parameters = model.layers, {}
    for kept in edits.kept:
        layer = layers[kept.layer]
        assert isinstance(layer, SoftMoE) and layer.constants is not None, (
            "the edits added constants"
        )
        parameters[kept.layer] = layer.constants
    for merged in edits.merged:
        layer = layers[merged.layer]
        assert isinstance(layer, MuMoE), "only muMoE experts can be merged"
        for index in range(len(layer.spec.tensors)):
            (parameters[merged.key(index)],) = layer.factors(index)
    return parameters
