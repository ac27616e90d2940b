"""The guides run: every block, in order, as a reader would type it."""

from __future__ import annotations

import shutil
from pathlib import Path

from moexport.tests.docs.documents import ROOT, assert_printed, blocks, run_block


def follow(page: str, folder: Path) -> int:
    """Runs a page's blocks in one folder and compares its excerpts; returns how many ran."""
    printed, count = "", 0
    for block in blocks(ROOT / page):
        if block.language == "text":
            assert_printed(block, printed)
        else:
            printed = run_block(block, folder)
            count += 1
    return count


def test_the_guide_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    assert follow("docs/guide.md", tmp_path) > 8


def test_a_network_of_ones_own_is_exported_as_the_families_page_shows(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    assert follow("docs/families.md", tmp_path) == 1
