"""Reads `.npy` and `.npz` files: the names, headers and numbers of their arrays, in small parts.

Mapped pages would count as memory in use, and an array inside an archive cannot be mapped.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.lib import format as npy

from ..common.files import allowed_bytes
from ..errors import FeedError
from .batches import OUTPUT, Array

FEED_HINT = "a feed yields batches of numbers, [b, …]: arrays, or dicts of arrays by input name"

LABELS = ("label", "labels")
"""Names of arrays in an archive that can only be labels."""

LABEL_NAMES = (*LABELS, "y")
"""Names of labels in an archive; they are never used as inputs."""


def check_inputs(
    dtype: np.dtype[Any], shape: tuple[int, ...], where: str, yielded: str | None = None
) -> None:
    """Raises `FeedError` unless an array can be a batch of inputs: numbers, with a batch axis."""
    if dtype.kind not in "biuf" or not shape:
        what = f"yields {yielded}" if yielded else f"contains {dtype.name} {shape}"
        raise FeedError(f"{where} {what}, not an array of inputs", hint=FEED_HINT)


def label_names(inputs: Sequence[str], outputs: Sequence[str] = ()) -> list[str]:
    """Returns the names that labels may have in an archive, most likely first; none is an input."""
    return [name for name in (*LABEL_NAMES, *outputs) if name not in inputs]


def main_name(names: Collection[str], name: str, others: Collection[str]) -> str | None:
    """Returns `name` if it is in `names`, or the only name neither in `others` nor `OUTPUT`."""
    if name in names:
        return name
    candidates = [candidate for candidate in names if candidate not in others]
    if len(candidates) > 1:
        candidates = [candidate for candidate in candidates if candidate != OUTPUT]
    return candidates[0] if len(candidates) == 1 else None


def npy_array(data: bytes, where: str) -> Array:
    """Returns the array in the bytes of an `.npy` file; raises `FeedError` if it is invalid."""
    file = io.BytesIO(data)
    try:
        _header(file, where, len(data))
        file.seek(0)
        return np.asarray(npy.read_array(file, allow_pickle=False))
    except UNREADABLE as error:
        raise FeedError(f"{where}: not a readable .npy file ({error})") from error


CHUNK_BYTES = 4 << 20
"""How many bytes to read at once, in complete rows; at least one row is read."""

UNREADABLE = (
    *(ValueError, TypeError, KeyError, EOFError, OSError, OverflowError, RecursionError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError, SyntaxError),
    *(NotImplementedError, RuntimeError),
)
"""Exceptions for invalid or damaged files: Python raises a dozen kinds for broken zip archives, and
parses the headers of arrays as Python code."""


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """The header of an array, known before its numbers are read."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """The number of bytes of one input."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Archive:
    """The contents of an `.npz` file, known before its numbers are read.

    `inputs` names the requested array, or the only one whose name is not for labels; `header` is
    its header, and `label` names the array of labels, if any. `digest` identifies the content by
    the checksums in the archive.
    """

    inputs: str
    header: ArrayHeader
    label: str | None
    digest: str


def npz_archive(
    path: Path, name: str, others: Sequence[str] = (), outputs: Sequence[str] = ()
) -> Archive:
    """Returns the contents of an `.npz` file for the input called `name`, next to `others`.

    Labels may also be named after one of `outputs`. Raises a `FeedError` that names the file or
    lists its arrays.
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
    """Returns an array of an `.npz` file; raises `FeedError` if it is missing or invalid."""
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
    if path.exists() and not path.is_file():  # a device may never end, and a pipe cannot seek
        raise FeedError(f"{path}: not a file", hint=f"give inputs in a file: inputs{kind}")
    try:
        yield
    except UNREADABLE as error:
        other = ".npz" if kind == ".npy" else ".npy"
        if _has_signature(path, other):
            raise FeedError(
                f"{path}: not a readable {kind} file (it is an {other})",
                hint="rename it if it contains inputs",
            ) from error
        raise FeedError(
            f"{path}: not a readable {kind} file ({error})",
            hint="inputs are an .npz file, a folder of .npy files or package.module:iterable",
        ) from error


def _has_signature(path: Path, kind: str) -> bool:
    """Returns whether a file has the signature of `.npz` or `.npy` files."""
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
        size, unpacked = path.stat().st_size, 0
        _check_ends(path, archive)
        for member in archive.infolist():
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise NotImplementedError(f"unsupported compression of {member.filename}")
            unpacked += member.file_size
        if unpacked > allowed_bytes(size):
            raise FeedError(
                f"{path}: its {size} bytes would unpack to {unpacked}, "
                f"but {allowed_bytes(size)} are allowed",
                hint="save it uncompressed: np.savez",
            )
        yield archive


def _check_ends(path: Path, archive: zipfile.ZipFile) -> None:
    """Raises ValueError unless an archive fills its file.

    Python silently reads only the last of several concatenated archives.
    """
    with path.open("rb") as file:
        file.seek(-len(END), 2)
        end = file.read()
    if (end[:4], end[-2:]) != (END[:4], END[-2:]):
        raise ValueError("the archive ends before the file does")
    if min((member.header_offset for member in archive.infolist()), default=0):
        raise ValueError("the archive does not begin at the start of the file")


END = b"PK\5\6" + bytes(18)
"""The end record of an empty archive; in NumPy's archives no comment follows this record."""


@contextmanager
def _member(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """Yields an open array of an archive, and its size in bytes."""
    size = archive.getinfo(f"{name}.npy").file_size
    with archive.open(f"{name}.npy") as file:
        yield cast(BinaryIO, file), size


def _names(archive: zipfile.ZipFile) -> tuple[str, ...]:
    return tuple(member.removesuffix(".npy") for member in archive.namelist())


def _inputs_name(
    archive: zipfile.ZipFile, path: Path, name: str, others: Sequence[str] = ()
) -> str:
    """Returns the name of the array of inputs (see `Archive`), which is never one of `others`."""
    names = _names(archive)
    main = main_name(names, name, (*LABEL_NAMES, *others))
    if main is None:
        saved = ", ".join(f"{n}={n}" for n in (name, *others)) if others else f"{name}=x"
        raise FeedError(
            f"{path} contains {', '.join(names) or 'nothing'}, but no array '{name}'",
            hint=f"save the inputs as np.savez(path, {saved})",
        )
    return main


def _may_label(archive: zipfile.ZipFile, name: str) -> bool:
    """Returns whether an array may be labels; one named like an output may be that output."""
    if name in LABEL_NAMES:
        return True
    with _member(archive, name) as (file, size):
        header = _header(file, name, size)
    return header.dtype.kind in "iu" or len(header.shape) == 1


@contextmanager
def inputs_in(
    path: Path, name: str, others: Sequence[str] = ()
) -> Iterator[tuple[BinaryIO, ArrayHeader]]:
    """Yields a file of inputs, opened where their numbers start, and their header."""
    if path.suffix == ".npz":
        with (
            _archive(path) as archive,
            _member(archive, _inputs_name(archive, path, name, others)) as (file, size),
        ):
            yield file, _inputs_header(file, path, size)
    else:
        with _readable(path, ".npy"), path.open("rb") as file:
            yield file, _inputs_header(file, path, path.stat().st_size)


def rows_in(path: Path, name: str, others: Sequence[str] = ()) -> Iterator[np.ndarray]:
    """Yields the rows of a file's inputs in chunks [c, …]."""
    with inputs_in(path, name, others) as (file, header):
        remaining = header.shape[0]
        if header.fortran:
            # In Fortran order no row is complete before the last byte, so all of it is read.
            transposed = replace(header, shape=header.shape[::-1], fortran=False)
            array = _read(file, transposed, transposed.shape[0]).T
            file.read(1)
            yield array
            return
        if not remaining * header.row_bytes:
            yield np.empty(header.shape, dtype=header.dtype)
            return
        step = max(1, CHUNK_BYTES // header.row_bytes)
        while remaining > 0:
            rows = _read(file, header, min(step, remaining))
            remaining -= len(rows)
            if not remaining:
                file.read(1)  # as in `_array`
            yield rows


def _inputs_header(file: BinaryIO, path: Path, size: int) -> ArrayHeader:
    header = _header(file, str(path), size)
    check_inputs(header.dtype, header.shape, str(path))
    return header


def _header(file: BinaryIO, where: str, size: int) -> ArrayHeader:
    """Returns the header of an array, read from its start; rejects arrays of Python objects.

    The header must not declare more than a file of `size` bytes can contain.
    """
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        header = ArrayHeader(*read(file))
    except MemoryError as error:  # raised by Python's parser, whose stack is limited
        raise ValueError("its header is nested too deeply") from error
    if header.dtype.hasobject:
        raise FeedError(
            f"{where} contains Python objects (dtype {header.dtype}), which are pickled: "
            "they are never loaded",
            hint="save numbers: np.array(x.tolist()), in which all rows have the same shape",
        )
    if any(not 0 <= size < 2**31 for size in header.shape):
        raise ValueError(f"an array cannot have shape {header.shape}")
    if header.shape and header.shape[0] > size:  # rows without numbers
        raise ValueError(f"it has {size} bytes, but an array of {header.shape[0]} rows")
    extra = size - file.tell() - header.dtype.itemsize * math.prod(header.shape)
    if extra < 0:
        raise EOFError("the file ends in the middle of the array")
    if extra > 0:
        raise ValueError(f"{extra} bytes follow the array")
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
