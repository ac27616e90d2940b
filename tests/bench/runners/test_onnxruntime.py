"""What a graph takes in ONNX Runtime: memory without PyTorch beside it, and the time of parts."""

from __future__ import annotations

from pathlib import Path

import moexport
import numpy as np
import onnx
import pytest
from moexport.bench.measure.latency import TimedRunner, part_of_node, parts_of, parts_of_profile
from moexport.bench.measure.memory import measure_memory, pickled
from moexport.bench.runners.base import GraphFile, chosen_experts
from moexport.bench.runners.graphs import SessionLoader
from moexport.errors import FeedError
from moexport.exporter.bundle.bundle import Bundle
from moexport.tests.recorded import read_case


def loader(exported: Path, lowering: str = "grouped") -> SessionLoader:
    file = exported / Bundle.open(exported).graph(lowering).file
    return SessionLoader(GraphFile(path=file, threads=1))


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32)


def test_a_graph_is_measured_in_a_process_without_pytorch(
    exported: Path, images: np.ndarray
) -> None:
    recipe = pickled(loader(exported))
    assert recipe is not None
    found = measure_memory(recipe, {1: images[:1], 4: images}, threads=1)
    # PyTorch alone would be 200 MB more.
    assert 20 < found.runtime_mb < 180
    assert found.runtime_mb < found.peak_mb[1] <= found.peak_mb[4]


def test_what_is_timed_is_the_runtimes_own_call(exported: Path, images: np.ndarray) -> None:
    runner = loader(exported)()
    call = runner.bound(images)
    (bare,) = call()
    np.testing.assert_array_equal(bare, runner.infer(images))
    # The inputs were checked when the call was prepared.
    with pytest.raises(FeedError, match="needs float32"):
        runner.bound(images[0])
    timed = TimedRunner(loader(exported), [images])
    timed(0)
    timed.rest()
    assert timed.wrapper_ms is not None
    assert timed.wrapper_ms > 0
    timed(1)  # it is opened again


def test_what_fails_in_the_other_process_is_told(exported: Path, images: np.ndarray) -> None:
    recipe = pickled(SessionLoader(GraphFile(path=exported / "gone.onnx")))
    assert recipe is not None
    with pytest.raises(RuntimeError, match=r"gone\.onnx"):
        measure_memory(recipe, {1: images[:1]})
    assert pickled(lambda: None) is None


@pytest.mark.parametrize("lowering", ["grouped", "gather"])
def test_every_layer_has_its_parts(exported: Path, images: np.ndarray, lowering: str) -> None:
    layers = ("blocks.2.mlp", "blocks.3.mlp")
    found = parts_of(loader(exported, lowering), [images[:1], images[1:2]], layers)
    for layer in layers:
        named = {part.part for part in found if part.layer == layer}
        assert named == {"router", "dispatch", "experts", "combine"}
    assert {part.part for part in found if part.layer is None} == {"host", "runtime"}
    assert all(part.ms >= 0 for part in found)


def event(name: str, start: float, end: float, category: str = "Node") -> dict[str, object]:
    return {"name": name, "cat": category, "ts": start, "dur": end - start, "tid": 1}


def test_a_branch_is_not_counted_twice() -> None:
    profile = [
        event("model_run", 0, 100, "Session"),
        event("m/router/top_kernel_time", 0, 100),
        event("model_run", 1000, 2000, "Session"),
        event("m/router/top_kernel_time", 1000, 1100),
        event("m/experts/0_kernel_time", 1100, 1500),
        event("m/experts/0/products_kernel_time", 1150, 1450),
        event("m/combine/C_kernel_time", 1500, 1600),
        event("head_kernel_time", 1600, 1900),
    ]
    found = {(p.layer, p.part): p.ms for p in parts_of_profile(profile, ["m"], skip=1)}
    assert found == pytest.approx(
        {
            ("m", "router"): 0.1,
            ("m", "experts"): 0.4,
            ("m", "combine"): 0.1,
            (None, "host"): 0.3,
            (None, "runtime"): 0.1,
        }
    )


def test_nodes_are_placed_by_their_names() -> None:
    assert part_of_node("m/gate.0/products", ["m"]) == ("m", "router")
    assert part_of_node("m/group/sorted", ["m"]) == ("m", "experts")
    assert part_of_node("m/output", ["m"]) == ("m", "combine")
    assert part_of_node("m2/output", ["m"]) == (None, "host")


def test_the_coefficients_of_a_mumoe_are_its_gate() -> None:
    gate = ("coefficients", "coefficients_2/largest", "all_coefficients/above", "gate.0/products")
    for name in (*gate, "all_coefficients_2", "coefficients_narrow", "coefficients_2_narrow"):
        assert part_of_node(f"m/{name}", ["m"]) == ("m", "router")
    assert part_of_node("m/tensor.0/product", ["m"]) == ("m", "experts")


def test_all_nodes_of_an_exported_gate_are_in_its_part(tmp_path: Path) -> None:
    case = read_case("mumoe_cp")
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, tmp_path / "out", k=2, verify=False)
    (layer,) = model.layers
    nodes = onnx.load(bundle.path / "model.onnx", load_external_data=False).graph.node
    routed = {n.name for n in nodes if part_of_node(n.name, [layer]) == (layer, "router")}
    coefficients = {n.name for n in nodes if "coefficients" in n.name}
    assert coefficients and coefficients <= routed


def test_experts_that_a_graph_exposes_by_input_are_those_of_its_tokens() -> None:
    by_input = np.array([[[3, 1], [0, 2]], [[1, 0], [2, 3]]])
    found = chosen_experts({"routed": by_input}, {"routed": 4, "whole": 2}, rows=4)
    assert found["routed"].tolist() == [[1, 3], [0, 2], [0, 1], [2, 3]]
    assert found["whole"].tolist() == [[0, 1]] * 4
