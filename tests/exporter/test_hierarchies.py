"""A share of a hierarchy is one of each level: in PyTorch, in graphs and in what shows them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.tests.bench.heads import trained_head
from moexport.tests.command import run
from moexport.tests.recorded import ENTMAX, read_case

LEVELS = (4, 3, 2)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return trained_head(tmp_path_factory.mktemp("hierarchy"), LEVELS)


def formula(checkpoint: Path, x: np.ndarray, keep: tuple[int, ...]) -> np.ndarray:
    """Outputs of a CP layer in float64 that keeps so many coefficients of each level."""
    loaded = torch.load(checkpoint, weights_only=True)
    state = {key: value.double().numpy() for key, value in loaded.items()}
    z = np.c_[x, np.ones(len(x))].astype(np.float64)
    product = z @ state[f"MuMoE.factors.{len(keep)}"]
    for level, k in enumerate(keep):
        gate = x.astype(np.float64) @ state[f"projs.{level}"]
        gate -= state[f"bn.{level}.running_mean"]
        gate /= np.sqrt(state[f"bn.{level}.running_var"] + 1e-5)
        a = entmax15(gate)
        a = np.where(np.argsort(np.argsort(-a, axis=1), axis=1) < k, a, 0)
        product *= a @ state[f"MuMoE.factors.{level}"]
    return np.asarray(product @ state[f"MuMoE.factors.{len(keep) + 1}"].T)


def entmax15(z: np.ndarray) -> np.ndarray:
    """By bisection on the threshold, in float64."""
    z = z / 2
    low, high = z.max(axis=-1, keepdims=True) - 1, z.max(axis=-1, keepdims=True)
    for _ in range(100):
        middle = (low + high) / 2
        over = (np.maximum(z - middle, 0) ** 2).sum(axis=-1, keepdims=True) >= 1
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    p = np.maximum(z - low, 0) ** 2
    return np.asarray(p / p.sum(axis=-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.plugins
@pytest.mark.parametrize(
    ("k", "kept", "shown"),
    [
        ("0.5", (2, 2, 1), "2·2·1"),
        ("0.25", (1, 1, 1), "1·1·1"),
        ("2", (2, 2, 2), "2·2·2"),
        ("3/4", (3, 2, 2), "3·2·2"),
        ("n", LEVELS, "4·3·2"),
    ],
)
def test_a_share_is_taken_of_each_level(
    k: str, kept: tuple[int, ...], shown: str, head: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, data = head
    out = tmp_path / "out"
    outcome = run(
        *("export", checkpoint, *ENTMAX, "-o", out, "--k", k, "--expose-routing"),
        *("--data", data, "--target", "ort-cpu"),
    )
    assert outcome.code == 0, outcome.err
    assert f"k = {shown} of 4·3·2" in outcome.err
    x = np.load(data)["input"]
    session = onnxruntime.InferenceSession(out / "model.onnx")
    y, *coefficients = session.run(None, {"input": x[:, None]})
    assert np.abs(y[:, 0] - formula(checkpoint, x, kept)).max() < 1e-4 * np.abs(y).max()
    assert [a.shape[-1] for a in coefficients] == list(LEVELS)
    for a, most in zip(coefficients, kept, strict=True):
        assert ((a > 0).sum(axis=-1) <= most).all()
    assert np.abs(Bundle.open(out).session()(x[:, None]) - y).max() == 0
    shown_in_table = run("inspect", out).out
    assert f"4·3·2   {shown}" in shown_in_table
    assert f"{shown} of 4·3·2" in (out / "README.md").read_text()
    assert run("verify", out).code == 0
    planned = ("export", checkpoint, *ENTMAX, "-o", tmp_path / "planned", "--k", k, "--dry-run")
    assert f"layer      {shown}/4·3·2  factorised" in run(*planned).out
    (layer,) = json.loads(run(*planned, "--json").out)["graphs"]["model.onnx"]
    assert layer["levels"] == [*LEVELS]
    assert (layer["k_levels"] or [min(layer["k"], n) for n in LEVELS]) == [*kept]


@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("name", ["mumoe_cp", "mumoe_tr_2level"])
def test_coefficients_are_outputs_where_all_are_kept(
    name: str, precision: str, tmp_path: Path
) -> None:
    case = read_case(name)
    np.savez(tmp_path / "x.npz", input=case.x)
    config = [f"--set={key}={json.dumps(value)}" for key, value in case.config.items()]
    weights: Path = case.weights
    outcome = run(
        "export",
        weights,
        *config,
        *("-o", tmp_path / "out", "--expose-routing"),
        *("--precision", precision, "--target", "ort-cpu", "--data", tmp_path / "x.npz"),
    )
    assert outcome.code == 0, outcome.err
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    x = case.x[:, None] if case.x.ndim == 2 else case.x
    outputs = session.run(None, {"input": x})
    assert len(outputs) > 1
    for a in outputs[1:]:
        assert a.dtype == np.float32 and np.abs(a.sum(axis=-1) - 1).max() < 1e-4


@pytest.mark.plugins
@pytest.mark.slow
def test_routing_of_new_inputs_needs_the_coefficients(
    head: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, data = head
    with np.load(data) as held:
        x = held["input"]
    np.savez(tmp_path / "new.npz", input=x)
    for name, options in (("plain", ()), ("shown", ("--expose-routing",))):
        out = tmp_path / name
        words = ("export", checkpoint, *ENTMAX, "--data", data, *options, "-o", out)
        assert run(*words).code == 0
    told = run("verify", tmp_path / "plain", "--data", data).out
    assert "noted   routing of --data: not compared: every layer keeps all" in told
    refused = run("verify", tmp_path / "plain", "--data", tmp_path / "new.npz")
    assert refused.code == 1 and "--expose-routing and --data records coefficients" in refused.hint
    told = run("verify", tmp_path / "shown", "--data", tmp_path / "new.npz").out
    assert "ok      routing of --data: no drift: 0.0%" in told


@pytest.mark.slow
@pytest.mark.plugins
def test_a_benchmark_compares_a_share_with_the_same_share(
    head: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, data = head
    outcome = run("export", checkpoint, *ENTMAX, "-o", tmp_path / "half", "--k", "0.5")
    assert outcome.code == 0, outcome.err
    with np.load(data) as held:
        x, labels = held["input"], held["label"]
    right = formula(checkpoint, x, (2, 2, 1)).argmax(axis=1) == labels
    measured: list[tuple[list[Path], list[str]]] = [
        ([checkpoint, tmp_path / "half"], []),  # of a bundle its own k is measured
        ([checkpoint], ["--k", "n,0.5"]),
    ]
    for models, ks in measured:
        outcome = run(
            "bench",
            *models,
            *ENTMAX,
            *("--data", data, "--engine", "onnxruntime"),
            *ks,
            *("--no-memory", "-o", tmp_path / "out"),
        )
        assert outcome.code == 0, outcome.err
        rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
        (row,) = [each for each in rows if each["k"] == 2 and each["engine"] == "onnxruntime"]
        assert row["error"] is None and row["parity"]["cosine"] > 0.99999
        assert row["accuracy"]["top1"] == pytest.approx(right.mean(), abs=1e-12)
        assert (row["levels"], row["k_levels"]) == ([4, 3, 2], [2, 2, 1])
        assert "2·2·1/4·3·2" in outcome.out and "4·3·2/4·3·2" in outcome.out
        page = (tmp_path / "out" / "report.html").read_text()
        assert "k = 2·2·1 of 4·3·2 in FP32" in page and "k = 2 of 4" not in page


@pytest.mark.plugins
def test_ks_that_no_row_tells_apart_are_refused(head: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, data = head
    outcome = run(
        *("bench", checkpoint, *ENTMAX, "--data", data, "--engine", "onnxruntime"),
        *("--k", "n,0.5,2", "-o", tmp_path / "out"),
    )
    assert outcome.code == 2
    assert outcome.error.startswith("--k 1/2 and --k 2: both keep 2 experts in the layer or level")
    assert outcome.hint == "measure them in two runs"
    assert not (tmp_path / "out" / "results.json").exists()
