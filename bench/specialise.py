"""What each expert of a layer is for: the classes that lose accuracy when it is removed.

For expert e, d_c = |ŷ_c − y_c| / y_c is the share of class c's accuracy that its removal changes.
The distance of d to the one-hot vector of its largest entry is the expert's class polysemanticity
(Eq. 4 of the muMoE paper): 0 for an expert without which one class is lost and no other changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..common.progress import Progress, Silent
from ..errors import FeedError, UsageError
from ..exporter.model import Model
from ..graphs.layers.base import MoELayer, moe_layers, sharing_weights
from ..graphs.layers.edits import NO_EDITS, LayerEdits
from ..graphs.layers.mumoe import MuMoE
from .bench_data import Array, LabelledData
from .metrics import one_per_sample

BATCH = 64


@dataclass(frozen=True, slots=True)
class ExpertEffect:
    """What removing one expert does.

    `level` counts from 1. `inputs` took the expert in (a coefficient that is not zero); `accuracy`
    and `change` are by class, None for a class without inputs. `polysemanticity` is None where no
    class changes.
    """

    level: int
    expert: int
    inputs: int
    accuracy: tuple[float | None, ...]
    change: tuple[float | None, ...]
    polysemanticity: float | None

    @property
    def most_changed(self) -> int:
        """The class whose accuracy changes most."""
        return max(range(len(self.change)), key=lambda c: abs(self.change[c] or 0.0))


@dataclass(frozen=True, slots=True)
class Group:
    """A subgroup of the inputs and, by level, its mean coefficients ā [n]: what Eq. 5 takes.

    A Soft MoE layer has no coefficients of that kind; its groups have none.
    """

    group: int | bool | str
    samples: int
    coefficients: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Specialisation:
    """The result of `moexport specialise`. `accuracy` and `samples` are by class."""

    model: str
    family: str
    layer: str
    kind: str
    levels: tuple[int, ...]
    accuracy: tuple[float | None, ...]
    samples: tuple[int, ...]
    experts: tuple[ExpertEffect, ...]
    groups: tuple[Group, ...]

    @property
    def mean_polysemanticity(self) -> float | None:
        """Over the experts whose removal changes a class; None where there is no such expert."""
        values = [e.polysemanticity for e in self.experts if e.polysemanticity is not None]
        return sum(values) / len(values) if values else None


@torch.inference_mode()
def specialise(
    model: Model,
    data: LabelledData,
    *,
    layer: str | None = None,
    groups: Array | None = None,
    batch: int = BATCH,
    progress: Progress | None = None,
) -> Specialisation:
    """Returns what each expert of a layer, by default the last, does for the accuracy by class.

    One pass over the data, and one per expert over the inputs that take it in; those that give it a
    coefficient of zero cannot change. `groups` [samples] are the subgroups whose mean coefficients
    are taken, by default the classes. Raises UsageError for a layer that is not there, FeedError
    for data without labels or a model that does not classify.
    """
    progress = progress or Silent()
    name = _layer_name(model, layer)
    if data.labels is None:
        raise FeedError(
            f"accuracy by class needs labels, and '{data.input_name}' comes without",
            hint="save them beside the inputs: numpy.savez(path, input=…, label=…)",
        )
    if groups is not None and groups.shape != (len(data),):
        raise FeedError(f"{groups.shape} subgroups for {len(data)} inputs")
    module = sharing_weights(model.module)
    watched = moe_layers(module)[name]
    progress.step(f"accuracy by class of {model.source.path}", total=len(data))
    base = _base(module, watched, data, batch, progress)
    places = [(level, e) for level, n in enumerate(watched.spec.levels) for e in range(n)]
    work = sum(int(base.takes_in[level][:, e].sum()) for level, e in places)
    progress.step(f"removing each of {len(places)} experts of {name}", total=work)
    effects = []
    for level, expert in places:
        watched.edits = LayerEdits(frozenset({(level, expert)}))
        rows = np.flatnonzero(base.takes_in[level][:, expert])
        right = base.right.copy()
        for part in _parts(rows, batch):
            right[part] = _predicted(module, data.inputs[part]) == data.labels[part]
            progress.advance(len(part))
        effects.append(_effect(level, expert, len(rows), base, right, data.labels))
    watched.edits = NO_EDITS
    return Specialisation(
        model=model.source.path,
        family=model.family,
        layer=name,
        kind=watched.spec.kind,
        levels=watched.spec.levels,
        accuracy=base.by_class(base.right, data.labels),
        samples=tuple(np.bincount(data.labels, minlength=base.classes).tolist()),
        experts=tuple(effects),
        groups=_groups(base, data.labels if groups is None else groups),
    )


@dataclass(frozen=True)
class _Base:
    """The untouched model on all inputs: what is right [s], and by level which experts take part.

    `takes_in` are booleans [s, n], `means` the coefficients [s, n] averaged over tokens.
    """

    classes: int
    right: Array
    takes_in: tuple[Array, ...]
    means: tuple[Array, ...]

    def by_class(self, right: Array, labels: Array) -> tuple[float | None, ...]:
        """The accuracy of each class."""
        seen = np.bincount(labels, minlength=self.classes)
        hits = np.bincount(labels[right], minlength=self.classes)
        return tuple(
            float(hit / count) if count else None for hit, count in zip(hits, seen, strict=True)
        )


def _base(
    module: nn.Module, layer: MoELayer, data: LabelledData, batch: int, progress: Progress
) -> _Base:
    records: list[list[Array]] = []

    def record(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, MuMoE)
        records.append([a.numpy() for a in layer.coefficients(args[0])])

    handle = layer.register_forward_pre_hook(record) if isinstance(layer, MuMoE) else None
    assert data.labels is not None
    right, takes_in, means, classes = [], [], [], 0
    try:
        for rows in data.batches(batch):
            records.clear()
            scores = _scores(module, data.inputs[rows])
            classes = scores.shape[1]
            data.check_classes(classes)
            right.append(scores.argmax(axis=1) == data.labels[rows])
            for coefficients in records:
                takes_in.append([(a != 0).any(axis=1) for a in coefficients])
                means.append([a.mean(axis=1, dtype=np.float64) for a in coefficients])
            progress.advance(len(scores))
    finally:
        if handle is not None:
            handle.remove()
    all_of_them = [np.ones((len(data), n), dtype=bool) for n in layer.spec.levels]
    return _Base(
        classes,
        np.concatenate(right),
        tuple(map(np.concatenate, zip(*takes_in, strict=True))) if takes_in else (*all_of_them,),
        tuple(map(np.concatenate, zip(*means, strict=True))),
    )


def _effect(
    level: int, expert: int, inputs: int, base: _Base, right: Array, labels: Array
) -> ExpertEffect:
    before = base.by_class(base.right, labels)
    after = base.by_class(right, labels)
    change = tuple(
        None if was is None or now is None else now - was
        for was, now in zip(before, after, strict=True)
    )
    return ExpertEffect(level + 1, expert, inputs, after, change, polysemanticity(before, change))


def polysemanticity(
    accuracy: Sequence[float | None], change: Sequence[float | None]
) -> float | None:
    """Returns ‖d − 1‖ for d_c = |change_c| / accuracy_c and the one-hot vector of the largest d_c.

    Classes without inputs, or of which nothing was right before, do not count; None where d = 0.
    """
    shares = [abs(c) / y for y, c in zip(accuracy, change, strict=True) if y and c is not None]
    largest = max(shares, default=0.0)
    if largest == 0:
        return None
    return math.sqrt(sum(d * d for d in shares) - largest**2 + (1 - largest) ** 2)


def _groups(base: _Base, by: Array) -> tuple[Group, ...]:
    found = []
    for value in np.unique(by):
        rows = by == value
        means = tuple(tuple(mean[rows].mean(axis=0).tolist()) for mean in base.means)
        found.append(Group(value.item(), int(rows.sum()), means))
    return tuple(found)


def _layer_name(model: Model, wanted: str | None) -> str:
    names = list(model.layers)
    if wanted is None:
        return names[-1]
    if wanted not in names:
        raise UsageError(
            f"--layer {wanted}: the model has no such MoE layer",
            hint=f"its MoE layers: {', '.join(names)}",
        )
    return wanted


def _parts(rows: Array, size: int) -> Iterator[Array]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _predicted(module: nn.Module, x: Array) -> Array:
    predicted: Array = _scores(module, x).argmax(axis=1)
    return predicted


def _scores(module: nn.Module, x: Array) -> Array:
    """Class scores [b, classes]; a muMoE head on vectors gives [b, 1, classes]."""
    output: torch.Tensor = module(torch.from_numpy(np.ascontiguousarray(x)))
    scores = one_per_sample(output.numpy())
    if scores.ndim != 2:
        raise FeedError(
            f"accuracy by class needs outputs of shape (batch, classes), and the model gives "
            f"{scores.shape}",
            hint="a layer or a language model does not classify its inputs",
        )
    return scores
