"""Measures how much of the untouched model's quality is kept, with a paired 95% interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from ....bench.measure.answers import (
    AnswerCounts,
    AnswerScores,
    PairedScores,
    are_attributes,
    check_attributes,
    per_output,
)
from ....bench.metrics import NegativeLogLikelihood, SequenceLosses, Z, score_interval, wilson
from ....bench.runners.base import first_of
from ....data.batches import IGNORED, Array, Labels
from ....data.feeds import check_classes
from ....data.user_code import callable_named
from ....errors import FeedError, UsageError
from ....exporter.bundle.parity import cosines
from ....exporter.checks.accuracy import one_per_sample
from ....exporter.inputs import Inputs
from .holdout import Holdout, batch_size, in_batches

MetricName = Literal["accuracy", "r2", "perplexity", "agreement", "function"]

R2 = "r2"

Function = Callable[[Array, Labels | None], Array]
"""A user's metric: maps outputs [b, …] and labels to a score for each input; higher is better."""


@dataclass(frozen=True, slots=True)
class Quality:
    """The share of the untouched model's quality that is kept on some inputs; 1 is all of it.

    `low` and `high` are the ends of the 95% interval, paired input by input. `shift` is how far the
    outputs moved; it ranks candidates with equal classes. `score` is the mean of the metric and
    `untouched` that of the untouched model; `tokens` is the number of tokens for token models.
    `answers` has the metrics if labels have one number for each output.
    """

    kept: float
    low: float
    high: float
    shift: float
    inputs: int
    score: float = 0.0
    untouched: float = 0.0
    tokens: int = 0
    answers: AnswerScores = AnswerScores()
    untouched_answers: AnswerScores = AnswerScores()


@dataclass(frozen=True, slots=True)
class Tally(PairedScores):
    """Sums of the scores over some inputs, and of how far the outputs moved.

    `tokens` has the losses of token models, whose metric is perplexity; `base` is then the sum of
    the untouched model's losses. `answers` has the sums if labels have one number for each output.
    """

    shift: float = 0.0
    tokens: NegativeLogLikelihood = field(default_factory=NegativeLogLikelihood)
    answers: AnswerCounts = field(default_factory=AnswerCounts)
    base_answers: AnswerCounts = field(default_factory=AnswerCounts)


@dataclass(frozen=True)
class Metric:
    """A metric: a built-in one, by name, or a user's function.

    `tokens` is whether inputs are sequences in which each token has class scores, `each_output`
    whether labels have one number for each output, as attributes and regression targets do.
    """

    name: MetricName
    function: Function | None = None
    title: str = ""
    tokens: bool = False
    each_output: bool = False

    def tally(self, y: Array, base: Array, x: Inputs, labels: Labels | None) -> Tally:
        """Returns the sums for a batch: outputs y and the untouched model's outputs `base`, [b, …].

        Raises `FeedError` for invalid labels or scores.
        """
        y, base = one_per_sample(y), one_per_sample(base)
        moved = self.shift(y, base)
        if self.name == "perplexity":
            ids = first_of(x)
            own_losses, base_losses = (
                SequenceLosses.of(logits, ids, labels) for logits in (y, base)
            )
            tokens = NegativeLogLikelihood.of(own_losses, base_losses)
            losses = float(base_losses.nll.sum())
            return Tally(inputs=len(y), base=losses, shift=moved, tokens=tokens)
        if self.each_output:
            pair = None if labels is None else per_output(y, labels, where="--data")
            assert pair is not None  # `metric_for` checked the labels
            own_numbers, targets = pair
            base_numbers = base.reshape(own_numbers.shape)
            answers, base_answers = (
                # Which metric applies depends on all labels (`metric_for`), not those of one batch.
                replace(
                    AnswerCounts.of(numbers, targets, base_numbers),
                    numeric=self.name != "accuracy" or not are_attributes(targets),
                    one_hot=0,
                )
                for numbers in (own_numbers, base_numbers)
            )
            return Tally(inputs=len(y), shift=moved, answers=answers, base_answers=base_answers)
        scores, base_scores = self._scores(y, base, labels), self._scores(base, base, labels)
        return Tally(**asdict(PairedScores.of(scores, base_scores)), shift=moved)

    def quality(self, tally: Tally) -> Quality:
        """Returns the kept quality; raises `FeedError` if the untouched model's score is 0."""
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
        if self.each_output:
            return self._quality_per_output(tally)
        self._check_base(tally.base, n)
        interval = tally.kept_interval
        if self.name == "agreement" and not self.tokens:
            interval = wilson(round(tally.own), n)
        elif self.name == "accuracy" and not self.tokens:
            both = round(tally.both)
            interval = score_interval(both, round(tally.base) - both, round(tally.own) - both)
        assert interval is not None  # the untouched model has a score
        return Quality(
            kept=tally.own / tally.base,
            low=interval.low,
            high=interval.high,
            shift=moved,
            inputs=n,
            score=tally.own / n,
            untouched=tally.base / n,
        )

    def _check_base(self, base: float, inputs: int) -> None:
        if base <= 0:
            raise FeedError(
                f"--metric {self.title or self.name}: the untouched model scores {base:g} on "
                f"{inputs} inputs, so there is nothing to keep",
                hint="check that the labels fit this model: classes counted from 0, attributes, or "
                "the numbers that the model predicts",
            )

    def _quality_per_output(self, tally: Tally) -> Quality:
        """Returns the kept share of the attributes' mean accuracy, or of R²."""
        answers = tally.answers.answers(tally.base_answers)
        base = tally.base_answers.answers(tally.base_answers)
        if answers.accuracy is None and self.name == "accuracy":
            raise FeedError(
                "--data: some labels are 0 or 1, like attributes, but others are not",
                hint="save attributes as 0 and 1; use --metric r2 for other numbers",
            )
        score, untouched = _score(answers), _score(base)
        self._check_base(untouched, tally.inputs)
        judged = answers.accuracy or answers.regression
        interval = None if judged is None else judged.retention_interval
        assert interval is not None  # the untouched model has a score
        return Quality(
            kept=score / untouched,
            low=interval.low,
            high=interval.high,
            shift=tally.shift / tally.inputs,
            inputs=tally.inputs,
            score=score,
            untouched=untouched,
            answers=answers,
            untouched_answers=base,
        )

    def needed(self, keep: float, share: float) -> int | None:
        """Returns how many inputs are needed to confirm `keep` if both models agree on all of them.

        `share` is the untouched model's accuracy. Returns None if the number depends on the data.
        """
        # In these cases, the score of an input is more than correct or wrong.
        if self.tokens or self.each_output or self.name == "function":
            return None
        correct = share if self.name == "accuracy" else 1.0
        return math.ceil(Z**2 * keep / (1 - keep) / max(correct, 1e-9)) + 1

    def _scores(self, y: Array, base: Array, labels: Labels | None) -> Array:
        if self.function is not None:
            return _scores_by(self.title, self.function, y, labels)
        classes = base.argmax(axis=-1) if self.name == "agreement" else labels
        assert classes is not None, "accuracy has labels (`metric_for`)"
        correct = (y.argmax(axis=-1) == classes) & np.isfinite(y).all(axis=-1)
        scores: Array = correct.astype(np.float64)
        if scores.ndim == 1:
            return scores
        counted = (classes != IGNORED).reshape(len(scores), -1)
        shares: Array = scores.reshape(counted.shape).sum(axis=1) / counted.sum(axis=1).clip(min=1)
        return shares

    def shift(self, y: Array, base: Array) -> float:
        """Returns the sum of how far outputs moved: divergence, squared distance or 1 − cosine."""
        if self.name == "function":
            return float((1 - cosines(y, base)).sum())
        if self.name == "r2":
            return float(((y - base).astype(np.float64) ** 2).reshape(len(y), -1).mean(1).sum())
        if self.each_output:
            return _binary_divergence(base, y)
        if not self.tokens:
            return _divergence(base, y)
        # One input at a time, because a language model's scores in float64 take twice the memory.
        return sum(_divergence(*pair) for pair in zip(base[:, None], y[:, None], strict=True))


def check_enough_inputs(
    metric: Metric, keep: float | None, holdout: Holdout, outputs: Array
) -> None:
    """Raises `FeedError` if there are too few inputs to confirm `keep` even in the best case."""
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
    found = metric.quality(scores)
    needed = metric.needed(keep, found.untouched)
    count = holdout.confirming_count
    if needed is not None and count is not None and count < needed:
        raise FeedError(
            f"--data: {count} inputs are left to confirm the result, but at least {needed} are "
            f"needed to show that {keep:.4g} is kept",
            hint=f"give at least {2 * needed} inputs, half of them to confirm, or lower --keep",
        )


def metric_for(name: str | None, outputs: Array, x: Inputs, labels: Labels | None) -> Metric:
    """Returns the metric that the user chose, or else the one that fits the data.

    `outputs` are the untouched model's for inputs x. Raises `UsageError` for a metric that does not
    fit them, `FeedError` if all labels are the same.
    """
    classes = one_per_sample(outputs)
    main = first_of(x)
    takes_ids = main.dtype.kind in "iu" and main.ndim == 2 and outputs.ndim == 3
    tokens = takes_ids and (labels is None or labels.ndim == 2)
    numbers = None
    if labels is not None and not (name is not None and ":" in name):
        numbers = per_output(outputs, labels[: len(outputs)], ids=takes_ids, where="--data")
    if numbers is not None and name in (None, "accuracy", R2):
        return _metric_per_output(name, numbers[1])
    if name is None:
        name = "perplexity" if tokens else "agreement" if labels is None else "accuracy"
        if classes.ndim != 2 and not tokens:
            raise UsageError(
                f"--metric: one is needed, since the outputs {outputs.shape} are not class scores",
                hint="--metric package.module:function scores each input by its outputs and labels",
            )
    if ":" in name:
        return Metric("function", callable_named(name, "a metric"), name)
    if name == R2:
        raise UsageError(
            f"--metric {name}: the data have no number for each output",
            hint=f"give --data with labels of shape (batch, {classes.shape[-1]})",
        )
    if name == "perplexity" and not tokens:
        raise UsageError(
            f"--metric perplexity: the model's outputs {outputs.shape} are not token predictions",
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
                f"--data: all {labels.size} labels are the same class, so accuracy cannot be "
                "measured",
                hint="give inputs of every class",
            )
    metric_name: Any = name
    return Metric(metric_name, title=name, tokens=tokens)


def _metric_per_output(name: str | None, labels: Labels) -> Metric:
    """Returns the metric for labels [b, o]: accuracy for attributes, R² for other numbers."""
    if name == "accuracy" or (name is None and are_attributes(labels)):
        check_attributes(labels, "--data")
        if (labels == labels[0]).all():
            raise FeedError(
                f"--data: all {len(labels)} inputs have the same labels, so accuracy cannot be "
                "measured",
                hint="give inputs with and without each attribute",
            )
        return Metric("accuracy", title="accuracy", each_output=True)
    return Metric("r2", title="R²", each_output=True)


def _scores_by(title: str, function: Function, y: Array, labels: Labels | None) -> Array:
    signature = "a function of outputs [b, …] and labels must return a score for each input [b]"
    try:
        scores = np.asarray(function(y, labels), dtype=np.float64)
    except Exception as error:  # user code may raise anything
        reason = f"the function failed: {type(error).__name__}: {error}"
        raise UsageError(f"--metric {title}: {reason}", hint=signature) from error
    if scores.shape != (len(y),):
        reason = f"the function returned an array of shape {scores.shape} for {len(y)} inputs"
        raise UsageError(f"--metric {title}: {reason}", hint=signature)
    if not np.isfinite(scores).all():
        at = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise UsageError(
            f"--metric {title}: the function returned {scores[at]} for an input",
            hint="a score must be finite: leave such inputs out, or return 0 for them",
        )
    return scores


def _score(answers: AnswerScores) -> float:
    if answers.accuracy is not None:
        return answers.accuracy.top1
    return 0.0 if answers.regression is None else answers.regression.r2


def _binary_divergence(base: Array, y: Array) -> float:
    """Returns the attributes' mean divergence of two binary decisions, summed over inputs."""
    p, q = (torch.from_numpy(x).double() for x in (base, y))
    yes = p.sigmoid() * (torch.nn.functional.logsigmoid(p) - torch.nn.functional.logsigmoid(q))
    no = (-p).sigmoid() * (torch.nn.functional.logsigmoid(-p) - torch.nn.functional.logsigmoid(-q))
    divergences = (yes + no).nan_to_num(nan=math.inf)
    return float(divergences.reshape(len(y), -1).mean(dim=1).sum())


def _divergence(base: Array, y: Array) -> float:
    """Returns the Kullback-Leibler divergence of y from `base`, [b, …], summed over inputs."""
    log_p, log_q = (torch.from_numpy(x).double().log_softmax(dim=-1) for x in (base, y))
    divergences = (log_p.exp() * (log_p - log_q)).sum(dim=-1).nan_to_num(nan=math.inf)
    return float(divergences.reshape(len(y), -1).mean(dim=1).sum())
