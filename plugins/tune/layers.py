"""One layer at a time: what each k and each subset of experts does to the whole model's outputs.

Every layer's inputs and outputs are computed once. What one layer is then tried with, the layers
before it are played back and those after it computed again. A model whose routers choose k is run
as a whole.
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
from ...data.feeds import Array
from ...exporter.inputs import Inputs
from ...exporter.model import Model
from ...graphs.layers.base import MoELayer, moe_layers, replaced_layers, sharing_weights
from ...graphs.layers.mumoe import MuMoE
from ...graphs.layers.soft_moe import Chooser, SoftMoE
from .accuracy.holdout import batch_size, in_batches
from .accuracy.quality import Metric, Quality, Tally
from .recipe import LayerRecipe
from .routed import asked_for, routed_layers
from .substitutes.substitutes import Seen

BATCH = 32

MOST = 512
"""Inputs on which single layers are tried: they rank choices, and whole graphs decide."""

MOST_SEEN, SEEN_S = 8192, 5.0
"""Inputs that substitutes are fitted to. Beyond `MOST` they are recorded for so long at most."""

MOST_TOKENS = 1 << 14
"""Tokens on which single layers of a language model are tried."""

NOTHING: Mapping[str, np.ndarray] = MappingProxyType({})

HELD_BYTES = 1 << 29
"""What the inputs and outputs of all layers may take."""


class Replay:
    """A model on some inputs, of which every layer's inputs and outputs are kept."""

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
        most = max(1, MOST_TOKENS // data.inputs[0].size) if of_tokens else MOST_SEEN
        size, began = batch or min(BATCH, batch_size(outputs)), time.monotonic()
        seen = min(most, MOST_SEEN, len(data))
        seen = max(size, seen - seen % size) if batch else seen
        for rows, x, labels in in_batches(data.head(seen), size):
            long = rows.start >= MOST and time.monotonic() - began > SEEN_S
            if self._batches and (held > HELD_BYTES or long or over()):
                break
            if not self.routed:
                with self._recorded():
                    self._run(x)
                kept = (self.inputs, self.outputs)
                held += sum(arrays[-1].nbytes for part in kept for arrays in part.values())
            self._batches.append((x, outputs[rows], labels))

    def tokens(self) -> dict[str, Array]:
        """Returns what each layer is given, [s, m, d], of a model without routers."""
        return {name: torch.cat(tokens).numpy() for name, tokens in self.inputs.items() if tokens}

    @property
    def seen(self) -> Seen:
        """What the model was seen to do."""
        samples = [(x, base) for x, base, _ in self._batches]
        scores = self.metric.name != "function"
        return Seen(tokens=self.inputs, samples=samples, scores=scores)

    def quality(
        self, name: str, choice: LayerRecipe, substitutes: Mapping[str, np.ndarray] = NOTHING
    ) -> Quality:
        """Returns what is kept with one layer changed; its precision plays no part.

        `substitutes` take the places of experts that are not among those of the choice.
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
        """Yields the model with one layer as it is chosen."""
        if self.routed:
            k = {other: layer.spec.trained_k for other, layer in self.layers.items()}
            changed = asked_for(self.model, {**k, name: choice.k})
            yield PyTorch(changed.module, changed.inputs).infer
            return
        layer = self.layers[name]
        with ExitStack() as changes:
            changes.enter_context(self._playing_before(name))
            if choice.merged:
                assert isinstance(layer, MuMoE), "only the experts of those are merged"
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
    def _playing_before(self, name: str) -> Iterator[None]:
        names = list(self.layers)
        before = {
            self.layers[earlier]: _Played(self, earlier) for earlier in names[: names.index(name)]
        }
        with replaced_layers(self.module, lambda _, layer: before.get(layer, layer)):
            yield


class _Played(nn.Module):
    """Stands for a layer: returns what it has returned for the batch."""

    def __init__(self, replay: Replay, name: str) -> None:
        super().__init__()
        self._returned = replay.outputs[name]
        self._at = partial(getattr, replay, "at")

    def forward(self, *_: Tensor, **__: Tensor) -> Tensor:
        """Returns the layer's outputs, computed before."""
        at: int = self._at()
        return self._returned[at]


@contextmanager
def _replaced(module: nn.Module, layer: MoELayer, other: MoELayer) -> Iterator[None]:
    """Within the context another layer is at the places of one."""
    with replaced_layers(module, lambda _, there: other if there is layer else there):
        yield


@contextmanager
def _as_chosen(
    layer: MoELayer, choice: LayerRecipe, constants: np.ndarray | None
) -> Iterator[None]:
    """Within the context a layer computes what is chosen for it.

    `constants` [n − e, p, o] are what the experts that are not among those of the choice give.
    """
    before = layer.keep, layer.algorithm
    n = len(choice.experts) or layer.spec.experts
    try:
        layer.keep = None if choice.k >= layer.spec.experts else choice.k
        layer.algorithm = "selected" if layer.spec.chooses_sets else "masked"
        if constants is not None:
            assert isinstance(layer, SoftMoE), "only those have experts to drop"
            layer.chooser = _chooser(choice.experts, all_of_them=choice.k >= n)
            others = [e for e in range(layer.spec.experts) if e not in {*choice.experts}]
            layer.unchosen = others, torch.from_numpy(constants)
        yield
    finally:
        layer.keep, layer.algorithm = before
        if isinstance(layer, SoftMoE):
            layer.chooser = layer.unchosen = None


def _chooser(experts: Sequence[int], *, all_of_them: bool) -> Chooser:
    """The k experts of the largest scores among some; these themselves where k is all of them."""
    known = torch.tensor(experts)

    def choose(scores: Tensor, k: int) -> Tensor:
        if all_of_them:
            return known.expand(len(scores), -1)
        best = scores[:, known].topk(k, dim=1).indices
        chosen: Tensor = known[best].sort(dim=1).values
        return chosen

    return choose


def in_turn(choices: Mapping[str, Sequence[LayerRecipe]]) -> Iterator[tuple[str, LayerRecipe]]:
    """Yields each choice of each layer."""
    longest = max(map(len, choices.values()), default=0)
    for index in range(longest):  # of every layer one, so that an early end leaves none out
        for name, listed in choices.items():
            if index < len(listed):
                yield name, listed[index]
