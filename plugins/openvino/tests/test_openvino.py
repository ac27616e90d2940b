"""Graphs of `--target openvino` compute the same in OpenVINO as PyTorch.

Each is exported with its parity check, which runs in OpenVINO, and opened there again.
"""

from __future__ import annotations

import csv
import importlib.util
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.bench.engines import KINDS
from moexport.errors import LoweringError, MissingExtraError, UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.graphs.targets import Precision
from moexport.plugins.openvino import session as openvino
from moexport.plugins.openvino.session import OpenVinoSession, _message
from moexport.plugins.token_routed.tests.test_routed_precisions import exported as routed
from moexport.plugins.token_routed.tests.test_vmoe_routed import computed, loaded
from moexport.plugins.token_routed.tests.test_vmoe_vit import apart, config_file
from moexport.plugins.token_routed.tests.test_vmoe_vit import read_case as read_jax_case
from moexport.tests.command import PROGRAM, run
from moexport.tests.exporter.families.reference import vit
from moexport.tests.exporter.families.states import vit_state
from moexport.tests.recorded import read_case

pytestmark = pytest.mark.skipif(
    KINDS["openvino"].missing() is not None, reason=str(KINDS["openvino"].missing())
)


def computes(precision: str) -> bool:
    """Whether this CPU computes in a precision; otherwise exports in it are refused."""
    able = openvino.openvino_package().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return openvino.CAPABILITIES.get(precision, "FP32") in able


def exported(name: str, place: Path, **options: object) -> Bundle:
    case = read_case(name)
    model = moexport.load(case.weights, family=case.family, config=case.config)
    options = {"k": "n/4", "data": case.x, **options}
    return moexport.export(model, place, target="openvino", **options)


def opened(bundle: Bundle, lowering: str | None = None) -> OpenVinoSession:
    session = bundle.session(lowering or bundle.graph().file, threads=1)
    assert isinstance(session, OpenVinoSession)
    return session


def check(bundle: Bundle) -> None:
    """Checks that every graph passed, with the same experts in all choices except ties."""
    assert bundle.manifest.target == "openvino"
    for graph in bundle.manifest.graphs:
        assert graph.parity is not None and graph.parity["passed"]
        assert graph.parity["agreeing"] == graph.parity["choices"]


@pytest.mark.parametrize(
    ("name", "lowerings"),
    [
        ("soft_moe_vit", "dense,grouped"),
        ("soft_moe_conv", "grouped"),
        ("soft_moe_lucidrains_geglu_ln", "grouped"),
        ("mumoe_gpt2_cp", "factorised"),
        ("mumoe_tr_block_ln", "factorised"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_families_match_in_openvino_in_each_precision(
    name: str, lowerings: str, precision: Precision, tmp_path: Path
) -> None:
    if not computes(precision):
        pytest.skip(f"this CPU has no {precision}")
    bundle = exported(name, tmp_path / "out", lowering=lowerings, precision=precision)
    check(bundle)
    kinds = {"fp32": {"f32"}, "bf16": {"bf16", "f32"}, "int8": {"f32", "u8"}}[precision]
    for lowering in lowerings.split(","):
        assert {*opened(bundle, lowering).computed_in.split(", ")} == kinds


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_weights_match_and_are_refused_in_int8(
    precision: Precision, tmp_path: Path
) -> None:
    if not computes(precision):
        pytest.skip(f"this CPU has no {precision}")
    check(exported("soft_moe_vit", tmp_path / "out", lowering="gather", precision=precision))
    with pytest.raises(LoweringError, match="multiplies gathered INT8 weights as floats"):
        exported("soft_moe_vit", tmp_path / "int8", lowering="gather", precision="int8")


@pytest.mark.parametrize("k", ["n", "input"])
def test_all_experts_and_a_k_of_each_call_match_the_bundle(k: str, tmp_path: Path) -> None:
    bundle = exported("soft_moe_vit", tmp_path / "out", k=k)
    check(bundle)
    x = read_case("soft_moe_vit").x
    given = 3 if k == "input" else None
    mine = bundle.session(threads=1)(x, given)
    theirs = bundle.session(runtime="onnxruntime", threads=1)(x, given)
    np.testing.assert_allclose(mine, theirs, atol=2e-6)
    assert all(each.passed for each in bundle.verify())


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("int8", 5e-3)])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_factor_for_each_channel_follows_a_layer_whose_k_is_given(
    slots: int, precision: str, bound: float, tmp_path: Path
) -> None:
    """OpenVINO fuses LayerScale with the product before it if it knows the width."""
    state = vit_state(layer_scale=True, p=slots)
    torch.save(state, tmp_path / "vit.pt")
    x = np.random.default_rng(0).standard_normal((32, 3, 12, 12), np.float32)
    np.savez(tmp_path / "x.npz", input=x)
    arrays = {key: t.double().numpy() for key, t in state.items()}
    out = tmp_path / "out"
    for lowering in ("dense", "grouped"):
        options = ("--lowering", lowering, "--precision", precision, "--k", "input", "--force")
        settings = ("--set", "num_heads=3", "--set", "rest=default")
        files = ("export", tmp_path / "vit.pt", "-o", out, "--data", tmp_path / "x.npz")
        outcome = run(*files, "--target", "openvino", *options, *settings)
        assert outcome.code == 0, outcome.err
        assert run("verify", out).code == 0
        for k in (1, 3, 4):
            data = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz", "--force")
            outcome = run("run", out, *data, "--k", str(k))
            assert outcome.code == 0, outcome.err
            with np.load(tmp_path / "y.npz") as found:
                expected = vit(x.astype(np.float64), arrays, heads=3, pool="token", keep=k)
                assert apart(found["output"], expected) < bound


@pytest.mark.slow
def test_ports_in_bf16_are_fed_fp32(tmp_path: Path) -> None:
    if not computes("bf16"):
        pytest.skip("this CPU has no BF16")
    case, out = read_case("soft_moe_vit"), tmp_path / "out"
    np.savez(tmp_path / "x.npz", input=case.x)
    exported("soft_moe_vit", out, k=2, precision="bf16", io_precision="bf16")
    outcome = run("run", out, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert outcome.code == 0, outcome.err
    with np.load(tmp_path / "y.npz") as found:
        assert apart(found["output"], case.y(2)) < 2e-2
    assert run("verify", out).code == 0
    timed = ("--engine", "openvino", "--no-memory", "--threads", "1")
    outcome = run("bench", out, "-o", tmp_path / "report", *timed)
    assert outcome.code == 0, outcome.err
    with (tmp_path / "report" / "report.csv").open() as lines:
        (row,) = (row for row in csv.DictReader(lines) if row["engine"] == "openvino")
    assert row["error"] == "" and float(row["same_experts"]) == 1.0


def program(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("priority", ["false", "true"])
@pytest.mark.parametrize("k", [1, 2])
def test_experts_with_a_capacity_match_at_any_k(k: int, priority: str, tmp_path: Path) -> None:
    case, out = read_jax_case("jax_vmoe_every2_k1_indices"), tmp_path / "out"
    x = case.x(16)
    np.savez(tmp_path / "x.npz", input=x)
    config = ("--config", config_file(case, tmp_path), "--set", f"batch_priority={priority}")
    options = ("--target", "openvino", "--k", str(k))
    outcome = program("export", case.index, "-o", out, *config, *options)
    assert outcome.returncode == 0, outcome.stderr
    assert program("verify", out).returncode == 0
    outcome = program("run", out, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert outcome.returncode == 0, outcome.stderr
    with np.load(tmp_path / "y.npz") as found:
        y = found["output"]
    if k == 1 and priority == "false":
        expected = case.io["y_nobf16_b16"]
    else:  # which drops as a loop does: `test_vmoe_routed`
        model = loaded(case, batch_priority=priority, num_selected_experts=k)
        expected = computed(model, x)
    assert apart(y, expected) < 1e-5
    assert priority == "false" or apart(y, computed(loaded(case, num_selected_experts=k), x)) > 1e-2


@pytest.mark.parametrize(
    ("precision", "lowering", "kinds"),
    [
        ("fp32", "grouped", "f32"),
        ("fp32", "dense", "f32"),
        ("int8", "grouped", "f32, u8"),
        ("int8", "dense", "f32, u8"),
        ("int4", "grouped", "f32, i4"),
    ],
)
def test_token_routed_experts_match_without_a_calibration(
    precision: Precision, lowering: str, kinds: str, tmp_path: Path
) -> None:
    bundle = routed(tmp_path, precision, "openvino", lowering, scope="experts", opset=21)
    (graph,) = bundle.manifest.graphs
    assert graph.parity is not None and graph.parity["passed"]
    assert opened(bundle).computed_in == kinds


def test_int8_of_all_linear_layers_is_u8_but_for_router_attention_and_head(tmp_path: Path) -> None:
    bundle = exported("soft_moe_vit", tmp_path / "out", precision="int8", quantize="all")
    check(bundle)
    found = opened(bundle).products()
    integers = [nodes for nodes, kind in found if kind in ("u8", "i8")]
    floats = [nodes for nodes, kind in found if kind == "f32"]
    linears = bundle.manifest.numbers["linears"]
    assert len(integers) >= sum(reason is None for reason in linears.values())
    assert any("/router/" in nodes for nodes in floats)
    assert not any("/router/" in nodes for nodes in integers)


def test_in_bf16_what_chooses_experts_is_fp32(tmp_path: Path) -> None:
    if not computes("bf16"):
        pytest.skip("this CPU has no BF16")
    session = opened(exported("soft_moe_vit", tmp_path / "out", precision="bf16"))
    kinds = {kind for nodes, kind in session.products() if "/router/" in nodes}
    assert kinds == {"f32"}


def test_a_branch_is_refused_and_never_chosen(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="the target openvino does not support it") as refused:
        exported("soft_moe_vit", tmp_path / "out", lowering="conditional")
    assert "conditional" not in str(refused.value.hint)
    assert not (tmp_path / "out").exists()
    bundle = exported("soft_moe_vit", tmp_path / "auto", batch="1:8:32")
    for graph in bundle.manifest.graphs:
        nodes = onnx.load(bundle.path / graph.file, load_external_data=False).graph.node
        assert not any(node.op_type == "If" for node in nodes)


def test_a_precision_that_the_machine_does_not_compute_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(openvino.CAPABILITIES, "bf16", "NO SUCH THING")
    with pytest.raises(UsageError, match="computes it in FP32 on this machine"):
        exported("soft_moe_vit", tmp_path / "out", precision="bf16")
    with pytest.raises(UsageError, match="FP8 requires TensorRT"):
        exported("soft_moe_vit", tmp_path / "out", precision="fp8")
    assert not (tmp_path / "out").exists()


def test_a_version_that_is_too_old_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino, "OLDEST", (9999, 1))
    with pytest.raises(MissingExtraError, match=r"is too old: 9999\.1 is the oldest supported"):
        exported("soft_moe_vit", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_if_it_is_not_installed_the_hint_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "openvino" else find(name)
    )
    with pytest.raises(MissingExtraError, match="OpenVINO is not installed") as told:
        exported("soft_moe_vit", tmp_path / "out")
    assert "'.[openvino]'" in str(told.value.hint)


def test_a_check_without_it_names_its_extra_and_not_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported("soft_moe_vit", tmp_path / "out", lowering="dense")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "openvino" else find(name)
    )
    outcome = run("verify", tmp_path / "out")
    assert outcome.code == 3
    assert "parity of model.onnx: OpenVINO is not installed" in outcome.error
    assert "hint: pip install '.[openvino]'" in outcome.err
    assert "export the bundle again" not in outcome.err


@pytest.mark.parametrize("device", ["gpu", "npu"])
def test_a_missing_device_is_refused(device: str, tmp_path: Path) -> None:
    there = openvino.openvino_package().Core().available_devices
    if any(each.startswith(openvino.DEVICES[device]) for each in there):
        pytest.skip(f"this machine has a {device}")
    bundle = exported("soft_moe_vit", tmp_path / "out")
    with pytest.raises(UsageError, match=f'device="{device}": OpenVINO finds no such device'):
        bundle.session(device=device)(read_case("soft_moe_vit").x)


def test_a_bundle_for_another_runtime_is_refused(tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    np.savez(tmp_path / "x.npz", input=case.x)
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, tmp_path / "out", k=2, target="ort-cpu", verify=False)
    with pytest.raises(UsageError, match="was exported for ort-cpu, not for OpenVINO"):
        bundle.session(runtime="openvino")
    with pytest.raises(UsageError, match="exported for ort-cpu"):
        moexport.run(tmp_path / "out", tmp_path / "x.npz", tmp_path / "y.npz", engine="openvino")
    assert not (tmp_path / "y.npz").exists()


@pytest.mark.path
def test_run_accepts_a_runtime_and_caches_its_compiled_graph(tmp_path: Path) -> None:
    bundle = exported("soft_moe_vit", tmp_path / "out")
    x = read_case("soft_moe_vit").x
    np.savez(tmp_path / "x.npz", input=x)
    files = ("run", tmp_path / "out", "-i", tmp_path / "x.npz", "-o")
    cache = tmp_path / "cache"
    for place, options in {
        "own": ("--cache", cache),
        "again": ("--cache", cache, "--threads", "1"),
        "named": ("--runtime", "openvino"),
        "other": ("--runtime", "onnxruntime"),
    }.items():
        outcome = run(*map(str, (*files, tmp_path / f"{place}.npz", *options)))
        assert outcome.code == 0, outcome.err
    assert any(cache.iterdir())
    wanted = bundle.session(threads=1)(x)
    for place in ("own", "again", "named", "other"):
        with np.load(tmp_path / f"{place}.npz") as found:
            np.testing.assert_allclose(found["output"], wanted, atol=2e-6)


def test_calls_from_several_threads_run_side_by_side(tmp_path: Path) -> None:
    bundle = exported("soft_moe_vit", tmp_path / "out")
    x = read_case("soft_moe_vit").x
    session = bundle.session(threads=2, streams=2)
    wanted = session(x)
    with ThreadPoolExecutor(4) as threads:
        for y in threads.map(session, [x] * 16):
            np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "openvino", "streams": 0}, "streams=0 is not a number of calls"),
        ({"runtime": "onnxruntime", "streams": 2}, "streams=2 is an option of OpenVINO"),
        ({"runtime": "onnxruntime", "device": "gpu"}, "device='gpu' is an option of OpenVINO"),
        ({"provider": "cpu", "cache": "kept"}, "cache='kept' is an option of OpenVINO"),
        ({"provider": "cuda", "runtime": "openvino"}, "Provider' is an option of ONNX Runtime"),
        ({"runtime": "openvino", "profile": "times"}, "an option of ONNX Runtime"),
        ({"runtime": "tvm"}, "runtime='tvm': unknown runtime"),
    ],
)
def test_invalid_options_of_a_session_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    bundle = exported("mumoe_tr_block_ln", tmp_path / "out", verify=False, data=None)
    with pytest.raises(UsageError, match=re.escape(message)):
        bundle.session(**options)


def test_the_bundles_page_has_the_lines_that_run_it(tmp_path: Path) -> None:
    bundle = exported("soft_moe_vit", tmp_path / "out", precision="int8")
    page = (bundle.path / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program.replace('"model.onnx"', repr(str(bundle.path / "model.onnx"))), names)
    x = np.zeros((1, *read_case("soft_moe_vit").x.shape[1:]), np.float32)
    session = bundle.session(bundle.graph().file, threads=1)
    np.testing.assert_allclose(names["y"], session(x), atol=1e-6)
    assert "OpenVINO computed its matrix products in f32, u8 here" in page


def test_doctor_shows_what_the_instructions_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = (e for e in moexport.doctor().abilities if e.name == "run in OpenVINO")
    assert openvino.instructions() in line.detail
    for flags, said in {
        frozenset({"avx512_bf16", "avx512_vnni"}): "AVX-512 BF16: bf16 is faster than fp32; "
        "AVX-512 VNNI: int8 is fastest",
        frozenset({"amx_bf16", "amx_int8"}): "AMX: bf16 is faster than fp32; AMX: int8 is fastest",
        frozenset({"avx2"}): "no BF16 instructions: bf16 is no faster; no VNNI: int8 gains little",
    }.items():
        monkeypatch.setattr(openvino, "cpu_instructions", lambda flags=flags: flags)
        assert openvino.instructions() == said


def test_an_export_for_another_runtime_recommends_openvino_if_it_is_likely_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openvino, "cpu_instructions", lambda: frozenset({"avx512_bf16"}))
    large = 100_000_000
    assert "--target openvino --precision bf16" in str(openvino.advice("onnx", "fp32", large))
    for target, precision in (("openvino", "fp32"), ("tensorrt", "fp32"), ("ort-cpu", "int8")):
        assert openvino.advice(target, precision, large) is None
    assert openvino.advice("onnx", "fp32", 100_000) is None  # each call takes longer there
    monkeypatch.setattr(openvino, "cpu_instructions", lambda: frozenset({"avx512f"}))
    assert openvino.advice("onnx", "fp32", large) is None


def test_tune_measures_lowerings_in_openvino(tmp_path: Path) -> None:
    bundle = exported("soft_moe_vit", tmp_path / "out", lowering="tune")
    assert bundle.manifest.tuning is not None
    assert bundle.manifest.tuning.runtime.startswith("openvino 20")
    measured = bundle.manifest.tuning.measured[0]
    assert {each.lowering for each in measured.candidates} == {"dense", "gather", "grouped"}


def test_a_cached_graph_of_other_weights_is_not_used(tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    state = torch.load(case.weights)
    torch.save({n: t * 1.5 if "experts" in n else t for n, t in state.items()}, tmp_path / "w.pt")
    found = []
    for weights in (case.weights, tmp_path / "w.pt"):
        model = moexport.load(weights, family=case.family, config=case.config)
        place = tmp_path / "out"
        bundle = moexport.export(model, place, target="openvino", verify=False, force=True)
        y = bundle.session(threads=1, cache=tmp_path / "cache")(case.x)
        np.testing.assert_allclose(y, bundle.session(threads=1)(case.x), atol=1e-6)
        found.append(y)
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_an_error_of_openvino_without_a_message_has_its_location() -> None:
    checks = "Exception from core.cpp:117:\nCheck 'any_of(scale.size(), OC, 1U)' failed at x.cpp:5"
    assert _message(RuntimeError(f"{checks}\n\n\n")) == checks.splitlines()[-1]
    assert _message(RuntimeError(f"{checks}:\nShapes differ\n")) == "Shapes differ"
