"""Computes and caches SHA-256 hashes of files, and releases the pages of memory-mapped files.

Pages are released so that reading a large file does not fill the memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import stat
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CheckpointError, OutputError
from .documents import object_in
from .writing import write_text

STEP_BYTES = 256 << 20
"""Bytes read between two releases of pages; one release takes tens of milliseconds."""


MIN_RELEASED_BYTES = 16 << 20
"""Mapped files below this total stay resident: finding their pages would take too long."""


def release(files: Iterable[Path]) -> None:
    """Drops the resident pages of this process's mappings of `files`; a no-op outside Linux.

    The pages stay in the system's cache and are mapped again when touched. Private mappings with
    modified pages are skipped, since the changes would be lost. Some `files` may have been removed.
    """
    import psutil

    paths = {str(file.resolve()) for file in files}
    if not paths or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    for mapping in psutil.Process().memory_maps(grouped=False):
        if mapping.path in paths and not mapping.anonymous:  # anonymous: pages were modified
            start, end = (int(edge, 16) for edge in mapping.addr.split("-"))
            size = ctypes.c_size_t(end - start)
            libc.madvise(ctypes.c_void_p(start), size, ctypes.c_int(mmap.MADV_DONTNEED))


SMALL_BYTES = 128 << 20
"""Any file may unpack to this size."""

MAX_RATIO = 64
"""A larger file may unpack to this multiple of its size (shared weights, compression)."""


def allowed_bytes(size: int) -> int:
    """Returns how many bytes of data a file of a given size may declare."""
    return max(SMALL_BYTES, MAX_RATIO * size)


class Reading:
    """A pass over mapped files that releases their pages as it goes.

    Callers report what they have read; after every `STEP_BYTES` all resident pages of `files` are
    dropped, which bounds the memory for files of any size. Raises CheckpointError if a `watched`
    file was truncated meanwhile: touching pages beyond its end would kill the process.
    """

    def __init__(self, files: Iterable[Path] = (), watched: Watched | None = None) -> None:
        self._files, self._watched = tuple(files), watched
        self._large = sum(map(_size, self._files)) >= MIN_RELEASED_BYTES
        self._resident_bytes = 0
        self.advance(0)

    def advance(self, size: int) -> None:
        """Reports that `size` more bytes were read."""
        if self._watched is not None:
            self._watched.check_sizes()
        self._resident_bytes += size
        if self._resident_bytes >= STEP_BYTES:
            self.end()

    def end(self) -> None:
        """Drops the remaining resident pages."""
        if self._large:
            release(self._files)
        self._resident_bytes = 0


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # removed meanwhile; its pages may still be mapped
        return MIN_RELEASED_BYTES


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Watched:
    """Files at one moment: their states and their SHA-256.

    A state is the identity, size and times of change of a file; equal states mean equal contents.
    """

    files: tuple[Path, ...]
    states: tuple[tuple[int, ...], ...]
    sha256: str = ""

    @classmethod
    def now(cls, files: Sequence[Path]) -> Watched:
        """Returns the current states of files, without a hash."""
        return cls(tuple(files), tuple(_state(file) for file in files))

    def hashed(self) -> Watched:
        """Returns a copy with the SHA-256 of the files."""
        return replace(self, sha256=hash_files(self.files))

    def check_states(self) -> None:
        """Raises CheckpointError if a file was changed, replaced or removed meanwhile."""
        for file, state in zip(self.files, self.states, strict=True):
            if _state(file) != state:
                raise _changed(file)

    def check_sizes(self) -> None:
        """Raises CheckpointError if a file was truncated meanwhile."""
        for file, state in zip(self.files, self.states, strict=True):
            now = _state(file)
            if now[:2] == state[:2] and now[2:3] < state[2:3]:
                raise _changed(file)

    def check(self) -> None:
        """Raises CheckpointError if the contents of a file have changed.

        A file is hashed again only if its state has changed.
        """
        states = tuple(_state(file) for file in self.files)
        if states == self.states:
            return
        if any(not state for state in states) or hash_files(self.files) != self.sha256:
            pairs = zip(self.files, states, self.states, strict=True)
            raise _changed(next(f for f, now, then in pairs if now != then))


def _state(file: Path) -> tuple[int, ...]:
    """Returns the identity, size and times of change of a file; empty for a missing file."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changed(file: Path) -> CheckpointError:
    what = "was changed" if file.exists() else "was removed"
    return CheckpointError(
        f"{file} {what} while it was being read", hint="run again when nothing writes to the file"
    )


def hash_files(files: Sequence[Path]) -> str:
    """Returns the SHA-256 of one file, or of the digests of several; empty without files."""
    digests = [sha256(path) for path in files]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else ""


def known_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as hex digits, from a cache if the file has not changed.

    The cache is keyed by device, inode, size and times of change, in this process and in a file in
    the user's cache folder. Files changed within the last few seconds are not cached, because
    another change might leave the same times.
    """
    status = path.stat()
    times = (status.st_mtime_ns, status.st_ctime_ns)
    key = ":".join(map(str, (status.st_dev, status.st_ino, status.st_size, *times)))
    digest = _HASHES.get(key) or _remembered().get(key)
    if digest is not None:
        return digest
    digest = sha256(path)
    if time.time_ns() - max(times) > SETTLED_NS:
        _HASHES[key] = digest
        _remember(key, digest)
    return digest


SETTLED_NS = 3_000_000_000
"""The age from which hashes are cached; file systems record times in steps of up to 2 s."""

MAX_HASHES = 1000

_HASHES: dict[str, str] = {}


def _remembered() -> dict[str, str]:
    """Returns the hashes cached by earlier processes; empty if others may have written the file."""
    folder = cache_folder()
    if folder is None or why_not_private(folder) is not None:
        return {}
    entries = object_in(folder / "hashes.json").items()
    return {key: value for key, value in entries if isinstance(value, str)}


def _remember(key: str, digest: str) -> None:
    folder = cache_folder()
    if folder is None:
        return
    with suppress(OSError, OutputError):  # the cache is optional
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        entries = [*_remembered().items(), (key, digest)][-MAX_HASHES:]
        write_text(json.dumps(dict(entries), indent=0) + "\n", folder / "hashes.json")


def cache_folder() -> Path | None:
    """Returns this user's cache folder for moexport; None without a home folder."""
    try:
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA")
            return (Path(base) if base else Path.home() / "AppData" / "Local") / "moexport"
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "moexport"
    except RuntimeError:
        return None


def why_not_private(folder: Path) -> str | None:
    """Returns why others could put files into a folder; None if they cannot.

    A missing folder counts as private, and so does any folder on Windows.
    """
    if sys.platform == "win32" or not folder.exists():
        return None
    resolved = folder.resolve()
    for path in (resolved, *resolved.parents):
        status = path.stat()
        others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to user {status.st_uid}"
        # The sticky bit of a parent folder keeps others from renaming this user's files.
        if others and (path == resolved or not status.st_mode & stat.S_ISVTX):
            return f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):o})"
    return None
