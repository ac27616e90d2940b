"""What an engine's profiles do not contain is refused before it is loaded, without a GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from moexport.bench.runners.base import GraphFile
from moexport.bench.runners.tensorrt import EngineLoader
from moexport.errors import UsageError
from moexport.exporter.tensorrt.backends import first_gpu
from moexport.tests.command import Outcome, run
from moexport.tests.exporter.tensorrt.engines import build, export, needs_rtx
from moexport.tests.recorded import read_case

pytestmark = needs_rtx

CASE = "soft_moe_fkodom"  # a layer of 6 experts and width 24
PROFILES = ("--profile", "batch=1:2:4,tokens=4:8:16,k=2:2:3", "--profile", "batch=8,tokens=5,k=4")
X = read_case(CASE).x
INSIDE = np.zeros((2, 8, 24), np.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with an engine of two narrow profiles, whose plan is gone: nothing can load it."""
    folder = tmp_path_factory.mktemp("built")
    bundle = export(CASE, folder, "--k", "input", "--lowering", "gather")
    build(bundle, *PROFILES)
    (bundle / "engine-tensorrt-rtx.plan").unlink()
    return bundle


def run_engine(bundle: Path, folder: Path, x: np.ndarray, *options: str) -> Outcome:
    np.savez(folder / "x.npz", input=x)
    files = ("-i", folder / "x.npz", "-o", folder / "y.npz")
    outcome = run("run", bundle, *files, "--engine", "tensorrt-rtx", *options)
    assert not (folder / "y.npz").exists()
    assert outcome.out == ""
    return outcome


LISTED = "(input 1:2:4×4:8:16×24, k 2:2:3; input 8×5×24, k 4)"


@pytest.mark.parametrize(
    ("shape", "k", "code", "message", "hint"),
    [
        ((5, 8, 24), "2", 1, f"(5, 8, 24) are outside the engine's profile {LISTED}", "--profile"),
        ((2, 3, 24), "2", 1, f"(2, 3, 24) are outside the engine's profile {LISTED}", "--profile"),
        ((8, 5, 24), "2", 2, f"k = 2: outside the engine's profile {LISTED}", "--profile k="),
        ((2, 8, 24), "6", 2, f"k = 6: outside the engine's profile {LISTED}", "--profile k="),
        ((2, 8, 24), "7", 2, "--k 7: the model has 6 experts", "1 ≤ k ≤ 6"),
        ((2, 8, 24), None, 2, "k is an input of this engine, but no k was given", "add --k K"),
        (
            (2, 8, 23),
            "2",
            1,
            "(batch, tokens, 24), not float32 (2, 8, 23)",
            "`moexport inspect` shows the inputs",
        ),
        ((2, 0, 24), "2", 1, "input 'input' is empty: (2, 0, 24)", "tokens must be at least 1"),
    ],
)
def test_a_run_outside_the_profiles_is_refused_before_the_engine_is_looked_at(
    shape: tuple[int, ...],
    k: str | None,
    code: int,
    message: str,
    hint: str,
    built: Path,
    tmp_path: Path,
) -> None:
    options = () if k is None else ("--k", k)
    outcome = run_engine(built, tmp_path, np.zeros(shape, np.float32), *options)
    assert outcome.code == code
    assert message in outcome.error
    assert hint in outcome.hint


def test_a_run_inside_the_profiles_gets_as_far_as_the_engine(built: Path, tmp_path: Path) -> None:
    for x, k in ((INSIDE, "2"), (np.zeros((8, 5, 24), np.float32), "4")):
        outcome = run_engine(built, tmp_path, x, "--k", k)
        assert "engine-tensorrt-rtx.plan: there is no such engine" in outcome.error


def test_a_k_for_an_engine_that_has_its_own_is_refused(tmp_path: Path) -> None:
    bundle = export(CASE, tmp_path, "--k", "2", "--lowering", "gather")
    build(bundle, "--profile", "batch=1:2:4,tokens=4:8:16")
    outcome = run_engine(bundle, tmp_path, INSIDE, "--k", "2")
    assert outcome.code == 2
    assert outcome.error == "k = 2 was given, but the engine's k is baked in"


def test_a_benchmark_does_not_load_an_engine_for_a_k_outside_its_profiles(built: Path) -> None:
    with pytest.raises(UsageError, match="k = 5: outside the engine's profile"):
        EngineLoader(GraphFile(path=built / "model.onnx", k=5), "tensorrt-rtx")()


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        ("batch=1:2:4,tokens=4:8:32,k=3", "k = 1: outside the engine's profile"),
        ("batch=1:2:4,tokens=64", "are outside the engine's profile (input 1:2:4×64×24, k 1:1:6)"),
        ("batch=1:2:4,tokens=1:8:64", "there is no NVIDIA GPU here"),
    ],
)
def test_verify_says_what_keeps_an_engine_from_being_compared(
    profile: str, why: str, checked: Path, tmp_path: Path
) -> None:
    if "GPU" in why and first_gpu() is not None:
        pytest.skip("says what is so without a GPU")
    bundle = Path(shutil.copytree(checked, tmp_path / "out"))
    build(bundle, "--profile", profile)
    outcome = run("verify", bundle, "--json")
    assert outcome.code == 0, outcome.err
    checks = {each["name"]: each["detail"] for each in json.loads(outcome.out)["checks"]}
    detail = checks["engine engine-tensorrt-rtx.plan"]
    assert detail.startswith("built by TensorRT-RTX ")
    assert "; not run: " in detail
    assert why in detail


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without an engine that was compared with PyTorch on eight inputs."""
    folder = tmp_path_factory.mktemp("checked")
    case = read_case(CASE)
    outcome = run(
        *("export", case.weights, "--set", "version=0.2.0", "-o", folder / "out", "--k", "input"),
        *("--target", "tensorrt-rtx", "--lowering", "gather", "--no-engine"),
    )
    assert outcome.code == 0, outcome.err
    return folder / "out"
