"""Labelled data for a benchmark: inputs as the model takes them, and the class of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ..calibration.arrays import npz_array, npz_names
from ..calibration.labels import Array, LabelledBatch, Labels, check_classes
from ..errors import FeedError

__all__ = [
    "Array",
    "Labelled",
    "LabelledBatch",
    "LabelledData",
    "Labels",
    "fingerprint",
    "in_batches",
    "load_groups",
]


class Labelled(Protocol):
    """Where labelled inputs come from; they need not fit in memory."""

    @property
    def samples(self) -> int | None:
        """How many there are, None where that is known at the end only."""
        ...

    @property
    def labelled(self) -> bool:
        """Whether the inputs have labels."""
        ...

    @property
    def fingerprint(self) -> str:
        """What tells these data from others; a sweep goes on only over the same."""
        ...

    def head(self, count: int) -> LabelledData:
        """Returns the first `count` samples, fewer where there are fewer."""
        ...

    def stream(self, size: int, limit: int | None = None) -> Iterator[LabelledBatch]:
        """Yields batches of `size` samples, the last one shorter, up to `limit` samples."""
        ...


@dataclass(frozen=True, slots=True)
class LabelledData:
    """Inputs [samples, ...] and, where they are known, class labels [samples].

    Without labels it serves for latency, routing and parity, not for accuracy.
    """

    inputs: Array
    labels: Labels | None
    input_name: str = "input"
    label_name: str | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self)

    @property
    def labelled(self) -> bool:
        """Whether the inputs have labels."""
        return self.labels is not None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of inputs and labels."""
        return fingerprint(self.inputs, self.labels)

    def head(self, count: int) -> LabelledData:
        """Returns the first `count` samples, fewer where there are fewer."""
        labels = None if self.labels is None else self.labels[:count]
        return LabelledData(self.inputs[:count], labels, self.input_name, self.label_name)

    def stream(self, size: int, limit: int | None = None) -> Iterator[LabelledBatch]:
        """Yields batches of `size` samples, the last one shorter, up to `limit` samples."""
        data = self if limit is None else self.head(limit)
        for rows in data.batches(size):
            yield data.inputs[rows], None if data.labels is None else data.labels[rows]

    def batches(self, size: int) -> Iterator[slice]:
        """Yields slices of `size` samples that cover the data; the last one may be shorter."""
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))

    def batch(self, index: int, size: int) -> Array:
        """Returns the `index`-th batch of exactly `size` inputs, going round the data."""
        rows = np.arange(index * size, (index + 1) * size) % len(self)
        return np.ascontiguousarray(self.inputs[rows])

    def check_classes(self, classes: int) -> None:
        """Raises FeedError unless every label is a class of a model with `classes` outputs."""
        if self.labels is not None:
            check_classes(self.labels, classes, f"array '{self.label_name}'")


def fingerprint(*arrays: Array | None) -> str:
    """Returns the SHA-256 of some arrays: their kinds, shapes and values."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def in_batches(
    run: Callable[[Array], Array], x: Array, *, most: int, takes: Callable[[int], bool]
) -> Array:
    """Maps inputs [b, …] to outputs [b, …] where only some batch sizes can run.

    What is more than `most` runs in several batches; one of a size that nothing `takes` is filled
    up to `most` with its last input, whose further outputs are dropped.
    """
    parts = []
    for start in range(0, len(x), most):
        part = x[start : start + most]
        full = part
        if not takes(len(part)):
            full = np.ascontiguousarray(part[np.arange(most).clip(max=len(part) - 1)])
        parts.append(run(full)[: len(part)])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def load_groups(path: Path, name: str, samples: int) -> Array:
    """Returns the array `name` of an `.npz` file: the subgroup [samples] of each input.

    Subgroups are whole numbers, true and false, or texts. Raises FeedError, naming file and array,
    for what cannot be used.
    """
    names = npz_names(path)
    if name not in names:
        raise FeedError(
            f"{path}: no array '{name}' to group the inputs by",
            hint=f"it holds {', '.join(names)}",
        )
    groups = npz_array(path, name)
    if groups.shape != (samples,) or groups.dtype.kind not in "biuU":
        raise FeedError(
            f"{path}: array '{name}' is {groups.dtype} of shape {groups.shape}; subgroups are a "
            f"number or a text for each of the {samples} inputs",
            hint="for one group and the rest, save True for its inputs and False for the others",
        )
    return groups
