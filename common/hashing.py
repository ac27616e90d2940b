"""Hashes of files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path


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
