"""Real inputs, streamed in batches: `.npz`, `.npy`, shards, or `package.module:iterable`.

URLs may name files. `shards.py` reads tar files and Parquet; a DataLoader is an iterable. Files are
streamed, a few rows at a time: pages of a mapping would count as memory in use, and an array inside
an archive cannot be mapped.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.lib import format as npy

from ..common.files import allowed_bytes
from ..common.locations import local, named_by_url, no_such_feed, path_of, url_of
from ..errors import FeedError
from .batches import (
    IMAGE,
    LABEL,
    OUTPUT,
    Array,
    Feed,
    Fields,
    LabelledBatch,
    Labels,
    joined,
    limited,
    row_shapes,
)
from .shards import check_shards, shard_batches, shards_of
from .user_code import attribute_of, module_of, names_code

WANTED = "a feed yields batches of numbers, [b, …]: arrays, or dicts of arrays by input name"

LABELS = ("label", "labels")
"""Arrays in an archive that are labels and nothing else."""

LABEL_NAMES = (*LABELS, "y")
"""The names of labels in an archive: they are never used as inputs."""


def batches(feed: Feed, name: str) -> Iterator[np.ndarray]:
    """Yields batches [b, …] of the input called `name`, in order; files are read in small parts.

    Raises `FeedError` naming the file, array or object if it cannot be read.
    """
    return (batch[name] for batch in named_batches(feed, [name]))


def labelled_batches(feed: Feed, name: str, outputs: Sequence[str] = ()) -> Iterator[LabelledBatch]:
    """Yields batches [b, …] of the input called `name` with their labels, or None without labels.

    Raises as `named_batches` does.
    """
    labelled = named_batches(feed, [name], labelled=True, outputs=outputs)
    return ((batch[name], batch.get(LABEL)) for batch in labelled)


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
    With `labelled` the field `LABEL` holds the labels, if there are any: the array `label`,
    `labels` or `y` that is not an input, in an `.npz` also one named after an output in `outputs`;
    or the second item of a tuple. `own` are the names of a model's outputs: these fields hold the
    outputs of the user's own model, the first also under the name `OUTPUT`. Raises `FeedError` for
    inputs that cannot be read and, if `strict`, for invalid labels.
    """
    request = _Further(tuple(names), tuple(outputs), tuple(own), labelled=labelled, strict=strict)
    first, *others = names
    where = "the feed"
    feed = in_memory(feed)
    if isinstance(feed, Mapping):
        yield _of_dict(feed, request)
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
                for place, fields in shard_batches(shards, npy_array):
                    inputs = _shard_inputs(fields, first, place)
                    check_inputs(inputs.dtype, inputs.shape, place)
                    further = {n: fields[n] for n in others if n in fields}
                    yield {first: inputs} | further | request.targets({**fields}, inputs, place)
                return
            path = local(feed)
            if path.exists():
                yield from _file_batches(path, request)
                return
        if not names_code(where):
            raise no_such_feed(where)
        feed = _imported_items(where)
    if not isinstance(feed, Iterable):
        raise FeedError(f"the feed is {type(feed).__name__}, not batches of inputs", hint=WANTED)
    for item in feed:
        inputs = _array_of(item, first, where)
        batch = {first: inputs} | request.targets(item, inputs, where)
        if isinstance(item, dict):
            batch |= {name: _array_of(item, name, where) for name in others if name in item}
        yield batch


def in_memory(feed: Feed | None) -> Any:
    """Returns a feed with its tensors, single or in a dict, as arrays; other feeds unchanged."""
    if isinstance(feed, Mapping):
        return {name: _numbers(value) for name, value in feed.items()}
    return _numbers(feed)


HEAD = 8
"""The number of inputs on which a user's own network is checked."""


def head_of(feed: Feed | None) -> Any:
    """Returns the first inputs of a feed in memory, or the place of a file; None for others."""
    feed = in_memory(feed)
    if isinstance(feed, Mapping):
        return {name: value[:HEAD] for name, value in feed.items()}
    if isinstance(feed, np.ndarray):
        return feed[:HEAD]
    return feed if isinstance(feed, str | Path) else None


def _numbers(value: Any) -> Any:
    """A tensor as an array: on the CPU, without its gradient."""
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

    Raises `FeedError` naming an array that is missing or has another number of inputs.
    """
    first, *others = names
    where = "the data"
    known = label_names(names, outputs)
    main = _main_name(arrays, first, (*known, *others))
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
    if label is not None:
        classes, inputs = np.asarray(arrays[label]), found[first]
        label_place = f"{where}: '{label}'"
        found[LABEL] = checked_labels(classes, inputs.dtype, inputs.shape, label_place, f"'{main}'")
    return found


def _main_name(names: Collection[str], name: str, others: Collection[str]) -> str | None:
    """Returns `name`, or the only one of the `names` that is neither in `others` nor `OUTPUT`."""
    if name in names:
        return name
    left = [each for each in names if each not in others]
    if len(left) > 1:
        left = [each for each in left if each != OUTPUT]
    return left[0] if len(left) == 1 else None


@dataclass(frozen=True, slots=True)
class _Further:
    """The options for fields other than the first input (`named_batches`)."""

    names: tuple[str, ...]
    outputs: tuple[str, ...]
    own: tuple[str, ...]
    labelled: bool
    strict: bool

    def targets(self, item: object, inputs: Array, where: str) -> Fields:
        """The labels and the user's own outputs in an item of an iterable."""
        found = self.labels(lambda: _labels_of(item, inputs, where, self.names))
        if isinstance(item, dict):
            place = f"{where}: a batch's"
            found |= self.own_outputs(item, len(inputs), place, item.__getitem__)
        return found

    def labels(self, read: Callable[[], Fields], *, named: bool = False) -> Fields:
        """The field of labels, if requested; empty if the array may be something else.

        An array `named` as labels cannot: if it does not fit, `FeedError` is raised.
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
        """The names in a feed of the requested outputs, by output."""
        taken = {*self.names, *LABEL_NAMES}
        found: dict[str, str] = {}
        for index, name in enumerate(self.own):
            keys = [name, OUTPUT] if index == 0 and OUTPUT not in self.own else [name]
            key = next((each for each in keys if each in known and each not in taken), None)
            found |= {} if key is None else {name: key}
        return found

    def own_outputs(
        self, known: Iterable[str], count: int, where: str, read: Callable[[str], Any]
    ) -> Fields:
        """The fields of a user's own outputs for `count` inputs."""
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


def _of_dict(arrays: Mapping[str, Any], request: _Further) -> Fields:
    """The inputs of a dict as one batch, with the requested labels and outputs."""
    own = request.own_names(arrays).values()
    others = {name: value for name, value in arrays.items() if name not in own}
    fields = fields_of(others, request.names, request.outputs)
    count = len(fields[request.names[0]])
    if not request.labelled:
        fields.pop(LABEL, None)
    return fields | request.own_outputs(arrays, count, "the data:", arrays.__getitem__)


def _file_batches(path: Path, request: _Further) -> Iterator[Fields]:
    """The batches of a file or folder; labels and outputs in an `.npz` are read whole."""
    first, *others = request.names
    whole: Fields = {}
    if path.suffix == ".npz" and path.is_file() and (others or request.labelled or request.own):
        whole = {n: npz_array(path, n) for n in npz_names(path) if n in others}
        archive = npz_archive(path, first, others, request.outputs)
        header, label = archive.header, archive.label

        def labels() -> Fields:
            if label is None:
                return {}
            where, of = f"{path}: array '{label}'", f"'{archive.inputs}'"
            array = npz_array(path, label)
            checked = checked_labels(array, header.dtype, header.shape, where, of, whole=True)
            return {LABEL: checked}

        whole |= request.labels(labels, named=label in LABELS)
        known = [name for name in npz_names(path) if name not in (archive.inputs, label)]
        place, read = f"{path}: array", partial(npz_array, path)
        whole |= request.own_outputs(known, header.shape[0], place, read)
    for file in _files(path):
        start = 0
        for rows in _rows_in(file, first, others):
            end = start + len(rows)
            yield {first: rows, **{name: x[start:end] for name, x in whole.items()}}
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
        with _inputs_in(file, name) as (_, header):
            total += header.shape[0]
    return total


def samples(feed: Feed, name: str, most: int) -> np.ndarray:
    """Returns the first `most` inputs of a feed as one array [most or fewer, …]."""
    return named_samples(feed, [name], most)[name]


def named_samples(feed: Feed, names: Sequence[str], most: int) -> Fields:
    """Returns the first `most` inputs of a feed, an array per name that the feed contains."""
    taken = [*limited(named_batches(feed, names), most)]
    if not taken:
        hint = f"give at least one array for '{names[0]}'"
        raise FeedError("the feed contains no inputs", hint=hint)
    # Of inputs of several sizes (images of any height), keep those that stack.
    return joined([batch for batch in taken if row_shapes(batch) == row_shapes(taken[0])])


def is_there(where: str) -> bool:
    """Whether the inputs that a path names are there; raises `FeedError` for unreadable ones.

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
        with _inputs_in(path, ""):
            pass
    if path.is_dir() and not any(inside.is_dir() for inside in path.iterdir()):  # images
        _files(path)
    return path.exists()


def _files(path: Path) -> list[Path]:
    """The file itself, or the files of a folder."""
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
    # The user's code may fail in any way; its message becomes an error of the feed.
    try:
        items = iter(target() if callable(target) else target)
        yield from items
    except Exception as error:
        if items is None and isinstance(error, TypeError):
            raise FeedError(
                f"{where} is of type {type(target).__name__}, not an iterable of batches ({error})",
                hint=WANTED,
            ) from error
        raise FeedError(
            f"{where}: {type(error).__name__}: {error}",
            hint="the feed's own code failed: --verbose shows where",
        ) from error


def _array_of(item: object, name: str, where: str) -> np.ndarray:
    """The batch in an item of an iterable: an array or tensor, or a dict or tuple with it."""
    if isinstance(item, Mapping):
        if name not in item:
            raise FeedError(f"{where} yields a dict without '{name}'", hint=WANTED)
        item = item[name]
    elif isinstance(item, tuple | list) and item:
        item = item[0]
    try:
        array = np.asarray(_numbers(item))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FeedError(
            f"{where} yields {type(item).__name__}, not an array ({error})", hint=WANTED
        ) from error
    check_inputs(array.dtype, array.shape, where, type(item).__name__)
    return array


def check_inputs(
    dtype: np.dtype[Any], shape: tuple[int, ...], where: str, yielded: str | None = None
) -> None:
    """Raises `FeedError` unless an array can be a batch of inputs: numbers, with a batch axis."""
    if dtype.kind not in "biuf" or not shape:
        what = f"yields {yielded}" if yielded else f"contains {dtype.name} {shape}"
        raise FeedError(f"{where} {what}, not an array of inputs", hint=WANTED)


def label_names(inputs: Sequence[str], outputs: Sequence[str] = ()) -> list[str]:
    """Returns the possible names of labels in an archive, the likeliest first; no input's name."""
    return [name for name in (*LABEL_NAMES, *outputs) if name not in inputs]


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
    """The field with the inputs called `name`: by name, or the only one with numbers."""
    main = _main_name(fields, name, (*LABEL_NAMES, IMAGE))
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


def npy_array(data: bytes, where: str) -> Array:
    """Returns the array in the bytes of an `.npy` file; raises `FeedError` if it is invalid."""
    file = io.BytesIO(data)
    try:
        _header(file, where, len(data))
        file.seek(0)
        return np.asarray(npy.read_array(file, allow_pickle=False))
    except UNREADABLE as error:
        raise FeedError(f"{where}: not a readable .npy file ({error})") from error


LABELS_HINT = (
    "labels are classes [batch], counted from 0; or, for each of a model's o outputs, [batch, o]: "
    "attributes that are 0 or 1, or floats that a regression predicts"
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

    `whole`: the array is not one batch of several. Raises `FeedError` for invalid labels.
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


SIGNS = 8
"""From this many numbers on, labels of only −1 and 1 are read as attributes, not a regression."""


def _checked_attributes(labels: Labels, where: str, *, whole: bool) -> Labels:
    """Labels [b, o] unchanged; raises `FeedError` for implausible ones."""
    other = np.argwhere((labels != 0) & (labels != 1))
    signs = labels.size >= SIGNS and bool((np.abs(labels) == 1).all())
    if len(other) and (labels.dtype.kind != "f" or signs):
        row, column = (int(place) for place in other[0])
        raise FeedError(
            f"{where} has shape {labels.shape} and the value {labels[row, column]:g} at index "
            f"[{row}, {column}]; attributes are 0 or 1",
            hint="save labels.ravel() for classes"
            if labels.shape[1] == 1 and not signs
            else "save labels > 0 for attributes of -1 and 1, floats for a regression, and for "
            "classes one number per sample",
        )
    if whole and not len(other):
        check_not_one_hot(labels.shape, int((labels.sum(axis=1) == 1).sum()), where)
    return labels


def check_not_one_hot(shape: tuple[int, ...], with_one: int, where: str) -> None:
    """Raises FeedError for attributes of which every sample has one: those are one-hot classes.

    `with_one` counts the rows of labels of that `shape` that contain a single 1.
    """
    if shape[0] > 1 and shape[1] > 1 and with_one == shape[0]:
        raise FeedError(
            f"{where} has shape {shape} and one 1 in every row, like one-hot classes",
            hint="save labels.argmax(axis=1): the largest score decides between classes, the sign "
            "of each about attributes",
        )


def check_classes(labels: Labels, classes: int, where: str, *, first: int = 0) -> None:
    """Raises FeedError unless every label is a class; `first` is the index of the first one."""
    if labels.dtype.kind == "f":
        raise FeedError(
            f"{where} has labels that are not whole numbers, but the model has {classes} classes",
            hint="labels are class indices counted from 0",
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        at = int(wrong[0])
        raise FeedError(
            f"{where} has {wrong.size} labels outside 0..{classes - 1}; "
            f"the first is {int(labels[at])} at index {first + at}",
            hint=f"the model has {classes} classes, counted from 0",
        )


# --- streams -----------------------------------------------------------------------------------


class FeedHash:
    """A hash of inputs in order, independent of how they were batched or stored."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._kind: tuple[object, ...] | None = None
        self._others: list[FeedHash] = []
        self.samples = 0

    def update(self, batch: np.ndarray, *others: np.ndarray) -> None:
        """Adds the inputs of a batch [b, …], and those of further inputs of the model."""
        kind = (batch.dtype.str, batch.shape[1:])
        if kind != self._kind:  # shapes are part of the content, and rarely change
            self._hash.update(repr(kind).encode())
            self._kind = kind
        self._hash.update(np.ascontiguousarray(batch).data)
        self.samples += len(batch)
        self._others = self._others or [FeedHash() for _ in others]
        for own, array in zip(self._others, others, strict=True):
            own.update(array)

    def hexdigest(self) -> str:
        """The SHA-256 of everything so far, as hex digits."""
        whole = self._hash.copy()
        for own in self._others:
            whole.update(own.hexdigest().encode())
        return whole.hexdigest()


CHUNK_BYTES = 4 << 20
"""The number of bytes read at once, but at least one row."""

UNREADABLE = (
    *(ValueError, TypeError, KeyError, EOFError, OSError, OverflowError, RecursionError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError, SyntaxError),
    *(NotImplementedError, RuntimeError),
)
"""Exceptions for invalid or damaged files: Python detects broken zip archives in a dozen ways, and
parses headers of arrays as Python."""


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """The description of an array, before its numbers are read."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of one input."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Archive:
    """The contents of an `.npz` file, before its numbers are read.

    `inputs` is the requested array, or the only one without a label's name; `header` is its header,
    and `label` the array of labels, or None. `digest` identifies the file's content by the
    checksums in the archive.
    """

    inputs: str
    header: ArrayHeader
    label: str | None
    digest: str


def npz_archive(
    path: Path, name: str, others: Sequence[str] = (), outputs: Sequence[str] = ()
) -> Archive:
    """Returns the contents of an `.npz` file for the input called `name`, next to `others`.

    Labels may also have the name of one of `outputs`. Raises `FeedError` naming the file or listing
    its arrays.
    """
    with _archive(path) as archive:
        inputs = _inputs_name(archive, path, name, others)
        with _member(archive, inputs) as (file, size):
            header = _inputs_header(file, path, size)
        known = label_names((inputs, *others), outputs)
        label = next((n for n in known if n in _names(archive) and _may_label(archive, n)), None)
        members = sorted((m.filename, m.CRC, m.file_size) for m in archive.infolist())
        digest = hashlib.sha256(repr(members).encode()).hexdigest()
        return Archive(inputs=inputs, header=header, label=label, digest=digest)


def npz_names(path: Path) -> tuple[str, ...]:
    """Returns the names of the arrays in an `.npz` file; raises `FeedError` if it is invalid."""
    with _archive(path) as archive:
        return _names(archive)


def npz_array(path: Path, name: str) -> np.ndarray:
    """Returns an array of an `.npz` file; raises `FeedError` if it is missing or holds objects."""
    with _archive(path) as archive:
        return _array(archive, path, name)


def npz_arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields all arrays of an `.npz` file with their names; raises as `npz_array` does."""
    with _archive(path) as archive:
        for name in _names(archive):
            yield name, _array(archive, path, name)


def _array(archive: zipfile.ZipFile, path: Path, name: str) -> np.ndarray:
    with _member(archive, name) as (file, size):
        _header(file, f"{path}: array '{name}'", size)
        file.seek(0)
        array = np.asarray(npy.read_array(file, allow_pickle=False))
        file.read(1)  # reading past the last number makes the archive verify its checksum
        return array


@contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    """Within the context, failures to read a file become a `FeedError` that names it."""
    if path.exists() and not path.is_file():  # a device never ends, and a pipe cannot seek
        raise FeedError(f"{path}: not a file", hint=f"give inputs in a file: inputs{kind}")
    try:
        yield
    except UNREADABLE as error:
        other = ".npz" if kind == ".npy" else ".npy"
        if _is(path, other):
            raise FeedError(
                f"{path}: not a readable {kind} file (it is an {other})",
                hint="rename it if it contains inputs",
            ) from error
        raise FeedError(
            f"{path}: not a readable {kind} file ({error})",
            hint="inputs are an .npz file, a folder of .npy files or package.module:iterable",
        ) from error


def _is(path: Path, kind: str) -> bool:
    """Whether a file begins with the signature of a kind."""
    if kind == ".npz":
        return zipfile.is_zipfile(path)
    try:
        with path.open("rb") as file:
            return file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX
    except OSError:
        return False


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    with _readable(path, ".npz"), zipfile.ZipFile(path) as archive:
        size, most = path.stat().st_size, 0
        _check_ends(path, archive)
        for member in archive.infolist():
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise NotImplementedError(f"NumPy cannot compress like {member.filename}")
            most += member.file_size
        if most > allowed_bytes(size):
            raise FeedError(
                f"{path}: its {size} bytes would unpack to {most}, "
                f"but {allowed_bytes(size)} are allowed",
                hint="save it uncompressed: np.savez",
            )
        yield archive


def _check_ends(path: Path, archive: zipfile.ZipFile) -> None:
    """Raises ValueError unless an archive begins and ends with its file.

    Python silently reads only the last of several concatenated archives.
    """
    with path.open("rb") as file:
        file.seek(-len(END), 2)
        end = file.read()
    if (end[:4], end[-2:]) != (END[:4], END[-2:]):
        raise ValueError("the archive ends before the file does")
    if min((member.header_offset for member in archive.infolist()), default=0):
        raise ValueError("the archive begins after the start of the file")


END = b"PK\5\6" + bytes(18)
"""The end of an archive without members; NumPy writes no comment after it."""


@contextmanager
def _member(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """An opened array of an archive, and its size in bytes."""
    size = archive.getinfo(f"{name}.npy").file_size
    with archive.open(f"{name}.npy") as file:
        yield cast(BinaryIO, file), size


def _names(archive: zipfile.ZipFile) -> tuple[str, ...]:
    return tuple(member.removesuffix(".npy") for member in archive.namelist())


def _inputs_name(
    archive: zipfile.ZipFile, path: Path, name: str, others: Sequence[str] = ()
) -> str:
    """The array with the inputs called `name` (see `Archive`); never one of `others`."""
    names = _names(archive)
    main = _main_name(names, name, (*LABEL_NAMES, *others))
    if main is None:
        saved = ", ".join(f"{each}={each}" for each in (name, *others)) if others else f"{name}=x"
        raise FeedError(
            f"{path} contains {', '.join(names) or 'nothing'}, but no array '{name}'",
            hint=f"save the inputs as np.savez(path, {saved})",
        )
    return main


def _may_label(archive: zipfile.ZipFile, name: str) -> bool:
    """Whether an array can be labels: one with the name of an output may be that output."""
    if name in LABEL_NAMES:
        return True
    with _member(archive, name) as (file, size):
        header = _header(file, name, size)
    return header.dtype.kind in "iu" or len(header.shape) == 1


@contextmanager
def _inputs_in(
    path: Path, name: str, others: Sequence[str] = ()
) -> Iterator[tuple[BinaryIO, ArrayHeader]]:
    """The inputs of a file, opened at the start of the numbers."""
    if path.suffix == ".npz":
        with (
            _archive(path) as archive,
            _member(archive, _inputs_name(archive, path, name, others)) as (file, size),
        ):
            yield file, _inputs_header(file, path, size)
    else:
        with _readable(path, ".npy"), path.open("rb") as file:
            yield file, _inputs_header(file, path, path.stat().st_size)


def _rows_in(path: Path, name: str, others: Sequence[str] = ()) -> Iterator[np.ndarray]:
    """Yields the rows of a file's inputs in chunks [c, …]."""
    with _inputs_in(path, name, others) as (file, header):
        left = header.shape[0]
        if header.fortran:
            # In Fortran order no row is complete before the last byte, so the array is read whole.
            flipped = replace(header, shape=header.shape[::-1], fortran=False)
            whole = _read(file, flipped, flipped.shape[0]).T
            file.read(1)
            yield whole
            return
        if not left * header.row_bytes:
            yield np.empty(header.shape, dtype=header.dtype)
            return
        step = max(1, CHUNK_BYTES // header.row_bytes)
        while left > 0:
            rows = _read(file, header, min(step, left))
            left -= len(rows)
            if not left:
                file.read(1)  # as in `_array`
            yield rows


def _inputs_header(file: BinaryIO, path: Path, size: int) -> ArrayHeader:
    header = _header(file, str(path), size)
    check_inputs(header.dtype, header.shape, str(path))
    return header


def _header(file: BinaryIO, where: str, size: int) -> ArrayHeader:
    """The header of an array, read from its start; refuses arrays of Python objects.

    It must not declare more than a file of `size` bytes can contain.
    """
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        header = ArrayHeader(*read(file))
    except MemoryError as error:  # from Python's parser, which has its own stack
        raise ValueError("its header is nested too deeply") from error
    if header.dtype.hasobject:
        raise FeedError(
            f"{where} contains Python objects (dtype {header.dtype}), which are pickled and never "
            "loaded",
            hint="save numbers: np.array(x.tolist()), whose rows must be of one shape",
        )
    if any(not 0 <= size < 2**31 for size in header.shape):
        raise ValueError(f"an array cannot have shape {header.shape}")
    if header.shape and header.shape[0] > size:  # rows without numbers
        raise ValueError(f"it has {size} bytes but an array of {header.shape[0]} rows")
    more = size - file.tell() - header.dtype.itemsize * math.prod(header.shape)
    if more < 0:
        raise EOFError("the file ends in the middle of the array")
    if more > 0:
        raise ValueError(f"{more} bytes follow the array")
    return header


def _read(file: BinaryIO, header: ArrayHeader, count: int) -> np.ndarray:
    rows = np.empty((count, *header.shape[1:]), dtype=header.dtype)
    view = rows.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):  # an archive may return fewer bytes than requested
        got = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            raise EOFError("the file ends in the middle of the array")
        done += got
    return rows
