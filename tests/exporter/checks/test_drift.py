"""An export counts which experts its data choose, and `verify --data` finds when new data drift."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import BundleError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.checks.choices import (
    CHOICES,
    ChoiceHistogram,
    by_input,
    deviations,
    real_tokens,
    recorded_histograms,
)
from moexport.exporter.checks.drift import MIN_INPUTS, NAME, Drift, DriftCheck, drift_of
from moexport.tests.command import run
from moexport.tests.recorded import DATA

WEIGHTS = DATA / "soft_moe_lucidrains" / "weights.pt"


def tokens(seed: int, count: int = 96, shift: float = 0.0) -> np.ndarray:
    """Inputs [s, 6, d], each about a direction of its own kind; `shift` moves all to one side."""
    model = moexport.load(WEIGHTS)
    (layer,) = model.layers.values()
    random = np.random.default_rng(seed)
    side = np.random.default_rng(7).standard_normal(layer.spec.dim)
    x = random.standard_normal((count, 1, layer.spec.dim)) + shift * side
    noise = 0.3 * random.standard_normal((count, 6, layer.spec.dim))
    return np.asarray(x + noise, np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    np.savez(folder / "export.npz", input=tokens(0))
    np.savez(folder / "same.npz", input=tokens(1))
    np.savez(folder / "shifted.npz", input=tokens(2, shift=1.5))
    return folder


def exported(folder: Path, data: Path, **options: Any) -> Bundle:
    model = moexport.load(WEIGHTS)
    return moexport.export(model, folder / "out", data=data / "export.npz", **options)


def found(bundle: Bundle, file: Path) -> DriftCheck | None:
    checks = [check for check in bundle.verify(data=str(file)) if check.name == NAME]
    assert all(isinstance(check, DriftCheck) for check in checks)
    return checks[0] if checks else None  # type: ignore[return-value]


def chosen_in_float64(x: np.ndarray, k: int) -> np.ndarray:
    """Who is chosen by Algorithm 1 for inputs [s, m, d], [s, n]: from the layer's own weights."""
    layer: Any = next(iter(moexport.load(WEIGHTS).layers.values()))
    spec = layer.spec
    phi = layer.phi.double().numpy()
    x = x.astype(np.float64)
    with torch.no_grad():
        normed = layer.double().normalise(torch.from_numpy(x)).numpy()
    logits = np.einsum("smd,dnp->smnp", normed, phi)
    powers = np.exp(logits - logits.max(axis=(2, 3), keepdims=True))
    c = powers / powers.sum(axis=(2, 3), keepdims=True)
    best = np.argsort(-c.sum(axis=(1, 3)), axis=1)[:, :k]
    chosen = np.zeros((len(x), spec.experts))
    np.put_along_axis(chosen, best, 1.0, axis=1)
    return chosen


@pytest.mark.parametrize(
    "options",
    [{"k": 1}, {"k": "input"}, {"k": 1, "precision": "int8"}, {"k": 1, "batch": 4}],
    ids=str,
)
def test_shifted_inputs_are_found_and_others_of_the_same_kind_are_not(
    options: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    bundle = exported(tmp_path, data, **options)
    (drift,) = (found(bundle, data / "same.npz") or pytest.fail("nothing was compared")).drift
    assert not drift.drifted
    assert drift.low == 0.0 < drift.high < 0.35
    check = found(bundle, data / "shifted.npz")
    assert check is not None and check.passed
    (drift,) = check.drift
    (histogram,) = (recorded_histograms(bundle.manifest.answers) or {}).values()
    k = int(histogram.counts.sum()) // histogram.inputs
    before, now = (
        chosen_in_float64(tokens(seed, shift=s), k).sum(axis=0) / (96 * k)
        for seed, s in ((0, 0.0), (2, 1.5))
    )
    assert drift.drifted
    assert drift.low < drift.distance < drift.high
    assert drift.distance == pytest.approx(float(np.abs(now - before).sum()) / 2, abs=0.04)
    assert "DRIFTED" in check.detail and drift.text in check.detail


def test_the_manifest_holds_who_was_chosen_by_the_inputs_of_the_export(
    data: Path, tmp_path: Path
) -> None:
    bundle = exported(tmp_path, data, k=1)
    chosen = chosen_in_float64(tokens(0), 1)
    (layer,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["answers"][CHOICES][
        "layers"
    ].values()
    assert layer["inputs"] == 96
    assert layer["counts"] == chosen.sum(axis=0).tolist()
    assert layer["spread"] == pytest.approx(chosen.std(axis=0).tolist(), abs=1e-5)
    assert bundle.manifest.answers[CHOICES]["layers"].keys() == {"layer"}


def test_the_command_notes_a_drift_and_does_not_fail(data: Path, tmp_path: Path) -> None:
    exported(tmp_path, data, k=1)
    outcome = run("verify", tmp_path / "out", "--data", data / "shifted.npz")
    assert outcome.code == 0
    (line,) = [line for line in outcome.out.splitlines() if NAME in line]
    assert line.startswith(f"noted   {NAME}: DRIFTED")
    assert "export again with these inputs as --data" in line
    outcome = run("verify", tmp_path / "out", "--data", data / "shifted.npz", "--json")
    (check,) = [c for c in json.loads(outcome.out)["checks"] if c["name"] == NAME]
    assert check["passed"] and 0 < check["drift"][0]["low"] < check["drift"][0]["high"]
    line = run("verify", tmp_path / "out", "--data", data / "same.npz").out.splitlines()[-1]
    assert line.startswith(f"ok      {NAME}: no drift: ")


def test_where_nothing_is_chosen_or_known_no_drift_is_told(data: Path, tmp_path: Path) -> None:
    assert CHOICES not in exported(tmp_path / "n", data).manifest.answers
    outcome = run("verify", tmp_path / "n" / "out", "--data", data / "same.npz")
    assert outcome.code == 1 and "and no layer chooses among its experts" in outcome.error
    np.savez(tmp_path / "own_n.npz", input=tokens(1), output=tokens(1))
    outcome = run("verify", tmp_path / "n" / "out", "--data", tmp_path / "own_n.npz")
    assert f"ok      {NAME}: not compared: every layer keeps all" in outcome.out
    bundle = exported(tmp_path / "k", data, k=1)
    np.savez(tmp_path / "few.npz", input=tokens(1, MIN_INPUTS - 1))
    few = found(bundle, tmp_path / "few.npz")
    assert few is not None and f"{MIN_INPUTS - 1} inputs are too few" in few.detail and few.passed
    model = moexport.load(WEIGHTS)
    without = moexport.export(model, tmp_path / "without", k=1)  # random inputs: no histogram
    assert CHOICES not in without.manifest.answers
    np.savez(tmp_path / "own.npz", input=tokens(1), output=tokens(1))
    outcome = run("verify", tmp_path / "without", "--data", data / "same.npz")
    assert outcome.code == 1 and "neither labels nor outputs" in outcome.error
    outcome = run("verify", tmp_path / "without", "--data", tmp_path / "own.npz")
    assert f"ok      {NAME}: not compared: the export recorded no choices" in outcome.out


@pytest.mark.parametrize("layer", [{}, {"inputs": 3, "counts": [0, 0], "spread": [0, 0]}, 7])
def test_what_is_no_histogram_is_refused(layer: Any) -> None:
    with pytest.raises(BundleError, match="'choices' is not a histogram"):
        recorded_histograms({CHOICES: {"layers": {"layer": layer}}})
    assert recorded_histograms({}) is None


def test_choices_are_counted_by_input_with_what_a_capacity_drops() -> None:
    index = np.array([[0, 1], [1, 6], [3, 2], [2, 7]])  # two inputs of two tokens, n = 4
    counts, lost = by_input(index, 2, 4, {}) or pytest.fail("they are of single inputs")
    assert counts.tolist() == [[1, 2, 1, 0], [0, 0, 2, 2]]
    assert lost.tolist() == [1, 1]
    mask = {"attention_mask": np.array([[1, 0], [1, 1]])}
    counts, lost = by_input(index, 2, 4, mask) or pytest.fail("they are of single inputs")
    assert counts.tolist() == [[1, 1, 0, 0], [0, 0, 2, 2]]
    assert lost.tolist() == [0, 1]
    a = np.array([[[0.5, 0.5], [1.0, 0.0]]], np.float32)
    counts, _ = by_input(a, 1, 2, {}) or pytest.fail("they are of single inputs")
    assert counts.tolist() == [[1.5, 0.5]]
    assert by_input(np.array([[0, 1], [1, 0]]), 1, 2, {}) is None  # every expert
    assert by_input(index, 3, 4, {}) is None  # of no single inputs
    assert real_tokens({"encoder_attention_mask": mask["attention_mask"]}, 2, 2) is None


def histogram(counts: np.ndarray) -> ChoiceHistogram:
    spread = np.sqrt((deviations(counts) ** 2).mean(axis=0))
    return ChoiceHistogram(len(counts), counts.sum(axis=0), spread)


def drawn(random: np.random.Generator, count: int, classes: np.ndarray) -> np.ndarray:
    """Inputs of classes, each of which has two of six experts that it mostly chooses: [s, 6]."""
    of = random.choice(len(classes), count, p=classes)
    likes = np.random.default_rng(5).standard_normal((len(classes), 6)) * 2
    order = np.argsort(-(likes[of] + random.standard_normal((count, 6))), axis=1)[:, :2]
    chosen = np.zeros((count, 6))
    np.put_along_axis(chosen, order, 1.0, axis=1)
    return chosen


@pytest.mark.parametrize(("before", "now"), [(256, 256), (256, 24), (24, 256)])
def test_intervals_hold_the_true_distance_as_often_as_they_say(before: int, now: int) -> None:
    even, uneven = np.full(5, 0.2), np.array([0.6, 0.1, 0.1, 0.1, 0.1])
    large = np.random.default_rng(99)
    old, new = (drawn(large, 100_000, p).mean(axis=0) / 2 for p in (even, uneven))
    true = float(np.abs(new - old).sum()) / 2
    same, moved = list[Drift](), list[Drift]()
    for seed in range(60):
        random = np.random.default_rng(seed)
        kept = histogram(drawn(random, before, even))
        same.append(drift_of("layer", kept, drawn(random, now, even)))
        moved.append(drift_of("layer", kept, drawn(random, now, uneven)))
    assert sum(one.drifted for one in same) <= 2  # one in a hundred is expected
    assert sum(one.low <= true <= one.high for one in moved) >= 57
    assert np.mean([one.distance for one in moved]) == pytest.approx(true, rel=0.15)
    if min(before, now) > 200:
        assert all(one.drifted for one in moved)


def test_a_rare_expert_that_new_inputs_miss_is_no_drift() -> None:
    before = np.zeros((180, 3))
    before[:, 0] = 1
    before[7] = (0, 1, 0)
    now = np.zeros((72, 3))
    now[:, 0] = 1
    assert not drift_of("layer", histogram(before), now).drifted
    now[:36] = (0, 0, 1)
    assert drift_of("layer", histogram(before), now).drifted
