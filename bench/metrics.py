"""The quality of a case: accuracy, routing agreement and parity, as sums over batches.

Sums are immutable and can be added, so an evaluation can stream over the data or be split into
parts. Nothing in this module depends on an engine.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import numpy as np

from ..data.batches import IGNORED, Array, Labels
from ..errors import FeedError, ParityError
from ..exporter.bundle.parity import Tolerance, jaccard
from ..exporter.checks.accuracy import one_per_sample
from .results import (
    MAX_LOSING_CLASSES,
    Accuracy,
    ClassChange,
    Interval,
    OutputParity,
    Perplexity,
    RoutingAgreement,
)

Z = 1.959963984540054  # the 97.5% quantile of the normal distribution


def wilson(right: float, count: float) -> Interval:
    """Returns Wilson's score interval (1927) of right / count; it has a width even at 0 and 1."""
    share = right / count
    scale = 1 + Z**2 / count
    middle = (share + Z**2 / (2 * count)) / scale
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / scale
    return Interval(max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share)))


def score_interval(both: int, lost: int, won: int) -> Interval:
    """Returns the 95% interval of (both + won) / (both + lost), the kept share of correct answers.

    For the same inputs, `both` counts those that both models answer correctly, `lost` those that
    only the unmodified model does, and `won` those that only the other does. The interval contains
    the ratios that the score test does not reject (Nam and Blackwelder, Statistics in Medicine 21,
    2002). Wald's interval of the logarithm would accept 5 to 7% of the models that keep just less
    than requested, instead of 2.5%, if few answers differ.
    """
    high = _lowest_kept(both, won, lost)
    return Interval(_lowest_kept(both, lost, won), 1 / high if high else math.inf)


def inputs_needed(count: int, kept: float, low: float, keep: float) -> float:
    """Returns the approximate number of inputs that would show that at least `keep` is kept.

    On `count` inputs, the share is `kept` and the lower end of its interval is `low`; their
    difference is inversely proportional to the square root of the number of inputs.
    """
    return count * ((kept - low) / (kept - keep)) ** 2


def _lowest_kept(both: int, lost: int, won: int) -> float:
    """Returns the lower end of the interval of (both + won) / (both + lost), by bisection."""
    if both + won == 0:
        return 0.0
    low, high = 0.0, (both + won) / max(both + lost, 1e-3)
    for _ in range(60):
        middle = (low + high) / 2
        if _score(both, lost, won, middle) >= Z:
            low = middle
        else:
            high = middle
    return low


def _score(both: int, lost: int, won: int, ratio: float) -> float:
    """Returns how many standard deviations the kept share is above a hypothetical ratio.

    Under that hypothesis, a share x of the inputs that either model answers correctly is lost, and
    (x + ratio − 1) / ratio is won: x is the most likely value, the larger root of a quadratic.
    """
    count, minus, plus = both + lost + won, 1 - ratio, 1 + ratio
    linear = won + lost + minus * plus * (both + lost)
    root = math.sqrt(max(0.0, linear**2 - 4 * count * plus * lost * minus))
    x = max(0.0, minus, (linear + root) / (2 * count * plus))
    gained = (x - minus) / ratio
    variance = count * (gained + ratio**2 * x + minus**2 * max(0.0, 1 - x - gained))
    excess = won - ratio * lost + minus * both
    return excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)


class Sums:
    """Sums over samples; `a + b` adds them field by field.

    A field that is None in either operand is None in the result; fields in `LARGEST` take the
    maximum. A tuple has a sum per output and is empty without samples; a dict has counts.
    """

    __slots__ = ()
    LARGEST: ClassVar[frozenset[str]] = frozenset()

    def __add__(self, other: Self) -> Self:
        def added(name: str) -> Any:
            a, b = getattr(self, name), getattr(other, name)
            if a is None or b is None:
                return None
            if isinstance(a, tuple) and a and b:
                return tuple(map(operator.add, a, b))
            if isinstance(a, dict):
                return dict(Counter(a) + Counter(b))
            return max(a, b) if name in self.LARGEST else a + b

        return type(self)(*(added(part.name) for part in fields(self)))  # type: ignore[arg-type]


TOP = 5


@dataclass(frozen=True, slots=True)
class TopKCounts(Sums):
    """Counts of correctly classified samples, out of all `samples`.

    `among` counts those whose class is among the five best scores (None for up to five classes),
    and `both` those that the unmodified model also classifies correctly (None if unknown).
    """

    right: int = 0
    samples: int = 0
    among: int | None = 0
    both: int | None = 0

    @classmethod
    def of(cls, outputs: Array, labels: Labels, untouched: Array | None = None) -> Self:
        """Returns counts for class scores [b, classes] and labels [b]; else raises FeedError."""
        outputs = one_per_sample(outputs)
        if outputs.ndim != 2:
            raise FeedError(
                f"accuracy needs outputs of shape (batch, classes), but the model's have "
                f"{outputs.ndim} axes: {outputs.shape}",
                hint="leave the labels out to measure latency, routing and parity only",
            )
        if len(outputs) != len(labels):
            raise FeedError(f"{len(outputs)} outputs for {len(labels)} labels")
        right = outputs.argmax(axis=1) == labels
        in_top5 = None
        if outputs.shape[1] > TOP:
            best = np.argpartition(outputs, -TOP, axis=1)[:, -TOP:]
            in_top5 = int((best == labels[:, None]).any(axis=1).sum())
        in_both = None
        if untouched is not None:
            in_both = int((right & (one_per_sample(untouched).argmax(axis=1) == labels)).sum())
        return cls(int(right.sum()), len(labels), in_top5, in_both)

    def accuracy(self, untouched: TopKCounts) -> Accuracy:
        """Returns top-1 and top-5 accuracy, and the ratio of top-1 to the unmodified model's."""
        right, samples, in_top5, both = self.right, self.samples, self.among, self.both
        top1, base = right / samples, untouched.right / untouched.samples
        return Accuracy(
            top1,
            top1 / base if base > 0 else None,
            samples,
            top5=None if in_top5 is None else in_top5 / samples,
            top1_interval=wilson(right, samples),
            top5_interval=None if in_top5 is None else wilson(in_top5, samples),
            retention_interval=None
            if both is None or not untouched.right
            else score_interval(both, untouched.right - both, right - both),
        )


@dataclass(frozen=True, slots=True)
class ClassCounts(Sums):
    """Counts of samples, and of correctly classified ones, by class."""

    samples: dict[int, int] = field(default_factory=dict)
    right: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, outputs: Array, labels: Labels) -> Self:
        """Returns counts for class scores [b, classes] and labels [b]."""
        right = one_per_sample(outputs).argmax(axis=1) == labels
        return cls(*(dict(Counter(part.tolist())) for part in (labels, labels[right])))

    def losing(self, untouched: ClassCounts) -> tuple[ClassChange, ...]:
        """Returns the classes with fewer correct answers than in the unmodified model."""
        changes = [
            ClassChange(label, n, untouched.right.get(label, 0), self.right.get(label, 0))
            for label, n in self.samples.items()
        ]
        changes = [change for change in changes if change.right < change.untouched]
        changes.sort(key=lambda change: (change.right - change.untouched, change.label))
        return tuple(changes[:MAX_LOSING_CLASSES])


@dataclass(frozen=True, slots=True)
class RoutingOverlap(Sums):
    """Sums over chosen sets: their Jaccard index, and samples with equal sets in every layer.

    If tokens choose, the samples are tokens; of their `choices` in all layers, `same` are equal and
    `ties` are excluded.
    """

    jaccard: float = 0.0
    pairs: int = 0
    exact: int = 0
    samples: int = 0
    same: int = 0
    choices: int = 0
    ties: int = 0

    @classmethod
    def of(
        cls,
        chosen: Mapping[str, Array],
        reference: Mapping[str, Array],
        margins: Mapping[str, Array] | None = None,
        tie: float = 0.0,
    ) -> Self:
        """Compares the experts [b, k] chosen in each layer; ParityError if layers or sizes differ.

        With `margins` [b], by layer, rows are tokens: a choice with a margin up to `tie` is a tie,
        and either choice is correct.
        """
        if chosen.keys() != reference.keys():
            raise ParityError(
                f"routing of layers {sorted(chosen)} cannot be compared with {sorted(reference)}"
            )
        for name, expected in reference.items():
            if chosen[name].shape != expected.shape:
                raise ParityError(
                    f"layer {name}: chosen experts have shape {chosen[name].shape}, "
                    f"but the reference's have {expected.shape}"
                )
        if len({experts.shape[0] for experts in reference.values()}) > 1:
            raise ParityError(
                "routing cannot be compared: encoder and decoder route different tokens",
                hint="measure one part at a time: --set part=encoder, --set part=decoder",
            )
        table = np.stack([jaccard(chosen[name], experts) for name, experts in reference.items()])
        if not margins:
            exact = int((table == 1).all(axis=0).sum())  # over [layers, b]
            return cls(float(table.sum()), table.size, exact, table.shape[1])
        tied = np.stack([margins[name] <= tie for name in reference])
        same, clear = table == 1, ~tied
        return cls(
            jaccard=float(table[clear].sum()),
            pairs=int(clear.sum()),
            exact=int((same | tied).all(axis=0).sum()),
            samples=table.shape[1],
            same=int(same[clear].sum()),
            choices=table.size,
            ties=int(tied.sum()),
        )

    def agreement(self) -> RoutingAgreement:
        """Returns the mean Jaccard index and the share of samples that agree in every layer."""
        jaccard = self.jaccard / self.pairs if self.pairs else 1.0
        exact = self.exact / self.samples
        if not self.choices:
            return RoutingAgreement(jaccard, exact)
        same = self.same / self.pairs if self.pairs else 1.0
        return RoutingAgreement(jaccard, exact, same, self.ties / self.choices)


@dataclass(frozen=True, slots=True)
class ParityStatistics(Sums):
    """Sums for the largest difference and the cosine of all outputs.

    `same` is the number of outputs of inputs, or tokens, with the same experts as the reference.
    The fields `same_…` are their largest difference and output, and their sums of squares.
    """

    LARGEST = frozenset({"max_abs", "same_max_abs", "same_largest"})

    max_abs: float = 0.0
    dot: float = 0.0
    squares: float = 0.0
    reference_squares: float = 0.0
    outputs: int = 0
    same: int = 0
    same_max_abs: float = 0.0
    same_largest: float = 0.0
    same_squares: float = 0.0
    same_reference_squares: float = 0.0

    @classmethod
    def of(cls, outputs: Array, reference: Array, mask: Array | None = None) -> Self:
        """Compares outputs of one batch. Raises ParityError for other shapes, NaN or Inf.

        `mask` marks the inputs [b], or tokens [b, m], with the same experts; None for all.
        """
        if outputs.shape != reference.shape:
            raise ParityError(
                f"outputs have shape {outputs.shape}, but PyTorch's have {reference.shape}"
            )
        a, b = outputs.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
        if not np.isfinite(a).all():
            raise ParityError(f"{int((~np.isfinite(a)).sum())} of {a.size} outputs are not finite")
        error, expected = a - b, b
        if mask is not None:
            error, expected = (x.reshape(outputs.shape)[mask].ravel() for x in (error, expected))
        return cls(
            max_abs=float(np.abs(a - b).max()),
            dot=float(a @ b),
            squares=float(a @ a),
            reference_squares=float(b @ b),
            outputs=a.size,
            same=error.size,
            same_max_abs=float(np.abs(error).max(initial=0.0)),
            same_largest=float(np.abs(expected).max(initial=0.0)),
            same_squares=float(error @ error),
            same_reference_squares=float(expected @ expected),
        )

    def error_beyond(self, bounds: Tolerance) -> float | None:
        """Returns the error of outputs with the same experts, if it exceeds the bounds.

        In FP32, it is the largest difference divided by max|y|. At lower precision that would grow
        with the data, so it is the norm of the differences divided by that of the outputs. None if
        fewer than half of the outputs have the same experts.
        """
        if 2 * self.same < self.outputs or not self.same_largest:
            return None
        largest = self.same_max_abs / self.same_largest
        norms = math.sqrt(self.same_squares / self.same_reference_squares)
        distance = largest if bounds.routing == 1.0 else norms
        return None if distance <= bounds.rtol + bounds.atol / self.same_largest else distance

    def parity(self) -> OutputParity:
        """Returns the largest absolute difference and the cosine; zero outputs have cosine 1."""
        norm = float(np.sqrt(self.squares * self.reference_squares))
        if norm == 0:
            return OutputParity(self.max_abs, 1.0 if self.max_abs == 0 else 0.0)
        return OutputParity(self.max_abs, self.dot / norm)


@dataclass(frozen=True, slots=True)
class SequenceLosses:
    """The summed negative log-likelihood [b], in nats, and the tokens [b] of each sequence."""

    nll: Array
    tokens: Labels

    @staticmethod
    def of(logits: Array, ids: Labels, targets: Labels | None = None) -> SequenceLosses:
        """Returns sums over logits [b, m, v] of token ids [b, m].

        Without `targets` [b, m] the target at a position is the next id, and the last position has
        none; −1 in `targets` does not count. Raises FeedError for logits that do not fit the ids.
        """
        import torch  # not needed to write reports
        from torch.nn import functional as F

        if logits.ndim != 3 or logits.shape[:2] != ids.shape:
            raise FeedError(
                f"perplexity needs logits of shape (batch, tokens, vocabulary) for ids of shape "
                f"{ids.shape}, but the model's logits have {logits.shape}"
            )
        if targets is None:
            targets = np.full_like(ids, IGNORED)
            targets[:, :-1] = ids[:, 1:]
        # One sequence at a time: logits in double precision take twice the memory.
        nll = [
            F.cross_entropy(
                torch.from_numpy(sequence).double(),
                torch.from_numpy(target.astype(np.int64)),
                ignore_index=IGNORED,
                reduction="sum",
            )
            for sequence, target in zip(logits, targets, strict=True)
        ]
        return SequenceLosses(np.array(nll), (targets != IGNORED).sum(axis=1))


@dataclass(frozen=True, slots=True)
class NegativeLogLikelihood(Sums):
    """Summed negative log-likelihood (nats) of the tokens of some sequences.

    `squares`, `cross` and `lengths` are Σ nll², Σ nll · tokens and Σ tokens² over the sequences,
    for the spread between sequences. `apart_squares` and `apart_cross` are Σ d² and Σ d · tokens,
    where d is the unmodified model's nll minus this model's for the same sequence.
    """

    nll: float = 0.0
    tokens: int = 0
    sequences: int = 0
    squares: float = 0.0
    cross: float = 0.0
    lengths: int = 0
    apart_squares: float = 0.0
    apart_cross: float = 0.0

    @staticmethod
    def of(losses: SequenceLosses, untouched: SequenceLosses) -> NegativeLogLikelihood:
        """Returns sums over sequences, and over the same sequences in the unmodified model."""
        nll, tokens = losses.nll, losses.tokens
        difference = untouched.nll - nll
        return NegativeLogLikelihood(
            nll=float(nll.sum()),
            tokens=int(tokens.sum()),
            sequences=int((tokens > 0).sum()),
            squares=float(nll @ nll),
            cross=float(nll @ tokens),
            lengths=int(tokens @ tokens),
            apart_squares=float(difference @ difference),
            apart_cross=float(difference @ tokens),
        )

    @property
    def mean(self) -> float:
        return self.nll / self.tokens

    def perplexity(self, untouched: NegativeLogLikelihood) -> Perplexity:
        """Returns exp(mean nll), and the kept share relative to the unmodified model.

        The kept share is exp(mean d). Its interval is that of the mean of the differences, so
        sequences that are hard for both models do not widen it.
        """
        difference = untouched.mean - self.mean
        return Perplexity(
            value=math.exp(self.mean),
            retention=math.exp(difference),
            tokens=self.tokens,
            interval=self._interval(self.mean, self.squares, self.cross),
            retention_interval=self._interval(difference, self.apart_squares, self.apart_cross),
        )

    def _interval(self, mean: float, squares: float, cross: float) -> Interval | None:
        """Returns the 95% interval of exp(Σ x / Σ tokens), from Σ x² and Σ x · tokens."""
        if self.sequences < 2:
            return None
        # The variance of a ratio of two sums over sequences.
        residual = squares - 2 * mean * cross + mean * mean * self.lengths
        scale = self.sequences / (self.sequences - 1)
        half = Z * math.sqrt(max(0.0, residual * scale)) / self.tokens
        return Interval(math.exp(mean - half), math.exp(mean + half))
