"""The page about a layer of one's own runs, and shows what the example holds."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from moexport.docs.sources import ROOT
from moexport.tests.docs.documents import SITE, assert_printed, blocks, run_block, type_block

PAGE = SITE["own-layer.md"]
EXAMPLE = ROOT / "examples" / "own_layer.py"


@pytest.mark.slow
def test_the_path_from_a_layer_of_ones_own_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_layer", raising=False)
    printed, ran = "", 0
    for block in blocks(PAGE):
        if block.language == "text":
            assert_printed(block, printed)
        elif block.language == "bash":
            # An error of `almost.py` is shown with both of its lines: a shell's own program.
            runs = run_block if "2>&1" in block.text else type_block
            printed = runs(block, tmp_path)
            ran += 1
    assert ran == 5
    assert (tmp_path / "report" / "report.html").is_file()


def test_the_excerpts_are_those_of_the_example() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    shown = [block.text for block in blocks(PAGE) if block.language == "py"]
    layer, adapter, *others = shown
    assert layer in source and adapter in source
    for block in others:  # of layers that are not in the example: they can be read as Python
        compile(block, str(PAGE), "exec")
