"""Sums the scores of whole graphs on one of the two halves of the data: search or confirmation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...data.batches import Array, Labels
from ...exporter.inputs import Inputs
from ...exporter.session import Session
from .accuracy.quality import Metric, Tally


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs with their labels and the untouched model's outputs, to evaluate graphs."""

    inputs: Inputs
    labels: Labels | None
    outputs: Array
    metric: Metric

    @property
    def bytes(self) -> int:
        arrays = [self.inputs] if isinstance(self.inputs, np.ndarray) else self.inputs.values()
        return self.outputs.nbytes + sum(array.nbytes for array in arrays)

    def tally(self, session: Session) -> Tally:
        """Returns the sums of a graph over the batch."""
        return self.metric.tally(session(self.inputs), self.outputs, self.inputs, self.labels)


Tallies = Callable[[Sequence[Session]], list[Tally]]
"""Returns the sums of each graph over the same batches."""

Evaluate = Callable[[Iterable[Batch]], Tallies]
"""Returns a function that evaluates graphs over the given batches, which may be an iterator."""


def evaluate_here(batches: Iterable[Batch]) -> Tallies:
    """Returns a function that evaluates graphs on this machine, batch by batch."""

    def tallies(sessions: Sequence[Session]) -> list[Tally]:
        sums = [Tally() for _ in sessions]
        for batch in batches:
            sums = [
                tally + batch.tally(session) for tally, session in zip(sums, sessions, strict=True)
            ]
        return sums

    return tallies
