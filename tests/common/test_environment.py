"""What is recorded of a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from moexport.common import environment as module
from moexport.common.environment import (
    cpu_model,
    environment,
    kernel_instructions,
    peak_memory_bytes,
    versions,
)


def test_the_environment_is_json_and_names_versions_and_cpu() -> None:
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["packages"]["torch"].startswith("2.")
    assert found["cpu"]["model"]
    assert found["cpu"]["cores"] >= 1
    assert found["cpu"]["instructions"] == kernel_instructions()
    assert found["gpu"] is None or found["gpu"][0]["name"]


def test_the_peak_is_of_this_process() -> None:
    assert 10 << 20 < peak_memory_bytes() < 64 << 30


def test_packages_that_are_not_installed_are_left_out() -> None:
    assert versions(("numpy", "no-such-package-here")).keys() == {"numpy"}


def test_the_cpu_has_a_name_where_the_system_has_none(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Example CPU @ 3 GHz\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Example CPU @ 3 GHz"
    assert cpu_model(tmp_path / "missing")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'NVIDIA H200, 143771 MiB, 580.1'", "NVIDIA H200"),
        ("echo 'no driver' >&2; exit 9", None),
    ],
)
def test_gpus_are_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str | None
) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    gpus = module.gpus()
    assert (gpus[0]["name"] if gpus else None) == found


def test_collecting_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, moexport.common.environment as e; e.environment();"
        "print([m for m in ('torch', 'onnx', 'onnxruntime', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
