"""A lock that processes of one machine take turns at, so that two builds at once do no harm."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder: another process waits at its own `locked` until the block ends.

    The lock is on the folder itself, so it leaves no file behind and goes with the process that
    holds it. Where the system has no such lock (Windows, some network file systems) nothing waits.
    """
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # gives the lock back, too
