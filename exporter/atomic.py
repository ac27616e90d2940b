"""Writes a directory whole or not at all."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import BundleError
from .manifest import MANIFEST_FILE


def check_destination(destination: Path, *, force: bool, needed_bytes: int = 0) -> None:
    """Raises `BundleError` when a bundle cannot be written there, before any work is done.

    With `force` an existing bundle or an empty folder may be replaced; nothing else ever is.
    """
    if destination.exists() or destination.is_symlink():
        if not destination.is_dir():
            raise BundleError(
                f"{destination}: a file of this name exists", hint="choose another -o"
            )
        is_bundle = (destination / MANIFEST_FILE).is_file()
        if not is_bundle and any(destination.iterdir()):
            raise BundleError(
                f"{destination}: the folder exists and is not a bundle; it is left untouched",
                hint="choose another -o",
            )
        if is_bundle and not force:
            raise BundleError(
                f"{destination}: a bundle exists there", hint="--force replaces it when complete"
            )
    parent = _nearest_folder(destination.absolute().parent)
    if not parent.is_dir():
        raise BundleError(f"{parent}: not a folder, so {destination.name} cannot lie in it")
    if needed_bytes:
        free = shutil.disk_usage(parent).free
        if free < needed_bytes:
            raise BundleError(
                f"{parent}: no space: the bundle needs {needed_bytes / 1e6:.0f} MB and "
                f"{free / 1e6:.0f} MB are free",
                hint="free some space or choose another -o",
            )


@contextmanager
def written_whole(destination: Path, *, force: bool) -> Iterator[Path]:
    """Yields a temporary folder beside `destination` and renames it there when all went well.

    On any failure, an interrupt included, the temporary folder is removed and what was at the
    destination stays. Raises `BundleError` for no space or no permission.
    """
    check_destination(destination, force=force)
    partial: Path | None = None
    try:
        destination.absolute().parent.mkdir(parents=True, exist_ok=True)
        partial = Path(
            tempfile.mkdtemp(
                prefix=f".{destination.name}.", suffix=".partial", dir=destination.absolute().parent
            )
        )
        partial.chmod(0o755)
        yield partial
        _replace(partial, destination)
    except OSError as error:
        if error.errno in _WRITE_FAILURES:
            raise BundleError(
                f"{destination}: cannot be written: {error.strerror}",
                hint=_WRITE_FAILURES[error.errno],
            ) from error
        raise
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)  # gone already when all went well


_WRITE_FAILURES = {
    errno.ENOSPC: "free some space or choose another -o; nothing was left behind",
    errno.EDQUOT: "free some space or choose another -o; nothing was left behind",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "the file system is read-only: choose another -o",
}


def _replace(partial: Path, destination: Path) -> None:
    """Renames over an old bundle, which is moved aside first and put back if that fails."""
    if not destination.exists():
        partial.rename(destination)
        return
    old = partial.with_suffix(".old")
    destination.rename(old)
    try:
        partial.rename(destination)
    except OSError:
        old.rename(destination)
        raise
    shutil.rmtree(old)


def _nearest_folder(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
