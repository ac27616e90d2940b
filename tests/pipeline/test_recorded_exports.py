"""The nine recorded cases through the command line: export, run elsewhere, compare."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import Outcome, run, run_program
from conftest import RecordedCase, read_case
from moexport.exporter.bundle import Bundle
from moexport.exporter.session import Session, SessionOptions
from moexport.exporter.trace import TRACED_BATCH

RTOL = 1e-4  # of max|y|, as the recorded cases promise
EXACT = "dense,gather,grouped,conditional"

# com.microsoft.MoE takes experts of two matmuls that keep the width, and is exact with ReLU.
EXACT_FUSED = {"soft_moe_mnist", "soft_moe_mnist_normalized"}
FUSED = {
    *EXACT_FUSED,
    "soft_moe_conv",
    "soft_moe_lucidrains",
    "soft_moe_vit",
    "soft_moe_vit_slots",
    "soft_moe_vit_stacked",
}


def arguments(case: RecordedCase, folder: Path) -> tuple[str | Path, ...]:
    config = folder / "config.json"
    config.write_text(json.dumps(case.config))
    return (case.weights, "--config", config)


def export(case: RecordedCase, folder: Path, *options: str) -> Outcome:
    return run(
        "export",
        *arguments(case, folder),
        *("-o", folder / "out", "--data", inputs(case, folder, len(case.x))),
        *options,
    )


def inputs(case: RecordedCase, folder: Path, count: int) -> Path:
    path = folder / f"x{count}.npz"
    np.savez(path, input=case.x[:count])
    return path


def experts(case: RecordedCase) -> int:
    return int(case.config["num_experts"])


def assert_recorded(
    case: RecordedCase, bundle: Bundle, graph: str, k: int, given: int | None = None
) -> None:
    """The graph computes what was recorded, at each batch size that the recording allows."""
    record = bundle.graph(graph)
    session = observed(bundle, graph)
    expected = case.y(k if k < experts(case) else None)
    recorded = case.chosen(k)
    sizes = [1, len(case.x)]
    assert TRACED_BATCH not in sizes
    for size in sizes:
        values = session.run(case.x[:size], given)
        y = values[session.output_names[0]]
        assert np.abs(y - expected[:size]).max() <= RTOL * np.abs(expected[:size]).max()
        for layer, sets in zip(record.selected.values(), recorded, strict=bool(recorded)):
            assert np.array_equal(np.sort(values[layer], axis=1), sets[:size])


def observed(bundle: Bundle, graph: str) -> Session:
    chosen = bundle.graph(graph).selected.values()
    observe = dict.fromkeys(chosen, int(onnx.TensorProto.INT64))
    return bundle.session(graph, SessionOptions(observe=observe))


def test_every_case_holds_for_every_k_in_every_lowering(
    soft_moe_case: RecordedCase, tmp_path: Path
) -> None:
    case = soft_moe_case
    lowerings = [*EXACT.split(","), *(["fused"] if case.name in EXACT_FUSED else [])]
    for k in (experts(case), *case.ks):
        folder = tmp_path / str(k)
        folder.mkdir()
        outcome = export(
            case,
            folder,
            *("--k", str(k), "--lowering", ",".join(lowerings), "--target", "ort-cpu"),
        )
        assert outcome.code == 0, outcome.err
        bundle = Bundle.open(folder / "out")
        for graph in bundle.manifest.graphs:
            assert graph.parity is not None
            assert graph.parity["passed"]
            assert graph.parity["samples"] == len(case.x)
        for name in lowerings:
            assert set(bundle.graph(name).lowerings.values()) == {name}
            assert_recorded(case, bundle, name, k)


def test_the_fused_lowering_serves_the_experts_it_knows_and_refuses_the_others(
    soft_moe_case: RecordedCase, tmp_path: Path
) -> None:
    case, k = soft_moe_case, soft_moe_case.ks[0]
    outcome = export(
        case,
        tmp_path,
        *("--k", str(k), "--lowering", "fused", "--target", "ort-cpu", "--rtol", "2e-3"),
    )
    if case.name not in FUSED:
        assert outcome.code == 1
        assert "the lowering 'fused' cannot serve it: com.microsoft.MoE" in outcome.error
        assert not (tmp_path / "out").exists()
        return
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    (graph,) = bundle.manifest.graphs
    assert graph.parity is not None
    assert graph.parity["routing_agreement"] == 1.0
    tanh_form = "tanh form" in bundle.manifest.layers[0].reason
    assert tanh_form == (case.name not in EXACT_FUSED)


@pytest.mark.parametrize("name", ["soft_moe_vit", "soft_moe_vit_slots", "soft_moe_conv"])
def test_k_as_an_input_serves_every_k_with_one_graph(name: str, tmp_path: Path) -> None:
    case = read_case(name)
    outcome = export(case, tmp_path, "--k", "input", "--lowering", EXACT)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.k == "input"
    assert [layer.k for layer in bundle.manifest.layers] == [None] * len(bundle.manifest.layers)
    port = bundle.manifest.inputs[1]
    assert (port.name, port.dtype, port.shape) == ("k", "int64", [1])
    for lowering in EXACT.split(","):
        for k in (experts(case), *case.ks):
            assert_recorded(case, bundle, lowering, k, given=k)


def test_k_per_layer_is_kept_by_each_layer(tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    outcome = export(case, tmp_path, "--k", "2,8")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert [layer.k for layer in bundle.manifest.layers] == [2, 8]
    (value,) = bundle.manifest.graphs[0].selected.values()  # the second layer keeps all
    values = observed(bundle, "model.onnx").run(case.x)
    # The first layer's inputs do not depend on any k, so its choice is the recorded one.
    assert np.array_equal(np.sort(values[value], axis=1), case.chosen(2)[0])


@pytest.mark.parametrize(("share", "k"), [("0.25", 2), ("1/2", 4), ("1.0", 8), ("n", 8)])
def test_a_share_of_the_experts_is_a_number_of_them(share: str, k: int, tmp_path: Path) -> None:
    case = read_case("soft_moe_vit_stacked")
    outcome = export(case, tmp_path, "--k", share, "--lowering", "dense")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert [layer.k for layer in bundle.manifest.layers] == [k, k]
    assert_recorded(case, bundle, "dense", k)


@pytest.mark.parametrize("lowering", [*EXACT.split(","), "fused"])
def test_a_fixed_batch_is_a_constant_of_the_graph(lowering: str, tmp_path: Path) -> None:
    case = read_case("soft_moe_mnist_normalized")
    outcome = export(
        case,
        tmp_path,
        *("--batch", "4", "--k", "4", "--lowering", lowering, "--target", "ort-cpu"),
    )
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.batch == "4"
    assert bundle.manifest.inputs[0].shape == [4, 1, 28, 28]
    assert bundle.manifest.outputs[0].shape == [4, 10]
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    assert [d.dim_value for d in graph.input[0].type.tensor_type.shape.dim] == [4, 1, 28, 28]
    y = bundle.session()(case.x[1:5])
    assert np.abs(y - case.y(4)[1:5]).max() <= RTOL * np.abs(case.y(4)).max()
    refused = run(
        *("run", tmp_path / "out", "-o", tmp_path / "y.npz", "-i", inputs(case, tmp_path, 3))
    )
    assert refused.code == 1
    assert "(4, 1, 28, 28), not float32 (3, 1, 28, 28)" in refused.error
    assert not (tmp_path / "y.npz").exists()


@pytest.mark.parametrize("target", ["ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx"])
def test_every_target_gets_a_graph_that_onnx_runtime_agrees_with(
    target: str, tmp_path: Path
) -> None:
    case = read_case("soft_moe_vit")
    outcome = export(case, tmp_path, "--k", "2", "--target", target)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.target == target
    assert_recorded(case, bundle, "model.onnx", 2)


def test_renormalised_outputs_weigh_the_kept_experts_to_one(tmp_path: Path) -> None:
    case = read_case("soft_moe_lucidrains")
    options = ("--k", "2", "--lowering", EXACT, "--renormalize")
    assert export(case, tmp_path, *options).code == 0
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.renormalize
    expected = bundle.session("dense")(case.x)
    assert np.abs(expected - case.y(2)).max() > 0.01 * np.abs(case.y(2)).max()
    for lowering in EXACT.split(",")[1:]:
        y = bundle.session(lowering)(case.x)
        assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "lowering"),
    [("soft_moe_vit", "auto"), ("soft_moe_fkodom", "grouped"), ("soft_moe_conv", "gather")],
)
def test_the_program_itself_exports_verifies_and_runs(
    name: str, lowering: str, tmp_path: Path
) -> None:
    case, k = read_case(name), read_case(name).ks[-1]
    exported = run_program(
        *("export", *arguments(case, tmp_path), "-o", "made/out", "--k", str(k)),
        *("--lowering", lowering, "--data", inputs(case, tmp_path, len(case.x))),
        cwd=tmp_path,
    )
    assert exported.code == 0, exported.err
    assert exported.out.startswith("made/out: model.onnx, parity.npz, weights.bin")
    verified = run_program("verify", "made/out", cwd=tmp_path)
    assert verified.code == 0, verified.err
    assert verified.err == ""
    x = inputs(case, tmp_path, len(case.x))
    ran = run_program("run", "made/out", "-i", x, "-o", "y.npz", cwd=tmp_path)
    assert (ran.code, ran.out) == (0, "")
    with np.load(tmp_path / "y.npz") as arrays:
        assert arrays.files == ["output"]
        y = arrays["output"]
    assert np.abs(y - case.y(k)).max() <= RTOL * np.abs(case.y(k)).max()
