"""INT8 of muMoE models through the command line and Python: what is written, what it computes."""

from __future__ import annotations

import json
from pathlib import Path

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.graphs.edits import Rewrite
from moexport.graphs.layers.mumoe import FactorisedSpec, Form, MuMoESpec
from moexport.plugins.demo import mumoe as mumoe_demo
from moexport.plugins.demo.digits import CLASSES, load_digits
from moexport.tests.command import Outcome, run
from moexport.tests.exporter.quantization.test_precision import stored_types
from moexport.tests.graphs.lowerings.test_mumoe import spec_of
from moexport.tests.graphs.mumoe_layers import formula, random_layer, state_of
from moexport.tests.recorded import RecordedCase, read_case

INT8 = ("--precision", "int8", "--method", "minmax")


def export(case: RecordedCase, folder: Path, *options: str) -> Outcome:
    (folder / "config.json").write_text(json.dumps(case.config))
    np.savez(folder / "x.npz", input=case.x)
    arguments = ("export", case.weights, "--config", folder / "config.json", "-o", folder / "out")
    return run(*arguments, "--data", folder / "x.npz", *INT8, *options)


def normal_tokens(spec: MuMoESpec) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.standard_normal((16, 8, spec.dim)).astype(np.float32)


def exported_layer(spec: MuMoESpec, folder: Path, *options: str | Path) -> Outcome:
    """The outcome of exporting a layer with random weights, its ranges from normal tokens."""
    torch.save(state_of(random_layer(spec)), folder / "layer.pt")
    np.savez(folder / "x.npz", input=normal_tokens(spec))
    arguments = ("export", folder / "layer.pt", "-o", folder / "out", "--data", folder / "x.npz")
    return run(*arguments, "--set", "act=entmax15", *options)


def off(y: np.ndarray, expected: np.ndarray) -> float:
    assert y.shape == expected.shape
    return float(np.abs(y - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("target", ["ort-cpu", "onnx", "tensorrt"])
@pytest.mark.parametrize("name", ["mumoe_cp", "mumoe_tr_2level", "mumoe_cp_block_ln"])
def test_a_layer_computes_what_was_recorded_at_any_batch(
    name: str, target: str, tmp_path: Path
) -> None:
    case = read_case(name)
    k = case.ks[-1]
    outcome = export(case, tmp_path, "--k", str(k), "--target", target, "--no-engine")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert [layer.precision for layer in bundle.manifest.layers] == ["int8"]
    parity = bundle.manifest.parity
    assert parity is not None
    assert parity["passed"]
    assert parity["routing_agreement"] == 1.0
    session = bundle.session()
    x = case.x.astype(np.float32)
    x = x if x.ndim == 3 else x[:, None]
    for size in (1, 3, len(x)):
        y = session(x[:size])
        assert 1e-4 < off(y, case.y(k)[:size]) < 0.05
    assert run("verify", tmp_path / "out").code == 0
    assert "int8" in run("inspect", tmp_path / "out").out


def test_every_k_is_served_by_one_graph(tmp_path: Path) -> None:
    case = read_case("mumoe_tr")
    outcome = export(case, tmp_path, "--k", "input", "--target", "ort-cpu")
    assert outcome.code == 0, outcome.err
    session = Bundle.open(tmp_path / "out").session()
    x = case.x.astype(np.float32)[:, None]
    for k in case.ks:
        assert off(session(x, k), case.y(k)) < 0.05


def test_gpt2_computes_any_length_and_a_mixer_counts_its_tokens(tmp_path: Path) -> None:
    case = read_case("mumoe_gpt2_cp")
    assert export(case, tmp_path, "--target", "ort-cpu").code == 0
    session = Bundle.open(tmp_path / "out").session()
    x = case.x.astype(np.int64)
    for batch, length in ((1, 1), (2, 13), (3, 20)):
        y = session(x[:batch, :length])
        assert off(y, case.y(None)[:batch, :length]) < 0.08
    case = read_case("mumoe_mixer_cp")
    outcome = export(case, tmp_path, "--target", "ort-cpu", "--k", "4", "--force")
    assert outcome.code == 0, outcome.err
    parity = Bundle.open(tmp_path / "out").manifest.parity
    assert parity is not None
    # One of its 192 choices falls to another expert: with two inputs, half of those would differ.
    assert 0.98 < parity["routing_agreement"] < 1.0
    assert parity["max_rel"] < 0.05


def test_the_factors_take_a_quarter_of_the_disk(tmp_path: Path) -> None:
    tensors = (
        FactorisedSpec("cp", (16,), 96, 160, (128,), bias=True),
        FactorisedSpec("cp", (16,), 160, 96, (128,), bias=True),
    )
    spec = MuMoESpec("layer", tensors)
    size = {}
    for precision in ("fp32", "int8"):
        options = ("--precision", precision, "--target", "ort-cpu", "--force")
        assert exported_layer(spec, tmp_path, *options).code == 0
        size[precision] = (tmp_path / "out" / "weights.bin").stat().st_size
    types = stored_types(tmp_path / "out" / "model.onnx")
    large = 2 * 4 * (96 + 160) * 128
    kinds = {name.removeprefix("layer/"): kind for name, kind in types.items()}
    for tensor in ("tensor.0", "tensor.1"):
        assert kinds[f"{tensor}.input"] == kinds[f"{tensor}.output"] == onnx.TensorProto.INT8
        assert kinds[f"{tensor}.expert.0"] == onnx.TensorProto.FLOAT
    assert kinds["gate.0.weight"] == onnx.TensorProto.FLOAT
    assert 0.72 * large < size["fp32"] - size["int8"] < 0.76 * large  # scales, and whole pages
    assert sum(name.startswith("tensor.") for name in kinds) == 2 * (4 + 2)  # all that is stored


@pytest.mark.parametrize("form", ["cp", "tr", "tucker"])
def test_edits_are_those_of_fp32(form: Form, tmp_path: Path) -> None:
    spec = spec_of(form, (6, 4))
    means = ((0.25,) * 6, (0.5,) * 4)
    entry = {"layer": "layer", "output": 2, "coefficients": means, "lambda": 3.0}
    (tmp_path / "rewrite.json").write_text(json.dumps([entry]))
    edits = ("--ablate", "layer:1.2", "--rewrite", tmp_path / "rewrite.json")
    outcome = exported_layer(spec, tmp_path, *INT8, *edits, "--target", "ort-cpu")
    assert outcome.code == 0, outcome.err
    x = normal_tokens(spec)[:4]
    expected = formula(
        random_layer(spec), x, ablated=((0, 2),), rewrites=(Rewrite("", 2, means, 3.0),)
    )
    y = Bundle.open(tmp_path / "out").session()(x)
    assert off(y, expected) < 0.08


def test_an_unfactorised_layer_is_refused_unless_it_stays_in_floats(tmp_path: Path) -> None:
    outcome = exported_layer(spec_of("full", (6,)), tmp_path, *INT8, "--target", "ort-cpu")
    assert outcome.code == 1
    assert "layer layer: --precision int8 does not support this layer" in outcome.error
    assert "is not factorised" in outcome.error
    assert not (tmp_path / "out").exists()
    bundle = moexport.export(
        moexport.load(tmp_path / "layer.pt", config={"act": "entmax15"}),
        tmp_path / "out",
        precision="int8",
        target="ort-cpu",
        data=tmp_path / "x.npz",
        keep_floating=["layer"],
    )
    assert [layer.precision for layer in bundle.manifest.layers] == ["fp32"]


@pytest.mark.slow
def test_layers_are_ranked_and_kept_in_floats_as_asked(tmp_path: Path) -> None:
    case = read_case("mumoe_mixer_tr")
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    np.savez(tmp_path / "x.npz", input=case.x)
    given = (case.weights, "--config", tmp_path / "config.json", "--data", tmp_path / "x.npz")
    ranked = run("calibrate", *given, "-o", tmp_path / "table.json", "--sensitivity")
    assert ranked.code == 0, ranked.err
    assert ranked.out.count("mixer_blocks.") >= 4
    kept = run(
        *("export", *given, "-o", tmp_path / "out", *INT8, "--target", "ort-cpu"),
        *("--min-retention", "1"),
    )
    assert kept.code == 0, kept.err
    manifest = Bundle.open(tmp_path / "out").manifest
    assert manifest.numbers["retention"]["reached"] == 1.0
    assert {layer.precision for layer in manifest.layers} <= {"int8", "fp32"}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "rank"), [("cp", 48), ("tr", 12)])
def test_int8_keeps_the_accuracy_of_a_trained_head(form: Form, rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = load_digits()
    assert data.train.labels is not None
    assert data.test.labels is not None
    images, labels = (
        torch.from_numpy(data.train.inputs).flatten(1),
        torch.from_numpy(data.train.labels),
    )
    head = mumoe_demo.trainable_head(form, 16, images.shape[1], CLASSES, rank)
    rows = (torch.randint(len(images), (128,)) for _ in range(80))
    batches = ((images[chosen], labels[chosen]) for chosen in rows)
    mumoe_demo.save(mumoe_demo.fit(head, batches, 80, 5e-3), tmp_path / "head.pt")
    model = moexport.load(tmp_path / "head.pt", config={"input_rank": 2, "act": "entmax15"})
    x = data.test.inputs.reshape(len(data.test.inputs), -1)
    right = {}
    for precision in ("fp32", "int8"):
        bundle = moexport.export(
            model,
            tmp_path / precision,
            precision=precision,
            target="ort-cpu",
            data=images.numpy()[:256],
            k=8,
        )
        y = bundle.session()(x)[:, 0]
        right[precision] = float((y.argmax(axis=1) == data.test.labels).mean())
    assert right["fp32"] > 0.9
    assert abs(right["int8"] - right["fp32"]) <= 0.005
