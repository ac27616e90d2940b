"""Exported graphs compile in TensorRT-RTX through the command line, which needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from moexport.exporter.tensorrt.backends import RTX_CARDS
from moexport.tests.command import run
from moexport.tests.exporter.tensorrt.engines import build, export, needs_rtx, refused
from moexport.tests.recorded import DATA, read_case

ABLE = ("dense", "gather", "conditional", "block-grouped")

PROFILES: Mapping[str, str] = {
    "soft_moe_vit": "batch=1:4:16",
    "soft_moe_fkodom": "batch=1:4:8,tokens=4:16:64",
    "soft_moe_conv": "batch=1:4:8,height=2:8:16,width=3:8:16",
    "soft_moe_lucidrains_geglu_ln": "batch=1:4:8,tokens=4:16:64",
    "soft_moe_mnist_normalized": "batch=1:8:64",
}


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize("k", ["2", "input"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_vit_compiles_and_its_experts_compute_in_the_precision_asked_for(
    precision: str, k: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", input=read_case("soft_moe_vit").x)
    bundle = export(
        "soft_moe_vit",
        tmp_path,
        *("--k", k, "--lowering", "gather,conditional,block-grouped", "--precision", precision),
        *(("--data", str(tmp_path / "x.npz")) if precision == "int8" else ()),
    )
    profile = PROFILES["soft_moe_vit"] + (",k=1:2:6" if k == "input" else "")
    gather, conditional, grouped = build(bundle, "--profile", profile)
    assert gather["file"] == "engine-tensorrt-rtx.plan"
    assert conditional["file"] == "engine-tensorrt-rtx-conditional.plan"
    assert grouped["file"] == "engine-tensorrt-rtx-block-grouped.plan"
    for record in (gather, conditional, grouped):
        assert record["settings"]["compute_capabilities"] == ["SM89"]
        assert record["settings"]["tf32"] is False
        assert record["profiles"][0].get("k") == ([1, 2, 6] if k == "input" else None)
        layers = json.loads((bundle / record["layers"]).read_text())["layers"]
        experts = [each for each in layers if "/experts/" in each["name"]]
        assert experts
        assert {each["precision"] for each in experts} == {precision}
        routers = [each for each in layers if "/router/" in each["name"]]
        assert {each["precision"] for each in routers} == {"fp32"}


@needs_rtx
@pytest.mark.parametrize(
    ("name", "lowering", "k"),
    [
        ("soft_moe_vit", "dense", "input"),
        ("soft_moe_fkodom", "gather", "2"),
        ("soft_moe_fkodom", "conditional", "input"),
        ("soft_moe_conv", "conditional", "2"),
        ("soft_moe_lucidrains_geglu_ln", "gather", "2"),
        ("soft_moe_mnist_normalized", "dense", "2"),
        ("soft_moe_fkodom", "block-grouped", "2"),
        ("soft_moe_conv", "block-grouped", "2"),
        ("soft_moe_lucidrains_geglu_ln", "block-grouped", "input"),
    ],
)
def test_the_other_families_and_lowerings_compile(
    name: str, lowering: str, k: str, tmp_path: Path
) -> None:
    bundle = export(name, tmp_path, "--k", k, "--lowering", lowering)
    (record,) = build(bundle, "--profile", PROFILES[name])
    assert set(record["precision"]) == {"fp32"}


@needs_rtx
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("card", list(RTX_CARDS))
def test_block_grouped_compiles_for_every_card(precision: str, card: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input=read_case("soft_moe_vit").x)
    bundle = export(
        "soft_moe_vit",
        tmp_path,
        *("--k", "2", "--lowering", "block-grouped", "--precision", precision),
        *(("--data", str(tmp_path / "x.npz")) if precision == "int8" else ()),
    )
    options = ("--compute-capability", card, "--profile", "batch=1:16:64", "--json")
    outcome = run("build", bundle, *options)
    if card == "7.5":
        assert outcome.code == 1
        said = {
            "bf16": "one of the cards does not support a type in the graph",
            "fp16": "this graph does not compile for compute capability 7.5",
        }
        assert said.get(precision, said["fp16"]) in outcome.error
        assert outcome.hint.startswith("leave ") and "out of --compute-capability" in outcome.hint
        return
    assert outcome.code == 0, outcome.err
    (record,) = json.loads(outcome.out)
    assert precision in record["precision"]


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
    assert "model.onnx: TensorRT-RTX does not support node layer/" in outcome.error
    assert "(NonZero) in layer layer: no kernel has an output" in outcome.error
    assert outcome.hint.endswith(", ".join(ABLE))
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
    assert f"the lowering '{lowering}' cannot be used" in outcome.error
    assert f"the target {target} does not support it" in outcome.error
    assert outcome.hint == f"for --target {target} choose auto or one of: {', '.join(ABLE)}"
    assert list(tmp_path.iterdir()) == []
