"""Gives credit for the answer to each input: by class, by attribute, or by regression output.

The credit is whether the class is correct or, for each output, a number: whether the attribute is
correct, or 1 − (y − t)² / var(t), whose mean over the inputs is R².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...bench.data import LabelledData
from ...bench.measure.answers import are_attributes, check_attributes, decided, per_output
from ...data.batches import Array, Labels
from ...errors import FeedError

Judged = Literal["classes", "attributes", "targets"]
"""The kind of labels: classes [s], attributes [s, o], or the targets [s, o] of a regression."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Gives credit for answers by labels. `spread` [o] is the variance of the targets."""

    judged: Judged
    labels: Labels
    outputs: int
    spread: Array

    @property
    def samples(self) -> tuple[int, ...]:
        """The number of inputs of each class; for an attribute or output, that of all inputs."""
        if self.judged == "classes":
            return tuple(np.bincount(self.labels, minlength=self.outputs).tolist())
        return (len(self.labels),) * self.outputs

    def credit(self, scores: Array, rows: Array | slice = slice(None)) -> Array:
        """Returns the credits of the answers to some inputs: [b], or of each output [b, o]."""
        labels = self.labels[rows]
        if self.judged == "classes":
            return np.asarray(scores.argmax(axis=1) == labels)
        if self.judged == "attributes":
            return np.asarray(decided(scores) == (labels == 1))
        error = (scores.astype(np.float64) - labels) ** 2
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(1 - error / self.spread)

    def figures(self, credit: Array) -> tuple[float | None, ...]:
        """Returns the accuracy of each class or attribute, or R², from the credits of all inputs.

        A figure is None for a class without inputs or an output whose targets are all the same.
        """
        if self.judged == "classes":
            counts = self.samples
            hits = np.bincount(self.labels[credit], minlength=self.outputs)
            return tuple(float(h / n) if n else None for h, n in zip(hits, counts, strict=True))
        known = self.spread > 0
        means = credit.mean(axis=0)
        return tuple(float(m) if k else None for m, k in zip(means, known, strict=True))


def class_labels(data: LabelledData, scores: Array, where: str) -> tuple[Array, Labels]:
    """Returns the scores with classes or attributes; raises `FeedError` for other labels."""
    assert data.labels is not None  # the caller has checked them
    pair = per_output(scores, data.labels)
    if pair is None:
        data.check_classes(scores.shape[1])
        return scores, data.labels
    check_attributes(pair[1], where)
    return pair


def judge_of(data: LabelledData, scores: Array) -> Judge:
    """Returns the judge of scores [s, o] by the labels; raises `FeedError` for invalid labels."""
    assert data.labels is not None  # the caller has checked them
    where = f"array '{data.label_name or 'label'}'"
    pair = per_output(scores, data.labels, where=where)
    outputs = scores.shape[1]
    if pair is None:
        data.check_classes(outputs)
        return Judge("classes", data.labels, outputs, np.ones(outputs))
    labels = pair[1]
    if are_attributes(labels):
        check_attributes(labels, where)
        return Judge("attributes", labels, outputs, np.ones(outputs))
    spread = labels.var(axis=0)
    if not (spread > 0).any():
        raise FeedError(
            f"{where}: the targets of every input are the same, so R² is not defined",
            hint="give inputs whose targets differ",
        )
    return Judge("targets", labels, outputs, spread)
