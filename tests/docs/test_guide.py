"""The guides run: every block, in order, as a reader would type it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from moexport.docs.sources import ROOT
from moexport.exporter.bundle.bundle import Bundle
from moexport.tests.bench.heads import trained_head, unfair_head
from moexport.tests.docs.documents import SITE, assert_printed, blocks, type_block
from moexport.tests.docs.outliers import vit_with_outliers
from moexport.tests.docs.released import released

pytestmark = pytest.mark.slow


def follow(page: str, folder: Path, heading: str | None = None, end: str | None = None) -> int:
    """Runs a page's blocks in one folder and compares its excerpts; returns how many ran.

    With a `heading`, those from there; with an `end`, those before that heading.
    """
    lines = SITE[page].read_text(encoding="utf-8").splitlines()
    begin = 0 if heading is None else lines.index(heading)
    last = len(lines) if end is None else lines.index(end)
    printed, count = "", 0
    for block in blocks(SITE[page]):
        if not begin < block.line <= last or block.language == "py":  # a fragment of a program
            continue
        if block.language == "text":
            assert_printed(block, printed)
        else:
            printed = type_block(block, folder)
            count += 1
    return count


def test_the_guide_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    assert follow("guide.md", tmp_path) > 8


def test_the_page_on_tune_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    assert follow("tune.md", tmp_path) == 3
    assert (tmp_path / "tuned-report" / "report.html").is_file()
    for name in ("model.onnx", "weights.bin"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "tuned" / name).read_bytes()


def test_a_network_of_ones_own_is_exported_as_its_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert follow("own-network.md", tmp_path) == 1
    for name in ("examples", "examples.own_network"):
        del sys.modules[name]


def test_a_released_vmoe_goes_from_download_to_report_as_its_page_shows(tmp_path: Path) -> None:
    released(tmp_path)
    assert follow("v-moe.md", tmp_path) == 3
    assert (tmp_path / "report" / "report.html").is_file()
    assert Bundle.open(tmp_path / "vmoe-s32").manifest.source.family == "vmoe-vit"


def test_a_layer_that_int8_harms_stays_in_floats_as_the_calibration_page_shows(
    tmp_path: Path,
) -> None:
    vit_with_outliers(tmp_path)
    assert follow("calibration.md", tmp_path, "## As much INT8 as the accuracy allows") == 1


def test_experts_are_looked_at_and_edited_as_the_page_on_studies_shows(tmp_path: Path) -> None:
    trained_head(tmp_path)
    unfair_head(tmp_path)
    assert follow("studies.md", tmp_path, end="## How experts are used") == 9
    with np.load(tmp_path / "test.npz") as arrays:
        x, labels = arrays["input"][:, None], arrays["label"]
    nines = {
        name: (Bundle.open(tmp_path / name).session()(x)[:, 0].argmax(axis=1) == 9)
        for name in ("without", "rewritten")
    }
    assert nines["without"][labels == 9].mean() < 0.5  # what expert 8 was for
    assert nines["rewritten"][labels == 9].mean() < 0.5  # and what the rewrite was for
