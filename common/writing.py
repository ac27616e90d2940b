"""Where commands write: missing folders are made, and a file is there whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The system's errors where there is no room for a file."""

HINTS = {
    errno.ENOSPC: "free some space or choose another -o; nothing was left behind",
    errno.EDQUOT: "free some space or choose another -o; nothing was left behind",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "the file system is read-only: choose another -o",
    errno.ELOOP: "the link leads to itself: choose another -o",
    errno.EBUSY: "a folder that is in use cannot be replaced: choose one inside it with -o",
    errno.ENAMETOOLONG: "choose a shorter -o",
    errno.EFBIG: "the file system takes no file of that size: choose another -o",
}
"""What to do where writing fails for a reason that is not ours, by the system's error."""


def hint(error: OSError) -> str:
    """Returns what to do where writing has failed."""
    return HINTS.get(error.errno or 0, "choose another -o")


def check_folder(place: Path, option: str = "-o") -> None:
    """Raises OutputError, before any work, where a folder cannot be made or written to."""
    _check(nearest(place), place, option)


def check_file(place: Path) -> None:
    """Raises OutputError, before any work, where a file cannot be written.

    What is no file (a device, a pipe) is refused: a renamed file would take its place.
    """
    with told(place):
        mode = _mode(place)
    if mode is not None and not stat.S_ISREG(mode):
        folder = stat.S_ISDIR(mode)
        raise OutputError(
            f"{place}: cannot be written: it is {'a folder' if folder else 'no regular file'}",
            hint=f"name a file {'in it ' if folder else ''}with -o",
        )
    _check(nearest(place.resolve().parent), place)


def _mode(place: Path) -> int | None:
    """What a path leads to, links followed; None where there is nothing yet."""
    try:
        return place.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check(folder: Path, place: Path, option: str = "-o") -> None:
    """Refuses a place that is to lie in a folder, or to be it, where that is no folder for it.

    `option` is the one that named it.
    """
    if not folder.is_dir():
        inside = "" if folder == place.absolute() else f", so {place.name} cannot lie in it"
        raise OutputError(f"{folder}: not a folder{inside}", hint=f"choose another {option}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(
            f"{place}: cannot be written: no permission in {folder}", hint=HINTS[errno.EACCES]
        )


def make_folder(place: Path) -> None:
    """Makes a folder and those above it that are missing; OutputError where that fails."""
    check_folder(place)
    with told(place):
        place.mkdir(parents=True, exist_ok=True)


@contextmanager
def told(place: Path) -> Iterator[None]:
    """Within the context, what the system refuses to write is an OutputError that names `place`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{place}: cannot be written: {error.strerror or error}", hint=hint(error)
        ) from error


@contextmanager
def whole_file(place: Path) -> Iterator[Path]:
    """Yields a temporary file's path beside `place` and renames it there when all went well.

    It ends as `place` does. A link stays one: what it points to is replaced. On any failure what
    was there stays; OutputError tells of one in writing.
    """
    check_file(place)
    target = place.resolve()
    make_folder(target.parent)
    partial = target.with_name(f".{place.stem}.{os.getpid()}.partial{place.suffix}")
    try:
        with told(place):
            yield partial
            partial.replace(target)
    finally:
        with told(place):
            partial.unlink(missing_ok=True)


def write_text(text: str, place: Path) -> None:
    """Writes a text file whole or not at all; OutputError where it cannot be."""
    with whole_file(place) as partial:
        partial.write_text(text, encoding="utf-8")


def nearest(place: Path) -> Path:
    """Returns a path, or the first above it that exists."""
    path = place.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
