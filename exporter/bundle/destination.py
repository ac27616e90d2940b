"""The folder that a bundle is written to: checked before any work, and replaced atomically."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ...common.documents import object_in
from ...common.writing import (
    HINTS,
    cannot_write,
    find_temporary_folder,
    hint,
    is_partial,
    made_folder,
    nearest,
    replace_folder,
    temporary_folder,
)
from ...errors import BundleError
from .manifest import MANIFEST_FILE


def check_destination(destination: Path, *, force: bool, needed_bytes: int = 0) -> None:
    """Raises `BundleError`, before any work is done, if a bundle cannot be written there.

    An empty folder may be replaced; with `force`, so may a bundle that contains none of the user's
    own files. Anything else is never replaced.
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
                f"{destination}: a file with this name exists", hint="choose another -o"
            )
        listed = _files_of_bundle(destination)
        if listed is None and any(destination.iterdir()):
            raise BundleError(
                f"{destination}: the folder exists but is not a bundle; it is left untouched",
                hint="choose another -o",
            )
        if listed is not None and not force:
            raise BundleError(
                f"{destination}: a bundle already exists there",
                hint="--force replaces it when the export succeeds",
            )
        others = others_in(destination, listed or ())
        if others:
            raise BundleError(
                f"{destination}: the bundle's folder contains other files: "
                f"{', '.join(others[:6])}; it is left untouched",
                hint="move them elsewhere, since --force replaces the folder, or choose another -o",
            )
    parent = nearest(destination.absolute().parent)
    if not parent.is_dir():
        raise BundleError(
            f"{parent}: not a folder, so {destination.name} cannot be created in it",
            hint="choose another -o",
        )
    find_temporary_folder(parent)
    if needed_bytes and (free := shutil.disk_usage(parent).free) < needed_bytes:
        raise BundleError(
            f"{parent}: not enough space: the bundle needs {needed_bytes / 1e6:.0f} MB, but only "
            f"{free / 1e6:.0f} MB are free",
            hint="free some space or choose another -o",
        )


def others_in(folder: Path, files: Collection[str]) -> list[str]:
    """Returns the names in a bundle's folder that are not its files."""
    known = {MANIFEST_FILE, *files}
    folders = {str(parent) for name in known for parent in PurePosixPath(name).parents}

    def others(subfolder: Path) -> Iterator[str]:
        for path in subfolder.iterdir():
            name = path.relative_to(folder).as_posix()
            if name in folders:
                yield from others(path)
            elif name not in known and not is_partial(path):
                yield name

    return sorted(others(folder))


@contextmanager
def atomic_directory(destination: Path, *, force: bool) -> Iterator[Path]:
    """Yields a temporary folder next to `destination`, and renames it to `destination` on success.

    On failure or interrupt the temporary folder is removed and the destination stays unchanged.
    Links are followed: their target is replaced. Raises `BundleError` if space or permission
    is lacking, `OutputError` if a parent folder cannot be made.
    """
    check_destination(destination, force=force)
    target = destination.resolve()
    try:
        with made_folder(target.parent), temporary_folder(target) as partial:
            yield partial
            # another export may have finished meanwhile
            check_destination(destination, force=force)
            replace_folder(partial, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise BundleError(
                f"{destination}: another program wrote there meanwhile",
                hint="choose another -o, or export again",
            ) from error
        if error.errno in HINTS:
            raise _unwritable(destination, error) from error
        raise


def _files_of_bundle(folder: Path) -> set[str] | None:
    """Returns the files of the bundle in this folder; None if it is not a bundle.

    Other programs also write a `manifest.json`.
    """
    content = object_in(folder / MANIFEST_FILE)
    if not {"schema", "moexport", "layers"} <= content.keys():
        return None
    files = content.get("files")
    return {MANIFEST_FILE, *(files if isinstance(files, dict) else ())}


def _unwritable(destination: Path, error: OSError) -> BundleError:
    return BundleError(cannot_write(destination, error), hint=hint(error))
