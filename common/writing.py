"""Writes files and folders atomically: the result is complete or absent.

Partial output has a random name next to its destination, and is synced to the disk before it is
renamed. The next process that writes there removes the leftovers of killed processes that are more
than a day old, because nothing can still be writing to these.
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
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import OutputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The system's error numbers for a lack of space."""

HINTS = {
    errno.ENOSPC: "free some space or choose another -o; nothing was left behind",
    errno.EDQUOT: "free some space or choose another -o; nothing was left behind",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "the file system is read-only: choose another -o",
    errno.ELOOP: "the link leads to itself: choose another -o",
    errno.EBUSY: "a folder that is in use cannot be replaced: choose one inside it with -o",
    errno.ENAMETOOLONG: "choose a shorter -o",
    errno.EFBIG: "the file system supports no file of that size: choose another -o",
    errno.EIO: "the disk or the connection to it is failing: check the system log",
}
"""Hints for system errors, by error number."""

PARTIAL = ".partial"
"""The names of partial output contain this."""

OLD = ".old"
"""The suffix of folders that are moved aside during a replacement."""

STALE_S = 24 * 3600.0
"""Partial output older than this is assumed to come from a killed process."""


def is_partial(path: Path) -> bool:
    """Whether a path is partial output, of a running or a killed process."""
    return path.name.startswith(".") and PARTIAL in path.name


def hint(error: OSError) -> str:
    """Returns the hint for an error in writing."""
    return HINTS.get(error.errno or 0, "choose another -o")


def check_folder(place: Path, option: str = "-o") -> None:
    """Raises OutputError, before any work, if a folder cannot be made or written to."""
    _check(nearest(place), place, option)


def check_file(place: Path) -> None:
    """Raises OutputError, before any work, if a file cannot be written.

    Devices and pipes are refused, because a renamed file would replace them.
    """
    with output_errors(place), suppress(FileNotFoundError, NotADirectoryError):
        mode = place.stat().st_mode
        if not stat.S_ISREG(mode):
            folder = stat.S_ISDIR(mode)
            raise OutputError(
                f"{place}: cannot be written: it is "
                f"{'a folder' if folder else 'not a regular file'}",
                hint=f"name a file {'in it ' if folder else ''}with -o",
            )
    _check(nearest(place.resolve().parent), place)


def _check(folder: Path, place: Path, option: str = "-o") -> None:
    """Raises OutputError if `folder`, which is `place` or will contain it, cannot be used.

    `option` is the option that named `place`.
    """
    if not folder.is_dir():
        inside = "" if folder == place.absolute() else f", so {place.name} cannot be created in it"
        raise OutputError(f"{folder}: not a folder{inside}", hint=f"choose another {option}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(
            f"{place}: cannot be written: no permission in {folder}", hint=HINTS[errno.EACCES]
        )
    find_temporary_folder(folder)


def find_temporary_folder(fallback: Path) -> None:
    """Uses `fallback` for temporary files if the system has no folder for them.

    In a container with a read-only root, only the folder of the results is writable.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = os.environ["TMPDIR"] = str(fallback)  # also for child processes


def nearest(place: Path) -> Path:
    """Returns a path, or its closest parent that exists."""
    path = place.absolute()
    return next((folder for folder in (path, *path.parents) if folder.exists()), path)


def make_folder(place: Path) -> None:
    """Makes a folder and its missing parents; raises OutputError on failure."""
    check_folder(place)
    with output_errors(place):
        place.mkdir(parents=True, exist_ok=True)


@contextmanager
def made_folder(place: Path) -> Iterator[None]:
    """Makes a folder and its missing parents; on exit, removes those that are empty.

    Raises OutputError on failure.
    """
    missing = [folder for folder in (place, *place.parents) if not folder.exists()]
    with output_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # a folder may not be empty
            for folder in missing:
                folder.rmdir()


@contextmanager
def output_errors(place: Path) -> Iterator[None]:
    """Within the context, system errors in writing become an OutputError that names `place`.

    If a disk is full, the error names the file that did not fit, which may be elsewhere.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(cannot_write(place, error), hint=hint(error)) from error


def cannot_write(place: Path, error: OSError) -> str:
    """Returns a message with the path that could not be written: `place`, or a file elsewhere."""
    named = None if error.filename is None else Path(os.fsdecode(error.filename))
    if named is not None:
        if error.errno in FULL and not any(map(is_partial, (named, *named.parents))):
            place = named
        elif named.parent != place.parent and is_partial(named.parent):
            place = place / named.name
    return f"{place}: cannot be written: {error.strerror or error}"


@contextmanager
def whole_file(place: Path) -> Iterator[Path]:
    """Yields the path of a temporary file next to `place`, which replaces `place` on success.

    The temporary file has the suffix of `place`. Links are followed: their target is replaced. On
    failure the old file stays; failures in writing raise OutputError. After a power cut, the old or
    the new file is there, and it is complete.
    """
    check_file(place)
    target = place.resolve()
    with (
        made_folder(target.parent),
        output_errors(place),
        _temporary(target, target.suffix, lambda path: path.touch(exist_ok=False)) as partial,
    ):
        yield partial
        sync_to_disk(partial)
        move(partial, target)
        sync_to_disk(target.parent)


def write_text(text: str, place: Path) -> None:
    """Writes a text file whole or not at all; raises OutputError on failure."""
    with whole_file(place) as partial:
        partial.write_text(text, encoding="utf-8")


def temporary_folder(target: Path) -> AbstractContextManager[Path]:
    """Yields a new, empty folder next to `target`, and removes it when the block ends."""
    return _temporary(target, "", Path.mkdir)


def scratch_folder(name: str, within: Path | None = None) -> AbstractContextManager[Path]:
    """Yields a private temporary folder, and removes it when the block ends.

    It is in the system's folder for temporary files, or in `within`. Raises OutputError if the
    folder cannot be made.
    """
    place = within or Path(tempfile.gettempdir())

    def make(path: Path) -> None:
        with output_errors(place):
            path.mkdir(mode=0o700)

    return _temporary(place / f"moexport-{name}", "", make)


def scratch_file(name: str) -> AbstractContextManager[Path]:
    """Yields an empty temporary file, as `scratch_folder` does; raises OSError on failure."""
    place = Path(tempfile.gettempdir()) / f"moexport-{name}"
    return _temporary(place, "", lambda path: path.touch(mode=0o600, exist_ok=False))


_UNTIL_EXIT = ExitStack()


def scratch_until_exit(name: str) -> Path:
    """Makes a scratch folder that stays until `remove_scratch` or the end of the process."""
    return _UNTIL_EXIT.enter_context(scratch_folder(name))


def remove_scratch() -> None:
    """Removes the folders of `scratch_until_exit`."""
    _UNTIL_EXIT.close()


atexit.register(remove_scratch)


def replace_folder(new: Path, target: Path) -> None:
    """Replaces a folder with another on the same file system.

    The new folder is synced first. The old one is moved aside, and restored on failure: between the
    two renames there is no folder at `target`. Concurrent replacements wait.
    """
    for path in (*new.rglob("*"), new):
        sync_to_disk(path)
    remove_leftovers(target)
    aside = _hidden_sibling(target, OLD)
    with locked(target.parent):
        try:
            with suppress(FileNotFoundError):
                move(target, aside)
            move(new, target)
        finally:
            if aside.exists():
                _restore(aside, target)
    sync_to_disk(target.parent)
    if aside.exists():
        raise OutputError(
            f"{aside}: the old folder cannot be removed; the new one is complete: {target}",
            hint="remove the old one by hand: it is read-only, or in use",
        )


def move(old: Path, new: Path) -> None:
    """Renames a file or folder; on another file system, renames a copy.

    In a container, two names in one folder may be on two file systems: the image and the changes.
    """
    try:
        old.replace(new)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with _temporary(new, "", lambda _: None) as copy:
            if old.is_dir():
                shutil.copytree(old, copy, symlinks=True)
            else:
                shutil.copy2(old, copy)
            for path in (*copy.rglob("*"), copy):
                sync_to_disk(path)
            copy.rename(new)
        _remove(old)


def _restore(aside: Path, target: Path) -> None:
    """Moves back a folder that was moved aside, or removes it if `target` exists again."""
    if not target.exists():
        with suppress(OSError):  # without locks, another process may have created the target
            move(aside, target)
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Syncs a file's content, or a folder's list of names, to the disk."""
    if path.is_dir() and sys.platform == "win32":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY if sys.platform != "win32" else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without fsync
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Locks a folder: another process waits at its own `locked` until the block ends.

    Yields whether the folder is locked, which may be false without `wait`.

    The lock ends with the process. It is on the folder itself and leaves no file behind, except on
    Windows, which can only lock files. A file system without locks never waits.
    """
    if sys.platform == "win32":
        handle = os.open(folder / f".lock{PARTIAL}", os.O_RDWR | os.O_CREAT)
    else:
        handle = os.open(folder, os.O_RDONLY)
    with _locked(handle, wait) as free:
        yield free


@contextmanager
def _locked(handle: int, wait: bool) -> Iterator[bool]:
    """Locks an opened file or folder, and closes it when the block ends."""
    from filelock import lock_descriptor

    acquired = True
    try:
        with suppress(OSError):  # some network file systems have no locks
            acquired = lock_descriptor(handle, blocking=wait, poll_interval=0.005)
        yield acquired
    finally:
        os.close(handle)


@contextmanager
def exclusive_folder(folder: Path | None) -> Iterator[None]:
    """Locks a folder of results, made if necessary, for one command; does nothing for None.

    Raises OutputError at once if another command has locked it. The lock is on a file in the folder
    and ends with the process; a file system without locks refuses nothing. A folder that stays
    empty is removed.
    """
    if folder is None:
        yield
        return
    check_folder(folder)
    with made_folder(folder), _exclusive(folder / f".running{PARTIAL}", folder):
        yield


@contextmanager
def exclusive_place(place: Path) -> Iterator[None]:
    """Locks a file or folder to be written, as `exclusive_folder` does, with a file next to it."""
    target = place.resolve()
    with (
        made_folder(target.parent),
        _exclusive(target.with_name(f".{target.name}.running{PARTIAL}"), place),
    ):
        yield


@contextmanager
def _exclusive(lock: Path, place: Path) -> Iterator[None]:
    with output_errors(place):
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with _locked(handle, wait=False) as free:
        if not free:
            raise OutputError(
                f"{place}: another moexport process is writing its results there",
                hint="wait for it to finish, or choose another place",
            )
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


_TEMPORARY: set[Path] = set()


@contextmanager
def _temporary(target: Path, suffix: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """Yields a new path next to `target`, which is removed when the block ends.

    Its name is unpredictable, so that nobody can place a link there.
    """
    remove_leftovers(target, suffix)
    path = _hidden_sibling(target, PARTIAL + suffix, suffix)
    make(path)
    _TEMPORARY.add(path)
    try:
        yield path
    finally:
        _remove(path)
        _TEMPORARY.discard(path)


def _hidden_sibling(target: Path, ending: str, suffix: str = "") -> Path:
    return target.with_name(f".{target.name.removesuffix(suffix)}.{os.urandom(8).hex()}{ending}")


def remove_partial() -> None:
    """Removes this process's partial output, from a thread other than the one that writes it."""
    for path in left_behind():
        with suppress(OSError):  # `left_behind` reports what remains
            _remove(path)


def left_behind() -> list[Path]:
    """Returns the partial output that this process could not remove."""
    return sorted(path for path in _TEMPORARY if path.exists())


def remove_leftovers(target: Path, suffix: str = "") -> None:
    """Removes partial output of `target` by killed processes; moves back what they moved aside."""
    stem = re.escape(target.name.removesuffix(suffix))
    name = re.compile(rf"\.{stem}\.[0-9a-f]{{16}}({re.escape(PARTIAL + suffix)}|{re.escape(OLD)})")
    with suppress(OSError):  # leftovers that cannot be listed or removed do no harm
        for path in target.parent.iterdir():
            if not name.fullmatch(path.name) or path.is_symlink():
                continue
            if path.name.endswith(OLD) and not target.exists():
                # The process that moved the folder holds the lock while it runs.
                with locked(target.parent, wait=False) as free:
                    if free and not target.exists():
                        path.rename(target)
            elif time.time() - max(e.lstat().st_mtime for e in (path, *path.rglob("*"))) > STALE_S:
                # Renamed first: a process that resumes must not find only part of it.
                _remove(path.rename(_hidden_sibling(target, PARTIAL + suffix, suffix)))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
