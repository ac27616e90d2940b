"""FP8 factors and INT4 weights for engines: their values, and that they compile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import Manifest
from moexport.exporter.bundle.parity import TOLERANCES
from moexport.exporter.tensorrt.engines import DEFAULT_CARDS, FP8_CARDS
from moexport.tests.command import Outcome, run
from moexport.tests.exporter.tensorrt.engines import needs_rtx
from moexport.tests.recorded import read_case
from onnx.reference import ReferenceEvaluator

LAYER = "soft_moe_conv"  # widths that blocks of 32 divide
PROFILE = "batch=1:4:8,height=2:8:16,width=3:8:16"


def exported(folder: Path, precision: str, lowering: str, *options: str) -> Outcome:
    case = read_case(LAYER)
    written: tuple[str, ...] = ("--precision", precision, *options)
    np.savez(folder / "x.npz", input=case.x)
    (folder / "config.json").write_text(json.dumps(case.config))
    return run(
        *("export", case.weights, "--config", folder / "config.json", "-o", folder / "out"),
        *("--target", "tensorrt-rtx", "--no-engine", "--k", "2", "--lowering", lowering),
        *("--data", folder / "x.npz"),
        *written,
    )


def made(folder: Path, precision: str, lowering: str) -> Path:
    outcome = exported(folder, precision, lowering)
    assert outcome.code == 0, outcome.err
    return folder / "out"


FORMATS = [
    ("fp8", "dense"),
    ("fp8", "gather"),
    ("fp8", "conditional"),
    ("fp8", "block-grouped"),
    ("int4", "dense"),
    ("int4", "gather"),
    ("int4", "conditional"),
    ("int4", "block-grouped"),
]


@pytest.mark.parametrize(("precision", "lowering"), FORMATS)
def test_the_values_are_those_of_onnxs_reference_evaluator(
    precision: str, lowering: str, tmp_path: Path
) -> None:
    bundle = made(tmp_path, precision, lowering)
    x = read_case(LAYER).x
    evaluated = ReferenceEvaluator(onnx.load(bundle / "model.onnx")).run(["output"], {"input": x})
    first, *_ = evaluated
    expected = np.asarray(first, np.float32)
    assert (np.ptp(expected) > 0).all()
    y = Bundle.open(bundle).session()(x).astype(np.float32)
    # They add in another order and precision: what lies between is FP16.
    off = np.abs(y - expected).max() / np.abs(expected).max()
    assert off <= TOLERANCES["fp16"].rtol
    truth = read_case(LAYER).y(2)
    bounds = TOLERANCES["fp8" if precision == "fp8" else "int4"]
    assert np.abs(expected - truth).max() <= bounds.rtol * np.abs(truth).max()


def test_the_graphs_hold_the_types_that_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / "fp8").mkdir()
    (tmp_path / "int4").mkdir()
    fp8 = onnx.load(made(tmp_path / "fp8", "fp8", "gather") / "model.onnx")
    kinds = {t.name: t.data_type for t in fp8.graph.initializer}
    weights = [name for name in kinds if name.endswith(("experts.w1", "experts.w2"))]
    assert len(weights) == 2
    assert {kinds[name] for name in weights} == {onnx.TensorProto.FLOAT8E4M3FN}
    int4 = onnx.load(made(tmp_path / "int4", "int4", "conditional") / "model.onnx")
    found = [t for t in int4.graph.initializer if t.data_type == onnx.TensorProto.INT4]
    assert len(found) == 2 * read_case(LAYER).config["num_experts"]
    record = Manifest.read(tmp_path / "int4" / "out").layers[0]
    assert record.precision == "int4"


@needs_rtx
@pytest.mark.parametrize(("precision", "lowering"), FORMATS)
def test_they_compile_for_the_cards_that_have_them(
    precision: str, lowering: str, tmp_path: Path
) -> None:
    bundle = made(tmp_path, precision, lowering)
    outcome = run("build", bundle, "--profile", PROFILE, "--json")
    assert outcome.code == 0, outcome.err
    (record,) = json.loads(outcome.out)
    usual = FP8_CARDS if precision == "fp8" else DEFAULT_CARDS
    assert record["compute_capabilities"] == list(usual)
    layers = json.loads((bundle / record["layers"]).read_text())["layers"]
    experts = {each["precision"] for each in layers if "/experts/" in each["name"]}
    assert experts == {precision}


@needs_rtx
def test_a_card_without_fp8_is_refused_with_the_way_out(tmp_path: Path) -> None:
    bundle = made(tmp_path, "fp8", "gather")
    outcome = run("build", bundle, "--profile", PROFILE, "--compute-capability", "8.6")
    assert outcome.code == 1
    assert "one of the cards does not support a type in the graph" in outcome.error
    assert "FP8 8.9 or newer" in outcome.hint


@needs_rtx
def test_fp8_weights_cannot_be_bound(tmp_path: Path) -> None:
    bundle = made(tmp_path, "fp8", "gather")
    outcome = run("build", bundle, "--profile", PROFILE, "--bind-weights")
    assert outcome.code == 1
    assert "is FP8, which TensorRT gathers neither as a constant nor as an input" in outcome.error


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_fp8_is_for_engines(target: str, tmp_path: Path) -> None:
    outcome = run(
        *("export", read_case(LAYER).weights, "-o", tmp_path / "out"),
        *("--precision", "fp8", "--target", target),
    )
    assert outcome.code == 2
    assert "FP8 requires TensorRT on an Ada GPU or a newer one" in outcome.error
