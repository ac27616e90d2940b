"""Where commands write: a file or folder is there whole or not at all.

What is being written has a random name beside its destination, and is on the disk before it takes
its place. What a killed process left is removed by the next that writes there, once it is a day
old: nobody is writing it any more.
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
    errno.EIO: "the disk fails, or the connection to it: look at the system's log",
}
"""What to do where writing fails for a reason that is not ours, by the system's error."""

PARTIAL = ".partial"
"""In the names of what is being written."""

OLD = ".old"
"""Ends the names of folders that are moved aside while others take their places."""

STALE_S = 24 * 3600.0
"""What nobody has written to for so long is left of a process that was killed."""


def is_partial(path: Path) -> bool:
    """Whether something is being written under this name, or was by a process that was killed."""
    return path.name.startswith(".") and PARTIAL in path.name


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
    with output_errors(place), suppress(FileNotFoundError, NotADirectoryError):
        mode = place.stat().st_mode
        if not stat.S_ISREG(mode):
            folder = stat.S_ISDIR(mode)
            raise OutputError(
                f"{place}: cannot be written: it is {'a folder' if folder else 'no regular file'}",
                hint=f"name a file {'in it ' if folder else ''}with -o",
            )
    _check(nearest(place.resolve().parent), place)


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
    find_temporary_folder(folder)


def find_temporary_folder(beside: Path) -> None:
    """Lets temporary files lie beside what is written where the system has no folder for them.

    In a container whose root is read-only only the folder of the results can be written to.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = os.environ["TMPDIR"] = str(beside)  # for programs that are started, too


def nearest(place: Path) -> Path:
    """Returns a path, or the first above it that exists."""
    path = place.absolute()
    return next((folder for folder in (path, *path.parents) if folder.exists()), path)


def make_folder(place: Path) -> None:
    """Makes a folder and those above it that are missing; OutputError where that fails."""
    check_folder(place)
    with output_errors(place):
        place.mkdir(parents=True, exist_ok=True)


@contextmanager
def made_folder(place: Path) -> Iterator[None]:
    """Makes a folder and those above it that are missing; of these go, in the end, the empty ones.

    Raises OutputError where that fails.
    """
    missing = [folder for folder in (place, *place.parents) if not folder.exists()]
    with output_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # one is not empty
            for folder in missing:
                folder.rmdir()


@contextmanager
def output_errors(place: Path) -> Iterator[None]:
    """Within the context, what the system refuses to write is an OutputError that names `place`.

    Of a full disk it names the file that did not fit, which may lie elsewhere.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(refused(place, error), hint=hint(error)) from error


def refused(place: Path, error: OSError) -> str:
    """Returns what the system refuses to write: `place`, a file in it, or one elsewhere."""
    why = error.strerror or str(error)
    named = None if error.filename is None else Path(os.fsdecode(error.filename))
    if named is not None and error.errno in FULL and not any(map(is_partial, _way(named))):
        return f"{named}: cannot be written: {why}"
    if named is not None and named.parent != place.parent and is_partial(named.parent):
        return f"{place / named.name}: cannot be written: {why}"
    return f"{place}: cannot be written: {why}"


def _way(path: Path) -> tuple[Path, ...]:
    return (path, *path.parents)


@contextmanager
def whole_file(place: Path) -> Iterator[Path]:
    """Yields a temporary file's path beside `place` and renames it there when all went well.

    It ends as `place` does. A link stays one: what it points to is replaced. On any failure what
    was there stays; OutputError tells of one in writing. After a power cut either is there, whole.
    """
    check_file(place)
    target = place.resolve()
    with (
        made_folder(target.parent),
        output_errors(place),
        _temporary(target, target.suffix, _new_file) as partial,
    ):
        yield partial
        to_disk(partial)
        move(partial, target)
        to_disk(target.parent)


def _new_file(path: Path) -> None:
    path.touch(exist_ok=False)


def write_text(text: str, place: Path) -> None:
    """Writes a text file whole or not at all; OutputError where it cannot be."""
    with whole_file(place) as partial:
        partial.write_text(text, encoding="utf-8")


def temporary_folder(target: Path) -> AbstractContextManager[Path]:
    """A new, empty folder beside `target`, which is gone when the block ends."""
    return _temporary(target, "", Path.mkdir)


def scratch_folder(name: str, within: Path | None = None) -> AbstractContextManager[Path]:
    """A folder for a step's own files, which is gone when the block ends; nobody else may read it.

    It lies in the system's folder for temporary files, or `within` another. OutputError tells of a
    folder that cannot be made.
    """
    place = within or Path(tempfile.gettempdir())

    def make(path: Path) -> None:
        with output_errors(place):
            path.mkdir(mode=0o700)

    return _temporary(place / f"moexport-{name}", "", make)


def scratch_file(name: str) -> AbstractContextManager[Path]:
    """An empty file as `scratch_folder` is a folder; OSError where it cannot be made."""
    place = Path(tempfile.gettempdir()) / f"moexport-{name}"
    return _temporary(place, "", lambda path: path.touch(mode=0o600, exist_ok=False))


_UNTIL_EXIT = ExitStack()


def scratch_until_exit(name: str) -> Path:
    """Makes a scratch folder that stays until `remove_scratch` or the end of the process."""
    return _UNTIL_EXIT.enter_context(scratch_folder(name))


def remove_scratch() -> None:
    """Removes what `scratch_until_exit` made."""
    _UNTIL_EXIT.close()


atexit.register(remove_scratch)


def replace_folder(new: Path, target: Path) -> None:
    """Puts a folder in the place of another, on the same file system.

    All is on the disk before. The other one is moved aside first, and comes back where that fails:
    between the two renames there is none. Others that replace it at the same time wait.
    """
    for path in (*new.rglob("*"), new):
        to_disk(path)
    remove_leftovers(target)
    aside = _beside(target, OLD)
    with locked(target.parent):
        try:
            with suppress(FileNotFoundError):
                move(target, aside)
            move(new, target)
        finally:
            if aside.exists():
                _restore(aside, target)
    to_disk(target.parent)
    if aside.exists():
        raise OutputError(
            f"{aside}: the old folder cannot be removed; the new one is complete: {target}",
            hint="remove the old one by hand: it is only read, or in use",
        )


def move(old: Path, new: Path) -> None:
    """Renames a file or folder, on another file system too: there a copy is renamed.

    In a container two names in one folder may lie on two file systems: what its image has, and what
    was written since.
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
                to_disk(path)
            copy.rename(new)
        _remove(old)


def _restore(aside: Path, target: Path) -> None:
    """Moves back a folder that was moved aside, or removes it where another has its place."""
    if not target.exists():
        with suppress(OSError):  # where nothing locks, another may have taken the place meanwhile
            move(aside, target)
    if target.exists():
        remove_folder(aside)


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
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Holds a folder: another process waits at its own `locked` until the block ends.

    Yields whether it is held: without `wait` it is not where another holds it.

    The lock goes with the process that holds it. It is on the folder itself and leaves no file
    behind, but on Windows, which locks files alone. Where a file system has no locks nothing waits.
    """
    from filelock import lock_descriptor

    if sys.platform == "win32":
        handle = os.open(folder / f".lock{PARTIAL}", os.O_RDWR | os.O_CREAT)
    else:
        handle = os.open(folder, os.O_RDONLY)
    free = True
    try:
        with suppress(OSError):  # some network file systems have no locks
            free = lock_descriptor(handle, blocking=wait, poll_interval=0.005)
        yield free
    finally:
        os.close(handle)


@contextmanager
def held(folder: Path | None) -> Iterator[None]:
    """Holds a folder of results, which is made if need be, for one command; nothing for None.

    Raises OutputError at once where another command holds it. The lock is on a file in the folder
    and goes with the process; where a file system has no locks nobody is refused. A folder that
    stays empty is removed.
    """
    if folder is None:
        yield
        return
    check_folder(folder)
    with made_folder(folder), _holding(folder / f".running{PARTIAL}", folder):
        yield


@contextmanager
def held_place(place: Path) -> Iterator[None]:
    """Holds what is to be written in the end, as `held` does; the lock is on a file beside it."""
    target = place.resolve()
    with (
        made_folder(target.parent),
        _holding(target.with_name(f".{target.name}.running{PARTIAL}"), place),
    ):
        yield


@contextmanager
def _holding(lock: Path, place: Path) -> Iterator[None]:
    from filelock import lock_descriptor

    with output_errors(place):
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    free = True
    try:
        with suppress(OSError):
            free = lock_descriptor(handle, blocking=False)
        if not free:
            raise OutputError(
                f"{place}: another moexport is writing its results there",
                hint="wait until it has ended, or choose another place",
            )
        yield
    finally:
        if free:
            lock.unlink(missing_ok=True)
        os.close(handle)


_MADE: set[Path] = set()


@contextmanager
def _temporary(target: Path, suffix: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """Yields something new beside `target`, which is removed when the block ends.

    Nobody can tell its name before, so that no link waits there.
    """
    remove_leftovers(target, suffix)
    path = _beside(target, PARTIAL + suffix, suffix)
    make(path)
    _MADE.add(path)
    try:
        yield path
    finally:
        _remove(path)
        _MADE.discard(path)


def _beside(target: Path, ending: str, suffix: str = "") -> Path:
    return target.with_name(f".{target.name.removesuffix(suffix)}.{os.urandom(8).hex()}{ending}")


def remove_partial() -> None:
    """Removes what this process is writing, from another thread than the one that writes."""
    for path in left_behind():
        with suppress(OSError):  # `left_behind` names what stays
            _remove(path)


def left_behind() -> list[Path]:
    """Returns what this process began to write and could not remove."""
    return sorted(path for path in _MADE if path.exists())


def remove_leftovers(target: Path, suffix: str = "") -> None:
    """Removes what killed processes left of writing `target`; moves back what they moved aside."""
    stem = re.escape(target.name.removesuffix(suffix))
    name = re.compile(rf"\.{stem}\.[0-9a-f]{{16}}({re.escape(PARTIAL + suffix)}|{re.escape(OLD)})")
    with suppress(OSError):  # what cannot be listed or removed is as harmless as it was
        for path in target.parent.iterdir():
            if not name.fullmatch(path.name) or path.is_symlink():
                continue
            if path.name.endswith(OLD) and not target.exists():
                with locked(target.parent, wait=False) as free:  # else who moved it is at work
                    if free and not target.exists():
                        path.rename(target)
            elif _idle_s(path) > STALE_S:
                # Under another name first: whoever woke up to go on with it must not find a part.
                _remove(path.rename(_beside(target, PARTIAL + suffix, suffix)))


def _idle_s(path: Path) -> float:
    """How long nobody has written to a file, or to anything in a folder."""
    return time.time() - max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))


def _remove(path: Path) -> None:
    if path.is_dir():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)
