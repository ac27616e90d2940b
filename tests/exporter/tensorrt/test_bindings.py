"""Experts' weights as inputs of an engine, and its layers' choices as outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
from moexport.common.onnx_runtime import ort
from moexport.errors import EngineError
from moexport.exporter.bundle.manifest import Manifest
from moexport.exporter.tensorrt.backends import first_gpu
from moexport.exporter.tensorrt.bindings import (
    BoundWeight,
    check_weights,
    experts_of,
    map_weight,
    rewrite_graph,
)
from moexport.exporter.tensorrt.records import engines_of
from moexport.tests.command import run
from moexport.tests.exporter.tensorrt.engines import export, needs_rtx
from moexport.tests.recorded import read_case

VIT = "soft_moe_vit"
PRECISIONS = ("fp32", "fp16", "int8")


def bundle_of(folder: Path, precision: str, lowering: str, k: str = "2") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "x.npz", input=read_case(VIT).x)
    data = ("--data", str(folder / "x.npz")) if precision == "int8" else ()
    return export(VIT, folder, "--k", k, "--lowering", lowering, "--precision", precision, *data)


def opened(content: onnx.ModelProto, folder: Path) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.add_session_config_entry("session.disable_quant_qdq", "1")
    key = "session.model_external_initializers_file_folder_path"
    settings.add_session_config_entry(key, str(folder))
    return ort.InferenceSession(content.SerializeToString(), settings)


def arrays(folder: Path, model: onnx.ModelProto, bound: list[BoundWeight]) -> dict[str, Any]:
    """The bound weights as ONNX Runtime takes them, from the mapped file."""
    types = {each.name: each.type.tensor_type.elem_type for each in model.graph.input}
    return {
        each.name: map_weight(folder, each)
        .view(onnx.helper.tensor_dtype_to_np_dtype(types[each.name]))
        .reshape(each.shape)
        for each in bound
    }


@pytest.mark.parametrize("lowering", ["gather", "block-grouped"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_values_are_those_of_the_graph_with_constants(
    precision: str, lowering: str, tmp_path: Path
) -> None:
    bundle = bundle_of(tmp_path, precision, lowering)
    path, layers = bundle / "model.onnx", [each.name for each in Manifest.read(bundle).layers]
    model, bound = rewrite_graph(path, layers, bind=True)
    assert {name.rsplit(".", 1)[-1] for name in (each.name for each in bound)} >= {"w1", "w2"}
    # All of an expert's tensors are inputs: with other ones the engine has other experts.
    constant = {tensor.name for tensor in model.graph.initializer}
    assert not [name for name in constant if "/experts." in name]
    x = read_case(VIT).x
    expected = opened(onnx.load(path, load_external_data=False), bundle).run(None, {"input": x})
    feeds = {"input": x} | arrays(bundle, model, bound)
    found = opened(model, bundle).run(None, feeds)
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one, other)


def test_int8_is_dequantised_after_the_gather(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, "int8", "gather")
    layers = [each.name for each in Manifest.read(bundle).layers]
    model, bound = rewrite_graph(bundle / "model.onnx", layers, bind=True)
    weights = {each.name for each in bound if each.name.endswith((".w1", ".w2"))}
    readers = {n.op_type for n in model.graph.node if set(n.input) & weights}
    assert readers == {"Gather"}
    onnx.save(model, bundle / "bound.onnx")
    onnx.checker.check_model(bundle / "bound.onnx")


def test_what_its_layers_choose_becomes_an_output(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, "fp32", "block-grouped")
    graph = Manifest.read(bundle).graphs[0]
    names = list(graph.selected.values())
    model, _ = rewrite_graph(bundle / "model.onnx", [], bind=False, outputs=names)
    session = opened(model, bundle)
    assert [each.name for each in session.get_outputs()] == ["output", *names]
    _, *chosen = session.run(None, {"input": read_case(VIT).x})
    for each in chosen:
        assert each.dtype == np.int64 and each.shape == (len(read_case(VIT).x), 2)


def test_a_graph_that_gathers_nothing_has_nothing_to_bind(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, "fp32", "dense")
    with pytest.raises(EngineError, match="no expert's weights are gathered"):
        rewrite_graph(bundle / "model.onnx", ["blocks.2.mlp"], bind=True)


def test_experts_of_another_bundle_take_the_place_where_they_fit(tmp_path: Path) -> None:
    one = bundle_of(tmp_path / "one", "fp32", "gather")
    layers = [each.name for each in Manifest.read(one).layers]
    bound = rewrite_graph(one / "model.onnx", layers, bind=True)[1]
    same = bundle_of(tmp_path / "same", "fp32", "gather")
    assert [each.name for each in experts_of(same, "model.onnx", bound)] == [b.name for b in bound]
    half = bundle_of(tmp_path / "half", "fp16", "gather")
    with pytest.raises(EngineError, match="differs from the engine's"):
        experts_of(half, "model.onnx", bound)
    with pytest.raises(EngineError, match=r"has no model-gather\.onnx"):
        experts_of(same, "model-gather.onnx", bound)


def test_the_engines_graph_with_other_experts_computes_their_bundle(tmp_path: Path) -> None:
    """What an exchange of experts does: one graph, the bound weights of another checkpoint."""
    case = read_case(VIT)
    model = moexport.load(case.weights, config=case.config)
    asked: dict[str, Any] = {"target": "tensorrt-rtx", "lowering": "gather", "k": 2}
    one = moexport.export(model, tmp_path / "one", engine=False, verify=False, **asked)
    for layer in model.layers.values():
        for name, parameter in layer.named_parameters():
            if name.startswith("w1"):
                parameter.data.mul_(1.5)
    other = moexport.export(model, tmp_path / "other", engine=False, verify=False, **asked)
    layers = [each.name for each in one.manifest.layers]
    graph, bound = rewrite_graph(one.path / "model.onnx", layers, bind=True)
    taken = experts_of(other.path, "model.onnx", bound)
    session, x = opened(graph, one.path), {"input": case.x}
    (own,) = session.run(None, x | arrays(one.path, graph, bound))
    (found,) = session.run(None, x | arrays(other.path, graph, taken))
    assert np.array_equal(own, one.session()(case.x))
    assert np.abs(found - other.session()(case.x)).max() <= 1e-5 * np.abs(found).max()
    assert np.abs(found - own).max() > 1e-3 * np.abs(own).max()


def test_a_weights_file_that_has_changed_is_not_bound(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, "fp32", "gather")
    layers = [each.name for each in Manifest.read(bundle).layers]
    bound = rewrite_graph(bundle / "model.onnx", layers, bind=True)[1]
    check_weights(bundle, bound)
    content = bytearray((bundle / "weights.bin").read_bytes())
    content[-1] ^= 1
    (bundle / "weights.bin").write_bytes(content)
    with pytest.raises(EngineError, match="missing or has changed"):
        check_weights(bundle, bound)


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize("precision", PRECISIONS)
def test_engines_with_bound_weights_compile_and_leave_the_weights_out(
    precision: str, tmp_path: Path
) -> None:
    bundle = bundle_of(tmp_path, precision, "gather,block-grouped")
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    options = ("--compute-capability", "8.6,8.9,12.0", "--profile", "batch=1:4:16", "--json")
    plain = run("build", bundle, *options)
    bound = run("build", other, *options, "--bind-weights", "--expose-routing")
    assert (plain.code, bound.code) == (0, 0), bound.err
    names = set(Manifest.read(other).graphs[0].selected.values())
    for whole, light in zip(json.loads(plain.out), json.loads(bound.out), strict=True):
        weights = sum(each["nbytes"] for each in light["bound"])
        saved = (bundle / whole["file"]).stat().st_size - (other / light["file"]).stat().st_size
        assert weights > 100_000
        assert saved > 0.8 * weights
        assert set(light["settings"]["outputs"]) == {"output", *names}
        assert whole["settings"]["outputs"] == ["output"]
        assert light["precision"] == whole["precision"]
    read = engines_of(Manifest.read(other))
    assert [each.bound for each in read] == [each["bound"] for each in json.loads(bound.out)]


@needs_rtx
@pytest.mark.parametrize("again", [(), ("--expose-routing",)])
def test_an_engine_has_the_outputs_of_a_graph_that_shows_its_routing(
    again: tuple[str, ...], tmp_path: Path
) -> None:
    bundle = export(VIT, tmp_path, "--k", "2", "--lowering", "gather", "--expose-routing")
    built = run("build", bundle, "--compute-capability", "8.9", "--json", *again)
    assert built.code == 0, built.err
    names = Manifest.read(bundle).graphs[0].selected.values()
    assert json.loads(built.out)[0]["settings"]["outputs"] == ["output", *names]


@needs_rtx
def test_a_graph_that_keeps_every_expert_has_no_routing_to_expose(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, "fp32", "dense", k="n")
    outcome = run("build", bundle, "--compute-capability", "8.9", "--expose-routing")
    assert outcome.code == 1
    assert "there is no routing to expose" in outcome.error


@needs_rtx
@pytest.mark.skipif(first_gpu() is not None, reason="says what is so without a GPU")
def test_a_run_with_weights_on_the_host_ends_for_want_of_a_gpu_alone(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    bundle = bundle_of(tmp_path, "fp16", "gather")
    options = ("--compute-capability", "8.9", "--profile", "batch=1:4:16", "--bind-weights")
    assert run("build", bundle, *options).code == 0
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    outcome = run("run", bundle, *files, "--engine", "tensorrt-rtx", "--host-weights")
    assert outcome.code == 1
    assert "there is no NVIDIA GPU here" in outcome.error
    refused = run("run", bundle, *files, "--host-weights")
    assert refused.code == 2
    assert "--host-weights: no engine is loaded" in refused.error
