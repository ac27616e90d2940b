"""How fairly a classifier treats subgroups of its inputs, and the rewriting that helps one.

Each class is a question of its own, as an attribute is in the muMoE paper (§4.2, Appendix J): is
this input of the class? A subgroup's accuracy is the share of its inputs for which the answer is
right, its true-positive rate the same over those that are of the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...bench.metrics import wilson
from ...common.documents import from_data
from ...data.feeds import Array, Labels
from ...errors import FeedError, UsageError

Subgroup = int | bool | str
"""What a subgroup is called: a value of the array that names each input's."""

DRAWS = 4000
"""Of each subgroup's shares, from which the intervals of what follows from several come."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and where it lies with 95% confidence, given the inputs that were seen."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True, slots=True)
class SubgroupRates:
    """How often a class is decided right in one subgroup: over all inputs, and over its own.

    `true_positive_rate` is None for a subgroup without `positives`, inputs of the class.
    """

    group: Subgroup
    samples: int
    positives: int
    accuracy: Estimate
    true_positive_rate: Estimate | None


@dataclass(frozen=True, slots=True)
class ClassFairness:
    """How often a class is decided right in two subgroups or more.

    `target` is the subgroup that is looked at, `target_accuracy` its accuracy.
    `equality_of_opportunity` is |difference| of the true-positive rates of the target and of all
    other inputs; None where one of them holds no input of the class, which `undefined` says.
    `std_bias` is the standard deviation of the subgroups' accuracies and `max_min` the smallest of
    them; `accuracy` is that over all inputs.
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
    """The accuracy of a classifier (the share of inputs whose class is right), and each class."""

    accuracy: Estimate
    classes: tuple[ClassFairness, ...]


@dataclass(frozen=True, slots=True)
class Rewriting:
    """The rewriting of a class's output for a subgroup (Eq. 5), and what it does.

    `strength` is λ and `coefficients` the subgroup's mean coefficients ā, by level. `tried` counts
    the λ that were compared, 1 for one that was given; `budget` is the accuracy that they might
    cost. `before` and `after` are of that class, `accuracy_before` and `accuracy_after` of all.
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

    def entry(self) -> dict[str, object]:
        """The rewriting as the file of `export --rewrite` has it."""
        return {
            "layer": self.layer,
            "output": self.output,
            "coefficients": [list(mean) for mean in self.coefficients],
            "lambda": self.strength,
        }


@dataclass(frozen=True, slots=True)
class ModelFairness:
    """A model of a benchmark, as trained and, if it is, `edited`: there each class has one target.

    `rewritten` are the classes whose outputs are rewritten, `k` is what the edited model keeps.
    """

    model: str
    group_by: str
    k: int
    untouched: Fairness
    edited: Fairness | None = None
    rewritten: tuple[int, ...] = ()


SUBGROUPS = "subgroups"
"""Where these stand among the analyses of `results.json`."""


def compared_in(analyses: Mapping[str, Any], *, name: str = "results.json") -> list[ModelFairness]:
    """Returns what a results file says of subgroups.

    Raises ResultsError that names the file and the field that cannot be read.
    """
    compared = analyses.get(SUBGROUPS, ())
    return from_data(list[ModelFairness], compared, name, at=f"analyses.{SUBGROUPS}")


def check_groups(groups: Array, name: str) -> None:
    """Raises FeedError for fewer than two subgroups: there is nothing to compare."""
    names = np.unique(groups)
    if len(names) < 2:
        held = "none" if not len(names) else f"only {names[0]!s}"
        raise FeedError(
            f"{name} holds one subgroup ({held}), and fairness compares two or more",
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
    """Returns how fairly each class is decided, for the classes [s] that were predicted.

    `targets` names the subgroup that is looked at for each class; by default that of the lowest
    accuracy, the smaller one of two.
    """
    names = np.unique(groups)
    known = [name.item() for name in names]
    inside = groups[None, :] == names[:, None]  # [g, s]
    samples = inside.sum(axis=1)
    random = np.random.default_rng(0)
    decided = []
    for output in range(classes):
        of_class = labels == output
        right = (predicted == output) == of_class
        rights = (inside & right).sum(axis=1)
        positives = (inside & of_class).sum(axis=1)
        found_positives = (inside & of_class & right).sum(axis=1)
        rates = tuple(
            SubgroupRates(
                group=name,
                samples=int(size),
                positives=int(own),
                accuracy=share(int(correct), int(size)),
                true_positive_rate=share(int(hits), int(own)) if own else None,
            )
            for name, size, own, correct, hits in zip(
                known, samples, positives, rights, found_positives, strict=True
            )
        )
        accuracies = rights / samples
        at = int(np.lexsort((samples, accuracies))[0])
        if targets is not None:
            at = known.index(targets[output])
        draws = _drawn(random, rights, samples)
        opportunity, undefined = _opportunity(random, rates, at, output, found_positives, positives)
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
                accuracy=share(int(right.sum()), len(labels)),
            )
        )
    return Fairness(share(int((predicted == labels).sum()), len(labels)), tuple(decided))


def share(right: int, seen: int) -> Estimate:
    """Returns `right` of `seen`, with Wilson's interval."""
    interval = wilson(right, seen)
    return Estimate(right / seen, interval.low, interval.high)


def _drawn(random: np.random.Generator, right: Array, seen: Array) -> Array:
    """Draws shares [g, draws] as the counts [g] leave them open: Jeffreys' posterior.

    Unlike resampled inputs they have a width where all or none were right.
    """
    drawn: Array = random.beta(
        (right + 0.5)[:, None], (seen - right + 0.5)[:, None], (len(seen), DRAWS)
    )
    return drawn


def _within(value: float, draws: Array) -> Estimate:
    """A figure with the middle 95% of its draws, which it lies in."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(value, min(value, float(low)), max(value, float(high)))


def _opportunity(
    random: np.random.Generator,
    rates: Sequence[SubgroupRates],
    at: int,
    output: int,
    hits: Array,
    positives: Array,
) -> tuple[Estimate | None, str | None]:
    """Equality of opportunity between the subgroup `at` and all others, or why there is none."""
    own = np.array([hits[at], hits.sum() - hits[at]])
    seen = np.array([positives[at], positives.sum() - positives[at]])
    for count, who in zip(
        seen, (f"subgroup {rates[at].group!s}", f"all but {rates[at].group!s}"), strict=True
    ):
        if not count:
            return None, f"{who} holds no input of class {output}"
    first, second = own / seen
    draws = _drawn(random, own, seen)
    return _within(float(abs(first - second)), np.abs(draws[0] - draws[1])), None


def find_group(text: Subgroup, groups: Array) -> Subgroup:
    """Returns the subgroup that was meant, by its value or as text, else UsageError."""
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
    """A λ, and how many were compared to find it."""

    value: float
    tried: int


def sign_of(predicted: Labels, labels: Labels, inside: Array, output: int) -> int:
    """Returns the sign of λ that moves a subgroup's wrong answers towards the right ones.

    1 where more of its inputs of the class are missed than others are taken for it, else −1.
    Raises UsageError where none is wrong.
    """
    missed = int((inside & (labels == output) & (predicted != output)).sum())
    false = int((inside & (labels != output) & (predicted == output)).sum())
    if not missed and not false:
        raise UsageError(
            f"--rewrite-class {output}: the subgroup has no wrong answer there",
            hint="`specialise --group-by` without it says where it has",
        )
    return 1 if missed >= false else -1


def best_strength(
    scores: Array,
    alike: Array,
    labels: Labels,
    groups: Array,
    output: int,
    sign: int,
    budget: float,
) -> Strength:
    """Returns the λ of the best max-min that costs no more than `budget` of the accuracy.

    Scores [s, classes] of a class change by λ·`alike` [s], so that each input changes its answer
    at one λ of its own: between two of these nothing changes, and one λ from each stretch is all
    that there is to try. Of equals the smallest is taken; 0 where none is better than none.
    """
    others = np.delete(scores.astype(np.float64), output, axis=1)
    names = np.delete(np.arange(scores.shape[1]), output)
    rival = names[others.argmax(axis=1)]
    predicted = scores.argmax(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        turn = sign * (others.max(axis=1) - scores[:, output]) / alike
    moved = np.flatnonzero(np.isfinite(turn) & (turn > 0) & ((predicted == output) == (sign < 0)))
    moved = moved[np.argsort(turn[moved], kind="stable")]
    turns = turn[moved]
    of_class = labels[moved] == output
    gain = np.where(of_class, sign, -sign)  # of one answer: is it of the class?
    before = (predicted == labels)[moved].astype(int)
    after = of_class if sign > 0 else rival[moved] == labels[moved]
    change = after.astype(int) - before
    right = (predicted == output) == (labels == output)
    subgroups = np.unique(groups)
    # Accuracy of each subgroup, [g, λ], after so many inputs have changed their answer.
    shares = np.stack(
        [
            (right[groups == g].sum() + np.r_[0, np.cumsum(np.where(groups[moved] == g, gain, 0))])
            / (groups == g).sum()
            for g in subgroups
        ]
    )
    whole = ((predicted == labels).sum() + np.r_[0, np.cumsum(change)]) / len(labels)
    # A λ between two turns; those that come together turn together.
    ends = np.flatnonzero(np.r_[turns[1:] > turns[:-1], True]) if len(turns) else np.array([], int)
    stops = np.r_[0, ends + 1].astype(int)
    following = np.r_[turns[ends[:-1] + 1], turns[-1] * 1.1] if len(turns) else np.array([])
    values = np.r_[0.0, (turns[ends] + following) / 2]
    allowed = whole[stops] >= whole[0] - budget - 1e-12
    lowest = np.where(allowed, shares.min(axis=0)[stops], -1.0)
    best = int(lowest.argmax())  # the first of equals
    if not best:
        raise UsageError(
            f"--rewrite-class {output}: no strength makes the lowest accuracy of a subgroup better "
            f"for at most {budget:.1%} of the accuracy",
            hint="allow more with --budget, or give a strength with --strength",
        )
    return Strength(sign * float(values[best]), len(stops) - 1)
