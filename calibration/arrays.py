"""Reads arrays from `.npy` and `.npz` files a few rows at a time, whatever their size.

Mapping a file would do for `.npy` alone, and its pages count as memory in use; an array inside an
archive cannot be mapped. So both are read as streams.
"""

from __future__ import annotations

import hashlib
import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.lib import format as npy

from ..errors import FeedError

CHUNK_BYTES = 4 << 20
"""What is read at once, at least one row."""

UNREADABLE = (
    *(ValueError, TypeError, KeyError, EOFError, OSError, OverflowError, RecursionError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError, SyntaxError),
    *(NotImplementedError, RuntimeError),
)
"""What reading a file that is none, or is damaged, raises: zip archives have a dozen ways to be no
archive that Python reads, and headers of arrays are parsed as Python."""

LABEL_NAMES = ("label", "labels", "y")
"""What labels are called in an archive: never taken for inputs."""

WANTED = "a feed gives batches of numbers, [b, …]: arrays, or dicts that hold them by input name"


@dataclass(frozen=True, slots=True)
class Header:
    """What an array is, before its numbers are read."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of one input."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


def npy_rows(path: Path) -> Iterator[np.ndarray]:
    """Yields the rows of an `.npy` file in chunks [c, …]; `FeedError` when it is no such array."""
    with _open(path, ".npy") as file:
        yield from _rows(file, path, ".npy", path.stat().st_size)


def npz_rows(path: Path, name: str) -> Iterator[np.ndarray]:
    """Yields the rows of the inputs in an `.npz` file in chunks [c, …]: `Archive` says which.

    Raises `FeedError` that names the file, or lists its arrays.
    """
    with (
        _archive(path) as archive,
        _member(archive, path, _inputs(archive, path, name)) as (file, size),
    ):
        yield from _rows(file, path, ".npz", size)


def npy_count(path: Path) -> int:
    """Returns how many rows an `.npy` file holds, from its header alone."""
    with _open(path, ".npy") as file:
        return _header(file, path, ".npy", path.stat().st_size).shape[0]


def npz_count(path: Path, name: str) -> int:
    """Returns how many inputs an `.npz` file holds, from its header alone."""
    return npz_archive(path, name).header.shape[0]


@dataclass(frozen=True, slots=True)
class Archive:
    """What an `.npz` file holds, before its numbers are read.

    `inputs` is the array that was asked for, or the only one that is not called as labels are;
    `header` is its header and `label` the array of labels, None without one. `digest` tells the
    file's content from any other: it is made of the checksums that an archive keeps.
    """

    inputs: str
    header: Header
    label: str | None
    digest: str


def npz_archive(path: Path, name: str) -> Archive:
    """Returns what an `.npz` file holds for an input called `name`.

    Raises `FeedError` that names the file, or lists its arrays.
    """
    with _archive(path) as archive:
        inputs = _inputs(archive, path, name)
        with _member(archive, path, inputs) as (file, size):
            header = _header(file, path, ".npz", size)
        label = next((n for n in LABEL_NAMES if n in _names(archive) and n != inputs), None)
        members = sorted((m.filename, m.CRC, m.file_size) for m in archive.infolist())
        return Archive(inputs, header, label, hashlib.sha256(repr(members).encode()).hexdigest())


def npz_names(path: Path) -> tuple[str, ...]:
    """Returns the names of the arrays in an `.npz` file; `FeedError` when it is none."""
    with _archive(path) as archive:
        return _names(archive)


def npz_array(path: Path, name: str) -> np.ndarray:
    """Returns a whole array of an `.npz` file; `FeedError` where it is none, or one of objects."""
    with _archive(path) as archive, _member(archive, path, name) as (file, size):
        try:
            _any_header(file, f"{path}: array '{name}'", size)
            file.seek(0)
            return np.asarray(npy.read_array(file, allow_pickle=False))
        except UNREADABLE as error:
            raise _unreadable(path, ".npz", error) from error


def _open(path: Path, kind: str) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, kind, error) from error


def _archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except UNREADABLE as error:
        raise _unreadable(path, ".npz", error) from error


@contextmanager
def _member(archive: zipfile.ZipFile, path: Path, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """An array of an archive, open, and its size in bytes."""
    try:
        size = archive.getinfo(f"{name}.npy").file_size
        file = archive.open(f"{name}.npy")
    except UNREADABLE as error:
        raise _unreadable(path, ".npz", error) from error
    with file:
        yield cast(BinaryIO, file), size


def _names(archive: zipfile.ZipFile) -> tuple[str, ...]:
    return tuple(member.removesuffix(".npy") for member in archive.namelist())


def _inputs(archive: zipfile.ZipFile, path: Path, name: str) -> str:
    """The array that holds the inputs called `name`, as `Archive` says."""
    names = _names(archive)
    if name in names:
        return name
    others = [each for each in names if each not in LABEL_NAMES]
    if len(others) != 1:
        raise FeedError(
            f"{path}: holds {', '.join(names) or 'nothing'}, but no array '{name}'",
            hint=f"save the inputs as np.savez(path, {name}=x)",
        )
    return others[0]


def _rows(file: BinaryIO, path: Path, kind: str, size: int) -> Iterator[np.ndarray]:
    header = _header(file, path, kind, size)
    left = header.shape[0]
    if header.fortran:
        # Columns first: no row is complete before the last byte, so the array is read whole.
        yield _whole(file, header, path, kind)
        left = 0
    elif not left * header.row_bytes:
        yield np.empty(header.shape, dtype=header.dtype)
        left = 0
    step = max(1, CHUNK_BYTES // max(1, header.row_bytes))
    while left > 0:
        count = min(step, left)
        rows = _read(file, header, count, path, kind)
        left -= count
        if not left:
            _check_end(file, path, kind)
        yield rows


def _check_end(file: BinaryIO, path: Path, kind: str) -> None:
    """Reads on after the last row, where an archive compares its checksum."""
    try:
        file.read(1)
    except UNREADABLE as error:
        raise _unreadable(path, kind, error) from error


def _header(file: BinaryIO, path: Path, kind: str, size: int) -> Header:
    """The array's header; `FeedError` unless it is an array of inputs: numbers in a batch."""
    try:
        header = _any_header(file, str(path), size)
    except UNREADABLE as error:
        raise _unreadable(path, kind, error) from error
    check_inputs(header.dtype, header.shape, str(path))
    return header


def _any_header(file: BinaryIO, where: str, size: int) -> Header:
    """The header of an array of anything but Python objects; raises one of UNREADABLE, too.

    What it declares is no more than a file of `size` bytes can hold.
    """
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    header = Header(*read(file))
    if header.dtype.hasobject:
        raise FeedError(
            f"{where}: holds Python objects (dtype {header.dtype}), which are pickled and never "
            "loaded",
            hint="save numbers: np.array(x.tolist()), whose rows must be of one shape",
        )
    if any(not 0 <= each < 2**31 for each in header.shape):
        raise ValueError(f"an array cannot be of shape {header.shape}")
    if header.dtype.itemsize * math.prod(header.shape) > size - file.tell():
        raise EOFError("the file ends in the middle of the array")
    return header


def _read(file: BinaryIO, header: Header, count: int, path: Path, kind: str) -> np.ndarray:
    rows = np.empty((count, *header.shape[1:]), dtype=header.dtype)
    view = rows.reshape(-1).view(np.uint8).data
    try:
        done = 0
        while done < len(view):  # an archive may give less than was asked for
            got = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not got:
                raise EOFError("the file ends in the middle of the array")
            done += got
    except UNREADABLE as error:
        raise _unreadable(path, kind, error) from error
    return rows


def _whole(file: BinaryIO, header: Header, path: Path, kind: str) -> np.ndarray:
    flipped = Header(header.shape[::-1], False, header.dtype)
    array = _read(file, flipped, flipped.shape[0], path, kind).T
    _check_end(file, path, kind)
    return array


def check_inputs(
    dtype: np.dtype[Any], shape: tuple[int, ...], where: str, yielded: str | None = None
) -> None:
    """Raises `FeedError` unless an array can be a batch of inputs: numbers, with a batch axis."""
    if dtype.kind not in "biuf" or not shape:
        what = f"yields {yielded}" if yielded else f"holds {dtype.name} {shape}"
        raise FeedError(f"{where}: {what}, not an array of inputs", hint=WANTED)


def _unreadable(path: Path, kind: str, error: Exception) -> FeedError:
    other = ".npz" if kind == ".npy" else ".npy"
    if _is(path, other):
        return FeedError(
            f"{path}: not a readable {kind} file (it is an {other})",
            hint="rename it, if it holds inputs",
        )
    return FeedError(
        f"{path}: not a readable {kind} file ({error})",
        hint="inputs are an .npz file, a folder of .npy files or package.module:iterable",
    )


def _is(path: Path, kind: str) -> bool:
    """Whether a file begins as one of the other kind does."""
    try:
        with path.open("rb") as file:
            start = file.read(len(npy.MAGIC_PREFIX))
    except OSError:
        return False
    return start == npy.MAGIC_PREFIX if kind == ".npy" else zipfile.is_zipfile(path)
