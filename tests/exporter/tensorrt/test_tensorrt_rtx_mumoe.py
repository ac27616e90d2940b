"""Graphs of muMoE models compile in TensorRT-RTX, which needs no GPU for that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.graphs.edits import Ablation, Edits, Rewrite
from moexport.graphs.layers.mumoe import Form
from moexport.tests.command import run
from moexport.tests.exporter.tensorrt.engines import build, compiled, export, needs_rtx
from moexport.tests.graphs.lowerings.test_mumoe import spec_of
from moexport.tests.graphs.mumoe_layers import graph, random_layer, saved
from moexport.tests.recorded import read_case

pytestmark = needs_rtx

PROFILES: Mapping[str, str] = {
    "mumoe_cp": "batch=1:4:8,tokens=1:2:8",
    "mumoe_tr_2level": "batch=1:4:8,tokens=1:2:8",
    "mumoe_cp_block_ln": "batch=1:4:8,tokens=1:8:64",
    "mumoe_mixer_tr": "batch=1:2:4",
    "mumoe_gpt2_cp": "batch=1:2:4,tokens=1:16:32",
    "mumoe_gpt2_tr": "batch=1:2:4,tokens=1:16:32",
}
"""A case of each family and form, with the sizes of its input."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PROFILES)
def test_every_family_compiles_with_a_baked_k(name: str, tmp_path: Path) -> None:
    (record,) = build(export(name, tmp_path, "--k", "2"), "--profile", PROFILES[name])
    assert set(record["precision"]) == {"fp32"}


def test_a_head_that_lies_beside_its_backbone_compiles(tmp_path: Path) -> None:
    state = torch.load(read_case("mumoe_cp").weights, weights_only=True)
    head = {f"1.{key}": tensor for key, tensor in state.items()}
    torch.save({"0.patch_embed.proj.weight": torch.ones(8, 3, 2, 2), **head}, tmp_path / "clip.pt")
    options = (
        "--set",
        "act=entmax15",
        "--k",
        "2",
        "--target",
        "tensorrt-rtx",
        "--no-engine",
        "--no-verify",
    )
    outcome = run("export", tmp_path / "clip.pt", "-o", tmp_path / "out", *options)
    assert outcome.code == 0, outcome.err
    bundle = tmp_path / "out"
    assert Bundle.open(bundle).manifest.source.family == "mumoe-clip"
    (record,) = build(bundle, "--profile", "batch=1:4:8")
    assert set(record["precision"]) == {"fp32"}


def test_a_graph_that_keeps_all_coefficients_compiles(tmp_path: Path) -> None:
    bundle = export("mumoe_tr_2level", tmp_path, "--k", "n")
    assert build(bundle, "--profile", PROFILES["mumoe_tr_2level"])


@pytest.mark.parametrize("name", ["mumoe_cp", "mumoe_tr_2level"])
def test_k_as_an_input_compiles(name: str, tmp_path: Path) -> None:
    (record,) = build(export(name, tmp_path, "--k", "input"), "--profile", PROFILES[name])
    assert record["profiles"][0]["k"][0] == 1


@pytest.mark.parametrize("name", ["mumoe_cp", "mumoe_tr_2level"])
def test_int8_factors_compile(name: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input=read_case(name).x)
    data = ("--data", str(tmp_path / "x.npz"))
    bundle = export(name, tmp_path, "--k", "n", "--precision", "int8", *data)
    (record,) = build(bundle, "--profile", PROFILES[name])
    assert record["precision"].get("int8", 0) > 0


@pytest.mark.parametrize("activation", ["sparsemax", "softmax"])
def test_the_other_activations_compile(activation: Any, tmp_path: Path) -> None:
    model = graph(random_layer(spec_of("cp", (8,), activation=activation)))
    assert compiled(saved(model, tmp_path), tmp_path / "engine.plan")


@pytest.mark.parametrize("levels", [(8,), (8, 4)])
def test_a_layer_with_edits_compiles(levels: tuple[int, ...], tmp_path: Path) -> None:
    layer = random_layer(spec_of("cp", levels))
    means = tuple((1 / n,) * n for n in levels)
    rewrites = (Rewrite("", 3, means, 2.0), Rewrite("", 0, means, -1.0))
    layer.edits = Edits((Ablation("", 3, 1), *rewrites))
    assert compiled(saved(graph(layer), tmp_path), tmp_path / "engine.plan")


@pytest.mark.parametrize(
    ("form", "lowering"), [("tucker", "factorised"), ("full", "unfactorised"), ("full", "gathered")]
)
@pytest.mark.parametrize("kept", [None, 3])
def test_the_unfactorised_and_the_tucker_form_compile(
    form: Form, lowering: str, kept: int | None, tmp_path: Path
) -> None:
    model = graph(random_layer(spec_of(form, (8, 4), block=True)), kept, lowering)
    assert compiled(saved(model, tmp_path), tmp_path / "engine.plan")
