"""What is kept of the untouched model's quality, with a paired 95% interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from ....bench.metrics import (
    NegativeLogLikelihood,
    SequenceLosses,
    Sums,
    Z,
    one_per_sample,
    score_interval,
    wilson,
)
from ....bench.runners.base import first_of
from ....common.user_code import callable_named
from ....data.feeds import IGNORED, Array, Labels, check_classes
from ....errors import FeedError, UsageError
from ....exporter.inputs import Inputs
from ....exporter.parity import cosines
from .holdout import Holdout, batch_size, in_batches

MetricName = Literal["accuracy", "perplexity", "agreement", "function"]

Function = Callable[[Array, Labels | None], Array]
"""A user's own metric: outputs [b, …] and labels to a score of each input [b], more is better."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What is kept of the untouched model's quality over some inputs: 1 is all.

    `low` and `high` are the ends of the 95% interval, paired input by input. `shift` is how far the
    outputs themselves moved: what ranks candidates that classify alike. `score` is the mean of the
    metric itself and `untouched` that of the untouched model; `tokens` are those of token models.
    """

    kept: float
    low: float
    high: float
    shift: float
    inputs: int
    score: float = 0.0
    untouched: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tally(Sums):
    """Sums over some inputs of scores, of the untouched model's, and of their products.

    `tokens` are the losses of token models, which are judged by perplexity; `base` is then the
    summed loss of the untouched model.
    """

    inputs: int = 0
    own: float = 0.0
    base: float = 0.0
    own_squares: float = 0.0
    base_squares: float = 0.0
    both: float = 0.0
    shift: float = 0.0
    tokens: NegativeLogLikelihood = field(default_factory=NegativeLogLikelihood)


@dataclass(frozen=True)
class Metric:
    """What quality is: a name, and a function of the user's own where it is none of ours.

    `tokens`: inputs are sequences, and each of their tokens has class scores of its own.
    """

    name: MetricName
    function: Function | None = None
    title: str = ""
    tokens: bool = False

    def tally(self, y: Array, base: Array, x: Inputs, labels: Labels | None) -> Tally:
        """Returns the sums of a batch: outputs y and those of the untouched model, [b, …].

        Raises `FeedError` for labels or scores that cannot be.
        """
        y, base = one_per_sample(y), one_per_sample(base)
        moved = self._shift(y, base)
        if self.name == "perplexity":
            ids = first_of(x)
            own_losses, base_losses = (
                SequenceLosses.of(logits, ids, labels) for logits in (y, base)
            )
            tokens = NegativeLogLikelihood.of(own_losses, base_losses)
            losses = float(base_losses.nll.sum())
            return Tally(inputs=len(y), base=losses, shift=moved, tokens=tokens)
        own, theirs = self._scores(y, base, labels), self._scores(base, base, labels)
        return Tally(
            inputs=len(y),
            own=float(own.sum()),
            base=float(theirs.sum()),
            own_squares=float(own @ own),
            base_squares=float(theirs @ theirs),
            both=float(own @ theirs),
            shift=moved,
        )

    def quality(self, tally: Tally) -> Quality:
        """Returns what is kept; raises `FeedError` where there is nothing to keep."""
        n = tally.inputs
        moved = tally.shift / n
        if self.name == "perplexity":
            untouched = NegativeLogLikelihood(nll=tally.base, tokens=tally.tokens.tokens)
            perplexity = tally.tokens.perplexity(untouched)
            pair = perplexity.retention_interval
            return Quality(
                kept=perplexity.retention,
                low=0.0 if pair is None else pair.low,
                high=math.inf if pair is None else pair.high,
                shift=moved,
                inputs=n,
                score=perplexity.value,
                untouched=perplexity.value * perplexity.retention,
                tokens=perplexity.tokens,
            )
        if tally.base <= 0:
            raise FeedError(
                f"--metric {self.title or self.name}: the untouched model scores {tally.base:g} on "
                f"{n} inputs, so there is nothing to keep",
                hint="are the labels this model's classes, counted from 0?",
            )
        kept = tally.own / tally.base
        if self.name == "agreement" and not self.tokens:
            share = wilson(round(tally.own), n)
            low, high = share.low, share.high
        elif self.name == "accuracy" and not self.tokens:
            both = round(tally.both)
            pair = score_interval(both, round(tally.base) - both, round(tally.own) - both)
            low, high = pair.low, pair.high
        else:
            half = _half_width(tally, kept)
            low, high = kept - half, kept + half
        return Quality(
            kept=kept,
            low=low,
            high=high,
            shift=moved,
            inputs=n,
            score=tally.own / n,
            untouched=tally.base / n,
        )

    def needed(self, keep: float, share: float) -> int | None:
        """Returns how many inputs must confirm, if all agree, before `keep` can be shown.

        `share` is the untouched model's accuracy; None where no number can be told beforehand.
        """
        if self.tokens:  # how much one input tells depends on its tokens
            return None
        if self.name == "function":
            return None
        right = share if self.name == "accuracy" else 1.0
        return math.ceil(Z**2 * keep / (1 - keep) / max(right, 1e-9)) + 1

    def _scores(self, y: Array, base: Array, labels: Labels | None) -> Array:
        """A score [b] of each input."""
        if self.function is not None:
            return _own_scores(self.title, self.function, y, labels)
        wanted = base.argmax(axis=-1) if self.name == "agreement" else labels
        assert wanted is not None, "accuracy has labels (`metric_for`)"
        right = (y.argmax(axis=-1) == wanted) & np.isfinite(y).all(axis=-1)
        scores: Array = right.astype(np.float64)
        if scores.ndim == 1:
            return scores
        counted = (wanted != IGNORED).reshape(len(scores), -1)
        shares: Array = scores.reshape(counted.shape).sum(axis=1) / counted.sum(axis=1).clip(min=1)
        return shares

    def _shift(self, y: Array, base: Array) -> float:
        """How far outputs moved, summed over inputs: the divergence of class scores, or 1 − cos."""
        if self.name == "function":
            return float((1 - cosines(y, base)).sum())
        if not self.tokens:
            return _divergence(base, y)
        # One by one: in double precision, a language model's scores take twice their room.
        return sum(_divergence(*pair) for pair in zip(base[:, None], y[:, None], strict=True))


def check_enough(metric: Metric, keep: float | None, holdout: Holdout, outputs: Array) -> None:
    """Raises `FeedError` where no outcome could show what is to be kept."""
    if keep is None:
        return
    search = holdout.search
    scores = sum(
        (
            metric.tally(outputs[rows], outputs[rows], x, labels)
            for rows, x, labels in in_batches(search, batch_size(outputs))
        ),
        start=Tally(),
    )
    metric.quality(scores)
    needed = metric.needed(keep, scores.base / scores.inputs)
    count = holdout.confirming_count
    if needed is not None and count is not None and count < needed:
        raise FeedError(
            f"--data: {count} of its inputs confirm, and to show that {keep:.4g} is kept "
            f"takes at least {needed}, if all agree",
            hint=f"give at least {2 * needed} inputs, half of them to confirm, or ask for less",
        )


def metric_for(name: str | None, outputs: Array, x: Inputs, labels: Labels | None) -> Metric:
    """Returns the metric that is asked for, or that the data allow.

    `outputs` are the untouched model's for inputs x. Raises `UsageError` for one that does not go
    with them, `FeedError` for labels that are of one class.
    """
    classes = one_per_sample(outputs)
    main = first_of(x)
    of_ids = main.dtype.kind in "iu" and main.ndim == 2 and outputs.ndim == 3
    tokens = of_ids and (labels is None or labels.ndim == 2)
    if name is None:
        name = "perplexity" if tokens else "agreement" if labels is None else "accuracy"
        if classes.ndim != 2 and not tokens:
            raise UsageError(
                f"--metric: the model's outputs {outputs.shape} are no class scores, so what is to "
                "be kept must be said",
                hint="--metric package.module:function scores each input by its outputs and labels",
            )
    if ":" in name:
        return Metric("function", callable_named(name, "a metric"), name)
    if name not in ("accuracy", "perplexity", "agreement"):
        raise UsageError(
            f"--metric {name}: there is no such metric",
            hint="accuracy, perplexity, agreement, or package.module:function",
        )
    if name == "perplexity" and not tokens:
        raise UsageError(
            f"--metric perplexity: the model's outputs {outputs.shape} do not foretell tokens",
            hint="use accuracy or agreement",
        )
    if name == "accuracy":
        if labels is None:
            raise UsageError(
                "--metric accuracy: the data have no labels",
                hint="add the array `label` to the .npz, or use --metric agreement",
            )
        if classes.shape[:-1] != labels.shape:
            raise FeedError(f"--data: labels {labels.shape} for outputs {outputs.shape}")
        counted = labels[labels != IGNORED]
        check_classes(counted, classes.shape[-1], "--data")
        if len(np.unique(counted)) < 2:
            raise FeedError(
                f"--data: all {labels.size} labels are of one class, so accuracy says nothing",
                hint="give inputs of every class, mixed",
            )
    known: Any = name
    return Metric(known, title=name, tokens=tokens)


def _own_scores(title: str, function: Function, y: Array, labels: Labels | None) -> Array:
    try:
        scores = np.asarray(function(y, labels), dtype=np.float64)
    except Exception as error:  # the user's code may fail in any way
        raise UsageError(
            f"--metric {title}: it failed: {type(error).__name__}: {error}",
            hint="it takes outputs [b, …] and labels, and returns a score of each input [b]",
        ) from error
    if scores.shape != (len(y),):
        raise UsageError(
            f"--metric {title}: it returned {scores.shape} for {len(y)} inputs",
            hint="it takes outputs [b, …] and labels, and returns a score of each input [b]",
        )
    if not np.isfinite(scores).all():
        at = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise UsageError(
            f"--metric {title}: it returned {scores[at]} for an input",
            hint="a score is a finite number for each input: leave such inputs out, or give them 0",
        )
    return scores


def _half_width(tally: Tally, ratio: float) -> float:
    """Half of the interval of a ratio of two means over the same inputs (delta method).

    One more input is added that only one of the two scores, so that two which agree on every input
    still get a width.
    """
    n, mean = tally.inputs, tally.base / tally.inputs
    residual = tally.own_squares - 2 * ratio * tally.both + ratio**2 * tally.base_squares
    variance = (max(0.0, residual) + mean**2) / (n * max(1, n - 1))
    return Z * math.sqrt(variance) / mean


def _divergence(base: Array, y: Array) -> float:
    """The Kullback-Leibler divergence of scores [b, …] from the base's, summed over inputs."""
    log_p, log_q = (torch.from_numpy(x).double().log_softmax(dim=-1) for x in (base, y))
    apart = (log_p.exp() * (log_p - log_q)).sum(dim=-1).nan_to_num(nan=math.inf)
    return float(apart.reshape(len(y), -1).mean(dim=1).sum())
