"""The data in two halves: the search uses one; the other is read once, to confirm."""

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
data's length."""

BATCH = 64

BATCH_BYTES = 1 << 27
"""The largest size of one batch of outputs: those of language models have the whole vocabulary."""

OUTPUT_BYTES = 1 << 30
"""The largest size of the untouched model's outputs: those of language models are large."""

MIN_INPUTS = 512
"""The search uses at least this many inputs, if the data have them, whatever its time limit."""

ENOUGH_INPUTS, MAX_EXTRA_S = 4096, 20.0
"""Beyond `ENOUGH_INPUTS` the search adds more inputs only while the untouched model has run for
less than `MAX_EXTRA_S`."""

MOST_SEARCHED = 8192
MOST_SEARCHED_BYTES = 1 << 30
"""The largest number of inputs, and of bytes, that the search keeps in memory."""


def searched(first: int, count: int) -> Array:
    """Returns which of `count` inputs, starting at `first`, the search uses: bool [count].

    One input of each pair of neighbours is drawn, so data in any order are split evenly.
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
    """Labelled data in two halves: `search` is in memory, `confirming` yields the other half.

    If the search's half exceeds `MOST_SEARCHED` or `MOST_SEARCHED_BYTES`, the rest is left out.
    """

    data: Labelled
    search: LabelledData

    @staticmethod
    def of(data: Labelled) -> Holdout:
        """Reads the search's half; raises `FeedError` for data of fewer than two inputs."""
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
            if count >= MOST_SEARCHED or nbytes >= MOST_SEARCHED_BYTES:
                break
        if count < 1:
            raise FeedError("--data: one half has no inputs", hint="give a few hundred inputs")
        searched_labels = np.concatenate(labels) if data.labelled else None
        joined = {
            name: np.concatenate([batch_arrays[name] for batch_arrays in inputs])
            for name in inputs[0]
        }
        main = joined.pop(data.input_name)
        search = LabelledData(main, searched_labels, data.input_name, others=joined)
        return Holdout(data=data, search=search)

    def fewer(self, count: int) -> Holdout:
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

    If time is short or outputs are large, only the first inputs are run, in batches of a size that
    the graphs of `job` accept.
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
