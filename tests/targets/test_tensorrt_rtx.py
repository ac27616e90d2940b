"""Exported graphs compile in TensorRT-RTX through the command line, which needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from moexport.tests.command import run
from moexport.tests.recorded import DATA, read_case
from moexport.tests.targets.engines import build, export, needs_rtx, refused

ABLE = ("dense", "gather", "conditional")

PROFILES: Mapping[str, str] = {
    "soft_moe_vit": "batch=1:4:16",
    "soft_moe_fkodom": "batch=1:4:8,tokens=4:16:64",
    "soft_moe_conv": "batch=1:4:8,height=2:8:16,width=3:8:16",
    "soft_moe_lucidrains_geglu_ln": "batch=1:4:8,tokens=4:16:64",
    "soft_moe_mnist_normalized": "batch=1:8:64",
}


@needs_rtx
@pytest.mark.parametrize(
    ("name", "lowerings"),
    [
        ("soft_moe_vit", ABLE),
        ("soft_moe_fkodom", ("gather",)),
        ("soft_moe_conv", ("conditional",)),
        ("soft_moe_lucidrains_geglu_ln", ("gather",)),
        ("soft_moe_mnist_normalized", ("dense",)),
    ],
)
def test_graphs_compile_with_k_baked(name: str, lowerings: tuple[str, ...], tmp_path: Path) -> None:
    bundle = export(name, tmp_path, "--k", "2", "--lowering", ",".join(lowerings))
    records = build(bundle, "--profile", PROFILES[name])
    assert [record["file"] for record in records] == [
        "engine-tensorrt-rtx.plan",
        *(f"engine-tensorrt-rtx-{lowering}.plan" for lowering in lowerings[1:]),
    ]
    for record in records:
        assert set(record["precision"]) == {"fp32"}
        assert record["settings"]["compute_capabilities"] == ["SM89"]
        assert record["settings"]["tf32"] is False


@needs_rtx
@pytest.mark.parametrize("name", ["soft_moe_vit", "soft_moe_fkodom"])
def test_graphs_compile_with_k_as_an_input(name: str, tmp_path: Path) -> None:
    bundle = export(name, tmp_path, "--k", "input", "--lowering", "gather,conditional")
    records = build(bundle, "--profile", f"{PROFILES[name]},k=1:2:6")
    assert len(records) == 2
    assert all(record["profiles"][0]["k"] == [1, 2, 6] for record in records)


@needs_rtx
@pytest.mark.parametrize(
    ("precision", "k", "lowerings"),
    [
        ("fp16", "input", ("gather",)),
        ("fp16", "2", ("conditional",)),
        ("int8", "2", ("gather", "conditional")),
        ("int8", "input", ("gather",)),
    ],
)
def test_experts_are_built_in_the_precision_asked_for(
    precision: str, k: str, lowerings: tuple[str, ...], tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", input=read_case("soft_moe_vit").x)
    bundle = export(
        "soft_moe_vit",
        tmp_path,
        *("--k", k, "--lowering", ",".join(lowerings), "--precision", precision),
        *("--data", str(tmp_path / "x.npz")),
    )
    for record in build(bundle, "--profile", PROFILES["soft_moe_vit"]):
        assert precision in record["precision"]
        layers = json.loads((bundle / record["layers"]).read_text())["layers"]
        experts = [each for each in layers if "/experts/" in each["name"]]
        assert experts
        assert {each["precision"] for each in experts} == {precision}
        routers = [each for each in layers if "/router/" in each["name"]]
        assert {each["precision"] for each in routers} == {"fp32"}


@needs_rtx
def test_a_graph_that_keeps_every_expert_compiles(tmp_path: Path) -> None:
    bundle = export("soft_moe_mnist_normalized", tmp_path, "--k", "n", "--lowering=conditional")
    assert len(build(bundle, "--profile", PROFILES["soft_moe_mnist_normalized"])) == 1


@needs_rtx
def test_a_graph_that_the_importer_does_not_take_is_refused_before_the_build(
    tmp_path: Path,
) -> None:
    bundle = export("soft_moe_fkodom", tmp_path, "--k", "2", "--lowering=grouped", target="onnx")
    outcome = refused(bundle, "--target", "tensorrt-rtx")
    assert "model.onnx: TensorRT-RTX does not take node layer/" in outcome.error
    assert "(NonZero) of layer layer: its output's size depends on values" in outcome.error
    assert outcome.hint.endswith("dense, gather, conditional")
    assert "compiling" not in outcome.err


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize("lowering", ["grouped", "fused"])
def test_a_lowering_that_the_target_does_not_run_is_refused_with_the_able_ones(
    lowering: str, target: str, tmp_path: Path
) -> None:
    outcome = run(
        *("export", DATA / "soft_moe_mnist" / "weights.pt", "-o", tmp_path / "out"),
        *("--lowering", lowering, "--target", target),
    )
    assert (outcome.code, outcome.out) == (1, "")
    assert f"the lowering '{lowering}' cannot serve it" in outcome.error
    assert f"the target {target} does not run it" in outcome.error
    assert outcome.hint == f"for --target {target} choose auto or one of: {', '.join(ABLE)}"
    assert list(tmp_path.iterdir()) == []
