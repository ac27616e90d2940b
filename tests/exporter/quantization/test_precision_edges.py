"""Precisions at their edges: 16-bit inputs and outputs, what 16 bits cannot hold, zero columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.session import SessionOptions
from moexport.tests.command import Outcome, run
from moexport.tests.recorded import read_case

CASE = read_case("soft_moe_mnist")
K = "4"
State = dict[str, torch.Tensor]


def changed(folder: Path, change: Callable[[State], None]) -> Path:
    """The recorded checkpoint with a change."""
    state: State = torch.load(CASE.weights, weights_only=True)
    change(state)
    torch.save(state, folder / "changed.pt")
    return folder / "changed.pt"


def export(folder: Path, checkpoint: Path, *options: str | Path) -> Outcome:
    start = ("export", checkpoint, "-o", folder / "out", "--k", K, "--precision", "fp16")
    return run(*start, *options)


def in_pytorch(checkpoint: Path, x: np.ndarray) -> np.ndarray:
    model = moexport.load(checkpoint)
    reference: dict[str, Any] = {"k": int(K), "verify": False, "force": True}
    y: np.ndarray = moexport.export(model, checkpoint.parent / "single", **reference).session()(x)
    return y


def assert_close(y: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(y.astype(np.float32) - expected).max() <= 0.01 * np.abs(expected).max()


def test_inputs_and_outputs_may_be_of_16_bits(tmp_path: Path) -> None:
    outcome = export(tmp_path, CASE.weights, "--io-precision", "fp16")
    assert outcome.code == 0, outcome.err
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    for port in (*model.graph.input, *model.graph.output):
        assert port.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    manifest = Bundle.open(tmp_path / "out").manifest
    assert manifest.inputs[0].dtype == manifest.outputs[0].dtype == "float16"
    np.savez(tmp_path / "x.npz", input=CASE.x)  # FP32 is rounded on its way in
    outcome = run("run", tmp_path / "out", "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert outcome.code == 0, outcome.err
    with np.load(tmp_path / "y.npz") as arrays:
        y = arrays["output"]
    assert y.dtype == np.float16
    assert_close(y, CASE.y(int(K)))


def overflowing(state: State) -> None:
    """Hidden values 300 times larger, by weights that FP16 holds on either side."""
    for key in list(state):
        if key.endswith("1.weight") and key.startswith("experts"):
            state[key] = state[key] * 300
        elif key.endswith("3.weight"):
            state[key] = state[key] / 300


@pytest.mark.parametrize("target", ["onnx", "ort-cpu", "ort-web"])
def test_values_beyond_fp16_are_right_on_a_cpu(target: str, tmp_path: Path) -> None:
    checkpoint = changed(tmp_path, overflowing)
    x = 500 * CASE.x
    assert export(tmp_path, checkpoint, "--no-verify", "--target", target).code == 0
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.layers[0].precision == "fp16"
    assert_close(bundle.session(options=SessionOptions(rounded=True))(x), in_pytorch(checkpoint, x))


def test_values_seen_beyond_fp16_keep_their_layer_in_fp32(tmp_path: Path) -> None:
    checkpoint = changed(tmp_path, overflowing)
    x = 500 * CASE.x
    np.savez(tmp_path / "x.npz", input=x)
    expected = in_pytorch(checkpoint, x)
    gpu = ("--target", "ort-cuda")
    # Unseen, it cannot be known, and does overflow.
    assert export(tmp_path, checkpoint, "--no-verify", *gpu).code == 0
    blind = Bundle.open(tmp_path / "out")
    assert blind.manifest.layers[0].precision == "fp16"
    assert not np.isfinite(blind.session(options=SessionOptions(rounded=True))(x)).all()
    outcome = export(tmp_path, checkpoint, "--data", tmp_path / "x.npz", "--force", *gpu)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    (record,) = bundle.manifest.layers
    assert record.precision == "fp32"
    assert "layer/experts.products reached" in record.precision_reason
    assert record.precision_reason.endswith("kept in FP32")
    assert f"note: layer: in fp32: {record.precision_reason}\n" in outcome.err
    assert bundle.manifest.precision == "fp16"  # the rest of the network
    assert_close(bundle.session(options=SessionOptions(rounded=True))(x), expected)
    assert record.precision_reason in run("inspect", tmp_path / "out").out


def test_a_backbone_s_weights_beyond_fp16_keep_their_node_in_fp32(tmp_path: Path) -> None:
    def grow(state: State) -> None:
        state["decoder.1.weight"][0, 0] = 1e5

    checkpoint = changed(tmp_path, grow)
    outcome = export(tmp_path, checkpoint)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    (node,) = bundle.manifest.numbers["fp32_nodes"]
    assert "a weight of 1e+05 is above the largest FLOAT16" in node["reason"]
    assert node["reason"] in outcome.err
    assert node["reason"] in run("inspect", tmp_path / "out").out
    assert bundle.manifest.layers[0].precision == "fp16"
    y = bundle.session(options=SessionOptions(rounded=True))(CASE.x)
    assert_close(y, in_pytorch(checkpoint, CASE.x))


@pytest.mark.parametrize(
    ("target", "lowerings"),
    [("ort-cpu", "dense,gather,grouped,conditional"), ("tensorrt", "dense,gather,conditional")],
)
@pytest.mark.plugins
def test_int8_of_an_ablated_expert_is_zeros(target: str, lowerings: str, tmp_path: Path) -> None:
    """Its columns have no largest weight to take a scale from."""
    np.savez(tmp_path / "x.npz", input=CASE.x)
    ablated = ("--ablate", "layer:0,3,5", "--k", "n", "--no-engine")
    outcome = run(
        *("export", CASE.weights, "-o", tmp_path / "out", "--precision", "int8", *ablated),
        *("--data", tmp_path / "x.npz", "--target", target, "--method", "minmax"),
        *("--lowering", lowerings),
    )
    assert outcome.code == 0, outcome.err

    def zero(state: State) -> None:
        for expert in (0, 3, 5):
            state[f"experts.{expert}.3.weight"].zero_()

    with torch.no_grad():
        zeroed = moexport.load(changed(tmp_path, zero)).module
        expected = zeroed(torch.from_numpy(CASE.x)).numpy()
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.layers[0].precision == "int8"
    for graph in bundle.manifest.graphs:
        y = bundle.session(graph.file, SessionOptions(rounded=True))(CASE.x)
        off = np.abs(y - expected).max() / np.abs(expected).max()
        assert 1e-6 < off < 0.05
