"""Measures how fair a classifier is to subgroups of its inputs, and finds a rewrite for one.

Each class is a separate question, as an attribute is in the muMoE paper (§4.2): is this input of
the class? A subgroup's accuracy is the share of its inputs with the correct answer; its
true-positive rate is that share among its inputs of the class. A model that decides attributes
has one such question for each: labels [s, o] are 0 or 1, and the sign of a logit is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...bench.measure.answers import decided, mean_interval
from ...bench.metrics import wilson
from ...common.documents import from_data
from ...data.batches import Array, Labels
from ...errors import FeedError, UsageError

Subgroup = int | bool | str
"""The name of a subgroup: a value in the array that assigns each input to a subgroup."""

DRAWS = 4000
"""The draws of each subgroup's shares, for the intervals of figures of several subgroups."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95% interval, given these inputs."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True, slots=True)
class SubgroupRates:
    """How often the answer for a class is correct in one subgroup.

    `accuracy` is over all its inputs, `true_positive_rate` over the `positives`: its inputs of the
    class. The rate is None if there are none.
    """

    group: Subgroup
    samples: int
    positives: int
    accuracy: Estimate
    true_positive_rate: Estimate | None


@dataclass(frozen=True, slots=True)
class ClassFairness:
    """How often the answer for a class is correct in two or more subgroups.

    `target` is the examined subgroup, `target_accuracy` its accuracy. `equality_of_opportunity` is
    the absolute difference between the true-positive rates of the target and of all other inputs.
    It is None if either has no input of the class, for the reason in `undefined`. `std_bias` is the
    standard deviation of the subgroups' accuracies and `max_min` the smallest of them; `accuracy`
    is over all inputs.
    """

    output: int
    target: Subgroup
    subgroups: tuple[SubgroupRates, ...]
    target_accuracy: Estimate
    equality_of_opportunity: Estimate | None
    undefined: str | None
    std_bias: Estimate
    max_min: Estimate
    accuracy: Estimate


@dataclass(frozen=True, slots=True)
class Fairness:
    """The accuracy of a classifier, and the fairness of each class.

    `accuracy` is the share of inputs with the correct class. With `attributes`, attributes replace
    the classes, and the accuracy is the mean over them.
    """

    accuracy: Estimate
    classes: tuple[ClassFairness, ...]
    attributes: bool = False


@dataclass(frozen=True, slots=True)
class BlindThreshold:
    """The constant `value` to add to an output for every input, whatever its subgroup.

    It is chosen by the same rule as a rewrite, with the same budget, from `tried` values.
    """

    value: float
    tried: int
    accuracy_after: Estimate
    after: ClassFairness


@dataclass(frozen=True, slots=True)
class Rewriting:
    """The rewrite of a class's output for a subgroup (Eq. 5), and its effect.

    `strength` is λ and `coefficients` the subgroup's mean coefficients ā, by level. `tried` is the
    number of λ that were compared, 1 if λ was given; `budget` is the accuracy that λ may cost.
    `before` and `after` are for this class, `accuracy_before` and `accuracy_after` for all.
    `threshold` is None if no constant improves the lowest accuracy of a subgroup.
    """

    layer: str
    output: int
    group: Subgroup
    strength: float
    coefficients: tuple[tuple[float, ...], ...]
    tried: int
    budget: float | None
    accuracy_before: Estimate
    accuracy_after: Estimate
    before: ClassFairness
    after: ClassFairness
    threshold: BlindThreshold | None = None
    attributes: bool = False

    def entry(self) -> dict[str, object]:
        """Returns the rewrite as an entry of the file for `export --rewrite`."""
        return {
            "layer": self.layer,
            "output": self.output,
            "coefficients": [list(mean) for mean in self.coefficients],
            "lambda": self.strength,
        }


@dataclass(frozen=True, slots=True)
class ModelFairness:
    """The fairness of a model of a benchmark, as trained and, if there are edits, `edited`.

    Each class has the same target in both. `rewritten` are the classes whose outputs are rewritten;
    `k` is that of the edited model.
    """

    model: str
    group_by: str
    k: int
    untouched: Fairness
    edited: Fairness | None = None
    rewritten: tuple[int, ...] = ()


SUBGROUPS = "subgroups"
"""The key of subgroups in the analyses of `results.json`."""


def compared_in(analyses: Mapping[str, Any], *, name: str = "results.json") -> list[ModelFairness]:
    """Returns the fairness of each model in a results file.

    Raises a `ResultsError` that names the file and the field that cannot be read.
    """
    compared = analyses.get(SUBGROUPS, ())
    return from_data(list[ModelFairness], compared, name, at=f"analyses.{SUBGROUPS}")


def check_groups(groups: Array, name: str) -> None:
    """Raises `FeedError` for fewer than two subgroups, because there is nothing to compare."""
    names = np.unique(groups)
    if len(names) < 2:
        existing = f"only the subgroup {names[0]!s}" if len(names) else "no subgroup"
        raise FeedError(
            f"{name} has {existing}, but fairness compares two or more",
            hint="to compare one subgroup with the rest, save True for its inputs, False otherwise",
        )


def fairness(
    predicted: Labels,
    labels: Labels,
    groups: Array,
    classes: int,
    *,
    targets: Sequence[Subgroup] | None = None,
) -> Fairness:
    """Returns how fairly each class is decided, for the predicted classes [s].

    Attributes are predicted as bool [s, o] and have labels of that shape. `targets` has the
    subgroup to examine for each class, by default the one with the lowest accuracy; if several
    have it, the smallest of them.
    """
    names = np.unique(groups)
    known = [name.item() for name in names]
    inside = groups[None, :] == names[:, None]  # [g, s]
    samples = inside.sum(axis=1)
    random = np.random.default_rng(0)
    decided = []
    for output in range(classes):
        answers, of_class = answers_of(predicted, output), answers_of(labels, output)
        is_correct = answers == of_class
        correct_counts = (inside & is_correct).sum(axis=1)
        positives = (inside & of_class).sum(axis=1)
        found_positives = (inside & of_class & is_correct).sum(axis=1)
        rates = tuple(
            SubgroupRates(
                group=name,
                samples=int(size),
                positives=int(total),
                accuracy=share(int(correct), int(size)),
                true_positive_rate=share(int(hits), int(total)) if total else None,
            )
            for name, size, total, correct, hits in zip(
                known, samples, positives, correct_counts, found_positives, strict=True
            )
        )
        accuracies = correct_counts / samples
        target = int(np.lexsort((samples, accuracies))[0])
        if targets is not None:
            target = known.index(targets[output])
        draws = _draw_shares(random, correct_counts, samples)
        what = f"with attribute {output}" if predicted.ndim == 2 else f"of class {output}"
        opportunity, undefined = _equality_of_opportunity(
            random, rates, target, what, found_positives, positives
        )
        decided.append(
            ClassFairness(
                output=output,
                target=rates[target].group,
                subgroups=rates,
                target_accuracy=rates[target].accuracy,
                equality_of_opportunity=opportunity,
                undefined=undefined,
                std_bias=_estimate(float(accuracies.std()), draws.std(axis=0)),
                max_min=_estimate(float(accuracies.min()), draws.min(axis=0)),
                accuracy=share(int(is_correct.sum()), len(labels)),
            )
        )
    return Fairness(overall(predicted, labels), tuple(decided), attributes=predicted.ndim == 2)


def predicted_by(scores: Array, labels: Labels) -> Array:
    """Returns each input's class [s] or, for labels [s, o], its attributes, bool [s, o]."""
    answers: Array = decided(scores) if labels.ndim == 2 else scores.argmax(axis=1)
    return answers


def answers_of(classes: Array, output: int) -> Array:
    """Returns which inputs are of a class, for classes [s], or have an attribute, for [s, o]."""
    answers: Array = classes[:, output] == 1 if classes.ndim == 2 else classes == output
    return answers


def overall(predicted: Array, labels: Labels) -> Estimate:
    """Returns the share of inputs with the correct class, or the attributes' mean accuracy."""
    correct = predicted == labels
    if correct.ndim == 1:
        return share(int(correct.sum()), len(labels))
    shares = correct.mean(axis=1)
    interval = mean_interval(
        len(correct), correct.shape[1], float(shares.sum()), float(shares @ shares)
    )
    return Estimate(float(correct.mean()), interval.low, interval.high)


def share(count: int, total: int) -> Estimate:
    """Returns the share `count` / `total`, with Wilson's interval."""
    interval = wilson(count, total)
    return Estimate(count / total, interval.low, interval.high)


def _draw_shares(random: np.random.Generator, counts: Array, totals: Array) -> Array:
    """Draws shares [g, draws] from the posterior, with Jeffreys' prior, for the counts [g].

    Unlike shares of resampled inputs, these vary even if all answers were correct, or none.
    """
    drawn: Array = random.beta(
        (counts + 0.5)[:, None], (totals - counts + 0.5)[:, None], (len(totals), DRAWS)
    )
    return drawn


def _estimate(value: float, draws: Array) -> Estimate:
    """Returns a figure with the middle 95% of its draws, extended to include the figure."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(value, min(value, float(low)), max(value, float(high)))


def _equality_of_opportunity(
    random: np.random.Generator,
    rates: Sequence[SubgroupRates],
    target: int,
    what: str,
    hits: Array,
    positives: Array,
) -> tuple[Estimate | None, str | None]:
    """Returns the figure for the subgroup `target` and all others, or why it is undefined."""
    counts = np.array([hits[target], hits.sum() - hits[target]])
    totals = np.array([positives[target], positives.sum() - positives[target]])
    group = rates[target].group
    for total, name in zip(totals, (f"subgroup {group!s}", f"all but {group!s}"), strict=True):
        if not total:
            return None, f"{name} has no input {what}"
    first, second = counts / totals
    draws = _draw_shares(random, counts, totals)
    return _estimate(float(abs(first - second)), np.abs(draws[0] - draws[1])), None


def find_group(text: Subgroup, groups: Array) -> Subgroup:
    """Returns the subgroup with this value or text; raises `UsageError` if there is none."""
    names = [name.item() for name in np.unique(groups)]
    for name in names:
        if name == text or str(name).lower() == str(text).lower():
            known: Subgroup = name
            return known
    raise UsageError(
        f"--rewrite-group {text}: there is no such subgroup",
        hint=f"the subgroups: {', '.join(map(str, names))}",
    )


@dataclass(frozen=True, slots=True)
class Strength:
    """A λ, and the number of values that were compared to find it."""

    value: float
    tried: int


def sign_of(predicted: Labels, labels: Labels, inside: Array, output: int) -> int:
    """Returns the sign of λ that moves a subgroup's wrong answers towards the correct ones.

    The sign is −1 if the class is wrongly found for more of its inputs than missed, otherwise 1.
    Raises `UsageError` if no answer is wrong.
    """
    wanted, answers = answers_of(labels, output), answers_of(predicted, output)
    missed = int((inside & wanted & ~answers).sum())
    false = int((inside & ~wanted & answers).sum())
    if not missed and not false:
        raise UsageError(
            f"--rewrite-class {output}: the subgroup has no wrong answer for this class",
            hint="`specialise --group-by` without this option shows the accuracy of each class",
        )
    return 1 if missed >= false else -1


def best_strength(
    scores: Array,
    similarity: Array,
    labels: Labels,
    groups: Array,
    output: int,
    sign: int,
    budget: float,
) -> Strength | None:
    """Returns the λ with the best max-min that costs no more than `budget` of the accuracy.

    The scores [s] of the class change by λ·`similarity` [s], so each input changes its answer at
    its own λ. Between two of these nothing changes, so one λ from each interval is tried. Among
    equally good ones, the smallest is returned; None if none improves max-min. A `similarity` of 1
    for every input finds a blind threshold.
    """
    predicted = predicted_by(scores, labels)
    answers, wanted = answers_of(predicted, output), answers_of(labels, output)
    own_scores = scores[:, output].astype(np.float64)
    if labels.ndim == 2:
        limit = np.zeros(len(own_scores))
    else:
        others = np.delete(scores.astype(np.float64), output, axis=1)
        rival = np.delete(np.arange(scores.shape[1]), output)[others.argmax(axis=1)]
        limit = others.max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        flips_at = sign * (limit - own_scores) / similarity
    moved = np.flatnonzero(np.isfinite(flips_at) & (flips_at > 0) & (answers == (sign < 0)))
    moved = moved[np.argsort(flips_at[moved], kind="stable")]
    flips = flips_at[moved]
    of_class = wanted[moved]
    gain = np.where(of_class, sign, -sign)  # of correct answers for this class
    if labels.ndim == 2:
        change = gain / labels.shape[1]
    else:
        before = (predicted == labels)[moved].astype(int)
        after = of_class if sign > 0 else rival[moved] == labels[moved]
        change = after.astype(int) - before
    hits = answers == wanted
    subgroups = np.unique(groups)
    # The accuracy of each subgroup, [g, λ], after a number of inputs have changed their answer.
    shares = np.stack(
        [
            (hits[groups == g].sum() + np.r_[0, np.cumsum(np.where(groups[moved] == g, gain, 0))])
            / (groups == g).sum()
            for g in subgroups
        ]
    )
    accuracy = (predicted == labels).mean() + np.r_[0, np.cumsum(change)] / len(labels)
    # One λ between every two different flips.
    ends = np.flatnonzero(np.r_[flips[1:] > flips[:-1], True]) if len(flips) else np.array([], int)
    stops = np.r_[0, ends + 1].astype(int)
    following = np.r_[flips[ends[:-1] + 1], flips[-1] * 1.1] if len(flips) else np.array([])
    values = np.r_[0.0, (flips[ends] + following) / 2]
    allowed = accuracy[stops] >= accuracy[0] - budget - 1e-12
    lowest = np.where(allowed, shares.min(axis=0)[stops], -1.0)
    best = int(lowest.argmax())  # the first of the best
    if not best:
        return None
    return Strength(sign * float(values[best]), len(stops) - 1)
