"""Mapped pages are given back, and nothing that was changed in memory is ever lost."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from moexport.exporter.pages import release

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="page advice is Linux's; elsewhere it is a no-op"
)

SIZE = 64 << 20


def mapped_resident_bytes(path: Path) -> int:
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)
    return sum(
        1024 * int(match.group(1))
        for block in blocks
        if str(path) in block and (match := re.search(r"^Rss:\s+(\d+)", block, re.MULTILINE))
    )


def test_resident_pages_of_a_mapped_file_are_dropped_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    np.full(SIZE // 4, 3.0, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, dtype=np.float32, mode="r")
    assert mapped.sum(dtype=np.float64) == 3.0 * (SIZE // 4)
    assert mapped_resident_bytes(path) > SIZE // 2
    release([path])
    assert mapped_resident_bytes(path) < SIZE // 8
    assert mapped.sum(dtype=np.float64) == 3.0 * (SIZE // 4)


def test_a_mapping_that_was_written_to_keeps_its_changes(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    np.zeros(SIZE // 4, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, dtype=np.float32, mode="c")  # private: changes live in memory alone
    mapped[1000] = 7.0
    release([path])
    assert mapped[1000] == 7.0


def test_files_that_are_not_mapped_are_no_error(tmp_path: Path) -> None:
    release([tmp_path / "absent.bin"])
    release([])
    assert mapped_resident_bytes(tmp_path / "absent.bin") == 0
