"""Splits the data into two halves: one for the search, and one to read once, to confirm."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ....bench.data import InputsAndLabels, Labelled, LabelledData
from ....bench.runners.base import first_of
from ....bench.runners.pytorch import outputs_of, untouched
from ....common.console import Progress
from ....data.batches import Array, Labels
from ....errors import FeedError
from ....exporter.inputs import Inputs
from ....exporter.job import ExportJob
from ....exporter.model import Model
from ..budget import UNTOUCHED_SHARE, Clock

SEED = 20
BLOCK = 4096
"""Inputs are assigned to halves in blocks of this size, so an input's half does not depend on the
length of the data."""

BATCH = 64

BATCH_BYTES = 1 << 27
"""The largest size of a batch of outputs: a language model scores its whole vocabulary."""

OUTPUT_BYTES = 1 << 30
"""The size of the untouched model's outputs after which no more inputs are run."""

MIN_INPUTS = 512
"""The search uses at least this many inputs, if there are enough, whatever its time limit."""

ENOUGH_INPUTS, MAX_EXTRA_S = 4096, 20.0
"""The search uses more inputs than `ENOUGH_INPUTS` only if the untouched model runs them within
`MAX_EXTRA_S`."""

MAX_SEARCHED = 8192
MAX_SEARCHED_BYTES = 1 << 30
"""The number of inputs, and of bytes, after which the search reads no more into memory."""


def searched(first: int, count: int) -> Array:
    """Returns which of `count` inputs, starting at number `first`, the search uses: bool [count].

    One of each two neighbouring inputs is drawn, so data in any order are split evenly.
    """
    sides = []
    for block in range(first // BLOCK, -(-(first + count) // BLOCK)):
        drawn = np.random.default_rng([SEED, block]).integers(0, 2, BLOCK // 2)
        sides.append(np.stack([drawn, 1 - drawn], axis=1).ravel())
    start = first % BLOCK
    in_search: Array = np.concatenate(sides)[start : start + count].astype(bool)
    return in_search


@dataclass(frozen=True)
class Holdout:
    """Labelled data in two halves: `search` is in memory, `confirming` yields the other.

    If the search's half exceeds `MAX_SEARCHED` or `MAX_SEARCHED_BYTES`, its rest is left out.
    """

    data: Labelled
    search: LabelledData

    @staticmethod
    def of(data: Labelled) -> Holdout:
        """Reads the search's half; raises `FeedError` if it has no inputs."""
        inputs: list[Mapping[str, Array]] = []
        labels: list[Labels] = []
        count, nbytes = 0, 0
        for x, y in _half(data, searching=True):
            arrays = {data.input_name: x} if isinstance(x, np.ndarray) else x
            inputs.append(arrays)
            count += len(first_of(x))
            nbytes += sum(array.nbytes for array in arrays.values())
            if y is not None:
                labels.append(y)
            if count >= MAX_SEARCHED or nbytes >= MAX_SEARCHED_BYTES:
                break
        if count < 1:
            raise FeedError("--data: one half has no inputs", hint="give a few hundred inputs")
        searched_labels = np.concatenate(labels) if data.labelled else None
        joined = {name: np.concatenate([arrays[name] for arrays in inputs]) for name in inputs[0]}
        main = joined.pop(data.input_name)
        search = LabelledData(main, searched_labels, data.input_name, others=joined)
        return Holdout(data=data, search=search)

    def with_first(self, count: int) -> Holdout:
        """Returns the same halves with only the first `count` inputs in the search's half."""
        return replace(self, search=self.search.head(count))

    @property
    def confirming_count(self) -> int | None:
        """The number of confirming inputs; None if the length of the data is unknown."""
        total = self.data.samples
        return None if total is None else int((~searched(0, total)).sum())

    def confirming(self) -> Iterator[InputsAndLabels]:
        """Yields the confirming half in batches."""
        yield from _half(self.data, searching=False)


def _half(data: Labelled, *, searching: bool) -> Iterator[InputsAndLabels]:
    first = 0
    for x, y in data.stream(2 * BATCH):
        in_half = searched(first, len(first_of(x))) == searching
        first += len(in_half)
        if in_half.any():
            yield rows_of(x, in_half), None if y is None else y[in_half]


def rows_of(x: Inputs, rows: slice | Array) -> Inputs:
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x[rows])
    return {name: np.ascontiguousarray(array[rows]) for name, array in x.items()}


def in_batches(data: LabelledData, size: int) -> Iterator[tuple[slice, Inputs, Labels | None]]:
    """Yields data in batches, each with its slice of rows."""
    for rows, (x, labels) in zip(data.batches(size), data.stream(size), strict=True):
        yield rows, x, labels


def batch_size(outputs: Array) -> int:
    return max(1, min(BATCH, BATCH_BYTES // max(1, outputs[:1].nbytes)))


def untouched_outputs(
    model: Model, data: LabelledData, progress: Progress, clock: Clock, job: ExportJob
) -> Array:
    """Returns the untouched model's outputs for the search's half.

    Runs batches of a size that the graphs of `job` accept; if time is short or the outputs are
    large, runs only the first inputs.
    """
    least_batch = job.least_batch
    base, parts = untouched(model), []
    progress.step("running the untouched model", total=len(data), unit="inputs")
    parts.append(outputs_of(base, data.batch(0, least_batch), model.source.path))
    size, began = batch_size(parts[0]), time.monotonic()
    size = job.fixed_batch or max(least_batch, size - size % least_batch)
    nbytes = 0
    for rows, x, _ in in_batches(data.head(len(data) - len(data) % least_batch), size):
        if rows.start:
            short = clock.over(UNTOUCHED_SHARE) and rows.start >= MIN_INPUTS
            slow = rows.start >= ENOUGH_INPUTS and time.monotonic() - began > MAX_EXTRA_S
            if short or slow or nbytes > OUTPUT_BYTES:
                break
        parts.append(outputs_of(base, x, model.source.path))
        nbytes += parts[-1].nbytes
        progress.advance(len(first_of(x)))
    outputs: Array = np.concatenate(parts[1:])
    return outputs
