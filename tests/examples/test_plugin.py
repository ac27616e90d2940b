"""A package of somebody else's brings a family, a lowering, a runtime, its target and a command.

And it goes: what it brought is refused then, in words.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.docs.sources import ROOT
from moexport.tests.recorded import DATA

PLUGIN = ROOT / "examples" / "plugin"
CASE = DATA / "soft_moe_lucidrains"

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_package_is_short() -> None:
    files = [file for file in PLUGIN.iterdir() if file.is_file()]
    assert {file.suffix for file in files} == {".md", ".py", ".toml"}
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 150


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is installed."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    where = ("--no-deps", "--no-build-isolation", "--target", folder / "site", source)
    subprocess.run([*pip, *where], check=True, capture_output=True)
    return folder / "site"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of the package's family, and inputs."""
    folder = tmp_path_factory.mktemp("inputs")
    other = {"^slot_embeds$": "slots", r"^experts\.experts\.(\d+)": r"mlp\1"}
    tensors = torch.load(CASE / "weights.pt")
    for pattern, name in other.items():
        tensors = {re.sub(pattern, name, key): tensor for key, tensor in tensors.items()}
    torch.save(tensors, folder / "model.pt")
    np.savez(folder / "x.npz", input=np.load(CASE / "io.npz")["x"])
    return folder


def running(folder: Path, *site: Path) -> Run:
    """What runs a command in a folder, beside what is installed in further places."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), *map(str, site)]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moexport", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    return run


@pytest.mark.slow
def test_its_family_lowering_runtime_and_command_are_used(site: Path, inputs: Path) -> None:
    run = running(inputs, site)

    def printed(*words: str) -> str:
        done = run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed("export", "model.pt", "-o", "out", "--k", "2", "--lowering", "in-turn")
    manifest = json.loads((inputs / "out" / "manifest.json").read_text())
    assert manifest["source"]["family"] == "tiny-mixture"
    assert {layer["lowering"] for layer in manifest["layers"]} == {"in-turn"}
    assert "parity of model.onnx" in printed("verify", "out")
    printed("run", "out", "-i", "x.npz", "-o", "y.npz", "--engine", "onnx-reference")
    recorded = np.load(CASE / "io.npz")["y_k2"]
    (name,) = np.load(inputs / "y.npz").files
    np.testing.assert_allclose(np.load(inputs / "y.npz")[name], recorded, rtol=1e-4, atol=1e-5)
    assert "model.onnx  MatMul  " in printed("count", "out")
    # Its target: without --engine its runtime compares and runs the graphs.
    printed("export", "model.pt", "-o", "own", "--k", "2", "--target", "reference")
    assert json.loads((inputs / "own" / "manifest.json").read_text())["target"] == "reference"
    assert "ok      parity of model.onnx" in printed("verify", "own")
    printed("run", "own", "-i", "x.npz", "-o", "own.npz")
    printed("run", "own", "-i", "x.npz", "-o", "named.npz", "--engine", "onnx-reference")
    own, named = (np.load(inputs / file)[name] for file in ("own.npz", "named.npz"))
    np.testing.assert_array_equal(own, named)
    np.testing.assert_allclose(own, recorded, rtol=1e-4, atol=1e-5)
    # One that is named alone: what is chosen by itself is moexport's own.
    printed("export", "model.pt", "-o", "auto", "--k", "2", "--no-verify")
    chosen = json.loads((inputs / "auto" / "manifest.json").read_text())["layers"]
    assert "in-turn" not in json.dumps(chosen)


@pytest.mark.slow
def test_what_it_does_not_do_is_said(site: Path, inputs: Path) -> None:
    run = running(inputs, site)
    listed = "'onnxruntime', 'onnx-reference', 'openvino', 'tensorrt', 'tensorrt-rtx'"
    done = run("run", "out", "-i", "x.npz", "-o", "z.npz", "--engine", "nothing")
    assert (done.returncode, listed in done.stderr) == (2, True), done.stderr
    reference = ("run", "out", "-i", "x.npz", "-o", "z.npz", "--engine", "onnx-reference")
    done = run(*reference, "--provider", "cuda")
    assert done.returncode == 2
    assert "--provider: it belongs to ONNX Runtime, but ONNX's reference runs it" in done.stderr
    assert "--cache: it belongs to OpenVINO" in run(*reference, "--cache", "kept").stderr
    model = str(DATA / "mumoe_cp" / "weights.pt")
    settings = ("--set", "act=entmax15", "--set", "rest=default")
    done = run("export", model, "-o", "none", "--lowering", "in-turn", *settings)
    assert "it is for soft-moe layers, but this is a mumoe layer" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "model.pt", "-o", "none"), "no known family has these"),
        (
            ("export", "model.pt", "-o", "none", "--family", "tiny-mixture"),
            "unknown family 'tiny-mixture'",
        ),
        (
            ("export", str(CASE / "weights.pt"), "-o", "none", "--lowering", "in-turn"),
            "there is no lowering 'in-turn'",
        ),
        (
            ("run", "out", "-i", "x.npz", "-o", "none.npz", "--engine", "onnx-reference"),
            "'onnx-reference' is not one of 'onnxruntime', 'openvino'",
        ),
        (
            ("export", str(CASE / "weights.pt"), "-o", "none", "--target", "reference"),
            "'reference' is not one of 'onnx', 'ort-cpu'",
        ),
        (("verify", "own"), "target is 'reference', which no installed package provides"),
        (("run", "own", "-i", "x.npz", "-o", "none.npz"), "hint: install the plugin that runs it"),
        (("count", "out"), "No such command 'count'"),
    ],
)
def test_without_it_each_is_refused(words: tuple[str, ...], said: str, inputs: Path) -> None:
    done = running(inputs)(*words)
    assert done.returncode != 0
    assert said in done.stderr
    assert not (inputs / "none").exists()
