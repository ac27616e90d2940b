"""Reads a user's own MNIST: the four IDX files, plain or with `.gz`, or an `.npz` of four arrays.

Pixels are scaled as in the paper's released code: bytes divided by 255, minus the mean 0.1307,
divided by the standard deviation 0.3081, both of MNIST's training images.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
from moexport.bench.data import LabelledData
from moexport.data.arrays import npz_array, npz_names
from moexport.data.feeds import check_classes, checked_labels
from moexport.errors import FeedError
from moexport.plugins.demo.digits import CLASSES, Digits

SIDE = 28
MEAN, STD = 0.1307, 0.3081

ARRAYS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
"""The names of the arrays in an `.npz`: as in Keras, or as full words."""

FILES = (*(("train-images", 3), ("train-labels", 1)), *(("t10k-images", 3), ("t10k-labels", 1)))
"""The names of the IDX files, and the number of axes of each."""

FOLDERS = ("", "raw", "MNIST/raw")
"""The subfolders that are searched: the folder itself, and those of torchvision."""

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_BYTES = 1 << 30
HINT = (
    "pass the folder with train-images-idx3-ubyte, train-labels-idx1-ubyte and the two t10k files "
    f"(plain or .gz), or an .npz with {', '.join(ARRAYS[0])}"
)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Named:
    """An array and its name in messages."""

    where: str
    array: Array


def read_mnist(path: Path) -> Digits:
    """Returns MNIST from a user's files, with standardised images [b, 1, 28, 28].

    `path` is a folder of IDX files, one of these files, or an `.npz`. Raises FeedError otherwise.
    """
    if not path.exists():
        raise FeedError(f"{path}: no such file or folder", hint=HINT)
    if path.is_file() and path.suffix == ".npz":
        arrays = list(_of_npz(path))
    else:
        arrays = list(_of_idx_files(path))
    train, train_labels, test, test_labels = arrays
    return Digits(_labelled(train, train_labels), _labelled(test, test_labels))


def _of_npz(path: Path) -> Iterator[Named]:
    """Yields the four arrays: images and labels for training, and for testing."""
    present = {*npz_names(path)}
    names = next((names for names in ARRAYS if present.issuperset(names)), None)
    if names is None:
        ways = " or ".join(", ".join(names) for names in ARRAYS)
        raise FeedError(
            f"{path} has {', '.join(sorted(present)) or 'no arrays'}, not the four arrays of MNIST",
            hint=f"name them {ways}",
        )
    return (Named(f"{path}: array '{name}'", npz_array(path, name)) for name in names)


def _of_idx_files(path: Path) -> Iterator[Named]:
    """Yields the arrays of the four IDX files in a folder, or next to a file, in `FILES` order."""
    folder = path if path.is_dir() else path.parent
    problem = f"{path} has none of MNIST's IDX files"
    for subfolder in FOLDERS:
        files = {name: _idx_file(folder / subfolder, *name) for name in FILES}
        found = [file for file in files.values() if file is not None]
        if len(found) == len(FILES):
            return (Named(str(file), read_idx(file)) for file in found)
        if found:
            missing = [
                f"{stem}-idx{axes}-ubyte" for (stem, axes), file in files.items() if not file
            ]
            problem = f"{found[0].parent} lacks {', '.join(missing)}"
    raise FeedError(problem, hint=HINT)


def _idx_file(folder: Path, stem: str, axes: int) -> Path | None:
    names = (f"{stem}{dot}idx{axes}-ubyte{end}" for dot in "-." for end in ("", ".gz"))
    return next((path for name in names if (path := folder / name).is_file()), None)


def read_idx(path: Path) -> Array:
    """Returns the array of an IDX file, which may be compressed: a type, sizes and numbers.

    Raises FeedError if it is another kind of file, damaged or larger than 1 GiB.
    """
    try:
        with path.open("rb") as plain:
            file = gzip.GzipFile(fileobj=plain) if path.suffix == ".gz" else plain
            return _idx(cast(IO[bytes], file), path)
    except (OSError, EOFError, zlib.error) as error:
        raise FeedError(f"{path} cannot be read: {error}", hint="download it again") from error


def _idx(file: IO[bytes], path: Path) -> Array:
    start = file.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in TYPES or not 0 < start[3] < 5:
        raise FeedError(f"{path} is not an IDX file: it begins with {start!r}", hint=HINT)
    sizes = file.read(4 * start[3])
    shape = struct.unpack(f">{len(sizes) // 4}I", sizes[: len(sizes) // 4 * 4])
    dtype = np.dtype(TYPES[start[2]])
    wanted = math.prod(shape) * dtype.itemsize
    if len(shape) < start[3] or wanted > MAX_BYTES:
        raise FeedError(
            f"{path} is not an IDX file of images: its shape is {shape}", hint="download it again"
        )
    data = file.read(wanted + 1)
    if len(data) != wanted:
        more = "more" if len(data) > wanted else f"{len(data):,}"
        raise FeedError(
            f"{path} should have {wanted:,} bytes of numbers for the shape {shape}, but has {more}",
            hint="download it again",
        )
    return np.frombuffer(data, dtype).reshape(shape)


def _labelled(images: Named, labels: Named) -> LabelledData:
    """Checks images and labels and scales the images; raises FeedError unless 28×28 and 0..9."""
    sizes = tuple(size for size in images.array.shape[1:] if size != 1)
    if not len(images.array) or sizes not in ((SIDE, SIDE), (SIDE * SIDE,)):
        raise FeedError(
            f"{images.where} has shape {images.array.shape}, but MNIST's images are {SIDE}×{SIDE}",
            hint=f"pass images of shape (b, {SIDE}, {SIDE})",
        )
    if labels.array.ndim != 1:
        raise FeedError(
            f"{labels.where} has shape {labels.array.shape}, but each image has one label, 0 to 9",
            hint="for one-hot rows, pass labels.argmax(axis=1)",
        )
    shape = images.array.shape
    classes = checked_labels(
        labels.array, images.array.dtype, shape, labels.where, images.where, whole=True
    )
    check_classes(classes, CLASSES, labels.where)
    scaled = (_from_0_to_1(images) - MEAN) / STD
    inputs = scaled.astype(np.float32).reshape(-1, 1, SIDE, SIDE)
    return LabelledData(inputs, classes.astype(np.int64), "input", "label")


def _from_0_to_1(images: Named) -> Array:
    """Returns pixels from 0 to 1: integers from 0 to 255 are divided, floats unchanged."""
    where, array = images.where, images.array
    if array.dtype.kind not in "uif":
        raise FeedError(f"{where} has dtype {array.dtype}, but pixels must be numbers")
    largest = 1.0 if array.dtype.kind == "f" else 255.0
    if not (array.min() >= 0 and array.max() <= largest):  # also if NaN
        raise FeedError(
            f"{where} has pixels from {array.min():g} to {array.max():g}, but with dtype "
            f"{array.dtype} they must be from 0 to {largest:g}",
            hint="save the images as uint8, from 0 to 255",
        )
    return array.astype(np.float32) / np.float32(largest)
