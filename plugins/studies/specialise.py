"""What each expert of a layer is for: the classes that lose accuracy when it is removed.

For expert e, d_c = |ŷ_c − y_c| / y_c is the share of class c's accuracy that its removal changes.
The distance of d to the one-hot vector of its largest entry is the expert's class polysemanticity
(Eq. 4 of the muMoE paper): 0 for an expert without which one class is lost and no other changes.

With subgroups named it says how fairly they are treated (`fairness`), and finds the rewriting that
helps one of them. `report.specialisation` writes and draws what is found.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ...bench.data import LabelledData, labelled, load_groups
from ...bench.metrics import one_per_sample
from ...common.console import Progress, Silent
from ...data.feeds import Array
from ...errors import FeedError, UsageError
from ...exporter.inputs import check_array, with_axes
from ...exporter.model import Model, check_one_input, edited
from ...graphs.layers.base import NO_EDITS, LayerEdits, MoELayer, moe_layers, sharing_weights
from .edits import read_edits
from .fairness import (
    Fairness,
    Rewriting,
    Strength,
    Subgroup,
    best_strength,
    check_groups,
    fairness,
    find_group,
    sign_of,
)

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
class SubgroupCoefficients:
    """A subgroup of the inputs and, by level if there are any, its mean coefficients ā [n]."""

    group: Subgroup
    samples: int
    coefficients: tuple[tuple[float, ...], ...]


HEAVY = 0.5
"""A coefficient of at least this makes its expert the one that does most of the work."""

BINS = 10


@dataclass(frozen=True, slots=True)
class Load:
    """How the coefficients of a level are spread, over all tokens (a vector is one token).

    `shares` [n] says of each expert for which share of the tokens its coefficient is at least
    `HEAVY`, `largest` [BINS] how many tokens have their largest coefficient in each tenth of 0 … 1.
    """

    level: int
    tokens: int
    shares: tuple[float, ...]
    largest: tuple[int, ...]

    @property
    def heavy(self) -> int:
        """How many experts have such a coefficient for some token."""
        return sum(share > 0 for share in self.shares)


@dataclass(frozen=True, slots=True)
class Favour:
    """The rewriting that is wanted: a class, the subgroup that it is for, and how strong.

    `strength` is |λ|; None lets a search find the best that costs at most `budget` of the accuracy.
    """

    output: int
    group: Subgroup
    strength: float | None = None
    budget: float = 0.01

    def __post_init__(self) -> None:
        """Raises UsageError for numbers that cannot be meant."""
        if self.strength is not None and not 0 < abs(self.strength) < math.inf:
            raise UsageError(
                f"--strength {self.strength}: not a finite number other than 0",
                hint="its sign does not matter: it follows from the wrong answers",
            )
        if not 0 <= self.budget < 1:
            raise UsageError(
                f"--budget {self.budget}: a share of the accuracy, from 0 to below 1",
                hint="--budget 0.01 lets a search cost one in a hundred right answers",
            )


@dataclass(frozen=True, slots=True)
class Specialisation:
    """The result of `moexport specialise`. `accuracy` and `samples` are by class.

    `fairness` is known where subgroups were named, `rewriting` where one was wanted.
    """

    model: str
    family: str
    layer: str
    kind: str
    levels: tuple[int, ...]
    accuracy: tuple[float | None, ...]
    samples: tuple[int, ...]
    experts: tuple[ExpertEffect, ...]
    groups: tuple[SubgroupCoefficients, ...]
    load: tuple[Load, ...] = ()
    fairness: Fairness | None = None
    rewriting: Rewriting | None = None

    @property
    def mean_polysemanticity(self) -> float | None:
        """Over the experts whose removal changes a class; None where there is no such expert."""
        values = [e.polysemanticity for e in self.experts if e.polysemanticity is not None]
        return sum(values) / len(values) if values else None

    @property
    def ranked(self) -> list[ExpertEffect]:
        """The experts that change a class, those that change the accuracy most first."""
        changing = [e for e in self.experts if e.polysemanticity is not None]
        return sorted(
            changing, key=lambda e: (-sum(abs(c or 0.0) for c in e.change), e.level, e.expert)
        )

    def expert_name(self, effect: ExpertEffect) -> str:
        """An expert as `--ablate` takes it: its number, with its level where there are more."""
        return f"{effect.level}.{effect.expert}" if len(self.levels) > 1 else str(effect.expert)

    def overall(self, accuracy: Sequence[float | None]) -> float:
        """An accuracy by class as the share of all inputs."""
        right = sum((a or 0.0) * s for a, s in zip(accuracy, self.samples, strict=True))
        return right / sum(self.samples)


@torch.inference_mode()
def specialise(
    model: Model,
    data: str | Path | LabelledData,
    *,
    layer: str | None = None,
    group_by: str | Sequence[Subgroup] | None = None,
    favour: Favour | None = None,
    progress: Progress | None = None,
) -> Specialisation:
    """Returns what each expert of a layer, by default the last, does for the accuracy by class.

    One pass over the data, and one per expert over the inputs that take it in; those that give it a
    coefficient of zero cannot change. `group_by` are the subgroups that are compared and whose mean
    coefficients are taken, or the array of the file that holds them: by default the coefficients
    are those of the classes, and nothing is compared. `favour` asks for a rewriting. Raises
    UsageError for a layer, class or subgroup that is not there, FeedError for data without labels
    or a model that does not classify.
    """
    progress = progress or Silent()
    check_one_input(model, "specialise")
    held = labelled(data, model, 1).head(sys.maxsize)
    x, labels = with_axes(held.inputs, model.input), held.labels
    check_array(x, model.input, f"{model.source.path}: ")
    groups = _subgroups(data, group_by, len(x))
    if groups is not None:
        check_groups(groups, f"group_by={group_by!r}" if isinstance(group_by, str) else "group_by")
    wanted = None if favour is None else _with_group(favour, groups)
    name = list(model.layers)[-1] if layer is None else layer
    if name not in model.layers:
        raise UsageError(
            f"--layer {name}: the model has no such MoE layer",
            hint=f"its MoE layers: {', '.join(model.layers)}",
        )
    if labels is None:
        raise FeedError(
            f"accuracy by class needs labels, and '{held.input_name}' comes without",
            hint="save them beside the inputs: numpy.savez(path, input=…, label=…)",
        )
    module = sharing_weights(model.module)
    watched = moe_layers(module)[name]
    if wanted is not None:
        _check_rewritable(watched, name)
    progress.step(f"accuracy by class of {model.source.path}", total=len(x))
    seen = _one_pass(module, watched, held, x, wanted, progress)
    predicted, classes = seen.scores.argmax(axis=1), seen.scores.shape[1]
    before = _by_class(labels, classes, predicted == labels)
    effects = tuple(_effects(module, watched, x, labels, seen, progress))
    by_group = _groups(seen.means, labels if groups is None else groups)
    rewriting = None
    if wanted is not None:
        assert groups is not None  # `_with_group` has seen them
        rewriting = _rewriting(model, name, wanted, x, labels, groups, seen, by_group)
    return Specialisation(
        model=model.source.path,
        family=model.family,
        layer=name,
        kind=watched.spec.kind,
        levels=watched.spec.levels,
        accuracy=before,
        samples=tuple(np.bincount(labels, minlength=classes).tolist()),
        experts=effects,
        groups=by_group,
        load=seen.load,
        fairness=None if groups is None else fairness(predicted, labels, groups, classes),
        rewriting=rewriting,
    )


@dataclass(frozen=True, slots=True)
class _JudgedInputs:
    """What one pass over the inputs shows.

    `scores` [s, classes]; by level `means`, the mean coefficients of each input [s, n], and
    `taken`, who takes an expert in [s, n]: of a layer without coefficients everybody.
    """

    scores: Array
    means: Sequence[Array]
    taken: Sequence[Array]
    load: tuple[Load, ...]


def _one_pass(
    module: nn.Module,
    watched: MoELayer,
    held: LabelledData,
    x: Array,
    wanted: Favour | None,
    progress: Progress,
) -> _JudgedInputs:
    said: list[Array] = []
    means, takes_in = [], []
    loads = [_Loads(n) for n in watched.spec.levels] if watched.spec.rewritable else []
    for rows in held.batches(BATCH):
        with _coefficients(watched) as coefficients:
            scores = _scores(module, x[rows])
        held.check_classes(scores.shape[1])
        if wanted is not None and not said:
            _check_head(wanted, watched, module, x[rows], scores)
        said.append(scores)
        means.append([a.mean(axis=1, dtype=np.float64) for a in coefficients])
        takes_in.append([(a != 0).any(axis=1) for a in coefficients])
        for load, a in zip(loads, coefficients, strict=True):
            load.add(a)
        progress.advance(len(scores))
    return _JudgedInputs(
        np.concatenate(said),
        list(map(np.concatenate, zip(*means, strict=True))),
        list(map(np.concatenate, zip(*takes_in, strict=True)))
        or [np.ones((len(x), n), dtype=bool) for n in watched.spec.levels],
        tuple(sums.load(level) for level, sums in enumerate(loads, start=1)),
    )


def _effects(
    module: nn.Module,
    watched: MoELayer,
    x: Array,
    labels: Array,
    seen: _JudgedInputs,
    progress: Progress,
) -> Iterator[ExpertEffect]:
    """What removing each expert does, one after the other."""
    by_class = partial(_by_class, labels, seen.scores.shape[1])
    base = seen.scores.argmax(axis=1) == labels
    before = by_class(base)
    places = [(level, e) for level, n in enumerate(watched.spec.levels) for e in range(n)]
    work = sum(int(seen.taken[level][:, e].sum()) for level, e in places)
    progress.step(f"removing each of {len(places)} experts of {watched.spec.name}", total=work)
    for level, expert in places:
        watched.edits = LayerEdits(frozenset({(level, expert)}))
        inputs = np.flatnonzero(seen.taken[level][:, expert])
        right_now = base.copy()
        for part in np.split(inputs, range(BATCH, len(inputs), BATCH)):
            if part.size:
                right_now[part] = _scores(module, x[part]).argmax(axis=1) == labels[part]
                progress.advance(len(part))
        after = by_class(right_now)
        change = tuple(
            None if was is None or now is None else now - was
            for was, now in zip(before, after, strict=True)
        )
        moved = polysemanticity(before, change)
        yield ExpertEffect(
            level=level + 1,
            expert=expert,
            inputs=len(inputs),
            accuracy=after,
            change=change,
            polysemanticity=moved,
        )
    watched.edits = NO_EDITS


class _Loads:
    """The sums from which a level's `Load` follows, a batch of coefficients [b, m, n] at a time."""

    def __init__(self, experts: int) -> None:
        self.heavy = np.zeros(experts, np.int64)
        self.largest = np.zeros(BINS, np.int64)

    def add(self, a: Array) -> None:
        tokens = a.reshape(-1, a.shape[-1])
        self.heavy += (tokens >= HEAVY).sum(axis=0)
        # Rounding may leave a coefficient a little above 1.
        self.largest += np.histogram(tokens.max(axis=1).clip(0, 1), BINS, (0, 1))[0]

    def load(self, level: int) -> Load:
        tokens = int(self.largest.sum())
        shares = tuple((self.heavy / tokens).tolist())
        return Load(level, tokens, shares, tuple(self.largest.tolist()))


def _with_group(favour: Favour, groups: Array | None) -> Favour:
    """The wanted rewriting with its subgroup as the data have it."""
    if groups is None:
        raise UsageError(
            f"--rewrite-class {favour.output}: no subgroups are named that it could be for",
            hint="name the array that holds them with --group-by",
        )
    return replace(favour, group=find_group(favour.group, groups))


def _check_rewritable(layer: MoELayer, name: str) -> None:
    if not layer.spec.rewritable:
        raise UsageError(
            f"--rewrite-class: layer {name} is a {layer.spec.kind} layer, without coefficients to "
            "rewrite an output by",
            hint="only muMoE layers can be rewritten",
        )


def _check_head(
    wanted: Favour, layer: MoELayer, module: nn.Module, x: Array, scores: Array
) -> None:
    """Raises UsageError unless the layer gives the scores and one of them is the class's."""
    classes = scores.shape[1]
    if not 0 <= wanted.output < classes:
        raise UsageError(
            f"--rewrite-class {wanted.output}: the model has {classes} classes",
            hint=f"they are counted from 0: use 0 to {classes - 1}",
        )
    outputs: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda *made: outputs.append(made[2]))
    try:
        _scores(module, x[:1])
    finally:
        handle.remove()
    own = one_per_sample(outputs[-1].numpy())
    if own.shape != scores[:1].shape or not np.allclose(own, scores[:1], rtol=1e-4, atol=1e-6):
        raise UsageError(
            f"--rewrite-class {wanted.output}: layer {layer.spec.name} does not give the class "
            "scores themselves, so that its outputs are no classes",
            hint="name the head with --layer; `export --rewrite` takes any output of any layer",
        )


def _rewriting(
    model: Model,
    layer: str,
    wanted: Favour,
    x: Array,
    labels: Array,
    groups: Array,
    seen: _JudgedInputs,
    by_group: Sequence[SubgroupCoefficients],
) -> Rewriting:
    """The rewriting that was wanted, with what the model says when it is edited so."""
    output, group, scores = wanted.output, wanted.group, seen.scores
    means = next(subgroup.coefficients for subgroup in by_group if subgroup.group == group)
    predicted = scores.argmax(axis=1)
    sign = sign_of(predicted, labels, groups == group, output)
    if wanted.strength is None:
        alike = math.prod(a @ np.array(mean) for a, mean in zip(seen.means, means, strict=True))
        places = (scores, np.asarray(alike), labels, groups, output, sign)
        chosen = best_strength(*places, wanted.budget)
    else:
        chosen = Strength(sign * abs(wanted.strength), 1)
    entry = {"layer": layer, "output": output, "coefficients": means, "lambda": chosen.value}
    module = edited(model, read_edits(rewrite=[entry])).module
    parts = np.split(x, range(BATCH, len(x), BATCH))
    after = np.concatenate([_scores(module, part).argmax(axis=1) for part in parts])
    classes = scores.shape[1]
    targets = [group] * classes
    was = fairness(predicted, labels, groups, classes, targets=targets)
    now = fairness(after, labels, groups, classes, targets=targets)
    return Rewriting(
        layer=layer,
        output=output,
        group=group,
        strength=chosen.value,
        coefficients=means,
        tried=chosen.tried,
        budget=wanted.budget if wanted.strength is None else None,
        accuracy_before=was.accuracy,
        accuracy_after=now.accuracy,
        before=was.classes[output],
        after=now.classes[output],
    )


def _subgroups(
    data: str | Path | LabelledData, by: str | Sequence[Subgroup] | None, samples: int
) -> Array | None:
    """The subgroup of each input; None where nobody names any."""
    if isinstance(by, str):
        if isinstance(data, LabelledData):
            raise UsageError(
                f"group_by={by!r} names an array of a file, and the data are none",
                hint="give the subgroup of each input as a sequence",
            )
        return load_groups(Path(data), by, samples)
    groups = None if by is None else np.asarray(by)
    if groups is not None and groups.shape != (samples,):
        raise FeedError(f"{groups.shape} subgroups for {samples} inputs")
    return groups


@contextmanager
def _coefficients(layer: MoELayer) -> Iterator[list[Array]]:
    """Within the context a forward gives the layer's coefficients [b, m, n], by level, if any."""
    coefficients: list[Array] = []

    def record(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        coefficients[:] = [made.chosen.numpy() for made in layer.choices(args[0]).values()]

    # Where coefficients mix the experts, they are what is chosen.
    handle = layer.register_forward_pre_hook(record) if layer.spec.rewritable else None
    try:
        yield coefficients
    finally:
        if handle is not None:
            handle.remove()


def _by_class(labels: Array, classes: int, right: Array) -> tuple[float | None, ...]:
    """The accuracy of each class, None for one without inputs."""
    seen = np.bincount(labels, minlength=classes)
    hits = np.bincount(labels[right], minlength=classes)
    return tuple(float(h / count) if count else None for h, count in zip(hits, seen, strict=True))


def polysemanticity(
    accuracy: Sequence[float | None], change: Sequence[float | None]
) -> float | None:
    """Returns ‖d − 1‖ for d_c = |change_c| / accuracy_c and the one-hot vector of the largest d_c.

    Classes without inputs, or of which nothing was right before, do not count; None where d = 0.
    """
    shares = [abs(c) / y for y, c in zip(accuracy, change, strict=True) if y and c is not None]
    *others, largest = sorted(shares) or [0.0]
    return None if largest == 0 else math.hypot(*others, 1 - largest)


def _groups(means: Sequence[Array], by: Array) -> tuple[SubgroupCoefficients, ...]:
    """Each subgroup with its mean coefficients, of those [s, n] of the levels."""
    return tuple(
        SubgroupCoefficients(
            value.item(),
            int((by == value).sum()),
            tuple(tuple(mean[by == value].mean(axis=0).tolist()) for mean in means),
        )
        for value in np.unique(by)
    )


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
