"""Real inputs, streamed in batches: `.npz`, `.npy`, shards, or `package.module:iterable`.

Files may be named by URLs. `shards.py` reads tar files and Parquet; a DataLoader is an iterable.
Files are read as streams, a few rows at a time: mapped pages would count as memory in use, and an
array inside an archive cannot be mapped.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..common.files import allowed_bytes
from ..common.locations import local, named_by_url, url_of
from ..common.user_code import attribute_of, module_of, names_code
from ..errors import FeedError
from .shards import IMAGE, INPUT, LABEL, Fields, shard_batches, shards_of
from .shards import Array as Array  # noqa: PLC0414  what a feed yields

IGNORED = -1
"""A target token that is not counted."""

Labels = NDArray[np.int64]

LabelledBatch = tuple[Array, Labels | None]
"""Inputs [b, …] and their labels: classes [b], or target tokens [b, m]."""

Feed = str | Path | np.ndarray | Iterable[object]
"""What a caller may hand over: where inputs are, or the inputs themselves; `_array_of` says what an
iterable may yield."""

WANTED = "a feed gives batches of numbers, [b, …]: arrays, or dicts that hold them by input name"

LABEL_NAMES = ("label", "labels", "y")
"""What labels are called in an archive: never taken for inputs."""

_THEIRS = "the feed's own code failed: --verbose shows where"


def batches(feed: Feed, name: str) -> Iterator[np.ndarray]:
    """Yields batches [b, …] of the input called `name`, in order; files give a few rows at a time.

    Raises `FeedError` that names the file, array or object when there is nothing to read.
    """
    return (batch[name] for batch in named_batches(feed, [name]))


def labelled_batches(feed: Feed, name: str, outputs: Sequence[str] = ()) -> Iterator[LabelledBatch]:
    """Yields batches [b, …] of the input called `name` with their labels, None where it has none.

    Raises what `named_batches` raises.
    """
    labelled = named_batches(feed, [name], labelled=True, outputs=outputs)
    return ((batch[name], batch.get(LABEL)) for batch in labelled)


def named_batches(
    feed: Feed, names: Sequence[str], *, labelled: bool = False, outputs: Sequence[str] = ()
) -> Iterator[Fields]:
    """Yields batches of those of a model's inputs that a feed has; the first it must have.

    Of an `.npz`, of shards and of the dicts that code yields all that are called so; of any other
    feed the first. With `labelled` the field `LABEL` holds the labels, where there are any: the
    array `label`, `labels` or `y` that is no input, of an `.npz` also one that is called as one of
    `outputs` is; or the second of a tuple. Raises `FeedError` that names what
    cannot be read, or cannot be labels.
    """
    first, *others = names
    where = "the feed"
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
                    labels = _labels_of({**fields}, inputs, place, names) if labelled else {}
                    yield {first: inputs} | {n: fields[n] for n in others if n in fields} | labels
                return
            path = local(feed)
            if path.exists():
                yield from _file_batches(path, names, outputs, labelled=labelled)
                return
        if not names_code(where):
            raise FeedError(
                f"{where}: no such feed",
                hint="a feed is an .npz file, a folder of .npy files, shards (.tar, .parquet) or "
                "package.module:iterable",
            )
        feed = _imported_items(where)
    if not isinstance(feed, Iterable):
        raise FeedError(f"the feed is {type(feed).__name__}, not batches of inputs", hint=WANTED)
    for item in feed:
        inputs = _array_of(item, first, where)
        batch = {first: inputs} | (_labels_of(item, inputs, where, names) if labelled else {})
        if isinstance(item, dict):
            batch |= {name: _array_of(item, name, where) for name in others if name in item}
        yield batch


def _file_batches(
    path: Path, names: Sequence[str], outputs: Sequence[str], *, labelled: bool
) -> Iterator[Fields]:
    """The batches of a file or folder; what an `.npz` holds beside its inputs is read whole."""
    first, *others = names
    beside: Fields = {}
    if path.suffix == ".npz" and path.is_file() and (others or labelled):
        beside = {n: npz_array(path, n) for n in npz_names(path) if n in others}
        archive = npz_archive(path, first, others, outputs)
        if labelled and archive.label is not None:
            array, header = npz_array(path, archive.label), archive.header
            where = f"{path}: array '{archive.label}'"
            of = f"'{archive.inputs}'"
            beside[LABEL] = checked_labels(array, header.dtype, header.shape, where, of)
    for file in _files(path):
        start = 0
        for rows in _rows_in(file, first, others):
            end = start + len(rows)
            yield {first: rows, **{name: x[start:end] for name, x in beside.items()}}
            start = end


def count(feed: Feed, name: str) -> int | None:
    """Returns how many inputs a feed holds, or None where only reading it would tell."""
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
    """Returns the first `most` inputs of a feed, an array for each of the names that it has."""
    taken = [*limited(named_batches(feed, names), most)]
    if not taken:
        hint = f"give at least one array for '{names[0]}'"
        raise FeedError("the feed holds no inputs", hint=hint)
    # Inputs of several sizes (images of any height): keep those that stack.
    return _joined([batch for batch in taken if _row_shapes(batch) == _row_shapes(taken[0])])


def _files(path: Path) -> list[Path]:
    """The file itself, or those of a folder."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.npy"))
    if not files:
        raise FeedError(
            f"{path}: the folder holds no .npy file", hint="each file is one batch [b, …]"
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


def _array_of(item: object, name: str, where: str) -> np.ndarray:
    """The batch in what an iterable yields: an array or tensor, or a dict or tuple with it."""
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
    check_inputs(array.dtype, array.shape, where, type(item).__name__)
    return array


def check_inputs(
    dtype: np.dtype[Any], shape: tuple[int, ...], where: str, yielded: str | None = None
) -> None:
    """Raises `FeedError` unless an array can be a batch of inputs: numbers, with a batch axis."""
    if dtype.kind not in "biuf" or not shape:
        what = f"yields {yielded}" if yielded else f"holds {dtype.name} {shape}"
        raise FeedError(f"{where}: {what}, not an array of inputs", hint=WANTED)


def label_names(inputs: Sequence[str], outputs: Sequence[str] = ()) -> list[str]:
    """Returns what labels may be called in an archive, the likeliest first; no input is one."""
    return [name for name in (*LABEL_NAMES, *outputs) if name not in inputs]


def _labels_of(item: object, inputs: Array, where: str, names: Sequence[str]) -> Fields:
    """The field of labels in what an iterable yields, where there is one."""
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
    """The field that holds the inputs called `name`: of that name, or the only one of numbers."""
    candidates = [name for name in fields if name not in (*LABEL_NAMES, IMAGE)]
    if name in fields or len(candidates) == 1:
        return fields[name if name in fields else candidates[0]]
    if IMAGE in fields:
        raise FeedError(
            f"{where}: holds images, which only `bench` and `tune` read, with --pixels",
            hint="give arrays: a sample.npy for each input, as the model takes it",
        )
    raise FeedError(
        f"{where}: holds {', '.join(fields) or 'nothing that is read'}, but no field '{name}'",
        hint=f"in a tar each input is a sample.npy or sample.{name}.npy, in Parquet a column",
    )


def npy_array(data: bytes, where: str) -> Array:
    """Returns the array in the bytes of an `.npy` file; `FeedError` where there is none."""
    file = io.BytesIO(data)
    try:
        _header(file, where, len(data))
        file.seek(0)
        return np.asarray(npy.read_array(file, allow_pickle=False))
    except UNREADABLE as error:
        raise FeedError(f"{where}: not a readable .npy file ({error})") from error


def checked_labels(
    array: Array, dtype: np.dtype[Any], shape: tuple[int, ...], where: str, inputs_from: str
) -> Labels:
    """Returns labels of inputs of that type and shape: classes [b], or for ids [b, m] target ids.

    Raises `FeedError` for what are none.
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


# --- streams -----------------------------------------------------------------------------------


class FeedHash:
    """A hash of inputs in their order that does not depend on how they were batched or stored."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._kind: tuple[object, ...] | None = None
        self._beside: list[FeedHash] = []
        self.samples = 0

    def update(self, batch: np.ndarray, *beside: np.ndarray) -> None:
        """Adds the inputs of a batch [b, …], and those of a model's further inputs."""
        kind = (batch.dtype.str, batch.shape[1:])
        if kind != self._kind:  # shapes are part of the content, and seldom change
            self._hash.update(repr(kind).encode())
            self._kind = kind
        self._hash.update(np.ascontiguousarray(batch).data)
        self.samples += len(batch)
        self._beside = self._beside or [FeedHash() for _ in beside]
        for own, array in zip(self._beside, beside, strict=True):
            own.update(array)

    def hexdigest(self) -> str:
        """The SHA-256 of everything so far, as hex digits."""
        whole = self._hash.copy()
        for own in self._beside:
            whole.update(own.hexdigest().encode())
        return whole.hexdigest()


def limited(batches: Iterable[Fields], count: int | None) -> Iterator[Fields]:
    """Yields batches until `count` rows have come, all of them for None."""
    left = count
    for batch in batches:
        part = batch if left is None else rows_between(batch, 0, left)
        rows = row_count(part)
        if left is not None:
            left -= rows
        if rows:
            yield part
        if left == 0:
            return


def rebatched(batches: Iterable[Fields], size: int) -> Iterator[Fields]:
    """Yields the same rows in the same order as batches of `size`.

    The last batch, and the last before rows of another shape, may be smaller. So what is computed
    from them does not depend on the sizes that came in, to the last bit. Holds no more than one
    batch in and one out.
    """
    held: list[Fields] = []
    for batch in batches:
        if held and _row_shapes(batch) != _row_shapes(held[0]):
            yield _joined(held)
            held = []
        start, count = 0, sum(map(row_count, held))
        while row_count(batch) - start >= size - count:
            end = start + size - count
            yield _joined([*held, rows_between(batch, start, end)])
            held, count, start = [], 0, end
        if start < row_count(batch):
            # A copy, so that a small rest does not keep a large batch alive.
            rest = rows_between(batch, start, row_count(batch))
            held.append({name: x.copy() for name, x in rest.items()})
    if held:
        yield _joined(held)


def rebatched_pairs(
    pairs: Iterable[LabelledBatch], size: int, limit: int | None = None
) -> Iterator[LabelledBatch]:
    """Yields inputs and labels as `rebatched` does, until `limit` of them have come."""
    fields = (
        {INPUT: inputs} if labels is None else {INPUT: inputs, LABEL: labels}
        for inputs, labels in pairs
    )
    for batch in rebatched(limited(fields, limit), size):
        yield batch[INPUT], batch.get(LABEL)


def row_count(batch: Fields) -> int:
    """Returns the rows of a batch."""
    return len(next(iter(batch.values())))


def rows_between(batch: Fields, start: int, end: int) -> Fields:
    """Returns some rows of a batch."""
    return {name: x[start:end] for name, x in batch.items()}


def _row_shapes(batch: Fields) -> dict[str, tuple[int, ...]]:
    return {name: x.shape[1:] for name, x in batch.items()}


def _joined(parts: list[Fields]) -> Fields:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# --- files of arrays ---------------------------------------------------------------------------

CHUNK_BYTES = 4 << 20
"""What is read at once, at least one row."""

UNREADABLE = (
    *(ValueError, TypeError, KeyError, EOFError, OSError, OverflowError, RecursionError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError, SyntaxError),
    *(NotImplementedError, RuntimeError),
)
"""What reading a file that is none, or is damaged, raises: zip archives have a dozen ways to be no
archive that Python reads, and headers of arrays are parsed as Python."""


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """What an array is, before its numbers are read."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of one input."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Archive:
    """What an `.npz` file holds, before its numbers are read.

    `inputs` is the array that was asked for, or the only one that is not called as labels are;
    `header` is its header and `label` the array of labels, None without one. `digest` tells the
    file's content from any other: it is made of the checksums that an archive keeps.
    """

    inputs: str
    header: ArrayHeader
    label: str | None
    digest: str


def npz_archive(
    path: Path, name: str, others: Sequence[str] = (), outputs: Sequence[str] = ()
) -> Archive:
    """Returns what an `.npz` file holds for an input called `name`, beside `others`.

    Labels may be called as one of `outputs` is, too.

    Raises `FeedError` that names the file, or lists its arrays.
    """
    with _archive(path) as archive:
        inputs = _inputs_name(archive, path, name, others)
        with _member(archive, inputs) as (file, size):
            header = _inputs_header(file, path, size)
        known = label_names((inputs, *others), outputs)
        label = next((n for n in known if n in _names(archive)), None)
        members = sorted((m.filename, m.CRC, m.file_size) for m in archive.infolist())
        digest = hashlib.sha256(repr(members).encode()).hexdigest()
        return Archive(inputs=inputs, header=header, label=label, digest=digest)


def npz_names(path: Path) -> tuple[str, ...]:
    """Returns the names of the arrays in an `.npz` file; `FeedError` when it is none."""
    with _archive(path) as archive:
        return _names(archive)


def npz_array(path: Path, name: str) -> np.ndarray:
    """Returns a whole array of an `.npz` file; `FeedError` where it is none, or one of objects."""
    with _archive(path) as archive:
        return _array(archive, path, name)


def npz_arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields all arrays of an `.npz` file with their names; raises as `npz_array`."""
    with _archive(path) as archive:
        for name in _names(archive):
            yield name, _array(archive, path, name)


def _array(archive: zipfile.ZipFile, path: Path, name: str) -> np.ndarray:
    with _member(archive, name) as (file, size):
        _header(file, f"{path}: array '{name}'", size)
        file.seek(0)
        array = np.asarray(npy.read_array(file, allow_pickle=False))
        file.read(1)  # behind the last number an archive compares its checksum
        return array


@contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    """Within the context, what makes a file unreadable is a `FeedError` that names it."""
    if path.exists() and not path.is_file():  # a device never ends, and a pipe cannot be searched
        raise FeedError(f"{path}: not a file", hint=f"give inputs in a file: inputs{kind}")
    try:
        yield
    except UNREADABLE as error:
        other = ".npz" if kind == ".npy" else ".npy"
        if _is(path, other):
            raise FeedError(
                f"{path}: not a readable {kind} file (it is an {other})",
                hint="rename it, if it holds inputs",
            ) from error
        raise FeedError(
            f"{path}: not a readable {kind} file ({error})",
            hint="inputs are an .npz file, a folder of .npy files or package.module:iterable",
        ) from error


def _is(path: Path, kind: str) -> bool:
    """Whether a file begins as those of a kind do."""
    try:
        with path.open("rb") as file:
            start = file.read(len(npy.MAGIC_PREFIX))
    except OSError:
        return False
    return start == npy.MAGIC_PREFIX if kind == ".npy" else zipfile.is_zipfile(path)


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    with _readable(path, ".npz"), zipfile.ZipFile(path) as archive:
        size, most = path.stat().st_size, 0
        _check_ends(path, archive)
        for member in archive.infolist():
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise NotImplementedError(f"{member.filename} is compressed as NumPy does not")
            most += member.file_size
        if most > allowed_bytes(size):
            raise FeedError(
                f"{path}: {size} bytes that would unpack to {most}, "
                f"and {allowed_bytes(size)} are allowed",
                hint="save it uncompressed: np.savez",
            )
        yield archive


def _check_ends(path: Path, archive: zipfile.ZipFile) -> None:
    """Raises ValueError for an archive that does not begin and end with its file.

    Python reads the last of archives that were joined, and no word of the others.
    """
    with path.open("rb") as file:
        file.seek(-len(END), 2)
        end = file.read()
    if (end[:4], end[-2:]) != (END[:4], END[-2:]):
        raise ValueError("the archive ends before the file does")
    if min((member.header_offset for member in archive.infolist()), default=0):
        raise ValueError("the archive begins behind the beginning of the file")


END = b"PK\5\6" + bytes(18)
"""The end of an archive without members; NumPy writes no comment behind it."""


@contextmanager
def _member(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """An array of an archive, open, and its size in bytes."""
    size = archive.getinfo(f"{name}.npy").file_size
    with archive.open(f"{name}.npy") as file:
        yield cast(BinaryIO, file), size


def _names(archive: zipfile.ZipFile) -> tuple[str, ...]:
    return tuple(member.removesuffix(".npy") for member in archive.namelist())


def _inputs_name(
    archive: zipfile.ZipFile, path: Path, name: str, others: Sequence[str] = ()
) -> str:
    """The array that holds the inputs called `name`, as `Archive` says; `others` are no such."""
    names = _names(archive)
    if name in names:
        return name
    left = [name for name in names if name not in (*LABEL_NAMES, *others)]
    if len(left) != 1:
        saved = ", ".join(f"{each}={each}" for each in (name, *others)) if others else f"{name}=x"
        raise FeedError(
            f"{path}: holds {', '.join(names) or 'nothing'}, but no array '{name}'",
            hint=f"save the inputs as np.savez(path, {saved})",
        )
    return left[0]


@contextmanager
def _inputs_in(
    path: Path, name: str, others: Sequence[str] = ()
) -> Iterator[tuple[BinaryIO, ArrayHeader]]:
    """The inputs of a file, open where their numbers begin."""
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
            # Columns first: no row is complete before the last byte, so the array is read whole.
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
    """The header of an array of anything but Python objects, open at its beginning.

    What it declares is no more than a file of `size` bytes can hold.
    """
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        header = ArrayHeader(*read(file))
    except MemoryError as error:  # of Python's parser, which has a stack of its own
        raise ValueError("its header nests too deep") from error
    if header.dtype.hasobject:
        raise FeedError(
            f"{where}: holds Python objects (dtype {header.dtype}), which are pickled and never "
            "loaded",
            hint="save numbers: np.array(x.tolist()), whose rows must be of one shape",
        )
    if any(not 0 <= size < 2**31 for size in header.shape):
        raise ValueError(f"an array cannot be of shape {header.shape}")
    if header.shape and header.shape[0] > size:  # of rows that have no numbers
        raise ValueError(f"it has {size} bytes and an array of {header.shape[0]} rows")
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
    while done < len(view):  # an archive may give less than was asked for
        got = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            raise EOFError("the file ends in the middle of the array")
        done += got
    return rows
