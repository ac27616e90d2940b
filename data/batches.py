"""Batches of inputs: their types, their rows, and changes of batch size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

Fields = dict[str, Array]
"""A batch: an array [b, …] per field. Labels are in the field `LABEL`; image files are objects of
bytes."""

Inputs = np.ndarray | Mapping[str, np.ndarray]
"""The inputs of a model or graph: arrays by name, or the array of its only input."""

IMAGE, LABEL, INPUT = "image", "label", "input"

OUTPUT = "output"
"""The name in a feed of the outputs of a user's own model, if it is not that of the model's first
output. It is never used for inputs."""

IGNORED = -1
"""A target token that does not count."""

Labels = NDArray[Any]
"""Whole numbers: classes [b], target tokens [b, m], attributes [b, o] of 0 and 1. Floats: the
targets of a regression, [b] or [b, o]."""

LabelledBatch = tuple[Array, Labels | None]
"""Inputs [b, …] and their labels."""

Feed = str | Path | np.ndarray | Mapping[str, Any] | Iterable[object]
"""The inputs that a caller may pass: where to find them, or the inputs themselves.

The inputs themselves are an array or tensor [b, …], a dict of these by name, as in an `.npz`, or an
iterable of batches, whose items `_array_of` describes.
"""


def limited(batches: Iterable[Fields], count: int | None) -> Iterator[Fields]:
    """Yields batches up to a total of `count` rows, or all batches for None."""
    remaining = count
    for batch in batches:
        part = batch if remaining is None else rows_between(batch, 0, remaining)
        rows = row_count(part)
        if remaining is not None:
            remaining -= rows
        if rows:
            yield part
        if remaining == 0:
            return


def rebatched(batches: Iterable[Fields], size: int) -> Iterator[Fields]:
    """Yields the same rows in the same order as batches of `size`.

    The last batch, and the last before rows of another shape, may be smaller. Results are then
    identical, to the last bit, for any sizes of the original batches. At most one original batch
    and one new batch are in memory.
    """
    pending: list[Fields] = []
    for batch in batches:
        if pending and row_shapes(batch) != row_shapes(pending[0]):
            yield joined(pending)
            pending = []
        start, count = 0, sum(map(row_count, pending))
        while row_count(batch) - start >= size - count:
            end = start + size - count
            yield joined([*pending, rows_between(batch, start, end)])
            pending, count, start = [], 0, end
        if start < row_count(batch):
            # A copy, so that a small remainder does not keep a large batch alive.
            rest = rows_between(batch, start, row_count(batch))
            pending.append({name: x.copy() for name, x in rest.items()})
    if pending:
        yield joined(pending)


def rebatched_pairs(
    pairs: Iterable[LabelledBatch], size: int, limit: int | None = None
) -> Iterator[LabelledBatch]:
    """Yields up to `limit` inputs and labels, batched as by `rebatched`."""
    fields = (
        {INPUT: inputs} if labels is None else {INPUT: inputs, LABEL: labels}
        for inputs, labels in pairs
    )
    for batch in rebatched(limited(fields, limit), size):
        yield batch[INPUT], batch.get(LABEL)


def row_count(batch: Fields) -> int:
    """Returns the number of rows in a batch."""
    return len(next(iter(batch.values())))


def rows_between(batch: Fields, start: int, end: int) -> Fields:
    return {name: x[start:end] for name, x in batch.items()}


def row_shapes(batch: Fields) -> dict[str, tuple[int, ...]]:
    """Returns the shape of a row of each field."""
    return {name: x.shape[1:] for name, x in batch.items()}


def joined(parts: list[Fields]) -> Fields:
    """Joins batches, whose rows must have the same shapes, into one."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
