"""The data in two halves: one that the search sees, and one that is read once, to confirm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..bench.data import Labelled, LabelledData
from ..calibration.feeds import Array, LabelledBatch, Labels
from ..errors import FeedError

SEED = 20
BLOCK = 4096
"""Inputs whose side is drawn at once: the same for the same place, however long the data are."""

BATCH = 64

SEEN = 4096
SEEN_BYTES = 1 << 30
"""The most inputs, and bytes of them, that the search holds."""


def searched(first: int, count: int) -> Array:
    """Returns for the inputs from `first` on which are of the search's half, bool [count].

    Of each pair of neighbours one is drawn, so that data in any order are halved evenly.
    """
    sides = []
    for block in range(first // BLOCK, -(-(first + count) // BLOCK)):
        drawn = np.random.default_rng([SEED, block]).integers(0, 2, BLOCK // 2)
        sides.append(np.stack([drawn, 1 - drawn], axis=1).ravel())
    start = first % BLOCK
    found: Array = np.concatenate(sides)[start : start + count].astype(bool)
    return found


@dataclass(frozen=True)
class Halves:
    """Labelled data, of which `search` is one half, and `confirming` yields the other.

    Of more than `SEEN` inputs the search holds the first of its half alone.
    """

    data: Labelled
    search: LabelledData

    @staticmethod
    def of(data: Labelled) -> Halves:
        """Reads the search's half; raises `FeedError` for data of fewer than two inputs."""
        inputs: list[Array] = []
        labels: list[Labels] = []
        held, held_bytes = 0, 0
        for x, y in _of_side(data, searching=True):
            inputs.append(x)
            held, held_bytes = held + len(x), held_bytes + x.nbytes
            if y is not None:
                labels.append(y)
            if held >= SEEN or held_bytes >= SEEN_BYTES:
                break
        if held < 1:
            raise FeedError("--data: one half holds no inputs", hint="give some hundreds of inputs")
        given = np.concatenate(labels) if data.labelled else None
        return Halves(data, LabelledData(np.concatenate(inputs), given, data.input_name))

    @property
    def confirming_count(self) -> int | None:
        """How many inputs confirm; None where only reading them would tell."""
        total = self.data.samples
        return None if total is None else int((~searched(0, total)).sum())

    def confirming(self) -> Iterator[LabelledBatch]:
        """Yields the other half in batches."""
        yield from _of_side(self.data, searching=False)


def _of_side(data: Labelled, *, searching: bool) -> Iterator[LabelledBatch]:
    first = 0
    for x, y in data.stream(2 * BATCH):
        mine = searched(first, len(x)) == searching
        first += len(x)
        if mine.any():
            yield np.ascontiguousarray(x[mine]), None if y is None else y[mine]
