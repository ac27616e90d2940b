"""The pages on engines: what can be run without a GPU runs, and prints what they show."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from moexport.tests.docs.documents import ROOT, assert_printed, blocks, run_block
from moexport.tests.recorded import DATA
from moexport.tests.targets.engines import needs_rtx


@pytest.mark.parametrize(
    ("page", "written"),
    [
        pytest.param("edge.md", "edge/engine-tensorrt-rtx.plan", marks=needs_rtx),
        ("servers.md", "server/model.onnx"),
    ],
)
def test_the_page_runs_as_far_as_it_needs_no_gpu(page: str, written: str, tmp_path: Path) -> None:
    case = DATA / "soft_moe_vit"  # a ViT of width 48, which 12 heads divide
    shutil.copy(case / "weights.pt", tmp_path / "vit.pt")
    np.savez(tmp_path / "test.npz", input=np.load(case / "io.npz")["x"])
    printed = ""
    for block in blocks(ROOT / "docs" / page):
        if block.language == "bash":
            printed = run_block(block, tmp_path)
        elif block.language == "text":
            assert_printed(block, printed)
    assert (tmp_path / written).is_file()
