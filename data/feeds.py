"""Streams real inputs in batches from `.npz`, `.npy`, shards, or `package.module:iterable`.

URLs may name files. `arrays.py` reads arrays, `shards.py` tar files and Parquet; a DataLoader is
one of the iterables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..common.locations import local, named_by_url, no_such_feed, path_of, url_of
from ..errors import FeedError
from .arrays import (
    FEED_HINT,
    LABEL_NAMES,
    LABELS,
    check_inputs,
    inputs_in,
    label_names,
    main_name,
    npz_archive,
    npz_array,
    npz_names,
    rows_in,
)
from .batches import IMAGE, LABEL, OUTPUT, Array, Feed, Fields, Labels, joined, limited, row_shapes
from .shards import check_shards, shard_batches, shards_of
from .user_code import attribute_of, module_of, names_code


def batches(feed: Feed, name: str) -> Iterator[np.ndarray]:
    """Yields batches [b, …] of the input called `name`, in order; files are read in small parts.

    Raises a `FeedError` that names the file, array or object if it cannot be read.
    """
    return (batch[name] for batch in named_batches(feed, [name]))


def named_batches(
    feed: Feed,
    names: Sequence[str],
    *,
    labelled: bool = False,
    outputs: Sequence[str] = (),
    own: Sequence[str] = (),
    strict: bool = True,
) -> Iterator[Fields]:
    """Yields batches of the model's inputs that a feed contains; the first is required.

    An `.npz`, shards and dicts are searched for all these names; any other feed is the first input.
    With `labelled`, the field `LABEL` has the labels, if there are any: an array `label`, `labels`
    or `y` that is not an input; in an `.npz`, also one named after one of `outputs`; or the second
    item of a tuple. `own` has the names of a model's outputs: fields with these names contain the
    outputs of the user's own model. A feed may call the first of them `OUTPUT`. Raises `FeedError`
    for inputs that cannot be read and, if `strict`, for invalid labels.
    """
    request = _FieldRequest(
        tuple(names), tuple(outputs), tuple(own), labelled=labelled, strict=strict
    )
    first, *others = names
    where = "the feed"
    feed = in_memory(feed)
    if isinstance(feed, Mapping):
        yield _dict_batch(feed, request)
        return
    if isinstance(feed, np.ndarray):
        check_inputs(feed.dtype, feed.shape, where)
        yield {first: feed}
        return
    if isinstance(feed, str | Path):
        where = url_of(feed) or str(feed)
        with named_by_url():
            shards = shards_of(feed)
            if shards is not None:
                for shard, fields in shard_batches(shards):
                    inputs = _shard_inputs(fields, first, shard)
                    check_inputs(inputs.dtype, inputs.shape, shard)
                    extra = {n: fields[n] for n in others if n in fields}
                    yield {first: inputs} | extra | request.targets({**fields}, inputs, shard)
                return
            path = local(feed)
            if path.exists():
                yield from _file_batches(path, request)
                return
        if not names_code(where):
            raise no_such_feed(where)
        feed = _imported_items(where)
    if not isinstance(feed, Iterable):
        raise FeedError(f"the feed is {type(feed).__name__}, not batches of inputs", hint=FEED_HINT)
    for item in feed:
        inputs = _array_of(item, first, where)
        batch = {first: inputs} | request.targets(item, inputs, where)
        if isinstance(item, dict):
            batch |= {name: _array_of(item, name, where) for name in others if name in item}
        yield batch


def in_memory(feed: Feed | None) -> Any:
    """Returns a tensor, or a dict with tensors, as arrays; other feeds unchanged."""
    if isinstance(feed, Mapping):
        return {name: _as_array(value) for name, value in feed.items()}
    return _as_array(feed)


HEAD = 8
"""The number of inputs with which a user's own network is checked."""


def head_of(feed: Feed | None) -> Any:
    """Returns the first inputs of a feed in memory, or a path unchanged; None for other feeds."""
    feed = in_memory(feed)
    if isinstance(feed, Mapping):
        return {name: value[:HEAD] for name, value in feed.items()}
    if isinstance(feed, np.ndarray):
        return feed[:HEAD]
    return feed if isinstance(feed, str | Path) else None


def _as_array(value: Any) -> Any:
    """Returns a tensor as an array without its gradient; other values unchanged."""
    if not hasattr(value, "detach") or not hasattr(value, "numpy"):
        return value
    tensor = value.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:  # NumPy has no bfloat16
        return tensor.float().numpy()


def fields_of(
    arrays: Mapping[str, Any], names: Sequence[str], outputs: Sequence[str] = ()
) -> Fields:
    """Returns a dict's inputs by name, and its labels as `LABEL`, with the names as in an `.npz`.

    Raises a `FeedError` that names an array if it is missing or has another number of inputs.
    """
    first, *others = names
    where = "the data"
    known = label_names(names, outputs)
    main = main_name(arrays, first, (*known, *others))
    if main is None:
        raise FeedError(
            f"{where}: the dict has {', '.join(map(str, arrays)) or 'no items'}, but no '{first}'",
            hint=f"give {{{first!r}: x}}, and 'label' for labels",
        )
    found = {first: _array_of(arrays, main, where)}
    found |= {name: _array_of(arrays, name, where) for name in others if name in arrays}
    for name, array in found.items():
        if len(array) != len(found[first]):
            raise FeedError(
                f"{where}: '{name}' has {len(array)} inputs, but '{main}' has {len(found[first])}",
                hint="the first axis of every array is the batch",
            )
    label = next((name for name in known if name in arrays), None)
    if label is not None and LABEL not in names:
        classes, inputs = np.asarray(arrays[label]), found[first]
        label_text = f"{where}: '{label}'"
        found[LABEL] = checked_labels(classes, inputs.dtype, inputs.shape, label_text, f"'{main}'")
    return found


@dataclass(frozen=True, slots=True)
class _FieldRequest:
    """The fields to read besides the first input (see `named_batches`)."""

    names: tuple[str, ...]
    outputs: tuple[str, ...]
    own: tuple[str, ...]
    labelled: bool
    strict: bool

    def targets(self, item: object, inputs: Array, where: str) -> Fields:
        """Returns the labels and the user's own outputs in an item of an iterable."""
        found = self.labels(lambda: _labels_of(item, inputs, where, self.names))
        if isinstance(item, dict):
            text = f"{where}: a batch's"
            found |= self.own_outputs(item, len(inputs), text, item.__getitem__)
        return found

    def labels(self, read: Callable[[], Fields], *, named: bool = False) -> Fields:
        """Returns the field of labels, if requested; empty if the array may be something else.

        If the array's name can only mean labels (`named`), invalid labels raise `FeedError`.
        """
        if not self.labelled:
            return {}
        try:
            return read()
        except FeedError:
            if self.strict or named:
                raise
            return {}

    def own_names(self, known: Iterable[str]) -> dict[str, str]:
        """Returns the names that the requested outputs have in a feed, by output."""
        reserved = {*self.names, *LABEL_NAMES}
        found: dict[str, str] = {}
        for index, name in enumerate(self.own):
            keys = [name, OUTPUT] if index == 0 and OUTPUT not in self.own else [name]
            key = next((k for k in keys if k in known and k not in reserved), None)
            found |= {} if key is None else {name: key}
        return found

    def own_outputs(
        self, known: Iterable[str], count: int, where: str, read: Callable[[str], Any]
    ) -> Fields:
        """Returns the fields of a user's own outputs for `count` inputs."""
        found: Fields = {}
        for name, key in self.own_names(known).items():
            array = found[name] = np.asarray(read(key))
            if array.dtype.kind not in "biuf" or not array.shape:
                raise FeedError(
                    f"{where} '{key}' contains {array.dtype.name} {array.shape}, not the outputs "
                    "of a model",
                    hint="save the model's outputs for the inputs, one row per input",
                )
            if len(array) != count:
                raise FeedError(
                    f"{where} '{key}' contains outputs for {len(array)} inputs, but there are "
                    f"{count} inputs",
                    hint="save the model's outputs for these inputs, in their order",
                )
        return found


def _dict_batch(arrays: Mapping[str, Any], request: _FieldRequest) -> Fields:
    """Returns the inputs in a dict as one batch, with the requested labels and outputs."""
    outputs = request.own_names(arrays).values()
    others = {name: value for name, value in arrays.items() if name not in outputs}
    fields = fields_of(others, request.names, request.outputs)
    count = len(fields[request.names[0]])
    if not request.labelled and LABEL not in request.names:
        fields.pop(LABEL, None)
    return fields | request.own_outputs(arrays, count, "the data:", arrays.__getitem__)


def _file_batches(path: Path, request: _FieldRequest) -> Iterator[Fields]:
    """Yields the batches of a file or folder; reads all labels and outputs of an `.npz` at once."""
    first, *others = request.names
    arrays: Fields = {}
    if path.suffix == ".npz" and path.is_file() and (others or request.labelled or request.own):
        arrays = {n: npz_array(path, n) for n in npz_names(path) if n in others}
        archive = npz_archive(path, first, others, request.outputs)
        header, label = archive.header, archive.label

        def labels() -> Fields:
            if label is None:
                return {}
            where, inputs = f"{path}: array '{label}'", f"'{archive.inputs}'"
            array = npz_array(path, label)
            checked = checked_labels(array, header.dtype, header.shape, where, inputs, whole=True)
            return {LABEL: checked}

        arrays |= request.labels(labels, named=label in LABELS)
        known = [name for name in npz_names(path) if name not in (archive.inputs, label)]
        text, read = f"{path}: array", partial(npz_array, path)
        arrays |= request.own_outputs(known, header.shape[0], text, read)
    for file in _files(path):
        start = 0
        for rows in rows_in(file, first, others):
            end = start + len(rows)
            yield {first: rows, **{name: x[start:end] for name, x in arrays.items()}}
            start = end


def count(feed: Feed, name: str) -> int | None:
    """Returns the number of inputs in a feed, or None if that requires reading it."""
    feed = in_memory(feed)
    if isinstance(feed, Mapping):
        return len(fields_of(feed, [name])[name])
    if isinstance(feed, np.ndarray):
        return len(feed) if feed.ndim else None
    if not isinstance(feed, str | Path) or shards_of(feed) is not None:
        return None
    path = local(feed)
    if not path.exists():
        return None
    total = 0
    for file in _files(path):
        with inputs_in(file, name) as (_, header):
            total += header.shape[0]
    return total


def named_samples(feed: Feed, names: Sequence[str], limit: int) -> Fields:
    """Returns the first `limit` inputs of a feed: an array for each name that it contains."""
    parts = [*limited(named_batches(feed, names), limit)]
    if not parts:
        hint = f"give at least one array for '{names[0]}'"
        raise FeedError("the feed contains no inputs", hint=hint)
    # If sizes differ (images of any height), keep the inputs with the first shape.
    return joined([batch for batch in parts if row_shapes(batch) == row_shapes(parts[0])])


def has_inputs(where: str) -> bool:
    """Returns whether the inputs at a path exist; raises `FeedError` if they are unreadable.

    Reads no numbers: only the list of arrays in an archive, or an array's header.
    """
    shards = shards_of(where)
    if shards is not None:
        check_shards(shards)
        return True
    path = path_of(where)
    if path.is_file() and path.suffix == ".npz" and not npz_names(path):
        raise FeedError(f"{path} contains no array", hint="save the inputs: np.savez(path, x=x)")
    if path.is_file() and path.suffix == ".npy":
        with inputs_in(path, ""):
            pass
    if path.is_dir() and not any(inside.is_dir() for inside in path.iterdir()):  # images
        _files(path)
    return path.exists()


def _files(path: Path) -> list[Path]:
    """Returns the file itself, or the files of a folder."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.npy"))
    if not files:
        raise FeedError(
            f"{path}: the folder contains no .npy file", hint="each file is one batch [b, …]"
        )
    return files


def _imported_items(where: str) -> Iterator[object]:
    try:
        target = attribute_of(module_of(where), where)
    except Exception as error:
        raise FeedError(
            f"{where}: cannot be imported ({error})",
            hint="name an iterable of batches, or a function that returns one",
        ) from error
    items: Iterator[object] | None = None
    # The user's code may fail in any way; its errors are raised as `FeedError`.
    try:
        items = iter(target() if callable(target) else target)
        for item in items:  # noqa: UP028  `yield from` would close the user's iterator
            yield item
    except Exception as error:
        if items is None and isinstance(error, TypeError):
            raise FeedError(
                f"{where} is of type {type(target).__name__}, not an iterable of batches ({error})",
                hint=FEED_HINT,
            ) from error
        raise FeedError(
            f"{where}: {type(error).__name__}: {error}",
            hint="the feed's own code failed: --verbose shows where",
        ) from error


def _array_of(item: object, name: str, where: str) -> np.ndarray:
    """Returns the batch in an iterable's item: an array or tensor, or a dict or tuple with one."""
    if isinstance(item, Mapping):
        if name not in item:
            raise FeedError(f"{where} yields a dict without '{name}'", hint=FEED_HINT)
        item = item[name]
    elif isinstance(item, tuple | list) and item:
        item = item[0]
    try:
        array = np.asarray(_as_array(item))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FeedError(
            f"{where} yields {type(item).__name__}, not an array ({error})", hint=FEED_HINT
        ) from error
    check_inputs(array.dtype, array.shape, where, type(item).__name__)
    return array


def _labels_of(item: object, inputs: Array, where: str, names: Sequence[str]) -> Fields:
    labels: object = None
    if isinstance(item, dict):
        labels = next((item[name] for name in label_names(names) if name in item), None)
    elif isinstance(item, tuple | list) and len(item) > 1:
        labels = item[1]
    if labels is None:
        return {}
    where = f"{where}: a batch's labels"
    array = np.asarray(labels)
    return {LABEL: checked_labels(array, inputs.dtype, inputs.shape, where, "the batch")}


def _shard_inputs(fields: Fields, name: str, where: str) -> Array:
    """Returns the field of the input `name`: the one with that name, or the only candidate."""
    main = main_name(fields, name, (*LABEL_NAMES, IMAGE))
    if main is not None:
        return fields[main]
    if IMAGE in fields:
        raise FeedError(
            f"{where} contains images, which only `bench` and `tune` read, with --pixels",
            hint="give arrays: a sample.npy per input, as the model expects it",
        )
    raise FeedError(
        f"{where} contains {', '.join(fields) or 'no known fields'}, but no field '{name}'",
        hint=f"in a tar each input is a sample.npy or sample.{name}.npy, in Parquet a column",
    )


LABELS_HINT = (
    "labels are classes [batch], counted from 0, or an array [batch, o] with a value for each of "
    "the model's o outputs: attributes of 0 or 1, or floats that a regression predicts"
)


def checked_labels(
    array: Array,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    where: str,
    inputs_from: str,
    *,
    whole: bool = False,
) -> Labels:
    """Returns valid labels (`Labels`) of inputs with this type and shape, or tokens for ids [b, m].

    With `whole`, `array` has all labels, not one batch's. Raises `FeedError` for invalid labels.
    """
    tokens = dtype.kind in "iu" and array.shape == shape and array.ndim > 1
    if array.ndim not in (1, 2) and not tokens:
        raise FeedError(
            f"{where} has shape {array.shape}, which labels cannot have", hint=LABELS_HINT
        )
    if len(array) != shape[0]:
        raise FeedError(
            f"{where} has {len(array)} labels for the {shape[0]} samples of {inputs_from}"
        )
    if array.dtype.kind not in "biuf":
        raise FeedError(
            f"{where} has dtype {array.dtype}, but labels are numbers", hint=LABELS_HINT
        )
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise FeedError(
                f"{where} contains NaN or infinite values", hint="leave these inputs and labels out"
            )
        if array.ndim == 2 and not tokens:
            return _checked_attributes(array.astype(np.float64), where, whole=whole)
        if not (array == np.round(array)).all():
            targets: Labels = array.astype(np.float64)
            return targets
    labels: Labels = array.astype(np.int64)
    if tokens:
        return labels
    if labels.ndim == 2:
        return _checked_attributes(labels, where, whole=whole)
    if array.dtype.kind != "f" and labels.size and labels.min() < 0:
        first = int(np.flatnonzero(labels < 0)[0])
        raise FeedError(f"{where} has the negative label {int(labels[first])} at index {first}")
    return labels


MIN_SIGNS = 8
"""If there are this many labels or more, all −1 or 1, they are assumed to be attributes."""


def _checked_attributes(labels: Labels, where: str, *, whole: bool) -> Labels:
    """Returns labels [b, o] unchanged; raises `FeedError` for implausible labels."""
    not_binary = np.argwhere((labels != 0) & (labels != 1))
    signs = labels.size >= MIN_SIGNS and bool((np.abs(labels) == 1).all())
    if len(not_binary) and (labels.dtype.kind != "f" or signs):
        row, column = (int(index) for index in not_binary[0])
        raise FeedError(
            f"{where} has shape {labels.shape} and the value {labels[row, column]:g} at index "
            f"[{row}, {column}]; attributes are 0 or 1",
            hint="save labels.ravel() for classes"
            if labels.shape[1] == 1 and not signs
            else "save labels > 0 for attributes of -1 and 1, floats for a regression, and one "
            "number per sample for classes",
        )
    if whole and not len(not_binary):
        check_not_one_hot(labels.shape, int((labels.sum(axis=1) == 1).sum()), where)
    return labels


def check_not_one_hot(shape: tuple[int, ...], with_one: int, where: str) -> None:
    """Raises FeedError for one-hot classes: attributes of which every sample has exactly one.

    `with_one` is the number of rows with a single 1 in labels of this `shape`.
    """
    if shape[0] > 1 and shape[1] > 1 and with_one == shape[0]:
        raise FeedError(
            f"{where} has shape {shape} and exactly one 1 in every row, like one-hot classes",
            hint="save labels.argmax(axis=1): the class with the largest score is chosen, but each "
            "attribute is decided by the sign of its score",
        )


def check_classes(labels: Labels, classes: int, where: str, *, first: int = 0) -> None:
    """Raises FeedError unless every label is a class; `first` is the index of the first label."""
    if labels.dtype.kind == "f":
        raise FeedError(
            f"{where} has labels that are not whole numbers, but the model has {classes} classes",
            hint="labels are class indices counted from 0",
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        index = int(wrong[0])
        raise FeedError(
            f"{where} has {wrong.size} labels outside 0..{classes - 1}; "
            f"the first is {int(labels[index])} at index {first + index}",
            hint=f"the model has {classes} classes, counted from 0",
        )


class FeedHash:
    """A hash of inputs in order, independent of how they were batched or stored."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._kind: tuple[object, ...] | None = None
        self._others: list[FeedHash] = []
        self.samples = 0

    def update(self, batch: np.ndarray, *others: np.ndarray) -> None:
        """Adds a batch [b, …] of the model's first input, and those of its other inputs."""
        kind = (batch.dtype.str, batch.shape[1:])
        if kind != self._kind:  # shapes are part of the content, and rarely change
            self._hash.update(repr(kind).encode())
            self._kind = kind
        self._hash.update(np.ascontiguousarray(batch).data)
        self.samples += len(batch)
        self._others = self._others or [FeedHash() for _ in others]
        for feed_hash, array in zip(self._others, others, strict=True):
            feed_hash.update(array)

    def hexdigest(self) -> str:
        total = self._hash.copy()
        for feed_hash in self._others:
            total.update(feed_hash.hexdigest().encode())
        return total.hexdigest()
