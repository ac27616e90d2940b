"""Single layers: how each k and each subset of experts changes the whole model's outputs.

Every layer's inputs and outputs are computed once. When one layer is changed, the layers before it
return their recorded outputs and those after it are computed again. A model whose routers choose k
runs as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...bench.data import LabelledData
from ...bench.runners.pytorch import PyTorch
from ...data.batches import Array
from ...exporter.inputs import Inputs
from ...exporter.model import Model
from ...graphs.layers.base import MoELayer, moe_layers, replaced_layers, sharing_weights
from ...graphs.layers.mumoe import MuMoE
from ...graphs.layers.soft_moe import Chooser, SoftMoE
from .accuracy.holdout import batch_size, in_batches
from .accuracy.quality import Metric, Quality, Tally
from .recipe import LayerRecipe
from .routed import routed_layers, with_routed_k
from .substitutes.substitutes import Recording

BATCH = 32

MOST = 512
"""Inputs on which single layers are tried: they only rank choices; whole graphs decide."""

MOST_RECORDED, RECORDING_S = 8192, 5.0
"""Inputs that substitutes are fitted to. Beyond `MOST` inputs, recording stops after `RECORDING_S`
seconds."""

MOST_TOKENS = 1 << 14
"""Tokens on which single layers of a language model are tried."""

NOTHING: Mapping[str, np.ndarray] = MappingProxyType({})

HELD_BYTES = 1 << 29
"""The largest size of the recorded inputs and outputs of all layers."""


class Replay:
    """A model with the recorded inputs and outputs of every layer."""

    def __init__(
        self,
        model: Model,
        data: LabelledData,
        outputs: Array,
        metric: Metric,
        over: Callable[[], bool] = lambda: False,
        *,
        batch: int | None = None,
    ) -> None:
        """Runs the model in batches of `batch`, by default of as many inputs as memory allows."""
        self.model, self.routed = model, routed_layers(model)
        self.module = sharing_weights(model.module)
        self.layers = {name: moe_layers(self.module)[name] for name in model.layers}
        self.metric = metric
        self.at = 0
        self.inputs: dict[str, list[Tensor]] = {name: [] for name in self.layers}
        self.outputs: dict[str, list[Tensor]] = {name: [] for name in self.layers}
        self._batches: list[tuple[Inputs, Array, Array | None]] = []
        held, of_tokens = 0, data.inputs.dtype.kind in "iu"
        most = max(1, MOST_TOKENS // data.inputs[0].size) if of_tokens else MOST_RECORDED
        size, began = batch or min(BATCH, batch_size(outputs)), time.monotonic()
        count = min(most, MOST_RECORDED, len(data))
        count = max(size, count - count % size) if batch else count
        for rows, x, labels in in_batches(data.head(count), size):
            long = rows.start >= MOST and time.monotonic() - began > RECORDING_S
            if self._batches and (held > HELD_BYTES or long or over()):
                break
            if not self.routed:
                with self._recorded():
                    self._run(x)
                kept = (self.inputs, self.outputs)
                held += sum(arrays[-1].nbytes for part in kept for arrays in part.values())
            self._batches.append((x, outputs[rows], labels))

    def tokens(self) -> dict[str, Array]:
        """Returns the inputs of each layer, [s, m, d], for a model without routers."""
        return {name: torch.cat(tokens).numpy() for name, tokens in self.inputs.items() if tokens}

    @property
    def recording(self) -> Recording:
        """The recorded inputs and outputs that substitutes are fitted to."""
        samples = [(x, base) for x, base, _ in self._batches]
        scores = self.metric.name != "function"
        return Recording(tokens=self.inputs, samples=samples, scores=scores)

    def quality(
        self, name: str, choice: LayerRecipe, substitutes: Mapping[str, np.ndarray] = NOTHING
    ) -> Quality:
        """Returns the kept quality with one layer changed; the choice's precision is ignored.

        `substitutes` replace the experts that the choice removes.
        """
        tally = Tally()
        with self._changed(name, choice, substitutes) as run:
            for index, (x, base, labels) in enumerate(self._batches[: -(-MOST // BATCH)]):
                self.at = index
                tally = tally + self.metric.tally(run(x), base, x, labels)
        return self.metric.quality(tally)

    @contextmanager
    def _changed(
        self, name: str, choice: LayerRecipe, substitutes: Mapping[str, np.ndarray]
    ) -> Iterator[Callable[[Inputs], Array]]:
        """Yields the model with one layer changed."""
        if self.routed:
            k = {other: layer.spec.trained_k for other, layer in self.layers.items()}
            changed = with_routed_k(self.model, {**k, name: choice.k})
            yield PyTorch(changed.module, changed.inputs).infer
            return
        layer = self.layers[name]
        with ExitStack() as changes:
            changes.enter_context(self._earlier_layers_replaced(name))
            if choice.merged:
                assert isinstance(layer, MuMoE), "only muMoE experts can be merged"
                merged = layer.merged(
                    [torch.from_numpy(substitute) for substitute in substitutes.values()]
                )
                changes.enter_context(_replaced(self.module, layer, merged))
            else:
                changes.enter_context(_as_chosen(layer, choice, substitutes.get(name)))
            yield self._run

    def _run(self, x: Inputs) -> Array:
        return PyTorch(self.module, self.model.inputs).infer(x)

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

    @contextmanager
    def _earlier_layers_replaced(self, name: str) -> Iterator[None]:
        names = list(self.layers)
        before = {
            self.layers[earlier]: _RecordedOutputs(self, earlier)
            for earlier in names[: names.index(name)]
        }
        with replaced_layers(self.module, lambda _, layer: before.get(layer, layer)):
            yield


class _RecordedOutputs(nn.Module):
    """Replaces a layer: returns the outputs recorded for the current batch."""

    def __init__(self, replay: Replay, name: str) -> None:
        super().__init__()
        self._returned = replay.outputs[name]
        self._at = partial(getattr, replay, "at")

    def forward(self, *_: Tensor, **__: Tensor) -> Tensor:
        at: int = self._at()
        return self._returned[at]


@contextmanager
def _replaced(module: nn.Module, layer: MoELayer, other: MoELayer) -> Iterator[None]:
    """Replaces a layer by another within the context."""
    with replaced_layers(module, lambda _, there: other if there is layer else there):
        yield


@contextmanager
def _as_chosen(
    layer: MoELayer, choice: LayerRecipe, constants: np.ndarray | None
) -> Iterator[None]:
    """Makes a layer compute a choice within the context.

    `constants` [n − e, p, o] are the outputs of the removed experts.
    """
    before = layer.keep, layer.algorithm
    n = len(choice.experts) or layer.spec.experts
    try:
        layer.keep = None if choice.k >= layer.spec.experts else choice.k
        layer.algorithm = "selected" if layer.spec.chooses_sets else "masked"
        if constants is not None:
            assert isinstance(layer, SoftMoE), "only Soft MoE experts can be removed"
            layer.chooser = _chooser(choice.experts, all_of_them=choice.k >= n)
            others = [e for e in range(layer.spec.experts) if e not in {*choice.experts}]
            layer.unchosen = others, torch.from_numpy(constants)
        yield
    finally:
        layer.keep, layer.algorithm = before
        if isinstance(layer, SoftMoE):
            layer.chooser = layer.unchosen = None


def _chooser(experts: Sequence[int], *, all_of_them: bool) -> Chooser:
    """Returns a chooser of the k best-scored experts of a subset, or of the whole subset."""
    known = torch.tensor(experts)

    def choose(scores: Tensor, k: int) -> Tensor:
        if all_of_them:
            return known.expand(len(scores), -1)
        best = scores[:, known].topk(k, dim=1).indices
        chosen: Tensor = known[best].sort(dim=1).values
        return chosen

    return choose


def in_turn(choices: Mapping[str, Sequence[LayerRecipe]]) -> Iterator[tuple[str, LayerRecipe]]:
    """Yields the choices of all layers, one of each layer at a time."""
    longest = max(map(len, choices.values()), default=0)
    for index in range(longest):  # so that an early end leaves no layer out
        for name, listed in choices.items():
            if index < len(listed):
                yield name, listed[index]
