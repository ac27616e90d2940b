"""Real inputs, streamed in batches: `.npz`, a folder of `.npy`, or `package.module:iterable`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..common.user_code import attribute_of, module_of, names_code
from ..errors import FeedError
from .arrays import (
    LABEL_NAMES,
    WANTED,
    check_inputs,
    npy_count,
    npy_rows,
    npz_archive,
    npz_array,
    npz_count,
    npz_names,
    npz_rows,
)


class FeedHash:
    """A hash of inputs in their order that does not depend on how they were batched or stored."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._kind: tuple[object, ...] | None = None
        self.samples = 0

    def update(self, batch: np.ndarray) -> None:
        """Adds the inputs of a batch [b, …]."""
        kind = (batch.dtype.str, batch.shape[1:])
        if kind != self._kind:  # shapes are part of the content, and seldom change
            self._hash.update(repr(kind).encode())
            self._kind = kind
        self._hash.update(np.ascontiguousarray(batch).data)
        self.samples += len(batch)

    def hexdigest(self) -> str:
        """The SHA-256 of everything so far, as hex digits."""
        return self._hash.hexdigest()


Pair = tuple[np.ndarray, np.ndarray | None]
"""Inputs [b, …] and what belongs to each, [b, …], if there is anything."""


def limited(batches: Iterable[np.ndarray], count: int | None) -> Iterator[np.ndarray]:
    """Yields batches until `count` inputs have come, all of them for None."""
    return (x for x, _ in limited_pairs(((batch, None) for batch in batches), count))


def limited_pairs(pairs: Iterable[Pair], count: int | None) -> Iterator[Pair]:
    """Yields inputs and labels until `count` inputs have come, all of them for None."""
    left = count
    for pair in pairs:
        inputs, labels = pair if left is None else _cut(pair, 0, left)
        if left is not None:
            left -= len(inputs)
        if len(inputs):
            yield inputs, labels
        if left == 0:
            return


def rebatched(batches: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yields the same inputs in the same order as batches of `size`.

    The last batch, and the last before inputs of another shape, may be smaller. So what is computed
    from them does not depend on the sizes that came in, to the last bit. Holds no more than one
    batch in and one out.
    """
    return (x for x, _ in rebatched_pairs(((batch, None) for batch in batches), size))


def rebatched_pairs(pairs: Iterable[Pair], size: int) -> Iterator[Pair]:
    """Yields the same inputs and labels in the same order as batches of `size` (`rebatched`)."""
    held: list[Pair] = []
    count = 0
    for pair in pairs:
        inputs, _ = pair
        if held and inputs.shape[1:] != held[0][0].shape[1:]:
            yield _joined(held)
            held, count = [], 0
        start = 0
        while len(inputs) - start >= size - count:
            end = start + size - count
            yield _joined([*held, _cut(pair, start, end)])
            held, count, start = [], 0, end
        if start < len(inputs):
            # A copy, so that a small rest does not keep a large batch alive.
            rest, theirs = _cut(pair, start, len(inputs))
            held.append((rest.copy(), theirs))
            count += len(rest)
    if held:
        yield _joined(held)


Arrays = Mapping[str, np.ndarray]
"""A batch of every input of a model, [b, …] each, by name; the first is that which feeds are of."""


def limited_arrays(batches: Iterable[Arrays], count: int | None) -> Iterator[Arrays]:
    """Yields batches of several inputs until `count` have come, all of them for None."""
    left = count
    for batch in batches:
        part = batch if left is None else {name: x[:left] for name, x in batch.items()}
        size = _length(part)
        if left is not None:
            left -= size
        if size:
            yield part
        if left == 0:
            return


def rebatched_arrays(batches: Iterable[Arrays], size: int) -> Iterator[Arrays]:
    """Yields the same inputs in the same order as batches of `size` (`rebatched`)."""
    held: list[Arrays] = []
    for batch in batches:
        if held and _rows_like(batch) != _rows_like(held[0]):
            yield _stacked(held)
            held = []
        start = 0
        while _length(batch) - start >= size - sum(map(_length, held)):
            end = start + size - sum(map(_length, held))
            yield _stacked([*held, {name: x[start:end] for name, x in batch.items()}])
            held, start = [], end
        if start < _length(batch):
            # A copy, so that a small rest does not keep a large batch alive.
            held.append({name: x[start:].copy() for name, x in batch.items()})
    if held:
        yield _stacked(held)


def _length(batch: Arrays) -> int:
    return len(next(iter(batch.values())))


def _rows_like(batch: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: x.shape[1:] for name, x in batch.items()}


def _stacked(parts: list[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _cut(pair: Pair, start: int, end: int) -> Pair:
    inputs, labels = pair
    return inputs[start:end], None if labels is None else labels[start:end]


def _joined(parts: list[Pair]) -> Pair:
    if len(parts) == 1:
        return parts[0]
    labels = [labels for _, labels in parts if labels is not None]
    inputs = np.concatenate([inputs for inputs, _ in parts])
    return inputs, np.concatenate(labels) if labels else None


Feed = str | Path | np.ndarray | Iterable[object]
"""What a caller may hand over: where inputs are, or the inputs themselves; `array_of` says what an
iterable may yield."""

_THEIRS = "the feed's own code failed: --verbose shows where"


def batches(feed: Feed, name: str) -> Iterator[np.ndarray]:
    """Yields batches [b, …] of the input called `name`, in order; files give a few rows at a time.

    Raises `FeedError` that names the file, array or object when there is nothing to read.
    """
    if isinstance(feed, np.ndarray):
        yield _inputs(feed, "the feed")
    elif isinstance(feed, str | Path):
        yield from _located(str(feed), name)
    elif isinstance(feed, Iterable):
        for item in feed:
            yield array_of(item, name, "the feed")
    else:
        raise FeedError(f"the feed is {type(feed).__name__}, not batches of inputs", hint=WANTED)


def named_batches(feed: Feed, names: Sequence[str]) -> Iterator[Arrays]:
    """Yields batches of those of a model's inputs that a feed has; the first it must have.

    Of an `.npz` and of the dicts that code yields all that are called so; of any other feed the
    first.
    """
    first, *others = names
    if others and isinstance(feed, str | Path) and Path(feed).suffix == ".npz":
        found = [name for name in others if name in npz_names(Path(feed))]
        arrays = {name: npz_array(Path(feed), name) for name in found}
        start = 0
        for rows in npz_rows(Path(feed), first):
            end = start + len(rows)
            yield {first: rows, **{name: x[start:end] for name, x in arrays.items()}}
            start = end
        return
    if not others or isinstance(feed, np.ndarray | str | Path):
        located = isinstance(feed, str | Path) and not Path(feed).exists()
        if not (others and located and names_code(str(feed))):
            yield from ({first: batch} for batch in batches(feed, first))
            return
        where, items = str(feed), imported_items(str(feed))
    else:
        where, items = "the feed", iter(feed)
    for item in items:
        batch = {first: array_of(item, first, where)}
        if isinstance(item, dict):
            batch |= {name: array_of(item, name, where) for name in others if name in item}
        yield batch


def count(feed: Feed, name: str) -> int | None:
    """Returns how many inputs a feed holds, or None where only reading it would tell."""
    if isinstance(feed, np.ndarray):
        return len(feed) if feed.ndim else None
    if not isinstance(feed, str | Path) or not Path(feed).exists():
        return None
    path = Path(feed)
    if path.is_dir():
        return sum(npy_count(file) for file in _files(path))
    return npz_count(path, name) if path.suffix == ".npz" else npy_count(path)


def samples(feed: Feed, name: str, most: int) -> np.ndarray:
    """Returns the first `most` inputs of a feed as one array [most or fewer, …]."""
    taken = list(limited(batches(feed, name), most))
    if not taken:
        raise FeedError("the feed holds no inputs", hint=f"give at least one array for '{name}'")
    if len({batch.shape[1:] for batch in taken}) > 1:
        # Inputs of several sizes (images of any height): keep those that stack.
        taken = [batch for batch in taken if batch.shape[1:] == taken[0].shape[1:]]
    return np.concatenate(taken)


def _located(where: str, name: str) -> Iterator[np.ndarray]:
    path = Path(where)
    if path.is_dir():
        yield from _folder(path)
    elif path.exists():
        yield from npz_rows(path, name) if path.suffix == ".npz" else npy_rows(path)
    elif names_code(where):
        for item in imported_items(where):
            yield array_of(item, name, where)
    else:
        raise FeedError(
            f"{where}: no such feed",
            hint="a feed is an .npz file, a folder of .npy files or package.module:iterable",
        )


def _folder(path: Path) -> Iterator[np.ndarray]:
    for file in _files(path):
        yield from npy_rows(file)


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.npy"))
    if not files:
        raise FeedError(
            f"{path}: the folder holds no .npy file", hint="each file is one batch [b, …]"
        )
    return files


def imported_items(where: str) -> Iterator[object]:
    """Yields what `package.module:iterable` yields, as it is; `FeedError` when that fails."""
    try:
        target = attribute_of(module_of(where), where)
    except Exception as error:
        raise FeedError(
            f"{where}: cannot be imported ({error})",
            hint="name an iterable of batches, or a function that returns one",
        ) from error
    # What fails inside the user's code is the user's to see: its own words, as an error of a feed.
    try:
        items = iter(target() if callable(target) else target)
    except TypeError as error:
        raise FeedError(
            f"{where}: is {type(target).__name__}, not an iterable of batches ({error})",
            hint=WANTED,
        ) from error
    except Exception as error:
        raise FeedError(f"{where}: {type(error).__name__}: {error}", hint=_THEIRS) from error
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except Exception as error:
            raise FeedError(f"{where}: {type(error).__name__}: {error}", hint=_THEIRS) from error
        yield item


def array_of(item: object, name: str, where: str) -> np.ndarray:
    """Returns the batch in what an iterable yields: an array or tensor, or a dict or tuple with it.

    Raises `FeedError` for anything else.
    """
    if isinstance(item, dict):
        if name not in item:
            raise FeedError(f"{where}: yields a dict without '{name}'", hint=WANTED)
        item = item[name]
    elif isinstance(item, tuple | list) and item:
        item = item[0]
    try:
        array = np.asarray(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FeedError(
            f"{where}: yields {type(item).__name__}, not an array ({error})", hint=WANTED
        ) from error
    return _inputs(array, where, yielded=type(item).__name__)


def _inputs(array: np.ndarray, where: str, yielded: str | None = None) -> np.ndarray:
    """The array, when it can be a batch of inputs: numbers, with an axis for the batch."""
    check_inputs(array.dtype, array.shape, where, yielded)
    return array


IGNORED = -1
"""A target token that is not counted."""

Array = NDArray[Any]

Labels = NDArray[np.int64]

LabelledBatch = tuple[Array, Labels | None]
"""Inputs [b, …] and their labels: classes [b], or target tokens [b, m]."""


def labelled_batches(feed: Feed, name: str) -> Iterator[LabelledBatch]:
    """Yields batches [b, …] of the input called `name` with their labels, None where it has none.

    Labels are the array `label`, `labels` or `y` of an `.npz` or of a dict that code yields, and
    the second of a tuple. Raises `FeedError` that names what cannot be read, or cannot be labels.
    """
    if isinstance(feed, str | Path):
        if Path(feed).suffix == ".npz" and Path(feed).is_file():
            yield from _archive(Path(feed), name)
            return
        if not names_code(str(feed)):
            yield from ((x, None) for x in batches(feed, name))
            return
        where, items = str(feed), imported_items(str(feed))
    elif isinstance(feed, np.ndarray):
        yield from ((x, None) for x in batches(feed, name))
        return
    else:
        where, items = "the feed", iter(feed)
    for item in items:
        inputs = array_of(item, name, where)
        yield inputs, _labels_of(item, inputs, where)


def _archive(path: Path, name: str) -> Iterator[LabelledBatch]:
    """The batches of an `.npz`; its labels, a number an input, are read whole."""
    held = npz_archive(path, name)
    labels: Labels | None = None
    if held.label is not None:
        array, header = npz_array(path, held.label), held.header
        where = f"{path}: array '{held.label}'"
        labels = checked_labels(array, header.dtype, header.shape, where, f"'{held.inputs}'")
    start = 0
    for rows in npz_rows(path, name):
        yield rows, None if labels is None else labels[start : start + len(rows)]
        start += len(rows)


def _labels_of(item: object, inputs: Array, where: str) -> Labels | None:
    """The labels of what code yields: the second of a pair, or a dict's `label`."""
    labels: object = None
    if isinstance(item, dict):
        labels = next((item[name] for name in LABEL_NAMES if name in item), None)
    elif isinstance(item, tuple | list) and len(item) > 1:
        labels = item[1]
    if labels is None:
        return None
    array = np.asarray(labels)
    where = f"{where}: a batch's labels"
    return checked_labels(array, inputs.dtype, inputs.shape, where, "the batch")


def checked_labels(
    array: Array, dtype: np.dtype[Any], shape: tuple[int, ...], where: str, inputs_from: str
) -> Labels:
    """Returns the labels of some inputs: classes [b], or for token ids [b, m] target ids [b, m].

    `dtype` and `shape` are the inputs'; `where` and `inputs_from` name both in messages. Raises
    FeedError for what can be neither.
    """
    tokens = dtype.kind in "iu" and array.shape == shape and array.ndim > 1
    if array.ndim != 1 and not tokens:
        raise FeedError(
            f"{where} has shape {array.shape}; labels are one class per sample",
            hint="save labels.ravel()"
            if array.ndim == 2 and array.shape[1] == 1
            else "for one-hot labels save labels.argmax(axis=1)",
        )
    if len(array) != shape[0]:
        raise FeedError(
            f"{where} holds {len(array)} labels for the {shape[0]} samples of {inputs_from}"
        )
    whole = array.dtype.kind in "iu" or (
        array.dtype.kind == "f" and bool((array == np.round(array)).all())
    )
    if not whole:
        raise FeedError(
            f"{where} has dtype {array.dtype} and is not whole numbers",
            hint="labels are class indices counted from 0",
        )
    labels: Labels = array.astype(np.int64)
    if not tokens and labels.size and labels.min() < 0:
        first = int(np.flatnonzero(labels < 0)[0])
        raise FeedError(f"{where} holds the negative label {int(labels[first])} at index {first}")
    return labels


def check_classes(labels: Labels, classes: int, where: str, *, first: int = 0) -> None:
    """Raises FeedError unless every label is a class; `first` is the index of the first one."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        at = int(wrong[0])
        raise FeedError(
            f"{where} holds {wrong.size} labels outside 0..{classes - 1}; "
            f"the first is {int(labels[at])} at index {first + at}",
            hint=f"the model has {classes} classes, counted from 0",
        )
