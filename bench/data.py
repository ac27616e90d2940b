"""Labelled data for a benchmark: inputs as the model takes them, and the class of each."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ..calibration.labels import (
    LABEL_NAMES,
    Array,
    Labels,
    Pair,
    check_classes,
    checked_labels,
)
from ..errors import FeedError

__all__ = [
    "Array",
    "Labelled",
    "LabelledData",
    "Labels",
    "Pair",
    "fingerprint",
    "load_groups",
    "load_labelled",
    "rebatched",
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

    def stream(self, size: int, limit: int | None = None) -> Iterator[Pair]:
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

    def stream(self, size: int, limit: int | None = None) -> Iterator[Pair]:
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


def rebatched(pairs: Iterable[Pair], size: int, limit: int | None = None) -> Iterator[Pair]:
    """Yields the samples of batches of any size in batches of `size`, up to `limit` samples."""
    held: list[Pair] = []
    count = taken = 0
    for pair in pairs:
        inputs, labels = pair
        if limit is not None:
            room = limit - taken
            inputs, labels = inputs[:room], None if labels is None else labels[:room]
        taken += len(inputs)
        held.append((inputs, labels))
        count += len(inputs)
        while count >= size:
            whole = _joined(held)
            yield _rows(whole, 0, size)
            held, count = [_rows(whole, size, count)], count - size
        if limit is not None and taken >= limit:
            break
    if count:
        yield _joined(held)


def _joined(pairs: list[Pair]) -> Pair:
    if len(pairs) == 1:
        return pairs[0]
    labels = [labels for _, labels in pairs if labels is not None]
    inputs = np.concatenate([inputs for inputs, _ in pairs])
    return inputs, np.concatenate(labels) if labels else None


def _rows(pair: Pair, start: int, stop: int) -> Pair:
    inputs, labels = pair
    return inputs[start:stop], None if labels is None else labels[start:stop]


def load_labelled(path: Path, *, input_name: str = "input") -> LabelledData:
    """Returns the data of an `.npz` file: `input` (or its only float array) and the labels.

    Labels are looked for under `label`, `labels` and `y`; a file without them gives unlabelled
    data. Raises FeedError, naming file and array, for what cannot be used.
    """
    arrays = _read(path)
    label_name = next((name for name in LABEL_NAMES if name in arrays), None)
    inputs_from = _input_name(path, arrays, input_name, label_name)
    inputs = arrays[inputs_from]
    if inputs.ndim == 0 or len(inputs) == 0:
        raise FeedError(f"{path}: array '{inputs_from}' holds no samples")
    if inputs.dtype.kind == "f":
        if not np.isfinite(inputs).all():
            raise FeedError(f"{path}: array '{inputs_from}' holds NaN or infinite values")
        inputs = inputs.astype(np.float32, copy=False)
    if label_name is None:
        return LabelledData(inputs, None, inputs_from)
    where = f"{path}: array '{label_name}'"
    labels = checked_labels(
        arrays[label_name], inputs.dtype, inputs.shape, where, f"'{inputs_from}'"
    )
    return LabelledData(inputs, labels, inputs_from, label_name)


def _read(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise FeedError(f"{path}: no such file", hint="give an .npz file with inputs and labels")
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise FeedError(f"{path}: not an .npz archive", hint="write it with numpy.savez")
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise FeedError(
            f"{path}: cannot be read as .npz ({error})", hint="write it with numpy.savez"
        ) from error


def _input_name(path: Path, arrays: dict[str, Array], wanted: str, label_name: str | None) -> str:
    if wanted in arrays:
        return wanted
    floats = [n for n, a in arrays.items() if a.dtype.kind == "f" and n != label_name]
    if len(floats) == 1:
        return floats[0]
    held = ", ".join(f"'{name}'" for name in arrays) or "nothing"
    reason = "no float array" if not floats else f"{len(floats)} float arrays"
    raise FeedError(
        f"{path}: no array '{wanted}', and {reason} to take instead; the file holds {held}",
        hint=f"save the inputs as '{wanted}': numpy.savez(path, {wanted}=..., label=...)",
    )


def load_groups(path: Path, name: str, samples: int) -> Array:
    """Returns the array `name` of an `.npz` file: the subgroup [samples] of each input.

    Subgroups are whole numbers, true and false, or texts. Raises FeedError, naming file and array,
    for what cannot be used.
    """
    arrays = _read(path)
    if name not in arrays:
        raise FeedError(
            f"{path}: no array '{name}' to group the inputs by",
            hint=f"it holds {', '.join(arrays)}",
        )
    groups = arrays[name]
    if groups.shape != (samples,) or groups.dtype.kind not in "biuU":
        raise FeedError(
            f"{path}: array '{name}' is {groups.dtype} of shape {groups.shape}; subgroups are a "
            f"number or a text for each of the {samples} inputs",
            hint="for one group and the rest, save True for its inputs and False for the others",
        )
    return groups
