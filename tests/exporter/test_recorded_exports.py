"""The nine recorded cases through the command line: export, run elsewhere, compare."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
from moexport.common.libraries import untested_versions
from moexport.errors import UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.session import Session, SessionOptions
from moexport.graphs.sizes import TRACED_BATCH
from moexport.tests.command import Outcome, run, run_program
from moexport.tests.recorded import RecordedCase, read_case

RTOL = 1e-4  # of max|y|, as the recorded cases promise
EXACT = "dense,gather,grouped,conditional"

# com.microsoft.MoE takes experts of two matmuls that keep the width, and is exact with ReLU.
EXACT_FUSED = {"soft_moe_mnist", "soft_moe_mnist_normalized"}


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


def assert_holds(case: RecordedCase, folder: Path, k: int) -> None:
    lowerings = [*EXACT.split(","), *(["fused"] if case.name in EXACT_FUSED else [])]
    names = ",".join(lowerings)
    outcome = export(case, folder, "--k", str(k), "--lowering", names, "--target", "ort-cpu")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(folder / "out")
    assert [layer.k for layer in bundle.manifest.layers] == [k] * len(bundle.manifest.layers)
    for graph in bundle.manifest.graphs:
        assert graph.parity is not None
        assert graph.parity["passed"]
        assert graph.parity["samples"] == len(case.x)
    for name in lowerings:
        assert set(bundle.graph(name).lowerings.values()) == {name}
        assert_recorded(case, bundle, name, k)


def test_every_case_holds_in_every_lowering(soft_moe_case: RecordedCase, tmp_path: Path) -> None:
    assert_holds(soft_moe_case, tmp_path, soft_moe_case.ks[-1])


@pytest.mark.parametrize(
    "name", ["soft_moe_fkodom", "soft_moe_lucidrains_geglu_ln", "soft_moe_mnist_normalized"]
)
def test_with_all_experts_the_model_is_what_it_was(name: str, tmp_path: Path) -> None:
    assert_holds(read_case(name), tmp_path, experts(read_case(name)))


def test_k_as_an_input_serves_every_k_with_one_graph(
    soft_moe_case: RecordedCase, tmp_path: Path
) -> None:
    case = soft_moe_case
    outcome = export(case, tmp_path, "--k", "input", "--lowering", EXACT)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.k == "input"
    assert [layer.k for layer in bundle.manifest.layers] == [None] * len(bundle.manifest.layers)
    port = bundle.manifest.inputs[1]
    assert (port.name, port.dtype, port.shape) == ("k", "int64", (1,))
    for lowering in EXACT.split(","):
        for k in (experts(case), *case.ks):
            assert_recorded(case, bundle, lowering, k, given=k)


@pytest.mark.parametrize("name", ["soft_moe_lucidrains", "soft_moe_vit_slots"])
def test_the_fused_lowering_serves_a_model_with_gelu_within_its_tanh_form(
    name: str, tmp_path: Path
) -> None:
    case, k = read_case(name), read_case(name).ks[0]
    options = ("--k", str(k), "--lowering", "fused", "--target", "ort-cpu", "--rtol", "2e-3")
    outcome = export(case, tmp_path, *options)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    (graph,) = bundle.manifest.graphs
    assert graph.parity is not None
    assert graph.parity["routing_agreement"] == 1.0
    assert "tanh form" in bundle.manifest.layers[0].reason


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("soft_moe_fkodom", "com.microsoft.MoE does not support linear experts"),
        ("soft_moe_lucidrains_geglu_ln", "com.microsoft.MoE does not support gated experts"),
    ],
)
def test_the_fused_lowering_refuses_experts_it_does_not_know(
    name: str, why: str, tmp_path: Path
) -> None:
    outcome = export(read_case(name), tmp_path, "--lowering", "fused", "--target", "ort-cpu")
    assert outcome.code == 1
    assert f"the lowering 'fused' cannot be used: {why}" in outcome.error
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize(("share", "k"), [("0.25", 4), ("1/2", 8), ("n/1", 16), ("0.001", 1)])
def test_a_share_of_the_experts_is_a_number_of_them(share: str, k: int, tmp_path: Path) -> None:
    outcome = export(read_case("soft_moe_mnist"), tmp_path, "--k", share)
    assert outcome.code == 0, outcome.err
    assert [layer.k for layer in Bundle.open(tmp_path / "out").manifest.layers] == [k]


@pytest.mark.parametrize("text", ["1.0", "1.", "1.000", "+1.0"])
def test_a_k_of_one_with_a_point_is_refused_with_both_spellings(text: str, tmp_path: Path) -> None:
    outcome = export(read_case("soft_moe_mnist"), tmp_path, "--k", text)
    assert outcome.code == 2
    assert "--k 1 computes one expert, --k n all" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("k", [1.0, np.float64(1), np.float32(1), Fraction(1)])
def test_python_s_one_point_zero_is_refused_too(k: Any, tmp_path: Path) -> None:
    model = moexport.load(read_case("soft_moe_mnist").weights)
    with pytest.raises(UsageError, match="one expert, or all"):
        moexport.export(model, tmp_path / "out", k=k)
    with pytest.raises(UsageError, match="one expert, or all"):
        moexport.bench(model, k=[k, 0.5])
    bundle = moexport.export(model, tmp_path / "out", k="input")
    x = read_case("soft_moe_mnist").x[:2]
    if not isinstance(k, Fraction):
        with pytest.raises(UsageError, match="one expert, or all"):
            bundle.session()(x, k=k)
    one, all_of_them = bundle.session()(x, k=1), bundle.session()(x, k=16)
    assert np.abs(all_of_them - read_case("soft_moe_mnist").y()[:2]).max() < 1e-4
    assert np.abs(one - all_of_them).max() > 1e-3


def test_a_fixed_batch_is_a_constant_of_the_graph(tmp_path: Path) -> None:
    case = read_case("soft_moe_mnist_normalized")
    options = ("--batch", "4", "--k", "4", "--lowering", f"{EXACT},fused", "--target", "ort-cpu")
    outcome = export(case, tmp_path, *options)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.batch == "4"
    assert bundle.manifest.inputs[0].shape == (4, 1, 28, 28)
    assert bundle.manifest.outputs[0].shape == (4, 10)
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    assert [d.dim_value for d in graph.input[0].type.tensor_type.shape.dim] == [4, 1, 28, 28]
    for lowering in (*EXACT.split(","), "fused"):
        y = bundle.session(lowering)(case.x[1:5])
        assert np.abs(y - case.y(4)[1:5]).max() <= RTOL * np.abs(case.y(4)).max()
    refused = run(
        *("run", tmp_path / "out", "-o", tmp_path / "y.npz", "-i", inputs(case, tmp_path, 3))
    )
    assert refused.code == 1
    assert "(4, 1, 28, 28), not float32 (3, 1, 28, 28)" in refused.error
    assert not (tmp_path / "y.npz").exists()


@pytest.mark.parametrize("target", ["ort-cpu", "ort-cuda", "ort-web", "tensorrt", "tensorrt-rtx"])
def test_every_target_gets_a_graph_that_onnx_runtime_agrees_with(
    target: str, tmp_path: Path
) -> None:
    case = read_case("soft_moe_mnist")
    outcome = export(case, tmp_path, "--k", "2", "--target", target, "--no-engine")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lowering"),
    [("soft_moe_vit_stacked", "auto"), ("soft_moe_fkodom", "grouped"), ("soft_moe_conv", "gather")],
)
def test_the_program_itself_exports(name: str, lowering: str, tmp_path: Path) -> None:
    case, k = read_case(name), read_case(name).ks[-1]
    outcome = run_program(
        *("export", *arguments(case, tmp_path), "-o", "made/out", "--k", str(k)),
        *("--lowering", lowering, "--data", inputs(case, tmp_path, len(case.x))),
        cwd=tmp_path,
    )
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "made" / "out")
    # `auto` may write a graph for few inputs and one for many.
    files = sorted(graph.file for graph in bundle.manifest.graphs)
    assert len(files) == 1 or lowering == "auto"
    assert outcome.out.startswith(f"made/out: {', '.join(files)}, parity")
    assert "parity.npz, weights.bin" in outcome.out
    for file in files:
        assert_recorded(case, bundle, file, k)


def test_the_program_itself_runs_verifies_and_inspects(tmp_path: Path) -> None:
    case = read_case("soft_moe_lucidrains")
    assert export(case, tmp_path, "--k", "1").code == 0
    ran = run_program(
        *("run", "out", "-i", inputs(case, tmp_path, len(case.x)), "-o", "y.npz"), cwd=tmp_path
    )
    # Of packages that `make compat` was not run with yet.
    said = "".join(f"note: {line}\n" for line in untested_versions())
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.endswith(": y.npz: output of shape (3, 16, 32)\n")
    with np.load(tmp_path / "y.npz") as arrays:
        assert arrays.files == ["output"]
        y = arrays["output"]
    assert np.abs(y - case.y(1)).max() <= RTOL * np.abs(case.y(1)).max()
    verified = run_program("verify", "out", cwd=tmp_path)
    assert (verified.code, verified.err) == (0, said)
    checks = [line.split()[0] for line in verified.out.splitlines()]
    assert len(checks) >= 7
    assert {*checks} == {"ok"}
    inspected = run_program("inspect", "out", cwd=tmp_path)
    assert (inspected.code, inspected.err) == (0, said)
    assert "soft-moe-pytorch" in inspected.out


@pytest.mark.parametrize(("opset", "version"), [("20", 9), ("21", 10)])
def test_a_file_has_the_oldest_form_that_holds_its_opset(
    opset: str, version: int, tmp_path: Path
) -> None:
    weights = read_case("mumoe_cp").weights
    options = ("--set", "act=entmax15", "--opset", opset, "--no-verify")
    outcome = run("export", weights, "-o", tmp_path / "out", *options)
    assert outcome.code == 0, outcome.err
    for file in (tmp_path / "out").glob("*.onnx"):
        assert onnx.load(file, load_external_data=False).ir_version == version
