"""The page of a bundle has its engines: their GPUs, lines that run them, and that none was run."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.readme import README_FILE
from moexport.exporter.tensorrt.records import EngineRecord, gpus
from moexport.tests.command import run
from moexport.tests.exporter.tensorrt.engines import build, export, needs_rtx
from moexport.tests.recorded import DATA

PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
API: dict[str, Any] = json.loads((DATA / "tensorrt_api.json").read_text())


def page_of(bundle: Path) -> str:
    return (bundle / README_FILE).read_text(encoding="utf-8")


@needs_rtx
@pytest.mark.parametrize("k", ["2", "input"])
def test_a_build_adds_the_engine_to_the_page_of_its_bundle(k: str, tmp_path: Path) -> None:
    bundle = export("soft_moe_mnist", tmp_path, "--k", k, "--lowering", "gather")
    assert "Run the engine" not in page_of(bundle)
    (record,) = build(bundle)
    page = page_of(bundle)
    assert "RTX 40 series (8.9)" in page
    assert "**Never run**" in page
    assert f"TensorRT-RTX {record['version']}" in page
    for file in (record["file"], record["layers"]):
        assert f"| `{file}` | {(bundle / file).stat().st_size:,} |" in page
    chosen = f" --k {record['profiles'][0]['k'][1]}" if k == "input" else ""
    assert f"-o OUTPUTS.npz{chosen} --engine tensorrt-rtx --trust-engine" in page
    outcome = run("verify", bundle, "--trust-engine")
    assert "ok      hash of README.md: SHA-256 as recorded" in outcome.out


@needs_rtx
def test_the_lines_of_an_engine_are_names_of_moexport_and_tensorrt(tmp_path: Path) -> None:
    bundle = export("soft_moe_mnist", tmp_path, "--k", "input", "--lowering", "gather")
    build(bundle)
    ours, theirs, _ = PROGRAM.findall(page_of(bundle))
    assert callable(Bundle.engine)
    assert 'Bundle.open(".").engine("tensorrt-rtx", trust=True)' in ours
    compile(ours, "ours", "exec")
    holders = {
        "runtime": "Runtime",
        "engine": "ICudaEngine",
        "context": "IExecutionContext",
        "trt": "tensorrt",
    }
    called = {
        (holders[node.value.id], node.attr)
        for node in ast.walk(ast.parse(theirs))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in holders
    }
    assert len(called) >= 8
    for version, known in API.items():
        names = known["names"]
        missing = [
            (holder, name)
            for holder, name in called
            if holder != "tensorrt" and name not in names[holder]
        ]
        assert missing == [], version


@needs_rtx
def test_a_page_that_a_user_changed_stays(tmp_path: Path) -> None:
    bundle = export("soft_moe_mnist", tmp_path, "--k", "2")
    (bundle / README_FILE).write_text("mine", encoding="utf-8")
    build(bundle)
    assert page_of(bundle) == "mine"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "RTX 40 series (8.9)"),
        ({"compute_capabilities": ["8.6", "12.0"]}, "RTX 30 series (8.6), RTX 50 series (12.0)"),
        (
            {"flavour": "tensorrt", "device": "NVIDIA H100", "compute_capabilities": ["9.0"]},
            "NVIDIA H100 (9.0) only",
        ),
        (
            {"flavour": "tensorrt", "options": {"hardware_compatible": "ampere-plus"}},
            "compute capability 8.0 and newer",
        ),
        (
            {"flavour": "tensorrt", "options": {"hardware_compatible": "same-compute-capability"}},
            "compute capability 8.9",
        ),
    ],
)
def test_the_gpus_of_an_engine_are_told_by_name(changes: dict[str, Any], text: str) -> None:
    (one,) = json.loads((DATA / "manifest_with_engine_0_1_0.json").read_text())["engines"]
    assert gpus(EngineRecord(**one | changes)) == text
