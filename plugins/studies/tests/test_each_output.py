"""Labels with a number for each output, attributes and regressions, against float64 formulas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moexport.bench.measure.answers import AnswerCounts, PairedScores, mean_interval, per_output
from moexport.bench.metrics import wilson
from moexport.errors import FeedError
from moexport.plugins.studies.fairness import best_strength, fairness
from moexport.tests.bench.heads import attribute_head, regression_head
from moexport.tests.command import run
from moexport.tests.recorded import ENTMAX

HEAD = (*ENTMAX, "--set", "input_rank=2")


@pytest.fixture(scope="module")
def attributes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return attribute_head(tmp_path_factory.mktemp("attributes"))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return regression_head(tmp_path_factory.mktemp("targets"))


def entmax15(z: np.ndarray) -> np.ndarray:
    """The entmax by bisection on the threshold, in float64."""
    z = z / 2
    low, high = z.max(axis=-1, keepdims=True) - 1, z.max(axis=-1, keepdims=True)
    for _ in range(100):
        middle = (low + high) / 2
        over = (np.maximum(z - middle, 0) ** 2).sum(axis=-1, keepdims=True) >= 1
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    p = np.maximum(z - low, 0) ** 2
    return np.asarray(p / p.sum(axis=-1, keepdims=True))


def formula(
    checkpoint: Path, x: np.ndarray, *, without: int | None = None, keep: int = 12
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and coefficients of a CP layer with one level, in float64."""
    loaded = torch.load(checkpoint, weights_only=True)
    state = {key: value.double().numpy() for key, value in loaded.items()}
    gate = x.astype(np.float64) @ state["projs.0"]
    gate = (gate - state["bn.0.running_mean"]) / np.sqrt(state["bn.0.running_var"] + 1e-5)
    a = entmax15(gate)
    a = np.where(np.argsort(np.argsort(-a, axis=1), axis=1) < keep, a, 0)
    experts, inner, outer = (state[f"MuMoE.factors.{j}"] for j in range(3))
    kept = a.copy()
    if without is not None:
        kept[:, without] = 0
    z = np.c_[x, np.ones(len(x))].astype(np.float64)
    return ((kept @ experts) * (z @ inner)) @ outer.T, a


def arrays(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.load(path) as held:
        return held["input"], held["label"], held["third"]


def bench(
    head: Path, data: Path, out: Path, *options: str | Path
) -> tuple[list[dict[str, Any]], str]:
    outcome = run(
        *("bench", head, *HEAD, "--data", data, "--engine", "onnxruntime", "--no-memory"),
        *("--k", "n,2", "-o", out, *options),
    )
    assert outcome.code == 0, outcome.err
    return json.loads((out / "results.json").read_text())["rows"], outcome.out


def test_a_benchmark_tells_the_accuracy_of_each_attribute_and_the_mean(
    attributes: tuple[Path, Path], tmp_path: Path
) -> None:
    head, data = attributes
    x, labels, third = arrays(data)
    rows, text = bench(head, data, tmp_path / "out", "--group-by", "third")
    for row in rows:
        right = (formula(head, x, keep=row["k"])[0] > 0) == (labels == 1)
        accuracy = row["accuracy"]
        assert accuracy["top1"] == pytest.approx(right.mean(), abs=1e-12)
        found = accuracy["attributes"]
        assert [each["accuracy"] for each in found] == right.mean(axis=0).tolist()
        assert [each["positives"] for each in found] == labels.sum(axis=0).tolist()
        assert accuracy["top1_interval"]["low"] < accuracy["top1"] < 1
        assert (accuracy["n"], accuracy["top5"], row["losing"]) == (len(x), None, [])
    assert rows[-1]["accuracy"]["retention"] < 1
    shares = [f"{share:.1%}" for share in right.mean(axis=0)]
    assert re.search(rf"mean +{rows[0]['accuracy']['top1']:.1%}", text)
    assert all(share in text for share in shares)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Each output" in page and "Attribute" in page
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    (model,) = results["analyses"]["subgroups"]
    said = formula(head, x)[0] > 0
    wanted = fairness(said, labels, third, 3)
    assert model["untouched"]["attributes"] is True
    for each, expected in zip(model["untouched"]["classes"], wanted.classes, strict=True):
        assert each["max_min"]["value"] == expected.max_min.value
        assert each["std_bias"]["value"] == expected.std_bias.value
    assert "mean of all attributes" in text


def test_a_benchmark_tells_how_good_a_regression_is(
    targets: tuple[Path, Path], tmp_path: Path
) -> None:
    head, data = targets
    x, wanted, _ = arrays(data)
    rows, text = bench(head, data, tmp_path / "out")
    base: float | None = None
    for row in rows:
        error = formula(head, x, keep=row["k"])[0] - wanted
        spread = ((wanted - wanted.mean(axis=0)) ** 2).sum(axis=0)
        r2 = 1 - (error**2).sum() / spread.sum()
        found = row["regression"]
        assert row["accuracy"] is None
        assert found["r2"] == pytest.approx(r2, abs=1e-5)
        base = found["r2"] if base is None else base
        assert found["retention"] == pytest.approx(found["r2"] / base)
        assert found["outputs"] == pytest.approx(1 - (error**2).sum(axis=0) / spread, abs=1e-5)
        assert found["rmse"] == pytest.approx(np.sqrt((error**2).mean()), abs=1e-5)
        assert found["mae"] == pytest.approx(np.abs(error).mean(), abs=1e-5)
        low, high = (found["retention_interval"][end] for end in ("low", "high"))
        assert low < found["retention"] < high
    assert "R²" in text and "RMSE" in text
    assert "R²" in (tmp_path / "out" / "report.html").read_text()


def test_every_figure_of_an_attribute_is_counted_as_it_is_defined() -> None:
    labels = np.array([[1, 0], [0, 0], [1, 0], [1, 1], [0, 1], [1, 1]])
    said = np.array([[1, 0], [1, 0], [0, 1], [1, 1], [0, 1], [1, 0]]) == 1
    groups = np.array(["a", "a", "a", "b", "b", "b"])
    found = fairness(said, labels, groups, 2)
    right = said == (labels == 1)
    assert found.attributes and found.accuracy.value == pytest.approx(right.mean())
    first, second = found.classes
    assert [each.accuracy.value for each in first.subgroups] == [1 / 3, 1]
    assert (first.target, first.max_min.value) == ("a", 1 / 3)
    assert first.std_bias.value == pytest.approx(np.std([1 / 3, 1]))
    assert first.equality_of_opportunity is not None
    assert first.equality_of_opportunity.value == abs(1 / 2 - 1)
    assert second.equality_of_opportunity is None
    assert second.undefined == "subgroup a has no input with attribute 1"


def test_the_strength_for_an_attribute_is_the_best_of_a_fine_grid() -> None:
    random = np.random.default_rng(1)
    scores = random.standard_normal((300, 3)).astype(np.float32)
    labels, groups = random.integers(0, 2, (300, 3)), random.integers(0, 3, 300)
    for alike in (np.where(random.random(300) < 0.2, 0.0, random.random(300)), np.ones(300)):
        for sign in (1, -1):
            for budget in (0.0, 0.02, 0.5):

                def judged(strength: float, moved: np.ndarray = alike) -> tuple[float, float]:
                    y = scores.astype(np.float64)
                    y[:, 1] += strength * moved
                    right = (y > 0) == (labels == 1)
                    lowest = min(float(right[groups == g, 1].mean()) for g in range(3))
                    return lowest, float(right.mean())

                low, whole = judged(0.0)
                grid = [judged(sign * strength) for strength in np.linspace(0, 20, 4001)]
                best = max(each for each, kept in grid if kept >= whole - budget - 1e-12)
                found = best_strength(scores, alike, labels, groups, 1, sign, budget)
                if best == low:
                    assert found is None
                    continue
                assert found is not None and np.sign(found.value) == sign
                lowest, kept = judged(found.value)
                assert lowest >= best and kept >= whole - budget - 1e-12


def test_removing_an_expert_is_judged_by_attribute(
    attributes: tuple[Path, Path], tmp_path: Path
) -> None:
    head, data = attributes
    x, labels, third = arrays(data)
    outcome = run(
        *("specialise", head, *ENTMAX, "--data", data, "-o", tmp_path / "out"),
        *("--group-by", "third", "--rewrite-class", "2", "--rewrite-group", "true"),
        *("--strength", "3"),
    )
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "out" / "specialise.json").read_text())
    y, a = formula(head, x)
    assert found["judged"] == "attributes"
    assert found["accuracy"] == ((y > 0) == (labels == 1)).mean(axis=0).tolist()
    for effect in found["experts"]:
        after = (formula(head, x, without=effect["expert"])[0] > 0) == (labels == 1)
        assert effect["accuracy"] == after.mean(axis=0).tolist()
    mean = a[third].mean(axis=0)
    rewriting = found["rewriting"]
    assert rewriting["coefficients"][0] == pytest.approx(mean, abs=1e-5)
    moved = y.copy()
    moved[:, 2] += rewriting["strength"] * (a @ mean)
    right = (moved > 0) == (labels == 1)
    assert rewriting["after"]["target_accuracy"]["value"] == right[third, 2].mean()
    assert rewriting["accuracy_after"]["value"] == pytest.approx(right.mean())
    threshold = rewriting["threshold"]
    shown = "no constant improves the lowest accuracy"
    if threshold is not None:
        blind = y.copy()
        blind[:, 2] += threshold["value"]
        right = (blind > 0) == (labels == 1)
        assert threshold["after"]["target_accuracy"]["value"] == right[third, 2].mean()
        assert threshold["accuracy_after"]["value"] == pytest.approx(right.mean())
        shown = "blind threshold  True"
    assert shown in outcome.out and "attribute changed most" in outcome.out
    assert f"{found['accuracy'][1]:.1%}" in outcome.out
    outcome = run("export", head, *ENTMAX, "-o", tmp_path / "b", "--rewrite",
                  tmp_path / "out" / "rewrite.json")  # fmt: skip
    assert outcome.code == 0, outcome.err


def test_removing_an_expert_is_judged_by_the_outputs_of_a_regression(
    targets: tuple[Path, Path], tmp_path: Path
) -> None:
    head, data = targets
    x, wanted, _ = arrays(data)
    outcome = run("specialise", head, *ENTMAX, "--data", data, "-o", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "out" / "specialise.json").read_text())
    spread = ((wanted - wanted.mean(axis=0)) ** 2).sum(axis=0)

    def r2(y: np.ndarray) -> np.ndarray:
        return np.asarray(1 - ((y - wanted) ** 2).sum(axis=0) / spread)

    assert found["accuracy"] == pytest.approx(r2(formula(head, x)[0]), abs=1e-5)
    for effect in found["experts"]:
        y = formula(head, x, without=effect["expert"])[0]
        assert effect["accuracy"] == pytest.approx(r2(y), abs=1e-4)
    assert found["groups"] == [] and "output changed most" in outcome.out
    outcome = run(
        *("specialise", head, *ENTMAX, "--data", data, "--group-by", "third"),
        *("--rewrite-class", "1", "--rewrite-group", "true"),
    )
    assert outcome.code == 2 and "targets of a regression" in outcome.error


@pytest.mark.slow
@pytest.mark.parametrize(("which", "name"), [("attributes", "accuracy"), ("targets", "R²")])
def test_a_search_keeps_what_each_output_is_judged_by(
    which: str, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    head, data = request.getfixturevalue(which)
    outcome = run(
        *("tune", head, *HEAD, "--data", data, "--keep", "90%", "--time", "15s"),
        *("--batch", "1", "-o", tmp_path / "tuned", "--precision", "fp32"),
    )
    assert outcome.code == 0, outcome.err
    assert f"tuned: {name} kept" in outcome.out
    report = json.loads((tmp_path / "tuned-report" / "results.json").read_text())
    for row in report["rows"]:
        if name == "accuracy":
            assert len(row["accuracy"]["attributes"]) == 3 and row["regression"] is None
        else:
            assert len(row["regression"]["outputs"]) == 2 and row["accuracy"] is None


def test_sums_of_batches_are_those_of_the_whole() -> None:
    random = np.random.default_rng(0)
    y, base = random.standard_normal((2, 60, 3))
    labels = 1e6 + random.standard_normal((60, 3))
    whole = AnswerCounts.of(y, labels, base)
    parts = sum(
        (
            AnswerCounts.of(y[i : i + 7], labels[i : i + 7], base[i : i + 7])
            for i in range(0, 60, 7)
        ),
        start=AnswerCounts(),
    )
    spread = ((labels - labels.mean(axis=0)) ** 2).sum()
    found, expected = parts.regression(), whole.regression()
    assert found is not None and expected is not None
    assert found.r2 == pytest.approx(1 - ((y - labels) ** 2).sum() / spread, rel=1e-9)
    assert found.outputs == pytest.approx(expected.outputs, rel=1e-9)


def test_what_is_kept_has_the_interval_of_resampled_inputs() -> None:
    random = np.random.default_rng(0)
    base = (random.random((400, 5)) < 0.9).mean(axis=1)
    own = np.clip(base - (random.random(400) < 0.1) * 0.2, 0, 1)
    sums = PairedScores.of(own, base)
    picked = random.integers(0, 400, (4000, 400))
    ratios = own[picked].sum(axis=1) / base[picked].sum(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    assert sums.kept == own.sum() / base.sum() and sums.kept_interval is not None
    assert sums.kept_interval.low == pytest.approx(low, abs=0.003)
    assert sums.kept_interval.high == pytest.approx(high, abs=0.003)
    spread = mean_interval(400, 5, own.sum(), own @ own)
    low, high = np.percentile(own[picked].mean(axis=1), [2.5, 97.5])
    assert (spread.low, spread.high) == pytest.approx((low, high), abs=0.003)
    one = (random.random(400) < 0.9).astype(float)
    assert mean_interval(400, 1, one.sum(), one @ one) == wilson(one.sum(), 400)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.eye(3)[np.arange(360) % 3], "exactly one 1 in every row, like one-hot classes"),
        (np.zeros((360, 3), int) - 1, "the value -1 at index [0, 0]; attributes are 0 or 1"),
        (np.zeros((360, 2), int), "labels (batch, 2) for outputs (batch, 3)"),
        (np.full((360, 3), 0.5), "the targets of every input are the same"),
        (np.arange(360) / 7, "not whole numbers"),
    ],
)
def test_labels_that_fit_no_output_are_refused(
    labels: np.ndarray, message: str, attributes: tuple[Path, Path], tmp_path: Path
) -> None:
    head, data = attributes
    np.savez(tmp_path / "d.npz", input=arrays(data)[0], label=labels)
    for options in (
        ("bench", head, *HEAD, "--engine", "onnxruntime", "--k", "n", "-o", tmp_path / "out"),
        ("specialise", head, *ENTMAX),
    ):
        outcome = run(*options, "--data", tmp_path / "d.npz")
        assert outcome.code == 1 and outcome.hint
        assert message in outcome.error
        assert "nan" not in outcome.out.lower()


def test_an_attribute_that_no_input_has_is_told(
    attributes: tuple[Path, Path], tmp_path: Path
) -> None:
    head, data = attributes
    x, labels, third = arrays(data)
    labels[:, 1] = 0
    np.savez(tmp_path / "d.npz", input=x, label=labels, third=third)
    outcome = run(
        *("specialise", head, *ENTMAX, "--data", tmp_path / "d.npz", "--group-by", "third"),
        *("-o", tmp_path / "out"),
    )
    assert outcome.code == 0, outcome.err
    assert "no input with the attribute: 1" in outcome.out.replace("\n", " ")
    assert "nan" not in outcome.out.lower()
    found = json.loads((tmp_path / "out" / "specialise.json").read_text())
    assert found["classes"][1]["equality_of_opportunity"] is None


def test_classes_and_tokens_are_no_labels_of_each_output() -> None:
    assert per_output(np.zeros((4, 10)), np.arange(4)) is None
    assert per_output(np.zeros((4, 5, 9)), np.zeros((4, 5), int), ids=True) is None
    pair = per_output(np.zeros((4, 1)), np.arange(4))
    assert pair is not None and pair[1].shape == (4, 1)
    with pytest.raises(FeedError, match="labels"):
        per_output(np.zeros((4, 10)), np.zeros((4, 3), int))


def test_accuracy_of_attributes_is_printed_wherever_labels_are_given(
    attributes: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, data = attributes
    with np.load(data) as held:
        x, labels = held["input"][:256], held["label"][:256]
    right = int(((formula(checkpoint, x)[0] > 0) == labels).sum())
    wanted = f"{right / labels.size:.1%} ({right:,} of {labels.size:,})"
    inspected = run("inspect", checkpoint, *HEAD, "--data", data)
    assert f"PyTorch {wanted}" in inspected.out, inspected
    exported = run(
        *("export", checkpoint, *HEAD, "-o", tmp_path / "out", "--data", data),
        *("--target", "ort-cpu", "--verify-samples", "256"),
    )
    assert exported.code == 0, exported.err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["answers"]["pytorch"] == {"right": right, "of": labels.size}
    assert manifest["answers"]["graphs"]["model.onnx"] == {"right": right, "of": labels.size}
    verified = run("verify", tmp_path / "out", "--data", data)
    assert verified.code == 0 and wanted in verified.out + verified.err, verified
