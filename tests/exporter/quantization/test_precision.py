"""Precisions through the command line: what is written, what it computes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from moexport.exporter.bundle.bundle import Bundle
from moexport.tests.command import Outcome, run
from moexport.tests.recorded import RecordedCase, read_case

LOWERINGS = "dense,gather,grouped,conditional"


def export(case: RecordedCase, folder: Path, *options: str, data: bool = True) -> Outcome:
    config, feed = folder / "config.json", folder / "x.npz"
    config.write_text(json.dumps(case.config))
    np.savez(feed, input=case.x)
    fed = ("--data", feed) if data else ()
    return run(*("export", case.weights, "--config", config, "-o", folder / "out"), *fed, *options)


def stored_types(graph: Path) -> dict[str, int]:
    """The element type of every weight outside a graph's file."""
    model = onnx.load(graph, load_external_data=False)
    return {t.name: t.data_type for t in model.graph.initializer if t.external_data}


def layer(bundle: Bundle) -> Any:
    return bundle.manifest.layers[0]


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_int8_computes_what_was_recorded_within_its_bounds(target: str, tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    options = ("--k", "2", "--precision", "int8", "--target", target, "--method", "minmax")
    outcome = export(case, tmp_path, *options, "--lowering", LOWERINGS)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.precision == layer(bundle).precision == "int8"
    assert "calibration.json" in bundle.manifest.files
    for graph in bundle.manifest.graphs:
        assert graph.parity is not None
        assert graph.parity["passed"]
        assert graph.parity["routing_agreement"] == graph.parity["jaccard"] == 1.0
        y = bundle.session(graph.file)(case.x)
        off = np.abs(y - case.y(2)).max() / np.abs(case.y(2)).max()
        assert 1e-6 < off < 0.05
    verified = run("verify", tmp_path / "out")
    assert verified.code == 0, verified.err


def test_int8_experts_take_a_quarter_of_the_disk(tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    assert export(case, tmp_path, "--no-verify", data=False).code == 0
    single = (tmp_path / "out" / "weights.bin").stat().st_size
    options = ("--precision", "int8", "--force", "--target", "ort-cpu")
    assert export(case, tmp_path, *options).code == 0
    types = stored_types(tmp_path / "out" / "model.onnx")
    assert types["blocks.2.mlp/experts.w1"] == onnx.TensorProto.INT8
    assert types["blocks.2.mlp/phi"] == onnx.TensorProto.FLOAT
    experts = 4 * 2 * 2 * 8 * 48 * 192  # two layers, two matrices, n, d, h
    saved = single - (tmp_path / "out" / "weights.bin").stat().st_size
    assert 0.72 * experts < saved < 0.75 * experts  # scales take 2% at this width


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["soft_moe_vit", "mumoe_mixer_cp"])
def test_16_bits_halve_the_file_and_keep_the_routing(
    name: str, precision: str, tmp_path: Path
) -> None:
    case = read_case(name)
    k = str(case.ks[0])
    assert export(case, tmp_path, "--k", k, "--no-verify", data=False).code == 0
    single = (tmp_path / "out" / "weights.bin").stat().st_size
    outcome = export(case, tmp_path, "--k", k, "--precision", precision, "--force", data=False)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert (tmp_path / "out" / "weights.bin").stat().st_size < 0.58 * single
    assert layer(bundle).precision == precision
    assert bundle.manifest.numbers["router"] == "fp32"
    assert bundle.manifest.numbers["usual_fp32_nodes"]["LayerNormalization"] > 0
    assert bundle.manifest.inputs[0].dtype == bundle.manifest.outputs[0].dtype == "float32"
    assert bundle.manifest.parity is not None
    assert bundle.manifest.parity["routing_agreement"] == 1.0
    y = bundle.session()(case.x)
    wanted = case.y(case.ks[0])
    assert (
        np.abs(y - wanted).max() <= (0.01 if precision == "fp16" else 0.05) * np.abs(wanted).max()
    )


def test_weights_that_fp16_cannot_hold_stay_in_fp32_and_are_named(tmp_path: Path) -> None:
    import torch

    case = read_case("soft_moe_mnist")
    state = torch.load(case.weights, weights_only=True)
    for key in ("experts.0.1.weight", "experts.0.3.weight"):
        factor = 1e7 if key.endswith("1.weight") else 1e-7
        state[key] = state[key] * factor
    torch.save(state, tmp_path / "large.pt")
    outcome = run(
        *("export", tmp_path / "large.pt", "-o", tmp_path / "out", "--precision", "fp16"),
        *("--k", "4"),
    )
    assert outcome.code == 0, outcome.err
    record = layer(Bundle.open(tmp_path / "out"))
    assert record.precision == "fp32"
    assert "experts.w1: a weight of" in record.precision_reason
    assert "kept in FP32" in record.precision_reason


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (("--precision", "int8"), 2, "its ranges need real inputs"),
        (("--precision", "bf16", "--target", "ort-cpu"), 2, "has no BF16 kernels"),
        (("--precision", "int8", "--target", "ort-cuda"), 1, "not a multiple of 32"),
        (
            ("--precision", "int8", "--target", "ort-cuda", "--rest", "fp32"),
            2,
            "integer weights are multiplied in FP16 there",
        ),
        (("--precision", "int8", "--target", "ort-cuda", "--method", "mse"), 2, "needs no ranges"),
        (
            ("--precision", "int8", "--target", "ort-cuda", "--weight-bits", "7"),
            2,
            "exact with all 8 bits",
        ),
        (("--quantize", "all"), 2, "--quantize belongs to --precision int8"),
        (("--precision", "int8", "--weight-bits", "4"), 2, "INT8 weights have 7 or 8 bits"),
        (("--precision", "fp16", "--io-precision", "bf16"), 2, "the graph computes in fp16"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    options: tuple[str, ...], code: int, why: str, tmp_path: Path
) -> None:
    outcome = export(read_case("soft_moe_mnist"), tmp_path, *options, data=False)
    assert outcome.code == code
    assert why in outcome.error
    assert outcome.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_all_linear_layers_but_the_head_may_be_int8(target: str, tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    options = ("--k", "2", "--precision", "int8", "--quantize", "all", "--target", target)
    outcome = export(case, tmp_path, *options, "--method", "minmax")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    linears = bundle.manifest.numbers["linears"]
    assert [name for name, reason in linears.items() if reason] == [list(linears)[-1]]
    types = stored_types(tmp_path / "out" / "model.onnx")
    assert types["blocks.0.attn.qkv/MatMul/weight"] == onnx.TensorProto.INT8
