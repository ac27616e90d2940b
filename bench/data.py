"""Labelled data for a benchmark: inputs as the model takes them, and the class of each."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FeedError

LABEL_NAMES = ("label", "labels", "y")

Array = NDArray[Any]
Labels = NDArray[np.int64]


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
        if self.labels is None:
            return
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= classes))
        if wrong.size:
            first = int(wrong[0])
            raise FeedError(
                f"array '{self.label_name}' holds {wrong.size} labels outside 0..{classes - 1}; "
                f"the first is {int(self.labels[first])} at index {first}",
                hint=f"the model has {classes} classes, counted from 0",
            )


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
    labels = _labels(path, label_name, arrays[label_name], len(inputs), inputs_from)
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


def _labels(path: Path, name: str, array: Array, samples: int, inputs_from: str) -> Labels:
    if array.ndim != 1:
        raise FeedError(
            f"{path}: array '{name}' has shape {array.shape}; labels are one class per sample",
            hint="for one-hot labels save labels.argmax(axis=1)",
        )
    if len(array) != samples:
        raise FeedError(
            f"{path}: array '{name}' holds {len(array)} labels for the {samples} samples of "
            f"'{inputs_from}'"
        )
    whole = array.dtype.kind in "iu" or (
        array.dtype.kind == "f" and bool((array == np.round(array)).all())
    )
    if not whole:
        raise FeedError(
            f"{path}: array '{name}' has dtype {array.dtype} and is not whole numbers",
            hint="labels are class indices counted from 0",
        )
    labels: Labels = array.astype(np.int64)
    if labels.min() < 0:
        first = int(np.flatnonzero(labels < 0)[0])
        raise FeedError(
            f"{path}: array '{name}' holds the negative label {int(labels[first])} at index {first}"
        )
    return labels


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
