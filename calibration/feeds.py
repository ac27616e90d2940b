"""Real inputs, streamed in batches: `.npz`, a folder of `.npy`, or `package.module:iterable`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ..common.user_code import attribute_of, module_of, names_code
from ..errors import FeedError
from .arrays import WANTED, check_inputs, npy_count, npy_rows, npz_count, npz_rows
from .stream import limited

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
