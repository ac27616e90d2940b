"""How fair a classifier is to subgroups of its inputs, and the rewriting that helps one of them.

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
"""The name of a subgroup: a value of the array with each input's subgroup."""

DRAWS = 4000
"""The number of draws of each subgroup's shares, for the intervals of figures of several."""


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

    It is measured over all inputs, and over those of the class. `true_positive_rate` is None for a
    subgroup without `positives`, inputs of the class.
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
    the absolute difference between the true-positive rates of the target and of all other inputs;
    None if either has no input of the class, and `undefined` then has the reason. `std_bias` is the
    standard deviation of the subgroups' accuracies and `max_min` the smallest of them; `accuracy`
    is that over all inputs.
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
    """The accuracy of a classifier (the share of inputs with the correct class) and of each class.

    With `attributes`, attributes replace the classes, and the accuracy is the mean over them.
    """

    accuracy: Estimate
    classes: tuple[ClassFairness, ...]
    attributes: bool = False


@dataclass(frozen=True, slots=True)
class BlindThreshold:
    """The constant `value` added to an output of every input, whatever its subgroup.

    It is chosen by the same rule as a rewriting, with the same budget, from `tried` values.
    """

    value: float
    tried: int
    accuracy_after: Estimate
    after: ClassFairness


@dataclass(frozen=True, slots=True)
class Rewriting:
    """The rewriting of a class's output for a subgroup (Eq. 5), and its effect.

    `strength` is λ and `coefficients` the subgroup's mean coefficients ā, by level. `tried` counts
    the λ that were compared, 1 if λ was given; `budget` is the accuracy that it may cost. `before`
    and `after` are for that class, `accuracy_before` and `accuracy_after` for all.
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
        """The rewriting as an entry of the file for `export --rewrite`."""
        return {
            "layer": self.layer,
            "output": self.output,
            "coefficients": [list(mean) for mean in self.coefficients],
            "lambda": self.strength,
        }


@dataclass(frozen=True, slots=True)
class ModelFairness:
    """A model of a benchmark, as trained and, if there are edits, `edited`.

    Each class has the same target in both. `rewritten` are the classes whose outputs are rewritten;
    `k` is the edited model's.
    """

    model: str
    group_by: str
    k: int
    untouched: Fairness
    edited: Fairness | None = None
    rewritten: tuple[int, ...] = ()


SUBGROUPS = "subgroups"
"""The name of subgroups among the analyses of `results.json`."""


def compared_in(analyses: Mapping[str, Any], *, name: str = "results.json") -> list[ModelFairness]:
    """Returns the subgroups in a results file.

    Raises ResultsError with the file and the field that cannot be read.
    """
    compared = analyses.get(SUBGROUPS, ())
    return from_data(list[ModelFairness], compared, name, at=f"analyses.{SUBGROUPS}")


def check_groups(groups: Array, name: str) -> None:
    """Raises FeedError for fewer than two subgroups: there is nothing to compare."""
    names = np.unique(groups)
    if len(names) < 2:
        existing = "none" if not len(names) else f"only {names[0]!s}"
        raise FeedError(
            f"{name} has one subgroup ({existing}), but fairness compares two or more",
            hint="for one subgroup and the rest, save True for its inputs and False for the others",
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

    Attributes are predicted as bool [s, o], and have labels of that shape. `targets` names the
    examined subgroup of each class; by default that of the lowest accuracy, the smaller one of two.
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
                positives=int(own),
                accuracy=share(int(correct), int(size)),
                true_positive_rate=share(int(hits), int(own)) if own else None,
            )
            for name, size, own, correct, hits in zip(
                known, samples, positives, correct_counts, found_positives, strict=True
            )
        )
        accuracies = correct_counts / samples
        at = int(np.lexsort((samples, accuracies))[0])
        if targets is not None:
            at = known.index(targets[output])
        draws = _drawn(random, correct_counts, samples)
        what = f"with attribute {output}" if predicted.ndim == 2 else f"of class {output}"
        opportunity, undefined = _opportunity(random, rates, at, what, found_positives, positives)
        decided.append(
            ClassFairness(
                output=output,
                target=rates[at].group,
                subgroups=rates,
                target_accuracy=rates[at].accuracy,
                equality_of_opportunity=opportunity,
                undefined=undefined,
                std_bias=_within(float(accuracies.std()), draws.std(axis=0)),
                max_min=_within(float(accuracies.min()), draws.min(axis=0)),
                accuracy=share(int(is_correct.sum()), len(labels)),
            )
        )
    return Fairness(overall(predicted, labels), tuple(decided), attributes=predicted.ndim == 2)


def predicted_by(scores: Array, labels: Labels) -> Array:
    """Returns the class [s] of each input, or for labels [s, o] its attributes, bool [s, o]."""
    answers: Array = decided(scores) if labels.ndim == 2 else scores.argmax(axis=1)
    return answers


def answers_of(classes: Array, output: int) -> Array:
    """Returns which inputs are of a class, given classes [s], or have an attribute, if [s, o]."""
    answers: Array = classes[:, output] == 1 if classes.ndim == 2 else classes == output
    return answers


def overall(predicted: Array, labels: Labels) -> Estimate:
    """Returns the share of inputs whose class is correct, or the mean accuracy of attributes."""
    correct = predicted == labels
    if correct.ndim == 1:
        return share(int(correct.sum()), len(labels))
    shares = correct.mean(axis=1)
    interval = mean_interval(
        len(correct), correct.shape[1], float(shares.sum()), float(shares @ shares)
    )
    return Estimate(float(correct.mean()), interval.low, interval.high)


def share(right: int, total: int) -> Estimate:
    """Returns the share `right` / `total`, with Wilson's interval."""
    interval = wilson(right, total)
    return Estimate(right / total, interval.low, interval.high)


def _drawn(random: np.random.Generator, right: Array, total: Array) -> Array:
    """Draws shares [g, draws] from Jeffreys' posterior for the counts [g].

    Unlike resampled inputs, they vary even if all or no answers were correct.
    """
    drawn: Array = random.beta(
        (right + 0.5)[:, None], (total - right + 0.5)[:, None], (len(total), DRAWS)
    )
    return drawn


def _within(value: float, draws: Array) -> Estimate:
    """A figure with the middle 95% of its draws, extended to include it."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(value, min(value, float(low)), max(value, float(high)))


def _opportunity(
    random: np.random.Generator,
    rates: Sequence[SubgroupRates],
    at: int,
    what: str,
    hits: Array,
    positives: Array,
) -> tuple[Estimate | None, str | None]:
    """Equality of opportunity between the subgroup `at` and all others, or why there is none."""
    own = np.array([hits[at], hits.sum() - hits[at]])
    total = np.array([positives[at], positives.sum() - positives[at]])
    for count, who in zip(
        total, (f"subgroup {rates[at].group!s}", f"all but {rates[at].group!s}"), strict=True
    ):
        if not count:
            return None, f"{who} has no input {what}"
    first, second = own / total
    draws = _drawn(random, own, total)
    return _within(float(abs(first - second)), np.abs(draws[0] - draws[1])), None


def find_group(text: Subgroup, groups: Array) -> Subgroup:
    """Returns the subgroup of this value or text; raises UsageError if there is none."""
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
    """A λ, and how many values were compared to find it."""

    value: float
    tried: int


def sign_of(predicted: Labels, labels: Labels, inside: Array, output: int) -> int:
    """Returns the sign of λ that moves a subgroup's wrong answers towards the correct ones.

    It is 1 if more of its inputs have a missed class than a wrongly found one, otherwise −1.
    Raises UsageError if no answer is wrong.
    """
    wanted, answers = answers_of(labels, output), answers_of(predicted, output)
    missed = int((inside & wanted & ~answers).sum())
    false = int((inside & ~wanted & answers).sum())
    if not missed and not false:
        raise UsageError(
            f"--rewrite-class {output}: the subgroup has no wrong answer there",
            hint="`specialise --group-by` without it shows the classes with wrong answers",
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
    """Returns the λ of the best max-min that costs no more than `budget` of the accuracy.

    Scores [s, classes] of a class change by λ·`similarity` [s], so each input changes its answer at
    its own λ; between two of these nothing changes, and one λ from each interval is tried. Of
    equally good ones the smallest wins; None if none improves max-min. A `similarity` of 1
    everywhere finds a blind threshold.
    """
    predicted = predicted_by(scores, labels)
    answers, wanted = answers_of(predicted, output), answers_of(labels, output)
    own = scores[:, output].astype(np.float64)
    if labels.ndim == 2:
        limit = np.zeros(len(own))
    else:
        others = np.delete(scores.astype(np.float64), output, axis=1)
        rival = np.delete(np.arange(scores.shape[1]), output)[others.argmax(axis=1)]
        limit = others.max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        flips_at = sign * (limit - own) / similarity
    moved = np.flatnonzero(np.isfinite(flips_at) & (flips_at > 0) & (answers == (sign < 0)))
    moved = moved[np.argsort(flips_at[moved], kind="stable")]
    flips = flips_at[moved]
    of_class = wanted[moved]
    gain = np.where(of_class, sign, -sign)  # in correct answers for this class
    if labels.ndim == 2:
        change = gain / labels.shape[1]
    else:
        before = (predicted == labels)[moved].astype(int)
        after = of_class if sign > 0 else rival[moved] == labels[moved]
        change = after.astype(int) - before
    hits = answers == wanted
    subgroups = np.unique(groups)
    # Accuracy of each subgroup, [g, λ], after a number of inputs have changed their answer.
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
    best = int(lowest.argmax())  # the first of equals
    if not best:
        return None
    return Strength(sign * float(values[best]), len(stops) - 1)
