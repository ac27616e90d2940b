"""Real inputs, streamed in batches: `.npz`, a folder of `.npy`, or `package.module:iterable`."""

from __future__ import annotations

import importlib
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile

from ..errors import FeedError

Feed = str | Path | np.ndarray | Iterable[np.ndarray]
"""What a caller may hand over: where inputs are, or the inputs themselves."""


_WANTED = "a feed gives batches of numbers, [b, …]: arrays, or dicts that hold them by input name"
_THEIRS = "the feed's own code failed: --verbose shows where"


def batches(feed: Feed, name: str) -> Iterator[np.ndarray]:
    """Yields batches [b, …] of the input called `name`, as the feed holds them.

    Raises `FeedError` that names the file, array or object when there is nothing to read.
    """
    if isinstance(feed, np.ndarray):
        yield _inputs(feed, "the feed")
    elif isinstance(feed, str | Path):
        yield from _located(str(feed), name)
    elif isinstance(feed, Iterable):
        for item in feed:
            yield _array(item, name, "the feed")
    else:
        raise FeedError(f"the feed is {type(feed).__name__}, not batches of inputs", hint=_WANTED)


def samples(feed: Feed, name: str, count: int) -> np.ndarray:
    """Returns the first `count` inputs of a feed as one array [count or fewer, …]."""
    taken: list[np.ndarray] = []
    left = count
    for batch in batches(feed, name):
        taken.append(np.asarray(batch[:left]))
        left -= len(taken[-1])
        if left <= 0:
            break
    if not taken or not sum(len(batch) for batch in taken):
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
        yield _npz(path, name) if path.suffix == ".npz" else _npy(path)
    elif ":" in where and not path.suffix:
        yield from _imported(where, name)
    else:
        raise FeedError(
            f"{where}: no such feed",
            hint="a feed is an .npz file, a folder of .npy files or package.module:iterable",
        )


def _npz(path: Path, name: str) -> np.ndarray:
    arrays = _read(path, ".npz")
    if not isinstance(arrays, NpzFile):
        raise FeedError(f"{path}: not a readable .npz file (it is an .npy)", hint="rename it")
    with arrays:
        names = list(arrays)
        if name not in names and len(names) != 1:
            raise FeedError(
                f"{path}: holds {', '.join(names) or 'nothing'}, but no array '{name}'",
                hint=f"save the inputs as np.savez(path, {name}=x)",
            )
        try:
            array = arrays[name if name in names else names[0]]
        except _UNREADABLE as error:
            raise FeedError(f"{path}: not a readable .npz file ({error})") from error
    return _inputs(array, str(path))


def _npy(path: Path) -> np.ndarray:
    array = _read(path, ".npy")
    if isinstance(array, NpzFile):
        array.close()
        raise FeedError(f"{path}: not a readable .npy file (it is an .npz)", hint="rename it")
    return _inputs(array, str(path))


_UNREADABLE = (ValueError, zipfile.BadZipFile, zlib.error, EOFError, OSError)


def _read(path: Path, kind: str) -> np.ndarray | NpzFile:
    """What `np.load` makes of a file; arrays are mapped, archives read as their parts are taken."""
    try:
        loaded: np.ndarray | NpzFile = np.load(path, allow_pickle=False, mmap_mode="r")
    except _UNREADABLE as error:
        raise FeedError(f"{path}: not a readable {kind} file ({error})") from error
    return loaded


def _folder(path: Path) -> Iterator[np.ndarray]:
    files = sorted(path.glob("*.npy"))
    if not files:
        raise FeedError(
            f"{path}: the folder holds no .npy file", hint="each file is one batch [b, …]"
        )
    for file in files:
        yield _npy(file)


def _imported(where: str, name: str) -> Iterator[np.ndarray]:
    module_name, _, attribute = where.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a user's own module lies in the current directory
    try:
        target = getattr(importlib.import_module(module_name), attribute)
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
            hint=_WANTED,
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
        yield _array(item, name, where)


def _array(item: object, name: str, where: str) -> np.ndarray:
    """A batch from what an iterable yields: an array, a tensor, or a dict or tuple around one."""
    if isinstance(item, dict):
        if name not in item:
            raise FeedError(f"{where}: yields a dict without '{name}'", hint=_WANTED)
        item = item[name]
    elif isinstance(item, tuple | list) and item:
        item = item[0]
    try:
        array = np.asarray(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FeedError(
            f"{where}: yields {type(item).__name__}, not an array ({error})", hint=_WANTED
        ) from error
    return _inputs(array, where, yielded=type(item).__name__)


def _inputs(array: np.ndarray, where: str, yielded: str | None = None) -> np.ndarray:
    """The array, when it can be a batch of inputs: numbers, with an axis for the batch."""
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        what = f"yields {yielded}" if yielded else f"holds {array.dtype.name} {array.shape}"
        raise FeedError(f"{where}: {what}, not an array of inputs", hint=_WANTED)
    return array
