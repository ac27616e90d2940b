"""Graphs of muMoE models parse and compile in TensorRT-RTX, which needs no GPU for that."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from moexport.graphs.edits import LayerEdits, Rewrite
from moexport.tests.command import run
from moexport.tests.graphs.mumoe_layers import graph, random_layer, saved
from moexport.tests.graphs.test_mumoe import spec_of
from moexport.tests.recorded import read_case

Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="TensorRT-RTX is not installed: pip install 'moexport[rtx]'",
)

PROFILES: Mapping[str, Sizes] = {
    "mumoe_cp": ((1, 1, 24), (4, 2, 24), (8, 8, 24)),
    "mumoe_tr_2level": ((1, 1, 24), (4, 2, 24), (8, 8, 24)),
    "mumoe_cp_block_ln": ((1, 1, 24), (4, 8, 24), (8, 64, 24)),
    "mumoe_mixer_tr": ((1, 3, 224, 224), (2, 3, 224, 224), (4, 3, 224, 224)),
    "mumoe_gpt2_cp": ((1, 1), (2, 16), (4, 32)),
    "mumoe_gpt2_tr": ((1, 1), (2, 16), (4, 32)),
}
"""A case of each family and form, with the sizes of its input."""


def compiled(path: Path, sizes: Sizes, k: Sizes | None = None) -> bytes:
    """Builds an engine for compute capability 8.9; fails with the parser's words."""
    trt: Any = importlib.import_module("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(path))
    errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
    assert parsed, f"{path.name} does not parse: {errors}"
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    model = onnx.load(path, load_external_data=False)
    profile.set_shape(model.graph.input[0].name, *sizes)
    if k is not None:
        profile.set_shape_input("k", *k)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None, f"{path.name} does not build"
    return bytes(engine)


def export(name: str, folder: Path, k: str) -> Path:
    case = read_case(name)
    config = folder / "config.json"
    config.write_text(json.dumps(case.config))
    outcome = run(
        *("export", case.weights, "--config", config, "-o", folder / "out", "--k", k),
        *("--target", "tensorrt-rtx"),
    )
    assert outcome.code == 0, outcome.err
    return folder / "out" / "model.onnx"


@pytest.mark.parametrize("name", PROFILES)
def test_every_family_compiles_with_a_baked_k(name: str, tmp_path: Path) -> None:
    assert compiled(export(name, tmp_path, "2"), PROFILES[name])


def test_a_graph_that_keeps_all_coefficients_compiles(tmp_path: Path) -> None:
    assert compiled(export("mumoe_tr_2level", tmp_path, "n"), PROFILES["mumoe_tr_2level"])


@pytest.mark.parametrize("name", ["mumoe_cp", "mumoe_tr_2level"])
def test_k_as_an_input_compiles(name: str, tmp_path: Path) -> None:
    path = export(name, tmp_path, "input")
    assert compiled(path, PROFILES[name], ((1,), (4,), (16,)))


@pytest.mark.parametrize("activation", ["sparsemax", "softmax"])
def test_the_other_activations_compile(activation: Any, tmp_path: Path) -> None:
    model = graph(random_layer(spec_of("cp", (8,), activation=activation)))
    assert compiled(saved(model, tmp_path), ((1, 1, 10), (2, 4, 10), (4, 8, 10)))


@pytest.mark.parametrize("levels", [(8,), (8, 4)])
def test_a_layer_with_edits_compiles(levels: tuple[int, ...], tmp_path: Path) -> None:
    layer = random_layer(spec_of("cp", levels))
    means = tuple((1 / n,) * n for n in levels)
    layer.edits = LayerEdits(frozenset({(0, 3)}), (Rewrite(3, means, 2.0), Rewrite(0, means, -1.0)))
    assert compiled(saved(graph(layer), tmp_path), ((1, 1, 10), (2, 4, 10), (4, 8, 10)))
