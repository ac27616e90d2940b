"""Gives memory-mapped pages back, so that reading a large file does not fill the memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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

    The pages stay in the system's cache and come back when they are next touched. A mapping with
    pages that were changed in memory is left alone, since those would be lost.
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
            file = fields[4] if len(fields) > 4 else ""
        elif head == "Anonymous:" and file.startswith("/"):
            changed = int(rest.split()[0]) > 0  # copies made when a private mapping is written to
            yield _Mapping(start, end - start, file, changed)
