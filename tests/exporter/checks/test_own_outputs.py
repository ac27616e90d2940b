"""Labels, and outputs of the user's own model, show that a network was rebuilt otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import FeedError, ParityError
from moexport.exporter.checks.accuracy import Score, evaluate
from moexport.exporter.checks.answers import ROUNDINGS, answers_of
from moexport.exporter.model import Model, TensorSpec
from moexport.tests.command import Outcome, run
from moexport.tests.recorded import DATA, MUMOE, SOFT_MOE, VIT_CONFIG, read_case

WRONG = ("--set", "num_heads=2", "--set", "global_pool=avg", "--set", "rest=default")
RIGHT = ("--set", "num_heads=4", "--set", "rest=default")
WEIGHTS = read_case("soft_moe_vit").weights


@dataclass(frozen=True)
class Labelled:
    """What the user's own model gives for some inputs, and labels of which it has nine in ten."""

    x: np.ndarray
    y: np.ndarray
    labels: np.ndarray

    def save(self, path: Path, **more: np.ndarray) -> Path:
        np.savez(path, input=self.x, label=self.labels, **more)  # type: ignore[arg-type]
        return path


def outputs(model: Model, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        y: np.ndarray = model.module(torch.from_numpy(x)).numpy()
    return y


@pytest.fixture(scope="module")
def own() -> Labelled:
    x = np.random.default_rng(0).standard_normal((60, 3, 32, 32), dtype=np.float32)
    y = outputs(moexport.load(WEIGHTS, config=VIT_CONFIG), x)
    labels = y.argmax(axis=1)
    labels[::10] = (labels[::10] + 1) % 10
    return Labelled(x, y, labels)


@pytest.fixture
def data(own: Labelled, tmp_path: Path) -> Path:
    return own.save(tmp_path / "test.npz", output=own.y)


def accuracy(y: np.ndarray, labels: np.ndarray) -> str:
    right = int((y.argmax(axis=1) == labels).sum())
    return f"{right / len(labels):.1%} ({right} of {len(labels)})"


def test_own_outputs_of_one_number_per_input_are_compared_next_to_labels() -> None:
    random = np.random.default_rng(0)
    x, y = random.random((8, 3), np.float32), random.random((8, 4), np.float32)
    energy = random.random(8, np.float32)
    sizes = {"logits": ("batch", 4), "energy": ("batch",)}
    spec = TensorSpec("x", "float32", ("batch", 3))
    ports = SimpleNamespace(
        input=spec,
        inputs=(spec,),
        outputs=tuple(TensorSpec(name, "float32", shape) for name, shape in sizes.items()),
    )
    data = {"x": x, "energy": energy, "label": y.argmax(axis=1)}
    found = evaluate(lambda _: {"logits": y, "energy": energy}, ports, [data], 8, {}, 8)
    assert found is not None and found.accuracy == Score(8, 8)
    assert found.agreeing == 8 and found.apart.max() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("export", "-o", "out"),
        ("export", "-o", "out", "--dry-run"),
        ("inspect",),
        ("calibrate", "-o", "out"),
        ("tune", "-o", "out", "--dry-run"),
        ("bench", "-o", "out", "--k", "n", "--engine", "onnxruntime"),
        pytest.param(("specialise", "-o", "out"), marks=pytest.mark.plugins),
    ],
    ids=" ".join,
)
def test_wrong_settings_are_refused_beside_outputs_of_the_user_s_own_model(
    command: tuple[str, ...],
    own: Labelled,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(command[0], WEIGHTS, *WRONG, "--data", data, *command[1:])
    assert outcome.code != 0
    assert "gives outputs that differ from your own model's in 60 of 60 inputs" in outcome.error
    assert "num_heads=2" in outcome.error
    assert "global_pool=avg" in outcome.error
    assert f"that of your outputs {accuracy(own.y, own.labels)}" in outcome.error
    assert "--set" in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.npz"]


def test_a_benchmark_compares_outputs_in_a_dict(own: Labelled) -> None:
    model = moexport.load(WEIGHTS, config={"num_heads": 2, "rest": "default"})
    given = {"input": own.x, "label": own.labels, "output": own.y}
    with pytest.raises(ParityError, match="gives outputs that differ from your own model"):
        moexport.bench(model, data=given, k="n", engine="onnxruntime")


def test_labels_alone_show_the_accuracy_in_pytorch_and_in_the_graph(
    own: Labelled, tmp_path: Path
) -> None:
    labelled = own.save(tmp_path / "test.npz")
    wrong = moexport.load(WEIGHTS, config={"num_heads": 2, "global_pool": "avg", "rest": "default"})
    less = accuracy(outputs(wrong, own.x), own.labels)
    assert less != accuracy(own.y, own.labels)
    outcome = exported(tmp_path, *WRONG, "--data", labelled)
    assert f"PyTorch {less}, model.onnx {less}" in outcome.err
    assert (
        "PyTorch is the network that is built from the checkpoint and its settings" in outcome.err
    )
    assert f"PyTorch {less}" in run("inspect", WEIGHTS, *WRONG, "--data", labelled).out
    verified = run("verify", tmp_path / "out")
    assert verified.code == 0
    assert f"PyTorch {less}, model.onnx {less}" in verified.out


def test_an_export_names_arrays_of_its_data_that_nothing_reads(
    own: Labelled, tmp_path: Path
) -> None:
    np.savez(tmp_path / "test.npz", input=own.x, target=own.labels)
    outcome = exported(tmp_path, *RIGHT, "--data", tmp_path / "test.npz")
    assert "test.npz: nothing reads 'target'; labels must be an array 'label'" in outcome.err
    labelled = exported(tmp_path, *RIGHT, "--data", own.save(tmp_path / "test.npz"), "--force")
    assert "nothing reads" not in labelled.err


def test_an_accuracy_on_the_inputs_that_gave_the_ranges_says_so(
    own: Labelled, tmp_path: Path
) -> None:
    labelled = own.save(tmp_path / "test.npz")
    int8 = (*RIGHT, "--data", labelled, "--precision", "int8", "--target", "onnx")
    same = "; the ranges come from the same inputs"
    assert same in exported(tmp_path, *int8).err
    table = tmp_path / "out" / "calibration.json"
    assert table.is_file()
    table.rename(tmp_path / "table.json")
    outcome = exported(tmp_path, *int8, "--calibration", tmp_path / "table.json", "--force")
    assert "accuracy on labelled inputs: " in outcome.err
    assert same not in outcome.err


def exported(folder: Path, *options: str | Path) -> Outcome:
    outcome = run("export", WEIGHTS, "-o", folder / "out", *options)
    assert outcome.code == 0, outcome.err
    return outcome


@pytest.mark.parametrize("k", ["n", "2", "input"])
def test_right_settings_pass_and_the_bundle_tells_its_accuracy(
    k: str, own: Labelled, data: Path, tmp_path: Path
) -> None:
    best = accuracy(own.y, own.labels)
    outcome = exported(tmp_path, *RIGHT, "--data", data, "--k", k, "--lowering", "dense")
    assert f"your own outputs {best}, PyTorch {best}" in outcome.err
    assert "PyTorch gives the same outputs as your own model" in outcome.err
    bundle = moexport.Bundle.open(tmp_path / "out")
    y = bundle.session()(own.x, **({"k": 8} if k == "input" else {}))
    here = accuracy(y, own.labels)
    found = bundle.manifest.answers
    assert found["own_outputs"]["inputs"] == 60
    assert found["own_outputs"]["max_rel"] < 1e-6
    score = found["graphs"]["model.onnx"]
    assert f"{score['right'] / score['of']:.1%} ({score['right']} of 60)" == here
    verified = run("verify", tmp_path / "out", "--data", data)
    assert verified.code == 0, verified.out
    assert f"accuracy of model.onnx: {here}" in verified.out
    assert ("not judged" in verified.out) == (k == "2")


def test_verify_fails_for_a_bundle_that_is_not_the_user_s_model(
    own: Labelled, data: Path, tmp_path: Path
) -> None:
    exported(tmp_path, *WRONG)
    assert run("verify", tmp_path / "out").code == 0
    outcome = run("verify", tmp_path / "out", "--data", data)
    assert outcome.code == 3
    assert "FAILED  model.onnx and your own model" in outcome.out
    outcome = run("verify", tmp_path / "out", "--data", own.save(tmp_path / "labelled.npz"))
    assert outcome.code == 0
    np.savez(tmp_path / "bare.npz", input=own.x)
    outcome = run("verify", tmp_path / "out", "--data", tmp_path / "bare.npz")
    assert outcome.code == 1
    assert "neither labels nor outputs" in outcome.error


@pytest.mark.slow
def test_a_setting_that_changes_little_is_more_than_rounding(
    own: Labelled, data: Path, tmp_path: Path
) -> None:
    little = ("--set", "norm_eps=1e-5", *RIGHT, "--data", data)
    outcome = run("export", WEIGHTS, "-o", tmp_path / "out", *little)
    assert outcome.code != 0
    assert "times as far from float64 as PyTorch's float32 is" in outcome.error
    outcome = run("export", WEIGHTS, "-o", tmp_path / "out", *little, "--rtol", "1e-3")
    assert outcome.code == 0, outcome.err
    # The measure is float64: of the right settings PyTorch's own rounding is within it.
    model = moexport.load(WEIGHTS, config=VIT_CONFIG)
    exact = moexport.load(WEIGHTS, config=VIT_CONFIG).module.double()
    with torch.no_grad():
        doubles = exact(torch.from_numpy(own.x).double()).numpy()
    for y in (own.y, doubles):
        answers = answers_of(model, [{"input": own.x, "output": y}])
        assert answers is not None
        assert answers.own is not None
        assert answers.own.roundings is not None
        assert answers.own.roundings <= 2 < ROUNDINGS


@pytest.mark.parametrize("name", [*SOFT_MOE, *MUMOE])
def test_recorded_outputs_of_published_code_are_the_rebuilt_model_s(name: str) -> None:
    case = read_case(name)
    model = moexport.load(case.weights, family=case.family, config=case.config)
    feed = [{model.input.name: case.x, model.output.name: case.y()}]
    answers = answers_of(model, feed)
    assert answers is not None
    assert answers.own is not None
    assert answers.own.inputs == len(case.x)
    assert answers.own.wrong == 0
    other = case.y() + 1e-3 * np.abs(case.y()).max()
    with pytest.raises(ParityError, match="gives outputs that differ"):
        answers_of(model, [{model.input.name: case.x, model.output.name: other}])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y: np.exp(y) / np.exp(y).sum(axis=1, keepdims=True), "softmax"),
        (lambda y: y[:, :5], "have the shape ('batch', 5)"),
        (lambda y: y.argmax(axis=1), "before any argmax"),
        (lambda y: y[:-1], "outputs for 59 inputs"),
        (lambda y: np.where(y == y.max(), np.nan, y), "NaN or Inf"),
    ],
)
def test_outputs_that_cannot_be_compared_are_told(
    change: Any, said: str, own: Labelled, tmp_path: Path
) -> None:
    model = moexport.load(WEIGHTS, config=VIT_CONFIG)
    path = own.save(tmp_path / "test.npz", output=change(own.y))
    with pytest.raises((FeedError, ParityError)) as caught:
        moexport.export(model, tmp_path / "out", data=path)
    assert said in f"{caught.value.message} {caught.value.hint}"
    assert not (tmp_path / "out").exists()


def test_the_array_may_come_from_code_that_gives_it_once(own: Labelled, tmp_path: Path) -> None:
    def batches() -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, 60, 7):
            rows = slice(start, start + 7)
            yield {"input": own.x[rows], "output": own.y[rows], "y": own.labels[rows]}

    model = moexport.load(WEIGHTS, config=VIT_CONFIG)
    bundle = moexport.export(model, tmp_path / "out", data=batches())
    assert bundle.manifest.answers["own_outputs"]["inputs"] == 60
    assert bundle.manifest.answers["pytorch"]["of"] == 60


def test_targets_that_are_no_classes_are_no_error(own: Labelled, tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", input=own.x, y=own.y[:, 0])
    model = moexport.load(WEIGHTS, config=VIT_CONFIG)
    bundle = moexport.export(model, tmp_path / "out", data=tmp_path / "test.npz")
    assert bundle.manifest.answers == {}
    assert "answers" not in json.loads(bundle.manifest.to_json())


def test_labels_that_are_no_classes_are_told_of_and_those_of_another_length_refused(
    tmp_path: Path,
) -> None:
    weights = DATA / "soft_moe_mnist" / "weights.pt"
    x = np.random.default_rng(0).normal(size=(5, 1, 28, 28)).astype(np.float32)
    few, wide = tmp_path / "few.npz", tmp_path / "wide.npz"
    np.savez(few, input=x, label=np.zeros(4, int))
    np.savez(wide, input=x, label=np.array([0, 1, 2, 3, 300]))
    place = tmp_path / "out"
    refused = run("export", weights, "-o", place, "--data", few)
    assert "array 'label' has 4 labels for the 5 samples" in refused.error
    assert not place.exists()
    words = "the labels of --data are neither classes nor attributes of this model's output"
    assert words in run("export", weights, "-o", place, "--data", wide).err
    checked = run("verify", place, "--data", wide)
    assert checked.code == 0
    (line,) = [line for line in checked.out.splitlines() if "accuracy of" in line]
    assert line.startswith(f"noted   accuracy of model.onnx: {words}")
    assert "array 'label' has 4 labels" in run("verify", place, "--data", few).error
