"""Scores for labels with a number per output: attributes and regression targets.

An attribute is 0 or 1, and the sign of its logit is the model's answer (muMoE, §4.2). A regression
is scored by R² = 1 − Σ‖y − t‖² / Σ‖t − t̄‖² over all outputs: 1 means no error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ...data.batches import Array, Labels
from ...data.feeds import check_not_one_hot
from ...errors import FeedError
from ...exporter.checks.accuracy import one_per_sample
from ..metrics import Sums, Z, wilson
from ..results import Accuracy, AttributeAccuracy, Interval, Regression


def decided(logits: Array) -> Array:
    """Returns the attributes that logits [b, o] predict: bool [b, o]."""
    positive: Array = logits > 0
    return positive


def per_output(
    outputs: Array, labels: Labels, *, ids: bool = False, where: str = "the data"
) -> tuple[Array, Labels] | None:
    """Returns outputs and labels as [b, o], if labels have a number per output.

    Returns None for classes [b] of scores [b, c] and target tokens [b, m] of `ids`. Raises
    FeedError for labels that fit no output.
    """
    if ids and labels.ndim == 2 and outputs.ndim == 3:
        return None
    y = one_per_sample(outputs)
    y = y[:, None] if y.ndim == 1 else y
    if labels.ndim == 1 and y.shape[1:] != (1,):
        return None
    numbers = labels[:, None] if labels.ndim == 1 else labels
    if numbers.shape != y.shape:
        expected = "batch, " + ", ".join(map(str, y.shape[1:]))
        raise FeedError(
            f"{where} has labels (batch, {numbers.shape[1]}) for outputs ({expected})",
            hint="save a class for each input, (batch,), or a number for each output, "
            "(batch, outputs)",
        )
    return y, numbers


def are_attributes(labels: Labels) -> bool:
    """Returns whether all labels [b, o] are 0 or 1."""
    return bool(((labels == 0) | (labels == 1)).all())


def mean_interval(count: int, answers: int, total: float, squares: float) -> Interval:
    """Returns the 95% interval of the mean of `count` shares, from their sum and sum of squares.

    A share counts the correct ones of an input's `answers`. The interval is Wilson's for the
    number of independent answers that matches the observed spread: from one per input to all.
    """
    mean = min(1.0, float(total) / count)
    spread = max(0.0, float(squares) / count - mean * mean)
    independent = mean * (1 - mean) / spread if spread else 1.0
    effective = count * min(float(answers), max(1.0, independent))
    return wilson(mean * effective, effective)


@dataclass(frozen=True, slots=True)
class PairedScores(Sums):
    """Sums of a score per input, of the unmodified model's score, and of their products."""

    inputs: int = 0
    own: float = 0.0
    base: float = 0.0
    own_squares: float = 0.0
    base_squares: float = 0.0
    both: float = 0.0

    @classmethod
    def of(cls, own: Array, base: Array) -> PairedScores:
        sums = (own.sum(), base.sum(), own @ own, base @ base, own @ base)
        return cls(len(own), *map(float, sums))

    @property
    def kept(self) -> float | None:
        """The ratio to the unmodified model's score; None if that is not positive."""
        return self.own / self.base if self.base > 0 else None

    @property
    def kept_interval(self) -> Interval | None:
        """The 95% interval of `kept`, a ratio of two means over the same inputs.

        It uses the delta method. One input that only one of the two models gets right is added, so
        that the interval has a width even if the models agree on every input.
        """
        ratio = self.kept
        if ratio is None:
            return None
        n, mean = self.inputs, self.base / self.inputs
        residual = self.own_squares - 2 * ratio * self.both + ratio**2 * self.base_squares
        variance = (max(0.0, residual) + mean**2) / (n * max(1, n - 1))
        half = Z * math.sqrt(variance) / mean
        return Interval(ratio - half, ratio + half)


@dataclass(frozen=True, slots=True)
class Moments:
    """The mean [o] of numbers, and the sum of their squared distances from it."""

    count: int = 0
    mean: tuple[float, ...] = ()
    squares: tuple[float, ...] = ()

    @staticmethod
    def of(numbers: Array) -> Moments:
        mean = numbers.mean(axis=0, dtype=np.float64)
        squares = ((numbers - mean) ** 2).sum(axis=0)
        return Moments(len(numbers), tuple(mean.tolist()), tuple(squares.tolist()))

    def __add__(self, other: Moments) -> Moments:
        """Returns the moments of both, without the cancellation of sums of squares."""
        if not self.count or not other.count:
            return other if not self.count else self
        count = self.count + other.count
        difference = np.subtract(other.mean, self.mean)
        mean = self.mean + difference * (other.count / count)
        squares = np.add(self.squares, other.squares)
        squares = squares + difference**2 * (self.count * other.count / count)
        return Moments(count, tuple(mean.tolist()), tuple(squares.tolist()))


@dataclass(frozen=True, slots=True)
class AnswerCounts(Sums):
    """Sums over labels [b, o] for the accuracy per attribute, or R².

    The result is R² if any label is not 0 or 1 (`numeric`), known once all are counted.
    `one_hot` counts the inputs with exactly one 1. For each output, `positives` and `right` are
    counts; `squared` and `absolute` are sums of squared and absolute errors. `shares` has sums of
    the correct share of an input's attributes, `errors` of an input's squared error.
    """

    LARGEST = frozenset({"numeric"})

    inputs: int = 0
    numeric: bool = False
    one_hot: int = 0
    positives: tuple[int, ...] = ()
    right: tuple[int, ...] = ()
    squared: tuple[float, ...] = ()
    absolute: tuple[float, ...] = ()
    targets: Moments = field(default_factory=Moments)
    shares: PairedScores = field(default_factory=PairedScores)
    errors: PairedScores = field(default_factory=PairedScores)

    @staticmethod
    def of(y: Array, labels: Labels, untouched: Array) -> AnswerCounts:
        """Returns counts over outputs, labels and the unmodified model's outputs, each [b, o]."""
        truth, targets = labels == 1, labels.astype(np.float64)
        right = decided(y) == truth
        error, base_error = (each.astype(np.float64) - targets for each in (y, untouched))
        return AnswerCounts(
            inputs=len(y),
            numeric=not are_attributes(labels),
            one_hot=int((labels.sum(axis=1) == 1).sum()),
            positives=tuple(truth.sum(axis=0).tolist()),
            right=tuple(right.sum(axis=0).tolist()),
            squared=tuple((error**2).sum(axis=0).tolist()),
            absolute=tuple(np.abs(error).sum(axis=0).tolist()),
            targets=Moments.of(targets),
            shares=PairedScores.of(right.mean(axis=1), (decided(untouched) == truth).mean(axis=1)),
            errors=PairedScores.of((error**2).sum(axis=1), (base_error**2).sum(axis=1)),
        )

    def accuracy(self, untouched: AnswerCounts) -> Accuracy | None:
        """Returns the accuracy, mean and per attribute; None if labels are not attributes.

        Raises FeedError for one-hot classes.
        """
        if not self.inputs or self.numeric:
            return None
        n = self.inputs
        check_not_one_hot((n, len(self.right)), self.one_hot, "the array of labels")
        shares = self.shares
        return Accuracy(
            top1=min(1.0, shares.own / n),
            retention=shares.kept,
            n=n,
            top1_interval=mean_interval(n, len(self.right), shares.own, shares.own_squares),
            retention_interval=shares.kept_interval,
            attributes=tuple(
                AttributeAccuracy(positives, right / n, base / n, wilson(right, n))
                for positives, right, base in zip(
                    self.positives, self.right, untouched.right, strict=True
                )
            ),
        )

    def answers(self, untouched: AnswerCounts) -> AnswerScores:
        """Returns the accuracy or regression scores, as the labels allow; may raise FeedError."""
        return AnswerScores(self.accuracy(untouched), self.regression())

    def regression(self) -> Regression | None:
        """Returns the regression scores; None if labels are attributes.

        Raises FeedError if all targets are equal.
        """
        if not self.numeric:
            return None
        n, spread = self.inputs, sum(self.targets.squares)
        # Smaller values are rounding errors of the targets.
        if spread <= n * sum(mean**2 for mean in self.targets.mean) * 1e-28:
            raise FeedError(
                "the data: the targets of every input are the same, so R² is not defined",
                hint="give inputs whose targets differ",
            )
        scores = scores_of(self.errors, n / spread)
        outputs = tuple(
            1 - error / squares if squares > 0 else None
            for error, squares in zip(self.squared, self.targets.squares, strict=True)
        )
        return Regression(
            r2=scores.own / n,
            retention=scores.kept,
            n=n,
            rmse=math.sqrt(sum(self.squared) / (n * len(outputs))),
            mae=sum(self.absolute) / (n * len(outputs)),
            outputs=outputs,
            retention_interval=scores.kept_interval,
        )


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """The quality of answers with a number per output: either score, or neither."""

    accuracy: Accuracy | None = None
    regression: Regression | None = None


def scores_of(errors: PairedScores, scale: float) -> PairedScores:
    """Returns sums of the scores 1 − scale · error, from those of errors."""
    n, own, base = errors.inputs, scale * errors.own, scale * errors.base
    squared = scale * scale
    return PairedScores(
        inputs=n,
        own=n - own,
        base=n - base,
        own_squares=n - 2 * own + squared * errors.own_squares,
        base_squares=n - 2 * base + squared * errors.base_squares,
        both=n - own - base + squared * errors.both,
    )


def check_attributes(labels: Labels, where: str) -> None:
    """Raises FeedError unless labels [b, o] are attributes that are not one-hot."""
    if not are_attributes(labels):
        row, column = (int(index) for index in np.argwhere((labels != 0) & (labels != 1))[0])
        raise FeedError(
            f"{where} contains {labels[row, column]:g} at index [{row}, {column}], but attributes "
            "are 0 or 1",
            hint="`bench` and `tune` measure regressions",
        )
    check_not_one_hot(labels.shape, int((labels.sum(axis=1) == 1).sum()), where)
