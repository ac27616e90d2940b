"""A user's MNIST is read from IDX files, plain or compressed, and from an `.npz`."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from moexport.errors import FeedError
from moexport.examples.studies.mnist_files import read_idx, read_mnist

Bytes = npt.NDArray[np.uint8]

RANDOM = np.random.default_rng(0)
IMAGES: Bytes = RANDOM.integers(0, 256, (30, 28, 28), np.uint8)
LABELS: Bytes = RANDOM.integers(0, 10, 30, np.uint8)
PARTS: dict[str, tuple[int, Bytes]] = {
    "train-images": (3, IMAGES[:20]),
    "train-labels": (1, LABELS[:20]),
    "t10k-images": (3, IMAGES[20:]),
    "t10k-labels": (1, LABELS[20:]),
}


def idx(array: npt.NDArray[np.generic], kind: int = 8) -> bytes:
    """The format as its author describes it: 0, 0, type, axes; sizes of four bytes; numbers."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, kind, array.ndim)) + sizes + array.tobytes()


def write_files(folder: Path, dot: str = "-", packed: tuple[str, ...] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (axes, array) in PARTS.items():
        file = folder / f"{name}{dot}idx{axes}-ubyte"
        if name in packed:
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            file.write_bytes(idx(array))


def check(path: Path) -> None:
    """What is read is what was written, on the scale of the released code."""
    data = read_mnist(path)
    for part, rows in ((data.train, slice(0, 20)), (data.test, slice(20, 30))):
        wanted = (IMAGES[rows, None].astype(np.float64) / 255 - 0.1307) / 0.3081
        assert part.inputs.shape == wanted.shape and part.inputs.dtype == np.float32
        assert np.abs(part.inputs - wanted).max() < 1e-6
        assert part.labels is not None
        assert part.labels.dtype == np.int64 and part.labels.tolist() == LABELS[rows].tolist()


@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("packed", [(), tuple(PARTS), ("t10k-images", "train-labels")])
@pytest.mark.parametrize("place", ["", "raw", "MNIST/raw"])
def test_idx_files_are_read(dot: str, packed: tuple[str, ...], place: str, tmp_path: Path) -> None:
    write_files(tmp_path / place, dot, packed)
    check(tmp_path)


def test_one_of_the_files_names_its_folder(tmp_path: Path) -> None:
    write_files(tmp_path)
    check(tmp_path / "t10k-labels-idx1-ubyte")


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("train_images", "train_labels", "test_images", "test_labels"),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: x[..., None],
        lambda x: x.reshape(-1, 784).astype(np.int64),
        lambda x: (x[:, None] / 255).astype(np.float32),
    ],
)
def test_an_npz_is_read(
    names: tuple[str, ...], form: Callable[[Bytes], Bytes], tmp_path: Path
) -> None:
    arrays = [form(array) if axes == 3 else array for axes, array in PARTS.values()]
    np.savez(tmp_path / "mnist.npz", **dict(zip(names, arrays, strict=True)))  # type: ignore[arg-type]
    check(tmp_path / "mnist.npz")


@pytest.mark.parametrize(("kind", "dtype"), [(0x0B, ">i2"), (0x0C, ">i4"), (0x0E, ">f8")])
def test_other_numbers_of_idx_files_are_read(kind: int, dtype: str, tmp_path: Path) -> None:
    numbers = np.arange(-6, 6).reshape(3, 2, 2).astype(dtype)
    (tmp_path / "numbers").write_bytes(idx(numbers, kind))
    assert (read_idx(tmp_path / "numbers") == numbers).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("t10k-labels-idx1-ubyte", None, r"lacks t10k-labels-idx1-ubyte"),
        ("train-images-idx3-ubyte", lambda b: b[:-1], r"should have 15,680 bytes .* has 15,679"),
        ("train-images-idx3-ubyte", lambda b: b + b"\0", r"should have 15,680 .* has more"),
        ("train-images-idx3-ubyte", lambda b: b[:9], r"is not an IDX file of images: its shape is"),
        (
            "train-images-idx3-ubyte",
            lambda _: b"<html>",
            r"is not an IDX file: it begins with b'<htm'",
        ),
        (
            "train-images-idx3-ubyte",
            lambda b: b[:4] + b"\xff" * 12,
            r"is not an IDX file of images: its shape is \(4294967295, ",
        ),
        (
            "train-images-idx3-ubyte",
            lambda _: idx(np.zeros((20, 32, 32), np.uint8)),
            r"has shape \(20, 32, 32\), but MNIST's images are 28×28",
        ),
        (
            "train-labels-idx1-ubyte",
            lambda _: idx(LABELS[:19]),
            r"train-labels-idx1-ubyte has 19 labels for the 20 samples of .*train-images",
        ),
        (
            "train-labels-idx1-ubyte",
            lambda _: idx(np.full(20, 11, np.uint8)),
            r"has 20 labels outside 0..9; the first is 11 at index 0",
        ),
        (
            "train-labels-idx1-ubyte",
            lambda _: idx(np.eye(10, dtype=np.uint8)[LABELS[:20]]),
            r"has shape \(20, 10\), but each image has one label",
        ),
    ],
)
def test_files_that_are_no_mnist_are_refused(
    name: str, change: Callable[[bytes], bytes] | None, message: str, tmp_path: Path
) -> None:
    write_files(tmp_path)
    file = tmp_path / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises(FeedError, match=message):
        read_mnist(tmp_path)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, packed=("train-images",))
    file = tmp_path / "train-images-idx3-ubyte.gz"
    for damaged in (file.read_bytes()[:200], b"\x1f\x8b" + b"x" * 40, b"plain"):
        file.write_bytes(damaged)
        with pytest.raises(FeedError, match=r"train-images-idx3-ubyte.gz cannot be read"):
            read_mnist(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"input": IMAGES, "label": LABELS}, r"has input, label, not the four arrays of MNIST"),
        (
            {"x_train": IMAGES.astype(np.float32)},
            r"'x_train' has pixels from 0 to 255, but with dtype float32 they must be from 0 to 1",
        ),
        ({"x_train": IMAGES.astype(np.int16) - 1}, r"'x_train' has pixels from -1 to 254"),
        (
            {"x_test": np.full((10, 28, 28), np.nan, np.float32)},
            r"'x_test' has pixels from nan to nan",
        ),
        ({"x_train": IMAGES.astype(str)}, r"'x_train' has dtype <U\d+, but pixels must be numbers"),
        ({"x_test": IMAGES[:0], "y_test": LABELS[:0]}, r"'x_test' has shape \(0, 28, 28\)"),
        ({"y_test": LABELS[20:] + 0.5}, r"'y_test' has labels that are not whole numbers"),
    ],
)
def test_arrays_that_are_no_mnist_are_refused(
    arrays: dict[str, npt.NDArray[np.generic]], message: str, tmp_path: Path
) -> None:
    names = ("x_train", "y_train", "x_test", "y_test")
    whole = {name: array for name, (_, array) in zip(names, PARTS.values(), strict=True)}
    if "input" not in arrays:
        if "x_train" in arrays:
            whole["y_train"] = LABELS
        arrays = whole | arrays
    np.savez(tmp_path / "mnist.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(FeedError, match=message):
        read_mnist(tmp_path / "mnist.npz")


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FeedError, match="no such file or folder"):
        read_mnist(tmp_path / "mnist")
    with pytest.raises(FeedError, match="has none of MNIST's IDX files"):
        read_mnist(tmp_path)
