"""Where commands write: a file or folder is there whole or not at all, and two take turns.

What is being written has a random name beside its destination, ends up on the disk before it is
renamed, and is locked by the process that writes it: so the next one that writes to the same place
removes what a killed one has left.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import OutputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The system's errors where there is no room for a file."""

HINTS = {
    errno.ENOSPC: "free some space or choose another -o; no part of it was left behind",
    errno.EDQUOT: "free some space or choose another -o; no part of it was left behind",
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
    with output_errors(place):
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
    with output_errors(place):
        place.mkdir(parents=True, exist_ok=True)


@contextmanager
def output_errors(place: Path) -> Iterator[None]:
    """Within the context, what the system refuses to write is an OutputError that names `place`.

    Of a full disk it names the file that did not fit, which may lie elsewhere.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in FULL and error.filename is not None
        where = error.filename if full and PARTIAL not in str(error.filename) else place
        raise OutputError(
            f"{where}: cannot be written: {error.strerror or error}", hint=hint(error)
        ) from error


@contextmanager
def whole_file(place: Path) -> Iterator[Path]:
    """Yields a temporary file's path beside `place` and renames it there when all went well.

    It ends as `place` does. A link stays one: what it points to is replaced. On any failure what
    was there stays; OutputError tells of one in writing. After a power cut either is there, whole.
    """
    check_file(place)
    target = place.resolve()
    make_folder(target.parent)
    with output_errors(place), _owned(target, target.suffix, _new_file) as partial:
        yield partial
        to_disk(partial)
        partial.replace(target)
        to_disk(target.parent)


def write_text(text: str, place: Path) -> None:
    """Writes a text file whole or not at all; OutputError where it cannot be."""
    with whole_file(place) as partial:
        partial.write_text(text, encoding="utf-8")


def temporary_folder(target: Path) -> AbstractContextManager[Path]:
    """A new, empty folder beside `target`, which is gone when the block ends."""
    return _owned(target, "", Path.mkdir)


def scratch_folder(name: str, within: Path | None = None) -> AbstractContextManager[Path]:
    """A folder for a step's own files, which is gone when the block ends; nobody else may read it.

    It lies in the system's folder for temporary files, or `within` another. What a killed process
    left of the same step is removed first. OutputError tells of a folder that cannot be made.
    """
    place = within or Path(tempfile.gettempdir())

    def make(path: Path) -> None:
        with output_errors(place):
            path.mkdir(mode=0o700)

    return _owned(place / f"moexport-{name}", "", make)


_UNTIL_EXIT = ExitStack()


def scratch_until_exit(name: str) -> Path:
    """Makes a scratch folder that stays until `remove_scratch` or the end of the process."""
    return _UNTIL_EXIT.enter_context(scratch_folder(name))


def remove_scratch() -> None:
    """Removes what `scratch_until_exit` made."""
    _UNTIL_EXIT.close()


atexit.register(remove_scratch)


def replace_folder(new: Path, target: Path) -> None:
    """Puts a folder, which `temporary_folder` made for it, in the place of another.

    Where the system can exchange the two there is a whole one at every moment, and the old one is
    the temporary one afterwards. All is on the disk before.
    """
    for path in (*new.rglob("*"), new):
        to_disk(path)
    if not target.exists():
        new.rename(target)
    elif not _exchanged(new, target):
        _replaced_in_turn(new, target)
    to_disk(target.parent)


def remove_folder(folder: Path) -> None:
    """Removes a folder even when interrupted again meanwhile; the interrupt then follows."""
    again: KeyboardInterrupt | None = None
    while folder.exists():
        try:
            shutil.rmtree(folder, ignore_errors=True)
            break
        except KeyboardInterrupt as interrupt:
            again = interrupt
    if again is not None:
        raise again


def to_disk(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, would outlast a power cut."""
    if path.is_dir() and sys.platform == "win32":  # opens no folders
        return
    handle = os.open(path, os.O_RDONLY if sys.platform != "win32" else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of a file system without it
            raise
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder: another process waits at its own `locked` until the block ends.

    The lock goes with the process that holds it. It is on the folder itself and leaves no file
    behind, but on Windows, which locks files alone. Where a file system has no locks nothing waits.
    """
    if sys.platform == "win32":
        handle = os.open(folder / f".lock{PARTIAL}", os.O_RDWR | os.O_CREAT)
    else:
        handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, wait=True)
        yield
    finally:
        os.close(handle)


def nearest(place: Path) -> Path:
    """Returns a path, or the first above it that exists."""
    path = place.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


PARTIAL = ".partial"
"""In the names of what is being written: it is nobody's once its writer is gone."""

OLD = ".old"
"""Ends the names of folders that are moved aside where the system cannot exchange two."""


def _new_file(path: Path) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    os.close(os.open(path, flags, 0o666))


@contextmanager
def _owned(target: Path, suffix: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """Yields something new beside `target`, which is removed when the block ends.

    Nobody can tell its name before, so that no link waits there.
    """
    remove_leftovers(target, suffix)
    stem = target.name.removesuffix(suffix)
    while True:
        path = target.with_name(f".{stem}.{os.urandom(8).hex()}{PARTIAL}{suffix}")
        make(path)
        _MADE.add(path)
        handle = _owner(path)
        try:
            if path.exists():  # else another process took it for a leftover before it was locked
                yield path
                return
        finally:
            try:
                _remove(path)
                _MADE.discard(path)
            finally:
                _release(handle)


_MADE: set[Path] = set()


def left_behind() -> list[Path]:
    """Returns what this process began to write and could not remove."""
    return sorted(path for path in _MADE if path.exists())


def remove_leftovers(target: Path, suffix: str = "") -> None:
    """Removes what killed processes left of writing `target`; moves back what they moved aside."""
    if sys.platform == "win32":  # tells not whether the owner lives
        return
    stem, own = re.escape(target.name.removesuffix(suffix)), os.geteuid()
    name = re.compile(rf"\.{stem}\.[0-9a-f]{{16}}({re.escape(PARTIAL + suffix)}|{re.escape(OLD)})")
    with suppress(OSError):  # what cannot be listed or removed is as harmless as it was
        for path in target.parent.iterdir():
            if not name.fullmatch(path.name) or path.is_symlink() or path.lstat().st_uid != own:
                continue
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not _lock(handle, wait=False):
                    continue
                if path.name.endswith(OLD) and not target.exists():
                    path.rename(target)
                _remove(path)
            finally:
                os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def _owner(path: Path) -> int | None:
    """A descriptor that locks a file or folder until it is closed; None where it is gone.

    None on Windows, too, where a file that is open cannot be renamed.
    """
    if sys.platform == "win32":
        return None
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    _lock(handle, wait=True)
    return handle


def _release(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    """Whether a descriptor is locked now, if that could be told."""
    from filelock import lock_descriptor

    try:
        return lock_descriptor(handle, blocking=wait, poll_interval=0.005)
    except OSError:  # some network file systems have no locks
        return False


_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2
"""Of Linux's renameat2 (linux/fs.h, fcntl.h) and macOS's renamex_np (sys/stdio.h)."""


def _exchanged(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step; False where the system cannot."""
    import ctypes

    libc: Any = None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):
        code = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    elif hasattr(libc, "renamex_np"):
        code = libc.renamex_np(*names, _RENAME_SWAP)
    else:
        return False
    if code == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # of a file system without it
        return False
    raise OSError(number, os.strerror(number), str(other))


def _replaced_in_turn(new: Path, target: Path) -> None:
    """Renames over a folder, which is moved aside first and put back if that fails."""
    old = target.with_name(new.name.replace(PARTIAL, OLD))
    handle = _owner(target)
    try:
        target.rename(old)
        new.rename(target)
    except BaseException:  # an interrupt between the two must not lose the old one
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        if target.exists():
            remove_folder(old)
        _release(handle)
