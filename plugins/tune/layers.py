"""Measures how each k and each subset of experts in one layer changes the whole model's outputs.

Every layer's inputs and outputs are computed once. When one layer is changed, the layers before it
return their recorded outputs, and the layers after it are computed again. A model with
token-routed layers always runs as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...bench.data import LabelledData
from ...bench.runners.pytorch import PyTorch
from ...data.batches import Array
from ...exporter.checks.accuracy import one_per_sample
from ...exporter.inputs import Inputs
from ...exporter.model import Model
from ...graphs.layers.base import (
    Algorithm,
    MoELayer,
    algorithm_1,
    moe_layers,
    replaced_layers,
    sharing_weights,
)
from ...graphs.layers.mumoe import MuMoE
from ...graphs.layers.soft_moe import SoftMoE
from .accuracy.holdout import batch_size, in_batches
from .accuracy.quality import Metric
from .recipe import LayerRecipe
from .routed import routed_layers
from .substitutes.substitutes import Recording

BATCH = 32

TRIED_INPUTS = 512
"""The number of inputs on which single layers are tried, to rank choices; whole graphs decide."""

MAX_RECORDED, RECORDING_S = 8192, 5.0
"""The largest number of inputs that substitutes are fitted to. After `TRIED_INPUTS`, recording ends
once it has taken `RECORDING_S` seconds."""

MAX_TOKENS = 1 << 14
"""The largest number of tokens on which single layers of a language model are tried."""

RECORDED_BYTES = 1 << 29
"""The largest size, in bytes, of the recorded inputs and outputs of all layers."""


class Replay:
    """A model with the recorded inputs and outputs of every layer."""

    def __init__(
        self,
        model: Model,
        data: LabelledData,
        outputs: Array,
        metric: Metric,
        out_of_time: Callable[[], bool],
        *,
        batch: int | None,
    ) -> None:
        """Runs the model in batches of size `batch`, or as large as memory allows."""
        self.model, self.routed = model, routed_layers(model)
        self.module = sharing_weights(model.module)
        self.layers = {name: moe_layers(self.module)[name] for name in model.layers}
        self.metric = metric
        self.batch_index = 0
        self._run = PyTorch(self.module, model.inputs).infer
        self.inputs: dict[str, list[Tensor]] = {name: [] for name in self.layers}
        self.outputs: dict[str, list[Tensor]] = {name: [] for name in self.layers}
        self._batches: list[tuple[Inputs, Array]] = []
        recorded_bytes, takes_tokens = 0, data.inputs.dtype.kind in "iu"
        limit = max(1, MAX_TOKENS // data.inputs[0].size) if takes_tokens else MAX_RECORDED
        size, began = batch or min(BATCH, batch_size(outputs)), time.monotonic()
        count = min(limit, MAX_RECORDED, len(data))
        count = max(size, count - count % size) if batch else count
        for rows, x, _ in in_batches(data.head(count), size):
            slow = rows.start >= TRIED_INPUTS and time.monotonic() - began > RECORDING_S
            if self._batches and (recorded_bytes > RECORDED_BYTES or slow or out_of_time()):
                break
            if not self.routed:
                with self._recorded():
                    self._run(x)
                lists = [*self.inputs.values(), *self.outputs.values()]
                recorded_bytes += sum(tensors[-1].nbytes for tensors in lists)
            self._batches.append((x, outputs[rows]))

    def tokens(self) -> dict[str, Array]:
        """Returns the recorded inputs of each layer, [s, m, d]; empty for a token-routed model."""
        return {name: torch.cat(tokens).numpy() for name, tokens in self.inputs.items() if tokens}

    @property
    def recording(self) -> Recording:
        """The recorded inputs and outputs that substitutes are fitted to."""
        scores = self.metric.name != "function"
        return Recording(tokens=self.inputs, samples=self._batches, scores=scores)

    def shift(self, name: str, choice: LayerRecipe, substitutes: Mapping[str, np.ndarray]) -> float:
        """Returns how far the outputs move if one layer is changed, regardless of its precision.

        `substitutes` replace the experts that the choice removes.
        """
        moved, inputs = 0.0, 0
        with self._changed(name, choice, substitutes) as run:
            for index, (x, base) in enumerate(self._batches[: -(-TRIED_INPUTS // BATCH)]):
                self.batch_index = index
                moved += self.metric.shift(one_per_sample(run(x)), one_per_sample(base))
                inputs += len(base)
        return moved / inputs

    @contextmanager
    def _changed(
        self, name: str, choice: LayerRecipe, substitutes: Mapping[str, np.ndarray]
    ) -> Iterator[Callable[[Inputs], Array]]:
        """Yields a function that runs the model with one layer changed."""
        if self.routed:
            k = {other: layer.spec.trained_k for other, layer in self.layers.items()}
            changed = self.model.host.with_k(self.model, {**k, name: choice.k})
            yield PyTorch(changed.module, changed.inputs).infer
            return
        layer, names = self.layers[name], list(self.layers)
        replaced: dict[str, nn.Module] = {
            earlier: _RecordedOutputs(self, earlier) for earlier in names[: names.index(name)]
        }
        constants: AbstractContextManager[None] = nullcontext()
        if choice.merged:
            assert isinstance(layer, MuMoE), "only muMoE experts can be merged"
            replaced[name] = layer.merged([*map(torch.from_numpy, substitutes.values())])
        elif name in substitutes:
            assert isinstance(layer, SoftMoE), "only Soft MoE experts can be removed"
            constants = _constant_experts(layer, choice, substitutes[name])
        keep = {} if choice.k >= layer.spec.experts else {name: choice.k}
        algorithm: Algorithm = "selected" if layer.spec.chooses_sets else "masked"
        computed = algorithm_1(self.module, keep, algorithm=algorithm)
        with computed, constants, replaced_layers(self.module, replaced.get):
            yield self._run

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        def record(layer: nn.Module, args: tuple[Any, ...], output: Tensor, name: str) -> None:
            assert isinstance(layer, MoELayer)
            self.inputs[name].append(layer.tokens(args[0]).clone())
            self.outputs[name].append(output.clone())

        with ExitStack() as hooks:
            for name, layer in self.layers.items():
                hooks.enter_context(layer.register_forward_hook(partial(record, name=name)))
            yield


class _RecordedOutputs(nn.Module):
    """Replaces a layer and returns the outputs recorded for the current batch."""

    def __init__(self, replay: Replay, name: str) -> None:
        super().__init__()
        self._replay, self._name = replay, name

    def forward(self, *_: Tensor, **__: Tensor) -> Tensor:
        return self._replay.outputs[self._name][self._replay.batch_index]


@contextmanager
def _constant_experts(layer: SoftMoE, choice: LayerRecipe, constants: np.ndarray) -> Iterator[None]:
    """Within the context, the removed experts return the constants [n − e, p, o]."""
    removed = [e for e in range(layer.spec.experts) if e not in {*choice.experts}]
    subset = torch.tensor(choice.experts)
    layer.chooser = partial(_best_of, subset, whole_subset=choice.k >= len(subset))
    layer.unchosen = removed, torch.from_numpy(constants)
    try:
        yield
    finally:
        layer.chooser = layer.unchosen = None


def _best_of(subset: Tensor, scores: Tensor, k: int, *, whole_subset: bool) -> Tensor:
    """Returns the k best-scored experts of a subset for each input, or the whole subset."""
    if whole_subset:
        return subset.expand(len(scores), -1)
    best = scores[:, subset].topk(k, dim=1).indices
    return subset[best].sort(dim=1).values


def interleaved(choices: Mapping[str, Sequence[LayerRecipe]]) -> Iterator[tuple[str, LayerRecipe]]:
    """Yields the choices of all layers, alternating between the layers."""
    longest = max(map(len, choices.values()), default=0)
    for index in range(longest):  # so that no layer is left out if time runs out
        for name, listed in choices.items():
            if index < len(listed):
                yield name, listed[index]
