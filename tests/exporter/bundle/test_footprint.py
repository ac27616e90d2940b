"""What a bundle tells of the machine that checked it, and of the memory that it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from moexport.common.environment import kernel_instructions
from moexport.exporter.bundle.manifest import Manifest
from moexport.tests.command import run
from moexport.tests.recorded import DATA

LAYER = DATA / "mumoe_cp" / "weights.pt"
EXPORT = ("export", LAYER, "--set", "act=entmax15", "--k", "2")


def test_a_bundle_tells_its_peak_memory_and_the_cpu(tmp_path: Path) -> None:
    done = run(*EXPORT, "-o", tmp_path / "out", "--target", "ort-cpu")
    assert done.code == 0, done.err
    facts = json.loads(run("inspect", "--json", tmp_path / "out").out)
    # Python with NumPy and ONNX Runtime, and a layer of a few kilobytes.
    assert 30e6 < facts["peak_memory_bytes"] < 300e6
    assert facts["environment"]["cpu"]["instructions"] == kernel_instructions()
    assert "memory      " in run("inspect", tmp_path / "out").out
    page = (tmp_path / "out" / "README.md").read_text()
    assert f"{facts['peak_memory_bytes'] / 1e6:.1f} MB of memory" in page
    for name in kernel_instructions():
        assert name in page
    assert run("verify", tmp_path / "out").code == 0


@pytest.mark.parametrize("given", [("--target", "ort-cuda"), ("--no-verify",)])
def test_what_was_not_measured_is_not_told(given: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*EXPORT, "-o", tmp_path / "out", *given)
    assert done.code == 0, done.err
    assert Manifest.read(tmp_path / "out").peak_memory_bytes is None
    assert "peak_memory_bytes" not in (tmp_path / "out" / "manifest.json").read_text()
    assert " of memory, including" not in (tmp_path / "out" / "README.md").read_text()
