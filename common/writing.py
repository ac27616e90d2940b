"""Where commands write: missing folders are made, and a file is there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import BundleError, OutputError
from ..exporter.bundle.manifest import MANIFEST_FILE

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


PARTIAL = ".partial"
"""How the names of what is being written end: it is nobody's once its writer is gone."""


def check_destination(destination: Path, *, force: bool, needed_bytes: int = 0) -> None:
    """Raises `BundleError` when a bundle cannot be written there, before any work is done.

    With `force` an existing bundle may be replaced, and an empty folder always; nothing else ever
    is, and no bundle in which somebody keeps files of their own.
    """
    try:
        destination.lstat()
        present = True
    except (FileNotFoundError, NotADirectoryError):
        present = False
    except OSError as error:
        raise _unwritable(destination, error) from error
    if present:
        if not destination.is_dir():
            raise BundleError(
                f"{destination}: a file of this name exists", hint="choose another -o"
            )
        listed = _files_of_bundle(destination)
        is_bundle = listed is not None
        if not is_bundle and any(destination.iterdir()):
            raise BundleError(
                f"{destination}: the folder exists and is not a bundle; it is left untouched",
                hint="choose another -o",
            )
        if is_bundle and not force:
            raise BundleError(
                f"{destination}: a bundle exists there", hint="--force replaces it when complete"
            )
        others = others_in(destination, listed or ())
        if others:
            raise BundleError(
                f"{destination}: the bundle's folder holds what is not of the bundle: "
                f"{', '.join(others[:6])}; it is left untouched",
                hint="move that elsewhere, since --force replaces the folder, or choose another -o",
            )
    parent = nearest(destination.absolute().parent)
    if not parent.is_dir():
        raise BundleError(
            f"{parent}: not a folder, so {destination.name} cannot lie in it",
            hint="choose another -o",
        )
    if needed_bytes:
        free = shutil.disk_usage(parent).free
        if free < needed_bytes:
            raise BundleError(
                f"{parent}: no space: the bundle needs {needed_bytes / 1e6:.0f} MB and "
                f"{free / 1e6:.0f} MB are free",
                hint="free some space or choose another -o",
            )


def others_in(folder: Path, files: Collection[str]) -> list[str]:
    """Returns the names of what lies in a bundle's folder and is none of its files."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in (MANIFEST_FILE, *files) and not path.name.endswith(PARTIAL)
    )


@contextmanager
def atomic_directory(destination: Path, *, force: bool) -> Iterator[Path]:
    """Yields a temporary folder beside `destination` and renames it there when all went well.

    On any failure, an interrupt included, the temporary folder is removed and what was at the
    destination stays. A link is followed: what it points to is replaced. Raises `BundleError` for
    no space or no permission.
    """
    check_destination(destination, force=force)
    place = destination.resolve()
    partial: Path | None = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=PARTIAL, dir=place.parent))
        partial.chmod(0o755)
        yield partial
        check_destination(destination, force=force)  # another export may have ended meanwhile
        _replace(partial, place)
    except OSError as error:
        if error.errno in HINTS:
            raise _unwritable(destination, error) from error
        raise
    finally:
        if partial is not None:
            _remove(partial)  # gone already when all went well


def _files_of_bundle(folder: Path) -> set[str] | None:
    """The files of the bundle in this folder; None where export did not write it.

    Other programs keep a `manifest.json`, too.
    """
    try:
        content = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or not {"schema", "moexport", "layers"} <= content.keys():
        return None
    files = content.get("files")
    return {MANIFEST_FILE, *(files if isinstance(files, dict) else ())}


def _unwritable(destination: Path, error: OSError) -> BundleError:
    return BundleError(
        f"{destination}: cannot be written: {error.strerror}",
        hint=hint(error),
    )


def _replace(partial: Path, destination: Path) -> None:
    """Renames over an old bundle, which is moved aside first and put back if that fails."""
    if not destination.exists():
        partial.rename(destination)
        return
    old = partial.with_suffix(".old")
    try:
        destination.rename(old)
        partial.rename(destination)
    except BaseException:  # an interrupt between the two must not lose the old bundle
        if old.exists() and not destination.exists():
            old.rename(destination)
        raise
    finally:
        if destination.exists():
            _remove(old)


def _remove(folder: Path) -> None:
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
