"""`--min-retention`: what is harmful stays in floats, and the manifest says why.

The network has two MoE layers. A hidden unit of the second is a thousand times larger than its
neighbours and weighs a thousandth in what follows: one range for all of them leaves the others
nothing of INT8's levels.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.errors import FeedError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.export import plan
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.graphs.layers.base import algorithm_1
from moexport.graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from moexport.tests.command import Outcome, run
from moexport.tests.recorded import DATA
from torch import Tensor, nn

EXPERTS, DIM, HIDDEN, TOKENS, CLASSES = 8, 16, 24, 6, 5
K = 2
INPUTS = 300

LAYER = DATA / "soft_moe_lucidrains" / "weights.pt"


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(name: str, seed: int, outlier: float = 1.0) -> SoftMoE:
    w1, w2 = random(EXPERTS, DIM, HIDDEN, seed=seed), random(EXPERTS, HIDDEN, DIM, seed=seed + 1)
    w1[:, :, 0] *= outlier
    w2[:, 0] /= outlier
    spec = SoftMoESpec(name, EXPERTS, 1, DIM, HIDDEN, DIM, activation="relu")
    phi = random(DIM, EXPERTS, 1, seed=seed + 2)
    return SoftMoE(spec, SoftMoEWeights(phi, w1 * DIM**-0.5, None, w2 * HIDDEN**-0.5, None))


class Network(nn.Module):
    """Two layers, and class scores [b, classes] of what is left of the tokens [b, m, d]."""

    def __init__(self, outlier: float) -> None:
        super().__init__()
        self.first = layer("first", 0)
        self.mix = nn.Linear(DIM, DIM)
        self.second = layer("second", 10, outlier)
        self.head = nn.Linear(DIM, CLASSES)
        for index, linear in enumerate((self.mix, self.head)):
            linear.weight.data = random(*linear.weight.shape, seed=20 + index)
            linear.bias.data.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.mix(tokens + self.first(tokens)).tanh()
        scores: Tensor = self.head((tokens + 4 * self.second(tokens)).mean(dim=1))
        return scores


def network(outlier: float) -> Model:
    return Model(
        Network(outlier).eval().requires_grad_(False),
        "test",
        {},
        Source("network.pt", ()),
        (TensorSpec("input", "float32", ("batch", TOKENS, DIM)),),
        (TensorSpec("output", "float32", ("batch", CLASSES)),),
    )


X = random(INPUTS, TOKENS, DIM, seed=30).numpy()
INT8: dict[str, Any] = {
    **{"precision": "int8", "method": "minmax", "target": "ort-cpu", "k": K, "engine": False}
}


def classes(model: Model, x: np.ndarray) -> np.ndarray:
    """What PyTorch answers with Algorithm 1."""
    with torch.no_grad(), algorithm_1(model.module, dict.fromkeys(model.layers, K)):
        return np.asarray(model.module(torch.from_numpy(x)).argmax(dim=-1))


def record(bundle: Bundle) -> dict[str, Any]:
    found: dict[str, Any] = bundle.manifest.numbers["retention"]
    return found


def test_the_layer_that_int8_harms_stays_in_floats_and_the_manifest_says_why(
    tmp_path: Path,
) -> None:
    model = network(outlier=1000.0)
    bundle = moexport.export(model, tmp_path / "out", data=X, min_retention=0.97, **INT8)
    first, second = bundle.manifest.layers
    assert (first.precision, first.precision_reason) == ("int8", "requested")
    assert second.precision == "fp32"
    found = record(bundle)
    (kept,) = found["kept"]
    assert kept["name"] == "second"
    assert kept["before"] < 0.8
    reason = f"kept in fp32 for --min-retention 0.97: only {kept['before']:.4f} with it in INT8"
    assert second.precision_reason == reason
    same = classes(model, X) == bundle.session()(X).argmax(axis=-1)
    assert found["reached"] == pytest.approx(same.mean())
    assert found["reached"] >= found["asked"] == 0.97
    assert (found["measure"], found["samples"]) == ("agreement", INPUTS)
    (note,) = [note for note in bundle.manifest.notes if "--min-retention" in note]
    assert f"reached {found['reached']:.4f}" in note
    assert "300 inputs without labels" in note
    assert "kept in fp32: second" in note
    shown = run("inspect", tmp_path / "out").out
    assert re.search(f"^second +fp32 +{re.escape(reason)}$", shown, re.MULTILINE)
    assert note in shown


def test_what_stays_in_floats_is_planned_in_floats(tmp_path: Path) -> None:
    """By whatever it stays there: plan, manifest and written graph agree."""
    asked = {**INT8, "data": X}
    found = plan(network(1000.0), tmp_path / "out", min_retention=0.97, **asked)
    named = plan(network(1000.0), tmp_path / "out", keep_floating=["second"], **asked)
    whole = plan(network(1000.0), tmp_path / "out", **asked)
    (_, second), (_, alike), (_, integers) = (
        each.graphs[0].layers for each in (found, named, whole)
    )
    assert [layer.precision for layer in found.graphs[0].layers] == ["int8", "fp32"]
    assert (second.chosen, second.reason) == (alike.chosen, alike.reason)
    assert second.predicted_us == alike.predicted_us != integers.predicted_us
    bundle = moexport.export(network(1000.0), tmp_path / "out", min_retention=0.97, **asked)
    for layer, recorded in zip(found.graphs[0].layers, bundle.manifest.layers, strict=True):
        written = {name: getattr(recorded, name) for name in layer.to_json()}
        assert written == layer.to_json()
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    integer = {node.name.partition("/")[0] for node in graph.node if "Integer" in node.op_type}
    assert integer == {"first"}


def test_a_layer_that_fp16_does_not_hold_is_planned_in_fp32(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"precision": "fp16", "target": "ort-cuda", "k": K, "engine": False}
    planned = plan(network(1e6), tmp_path / "out", **asked)
    halves = plan(network(1.0), tmp_path / "out", **asked)
    (_, wide), (_, narrow) = planned.graphs[0].layers, halves.graphs[0].layers
    assert (wide.precision, narrow.precision) == ("fp32", "fp16")
    assert "kept in FP32" in wide.precision_reason
    assert wide.predicted_us != narrow.predicted_us


@pytest.mark.plugins
def test_it_is_the_edited_model_that_is_retained(tmp_path: Path) -> None:
    ablated = "second:" + ",".join(map(str, range(EXPERTS)))
    bundle = moexport.export(
        network(1000.0), tmp_path / "out", data=X, min_retention=0.97, ablate=ablated, **INT8
    )
    assert record(bundle)["kept"] == ()  # what contributes nothing does no harm


def test_with_labels_it_is_the_accuracy_that_counts(tmp_path: Path) -> None:
    model = network(outlier=1000.0)
    labels = classes(model, X)
    labels[::5] = (labels[::5] + 1) % CLASSES  # FP32 has four of five right
    np.savez(tmp_path / "x.npz", input=X, label=labels)
    options = {**INT8, "data": tmp_path / "x.npz", "verify": False}
    bundle = moexport.export(model, tmp_path / "out", min_retention=0.1, **options)
    right = (bundle.session()(X).argmax(axis=-1) == labels).mean()
    found = record(bundle)
    assert (found["measure"], found["kept"]) == ("accuracy", ())
    assert found["reached"] == pytest.approx(right / 0.8)
    assert found["reached"] < 0.8


def test_the_backbone_s_linear_layers_are_given_up_together(tmp_path: Path) -> None:
    options = {**INT8, "quantize": "all", "data": X, "verify": False}
    bundle = moexport.export(network(1.0), tmp_path / "out", min_retention=0.98, **options)
    (part,) = record(bundle)["kept"]
    assert part["name"] == "the linear layers outside the MoE layers"
    assert [layer.precision for layer in bundle.manifest.layers] == ["int8", "int8"]
    assert bundle.manifest.numbers["linears"] == {}


def test_a_layer_alone_is_measured_by_the_cosine_and_a_dry_run_tells(tmp_path: Path) -> None:
    options = ("--data", feed(tmp_path), "--min-retention", "0.99", "--dry-run")
    outcome = export(tmp_path, *options)
    assert outcome.code == 0, outcome.err
    assert "mean cosine with FP32's outputs on 12 inputs); kept in fp32: nothing" in outcome.err
    assert "each of 12 inputs is 0.083 of the retention" in outcome.err
    outcome = export(tmp_path, *options, "--min-retention", "0.9999999", "--json")
    content = json.loads(outcome.out)
    (layer,) = content["graphs"]["model.onnx"]
    assert layer["precision"] == "fp32"
    assert "kept in fp32 for --min-retention" in layer["precision_reason"]
    assert "nothing is left in INT8, so --precision fp32 writes the same" in content["notes"]
    assert not (tmp_path / "out").exists()


def test_what_not_even_floats_hold_is_said(tmp_path: Path) -> None:
    options = ("--data", feed(tmp_path), "--min-retention", "1", "--target", "tensorrt")
    outcome = export(tmp_path, *options)
    assert outcome.code == 3
    assert " with every layer in fp16" in outcome.error
    assert "--rest fp32" in outcome.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-retention", "0"), "--min-retention 0: the share must be above 0 and at most 1"),
        (("--min-retention", "1.5"), "the share must be above 0 and at most 1"),
        (("--min-retention", "nan"), "the share must be above 0 and at most 1"),
        (("--min-retention", "0.9", "--precision", "fp16"), "belongs to --precision int8"),
        (("--min-retention", "0.9", "--k", "input"), "retention needs one k"),
        (("--min-retention", "0.9"), "there are none"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    outcome = export(tmp_path, *options)
    assert outcome.code == 2
    assert message in outcome.error
    assert outcome.hint
    assert list(tmp_path.iterdir()) == []


def test_a_table_does_not_replace_the_inputs(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    assert run("calibrate", LAYER, "--data", feed(tmp_path), "-o", table).code == 0
    outcome = export(tmp_path, "--calibration", table, "--min-retention", "0.9")
    assert outcome.code == 2
    assert "it is measured on real inputs, but there are none" in outcome.error
    np.savez(tmp_path / "empty.npz", input=np.empty((0, 5, 32), np.float32))
    options = ("--calibration", table, "--min-retention", "0.9", "--no-verify")
    outcome = export(tmp_path, *options, "--data", tmp_path / "empty.npz")
    assert outcome.code == 1
    assert "the feed contains no inputs to measure retention on" in outcome.error


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.full(INPUTS, 7), r"16 labels outside 0\.\.4; the first is 7 at index 0"),
        (np.zeros(INPUTS - 1, int), "has 299 labels for the 300 samples"),
        ((classes(network(1.0), X) + 1) % CLASSES, "FP32 predicts none of 300 labels"),
    ],
    ids=["other classes", "too few", "none right"],
)
def test_labels_that_do_not_serve_are_refused(
    labels: np.ndarray, message: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", input=X, label=labels)
    with pytest.raises(FeedError, match=message):
        moexport.export(
            network(1.0), tmp_path / "out", data=tmp_path / "x.npz", min_retention=0.9, **INT8
        )
    assert not (tmp_path / "out").exists()


def feed(folder: Path) -> Path:
    np.savez(folder / "x.npz", input=random(12, 5, 32, seed=40).numpy())
    return folder / "x.npz"


def export(folder: Path, *options: str | Path) -> Outcome:
    start = ("export", LAYER, "-o", folder / "out", "--precision", "int8", "--k", "2")
    return run(*start, *options)
