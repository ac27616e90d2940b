"""Gives memory-mapped pages back, so that reading a large file does not fill the memory."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STEP_BYTES = 256 << 20
"""So much of a mapped file is read before its pages are dropped, which takes tens of ms."""

_SMAPS = Path("/proc/self/smaps")


@dataclass(frozen=True, slots=True)
class _Mapping:
    """One mapping of this process: its address, its file and the bytes of it changed in memory."""

    start: int
    length: int
    file: str
    changed: bool


def release(files: Iterable[Path]) -> None:
    """Drops the resident pages of this process's mappings of `files`; a no-op outside Linux.

    The pages stay in the system's cache and come back when they are next touched. A private mapping
    with pages that were changed in memory is left alone, since those would be lost. A file may have
    been removed meanwhile.
    """
    if not sys.platform.startswith("linux") or not _SMAPS.exists():
        return
    wanted = {str(file.resolve()) for file in files}
    if not wanted:
        return
    libc = ctypes.CDLL(None)
    for mapping in _mappings(_SMAPS.read_text(encoding="utf-8", errors="replace")):
        if mapping.file in wanted and not mapping.changed:
            libc.madvise(
                ctypes.c_void_p(mapping.start),
                ctypes.c_size_t(mapping.length),
                ctypes.c_int(mmap.MADV_DONTNEED),
            )


class Reading:
    """A pass over mapped files that gives their pages back on the way.

    Whoever reads says how much: after every `STEP_BYTES` all resident pages of `files` are dropped,
    so that a pass over a file of any size holds little more than that.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._resident_bytes = 0

    def advance(self, size: int) -> None:
        """Another `size` bytes were read."""
        self._resident_bytes += size
        if self._resident_bytes >= STEP_BYTES:
            self.end()

    def end(self) -> None:
        """Drops what is still resident."""
        release(self._files)
        self._resident_bytes = 0


def _mappings(smaps: str) -> Iterator[_Mapping]:
    """Yields the file-backed mappings that a text in the format of /proc/PID/smaps lists."""
    start = end = 0
    file = ""
    for line in smaps.splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            low, _, high = head.partition("-")
            start, end = int(low, 16), int(high, 16)
            fields = rest.split(maxsplit=4)
            file = fields[4].removesuffix(" (deleted)") if len(fields) > 4 else ""
        elif head == "Anonymous:" and file.startswith("/"):
            changed = int(rest.split()[0]) > 0  # copies made when a private mapping is written to
            yield _Mapping(start, end - start, file, changed)


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(files: Sequence[Path]) -> str:
    """Returns the SHA-256 of one file, or of the digests of several; empty for none."""
    digests = [sha256(path) for path in files]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else ""
