"""Finds the role of each expert of a layer: the classes that lose accuracy when it is removed.

For expert e, d_c = |ŷ_c − y_c| / y_c is the share of class c's accuracy that its removal changes.
The distance of d from the one-hot vector of its largest entry is the expert's class polysemanticity
(Eq. 4 of the muMoE paper): 0 if without the expert one class is lost and no other changes. If
labels have a number for each output (`judge.py`), outputs replace the classes: attributes with
their accuracy, or a regression's outputs with their R².

If there are subgroups, `fairness` measures how fair the model is to them, and finds the rewrite
that helps one of them. `specialisation_report` writes and draws the result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...bench.data import LabelledData, labelled, load_groups
from ...bench.measure.sequences import benchmark_of
from ...common.console import Progress, Silent
from ...data.batches import Array
from ...errors import FeedError, UsageError
from ...exporter.checks.accuracy import one_per_sample
from ...exporter.inputs import check_array, with_axes
from ...exporter.model import Model, check_one_input, edited
from ...graphs.edits import NO_EDITS, Ablation, Edits
from ...graphs.layers.base import (
    MoELayer,
    RoutingDecision,
    moe_layers,
    recorded_choices,
    sharing_weights,
)
from .edits import read_edits
from .examples.search import Examples, layer_name
from .fairness import (
    BlindThreshold,
    Fairness,
    Rewriting,
    Strength,
    Subgroup,
    best_strength,
    check_groups,
    fairness,
    find_group,
    predicted_by,
    sign_of,
)
from .judge import Judge, Judged, judge_of
from .request import SpecialiseRequest
from .usage.count import Members, Usage, usage_of

BATCH = 64

BUDGET = 0.01
"""The share of the accuracy that a rewrite found by a search may cost by default."""


@dataclass(frozen=True, slots=True)
class ExpertEffect:
    """The effect of removing one expert.

    `level` counts from 1. `inputs` is the number of inputs with a nonzero coefficient for it;
    `accuracy` and `change` are by class, None for a class without inputs. `polysemanticity` is None
    if no class changes.
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
    """A subgroup of the inputs and, for each level with coefficients, their means ā [n]."""

    group: Subgroup
    samples: int
    coefficients: tuple[tuple[float, ...], ...]


HEAVY = 0.5
"""An expert with at least this coefficient does most of a token's work."""

BINS = 10


@dataclass(frozen=True, slots=True)
class Load:
    """The distribution of a level's coefficients over all tokens (an input vector is one token).

    `shares` [n] is, for each expert, the share of tokens whose coefficient is at least `HEAVY`;
    `largest` [BINS] is the number of tokens whose largest coefficient is in each tenth of 0 … 1.
    """

    level: int
    tokens: int
    shares: tuple[float, ...]
    largest: tuple[int, ...]

    @property
    def heavy(self) -> int:
        """The number of experts with a coefficient of at least `HEAVY` for some token."""
        return sum(share > 0 for share in self.shares)


@dataclass(frozen=True, slots=True)
class Specialisation:
    """The result of `moexport specialise`. `accuracy` and `samples` are by class.

    `judged` is the kind of labels: classes, attributes, or the targets of a regression, for which
    `accuracy` is R². `fairness` is set if there are subgroups, `rewriting` if one was requested.
    `usage` covers all layers; for models of texts, the rest is missing. Without labels there are
    only `examples`.
    """

    model: str
    family: str
    layer: str
    kind: str
    levels: tuple[int, ...]
    accuracy: tuple[float | None, ...] = ()
    samples: tuple[int, ...] = ()
    experts: tuple[ExpertEffect, ...] = ()
    groups: tuple[SubgroupCoefficients, ...] = ()
    load: tuple[Load, ...] = ()
    fairness: Fairness | None = None
    rewriting: Rewriting | None = None
    judged: Judged = "classes"
    usage: Usage | None = None
    examples: Examples | None = None

    @property
    def inputs(self) -> int:
        """The number of inputs."""
        if not self.samples and self.usage is not None:
            return self.usage.inputs
        return sum(self.samples) if self.judged == "classes" else max(self.samples, default=0)

    @property
    def mean_polysemanticity(self) -> float | None:
        """The mean over the experts whose removal changes a class; None if there is none."""
        values = [e.polysemanticity for e in self.experts if e.polysemanticity is not None]
        return sum(values) / len(values) if values else None

    @property
    def ranked(self) -> list[ExpertEffect]:
        """The experts that change a class, largest change of accuracy first."""
        changing = [e for e in self.experts if e.polysemanticity is not None]
        return sorted(
            changing, key=lambda e: (-sum(abs(c or 0.0) for c in e.change), e.level, e.expert)
        )

    def expert_name(self, effect: ExpertEffect) -> str:
        """Returns an expert's name for `--ablate`: its number, after its level if several."""
        return f"{effect.level}.{effect.expert}" if len(self.levels) > 1 else str(effect.expert)

    def overall(self, accuracy: Sequence[float | None]) -> float:
        """Returns the accuracy on all inputs from that by class, or the mean over outputs."""
        known = [(a, s) for a, s in zip(accuracy, self.samples, strict=True) if a is not None]
        return sum(a * s for a, s in known) / sum(s for _, s in known)


def only_counts(model: Model, data: str | Path | LabelledData | Mapping[str, Any]) -> bool:
    """Returns whether only the use of experts can be measured: for texts, or several inputs."""
    if len(model.inputs) > 1 or model.host.per_token:
        return True
    return not model.input.dtype.startswith("float") and not labelled(data, model, 1).labelled


def usage_only(
    model: Model, data: str | Path | LabelledData | Mapping[str, Any], request: SpecialiseRequest
) -> Specialisation:
    """Returns only how a model's experts are used, by class if the data have labels.

    Raises `UsageError` for options that need an accuracy, `FeedError` for data that do not fit.
    """
    refused = {
        "--layer": request.layer,
        "--group-by": request.group_by,
        "--rewrite-class": request.rewrite_class,
    }
    for option, value in refused.items():
        if value is not None:
            raise UsageError(
                f"{option}: no expert can be removed from this {model.family} model, which does "
                "not classify single inputs",
                hint=f"leave {option} out; the use of experts is counted in every layer",
            )
    benchmark = benchmark_of(model)
    if benchmark is None or isinstance(data, LabelledData | Mapping):
        dataset = labelled(data, model, 1).head(sys.maxsize)
    else:
        dataset = benchmark.data(data, model, None)
    if benchmark is not None:  # labels are the next tokens, not classes
        dataset = replace(dataset, labels=None)
    name, layer = list(model.layers.items())[-1]
    return Specialisation(
        model=model.source.path,
        family=model.family,
        layer=name,
        kind=layer.spec.kind,
        levels=layer.spec.levels,
        usage=usage_of(model, dataset, k=request.k, progress=request.progress or Silent()),
    )


@torch.inference_mode()
def specialise(
    model: Model, data: str | Path | LabelledData | Mapping[str, Any], request: SpecialiseRequest
) -> Specialisation:
    """Returns the effect of each expert of a layer, by default the last, on the accuracy by class.

    This takes one pass over the data, plus one per expert over the inputs with a nonzero
    coefficient for it, since no other input changes. Mean coefficients are by subgroup, if there
    are any, or by class. Another pass, with k experts, counts the choices. Raises `UsageError` for
    an unknown layer, class or subgroup, `FeedError` for data without labels or a model that does
    not classify.
    """
    layer, group_by, progress = request.layer, request.group_by, request.progress or Silent()
    check_one_input(model, "specialise")
    dataset = labelled(data, model, 1).head(sys.maxsize)
    x, labels = with_axes(dataset.inputs, model.input), dataset.labels
    check_array(x, model.input, f"{model.source.path}: ")
    groups = _subgroups(data, group_by, len(x))
    if groups is not None:
        check_groups(groups, f"group_by={group_by!r}" if isinstance(group_by, str) else "group_by")
    group = None
    if request.rewrite_group is not None and groups is not None:
        group = find_group(request.rewrite_group, groups)
    name = layer_name(model, layer)
    if labels is None:
        raise FeedError(
            f"accuracy by class needs labels, but '{dataset.input_name}' has none",
            hint="save them with the inputs: numpy.savez(path, input=…, label=…); --examples 9 "
            "needs no labels",
        )
    module = sharing_weights(model.module)
    moe_layer = moe_layers(module)[name]
    if group is not None and not moe_layer.spec.rewritable:
        raise UsageError(
            f"--rewrite-class: layer {name} is a {moe_layer.spec.kind} layer, which has no "
            "coefficients for a rewrite",
            hint="only muMoE layers can be rewritten",
        )
    progress.step(f"accuracy by class of {model.source.path}", total=len(x))
    results = _one_pass(module, moe_layer, dataset, x, request.rewrite_class, progress)
    judge = results.judge
    before = judge.figures(judge.credit(results.scores))
    effects = tuple(_effects(module, moe_layer, x, results, progress))
    by_group = tuple(_groups(results.means, groups, judge))
    fair = rewriting = None
    if groups is not None and judge.judged != "targets":
        predicted = predicted_by(results.scores, judge.labels)
        fair = fairness(predicted, judge.labels, groups, judge.outputs)
    if group is not None and groups is not None:
        rewriting = _rewriting(model, name, request, group, x, groups, results, by_group)
    counted_data = replace(dataset, inputs=x)
    return Specialisation(
        model=model.source.path,
        family=model.family,
        layer=name,
        kind=moe_layer.spec.kind,
        levels=moe_layer.spec.levels,
        accuracy=before,
        samples=judge.samples,
        experts=effects,
        groups=by_group,
        load=results.load,
        fairness=fair,
        rewriting=rewriting,
        judged=judge.judged,
        usage=usage_of(model, counted_data, k=request.k, subgroups=groups, progress=progress),
    )


@dataclass(frozen=True, slots=True)
class _JudgedInputs:
    """The results of one pass over the inputs, and their judge.

    `scores` is [s, classes]. By level, `means` [s, n] are the mean coefficients of each input, and
    `used` [s, n] is whether they are not all zero, or True for a layer without coefficients.
    """

    scores: Array
    means: Sequence[Array]
    used: Sequence[Array]
    load: tuple[Load, ...]
    judge: Judge


def _one_pass(
    module: nn.Module,
    moe_layer: MoELayer,
    dataset: LabelledData,
    x: Array,
    rewritten: int | None,
    progress: Progress,
) -> _JudgedInputs:
    outputs: list[Array] = []
    means, nonzero, counts = [], [], []
    # The choices of a layer with coefficients are its coefficients.
    recorded: AbstractContextManager[Mapping[str, RoutingDecision]] = nullcontext({})
    if moe_layer.spec.rewritable:
        recorded = recorded_choices(moe_layer)
    with recorded as choices:
        for rows in dataset.batches(BATCH):
            scores = _scores(module, x[rows])
            coefficients = [choice.chosen.numpy() for choice in choices.values()]
            if rewritten is not None and not outputs:
                _check_head(rewritten, moe_layer, module, x[rows], scores)
            outputs.append(scores)
            means.append([a.mean(axis=1, dtype=np.float64) for a in coefficients])
            nonzero.append([(a != 0).any(axis=1) for a in coefficients])
            counts.append([_counts(a) for a in coefficients])
            progress.advance(len(scores))
    scores = np.concatenate(outputs)
    return _JudgedInputs(
        scores,
        list(map(np.concatenate, zip(*means, strict=True))),
        list(map(np.concatenate, zip(*nonzero, strict=True)))
        or [np.ones((len(x), n), dtype=bool) for n in moe_layer.spec.levels],
        tuple(_load(i, batches) for i, batches in enumerate(zip(*counts, strict=True), start=1)),
        judge_of(dataset, scores),
    )


def _effects(
    module: nn.Module, moe_layer: MoELayer, x: Array, results: _JudgedInputs, progress: Progress
) -> Iterator[ExpertEffect]:
    """Yields the effect of removing each expert, one after the other."""
    judge = results.judge
    base = judge.credit(results.scores)
    before = judge.figures(base)
    experts = [(level, e) for level, n in enumerate(moe_layer.spec.levels) for e in range(n)]
    work = sum(int(results.used[level][:, e].sum()) for level, e in experts)
    progress.step(f"removing each of {len(experts)} experts of {moe_layer.spec.name}", total=work)
    for level, expert in experts:
        moe_layer.edits = Edits((Ablation(moe_layer.spec.name, expert, level + 1),))
        inputs = np.flatnonzero(results.used[level][:, expert])
        credit = base.copy()
        for part in np.split(inputs, range(BATCH, len(inputs), BATCH)):
            if part.size:
                credit[part] = judge.credit(_scores(module, x[part]), part)
                progress.advance(len(part))
        after = judge.figures(credit)
        change = tuple(
            None if was is None or now is None else now - was
            for was, now in zip(before, after, strict=True)
        )
        yield ExpertEffect(
            level=level + 1,
            expert=expert,
            inputs=len(inputs),
            accuracy=after,
            change=change,
            polysemanticity=polysemanticity(before, change),
        )
    moe_layer.edits = NO_EDITS


def _counts(a: Array) -> tuple[Array, Array]:
    """Counts the tokens with a heavy coefficient, by expert, and the tokens in each of `BINS`."""
    tokens = a.reshape(-1, a.shape[-1])
    # Rounding may make a coefficient slightly larger than 1.
    largest = np.histogram(tokens.max(axis=1).clip(0, 1), BINS, (0, 1))[0]
    return (tokens >= HEAVY).sum(axis=0), largest


def _load(level: int, counts: Sequence[tuple[Array, Array]]) -> Load:
    """Returns a level's load, from the counts of all batches."""
    heavy, largest = (np.sum(parts, axis=0) for parts in zip(*counts, strict=True))
    tokens = int(largest.sum())
    return Load(level, tokens, tuple((heavy / tokens).tolist()), tuple(largest.tolist()))


def _check_head(output: int, layer: MoELayer, module: nn.Module, x: Array, scores: Array) -> None:
    """Raises `UsageError` unless the layer computes the scores and has this class."""
    classes = scores.shape[1]
    if not 0 <= output < classes:
        raise UsageError(
            f"--rewrite-class {output}: the model has {classes} classes",
            hint=f"classes are counted from 0: use 0 to {classes - 1}",
        )
    outputs: list[torch.Tensor] = []
    with layer.register_forward_hook(lambda *call: outputs.append(call[2])):
        _scores(module, x[:1])
    y = one_per_sample(outputs[-1].numpy())
    if y.shape != scores[:1].shape or not np.allclose(y, scores[:1], rtol=1e-4, atol=1e-6):
        raise UsageError(
            f"--rewrite-class {output}: layer {layer.spec.name} does not compute the class "
            "scores itself, so its outputs are not classes",
            hint="choose the head with --layer; `export --rewrite` accepts any output of any layer",
        )


def _rewriting(
    model: Model,
    layer: str,
    request: SpecialiseRequest,
    group: Subgroup,
    x: Array,
    groups: Array,
    results: _JudgedInputs,
    by_group: Sequence[SubgroupCoefficients],
) -> Rewriting:
    """Returns the requested rewrite, with the results of the edited model."""
    output, judge = request.rewrite_class, results.judge
    assert output is not None  # `SpecialiseRequest` requires a class with a subgroup
    scores, labels = results.scores, judge.labels
    if judge.judged == "targets":
        raise UsageError(
            f"--rewrite-class {output}: the labels are the targets of a regression, which has no "
            "wrong answers",
            hint="give classes, or attributes of 0 and 1",
        )
    classes = scores.shape[1]

    def fairness_of(answers: Array) -> Fairness:
        return fairness(answers, labels, groups, classes, targets=[group] * classes)

    means = next(subgroup.coefficients for subgroup in by_group if subgroup.group == group)
    predicted = predicted_by(scores, labels)
    sign = sign_of(predicted, labels, groups == group, output)
    budget = BUDGET if request.budget is None else request.budget
    if request.strength is None:
        products = (a @ np.array(mean) for a, mean in zip(results.means, means, strict=True))
        similarity = np.asarray(math.prod(products))
        best = best_strength(scores, similarity, labels, groups, output, sign, budget)
        if best is None:
            raise UsageError(
                f"--rewrite-class {output}: no strength improves the lowest accuracy of a subgroup "
                f"for at most {budget:.1%} of the accuracy",
                hint="allow a higher cost with --budget, or give a --strength",
            )
        chosen = best
    else:
        chosen = Strength(sign * abs(request.strength), 1)
    entry = {"layer": layer, "output": output, "coefficients": means, "lambda": chosen.value}
    module = edited(model, read_edits(rewrite=[entry])).module
    parts = np.split(x, range(BATCH, len(x), BATCH))
    after = np.concatenate([predicted_by(_scores(module, part), labels) for part in parts])
    before, rewritten, threshold = fairness_of(predicted), fairness_of(after), None
    everywhere = np.ones(len(scores))
    blind = best_strength(scores, everywhere, labels, groups, output, sign, budget)
    if blind is not None:
        moved = scores.astype(np.float64)
        moved[:, output] += blind.value
        found = fairness_of(predicted_by(moved, labels))
        threshold = BlindThreshold(blind.value, blind.tried, found.accuracy, found.classes[output])
    return Rewriting(
        layer=layer,
        output=output,
        group=group,
        strength=chosen.value,
        coefficients=means,
        tried=chosen.tried,
        budget=budget if request.strength is None else None,
        accuracy_before=before.accuracy,
        accuracy_after=rewritten.accuracy,
        before=before.classes[output],
        after=rewritten.classes[output],
        threshold=threshold,
        attributes=before.attributes,
    )


def _subgroups(
    data: str | Path | LabelledData | Mapping[str, Any],
    by: str | Sequence[Subgroup] | None,
    samples: int,
) -> Array | None:
    """Returns the subgroup of each input, or None if there are no subgroups."""
    if isinstance(by, str):
        if isinstance(data, LabelledData):
            raise UsageError(
                f"group_by={by!r} names an array of a file, but the data are not a file",
                hint="give the subgroup of each input as a sequence",
            )
        return load_groups(data if isinstance(data, Mapping) else Path(data), by, samples)
    groups = None if by is None else np.asarray(by)
    if groups is not None and groups.shape != (samples,):
        raise FeedError(f"{groups.shape} subgroups for {samples} inputs")
    return groups


def polysemanticity(
    accuracy: Sequence[float | None], change: Sequence[float | None]
) -> float | None:
    """Returns ‖d − 1‖ for d_c = |change_c| / accuracy_c and the one-hot vector of the largest d_c.

    Classes without inputs or correct answers before the change do not count; None if d = 0.
    """
    shares = [
        abs(c) / y for y, c in zip(accuracy, change, strict=True) if y and y > 0 and c is not None
    ]
    *others, largest = sorted(shares) or [0.0]
    return None if largest == 0 else math.hypot(*others, 1 - largest)


def _groups(
    means: Sequence[Array], groups: Array | None, judge: Judge
) -> Iterator[SubgroupCoefficients]:
    """Yields each subgroup with its mean coefficients by level, from those of each input [s, n].

    Without subgroups, classes replace them, or the inputs that have each attribute.
    """
    members = Members.of(judge.labels, groups, None)
    for value, inside in zip(members.values, members.members.T, strict=True):
        if inside.any():
            mean = tuple(tuple(mean[inside].mean(axis=0).tolist()) for mean in means)
            yield SubgroupCoefficients(value, int(inside.sum()), mean)


def _scores(module: nn.Module, x: Array) -> Array:
    """Returns class scores [b, classes], even if the model returns [b, 1, classes]."""
    output: torch.Tensor = module(torch.from_numpy(np.ascontiguousarray(x)))
    scores = one_per_sample(output.numpy())
    if scores.ndim != 2:
        raise FeedError(
            f"accuracy by class needs outputs of shape (batch, classes), but the model returns "
            f"{scores.shape}",
            hint="a layer or a language model does not classify its inputs",
        )
    return scores
