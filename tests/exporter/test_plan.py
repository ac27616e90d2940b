"""For which batches `auto` chooses, through the command line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import moexport
import pytest
from moexport.exporter.bundle.manifest import LayerRecord
from moexport.exporter.export import plan
from moexport.exporter.job import export_job
from moexport.exporter.options import ExportOptions
from moexport.tests.command import run
from moexport.tests.recorded import many_experts, read_case

LAYER = read_case("soft_moe_lucidrains").weights


def planned(weights: Path, *options: str) -> dict[str, Any]:
    """The layers of each graph that would be written."""
    outcome = run("export", weights, "-o", "out", "--k", "2", "--dry-run", "--json", *options)
    assert outcome.code == 0, outcome.err
    graphs: dict[str, Any] = json.loads(outcome.out)["graphs"]
    return graphs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch", "1:1:4"), "at batch 1 and 4, "),
        (("--batch", "2:4:16"), "at batch 2 and 4 and 16, "),
        (("--batch", "8"), "at batch 8 (others"),
        # An engine is compiled for OPT.
        (("--batch", "2:4:16", "--target", "tensorrt"), "at batch 4 (others"),
    ],
)
def test_a_graph_is_chosen_for_all_batches_that_it_serves(
    options: tuple[str, ...], said: str
) -> None:
    (layer,) = planned(LAYER, *options)["model.onnx"]
    assert said in layer["reason"]


def test_where_an_end_would_be_much_faster_otherwise_each_end_gets_its_graph(
    tmp_path: Path,
) -> None:
    """A layer of 64 experts: of one input two are gathered, of very many all are needed."""
    layer, asked = many_experts(tmp_path), ("--batch", "1:1:65536", "--tokens", "1:4:1024")
    (one,), (other,) = planned(layer, *asked).values()
    assert one["lowering"] != other["lowering"]
    assert " times as fast: --batch " not in one["reason"] + other["reason"]
    (fixed,) = planned(layer, "--tokens", "1:4:1024", "--batch", "65536")["model.onnx"]
    assert fixed["lowering"] == other["lowering"]


def test_where_one_graph_is_asked_for_what_would_be_faster_is_said_and_can_be_had(
    tmp_path: Path,
) -> None:
    """`auto` beside another lowering is one graph for all batches."""
    layer, asked = many_experts(tmp_path), ("--batch", "1:1:65536", "--tokens", "1:4:1024")
    (reason,) = (
        each["reason"] for each in planned(layer, *asked, "--lowering", "auto,dense")["model.onnx"]
    )
    assert " times as fast: --batch " in reason
    advised = reason.rpartition("--lowering ")[2].removesuffix(" writes both")
    graphs = planned(layer, *asked, "--lowering", advised)
    assert advised.split(",") == ["auto", graphs[f"model-{advised[5:]}.onnx"][0]["lowering"]]


def test_where_k_is_an_input_of_an_engine_a_dense_graph_is_kept_for_a_k_near_n(
    tmp_path: Path,
) -> None:
    """So many experts that a quarter of them, copied, takes less than reading them all."""
    layer = many_experts(tmp_path, 3500)
    options = ("--target", "tensorrt", "--k", "input", "--tokens", "1:4:16")
    graphs = planned(layer, *options, "--batch", "1:1:8")
    assert [each["lowering"] for (each,) in graphs.values()] == ["gather", "dense"]
    assert graphs["model-dense.onnx"][0]["reason"] == "copies no weights, so it is for a k near n"
    (alone,) = planned(layer, *options, "--batch", "1:64:64").values()
    assert alone[0]["lowering"] == "dense"


def test_graphs_by_batch_with_k_as_an_input_are_not_taken_for_graphs_by_k(tmp_path: Path) -> None:
    layer, asked = many_experts(tmp_path), ("--batch", "1:1:65536", "--tokens", "1:4:1024")
    outcome = run("export", layer, "-o", "out", "--k", "input", "--dry-run", "--json", *asked)
    assert outcome.code == 0, outcome.err
    shown = json.loads(outcome.out)
    assert len(shown["graphs"]) > 1
    assert "k is an input" not in " ".join(shown["notes"])


def test_bench_refuses_what_the_graphs_of_export_do_not_run(tmp_path: Path) -> None:
    """Without a target both write standard ops alone."""
    arguments = ("bench", LAYER, "-o", tmp_path / "out", "--k", "2", "--lowering", "fused")
    outcome = run(*arguments, "--engine", "onnxruntime")
    assert outcome.code == 1
    assert "the target onnx does not support it" in outcome.error


@pytest.mark.parametrize(
    "options",
    [
        ExportOptions(layer_lowerings={"layr": ("dense", "measured")}),
        ExportOptions(keep_floating=["layr"], precision="int8"),
    ],
    ids=["layer_lowerings", "keep_floating"],
)
def test_a_layer_that_the_model_does_not_have_is_refused_with_the_nearest(
    options: ExportOptions,
) -> None:
    with pytest.raises(moexport.UsageError, match="no MoE layer is called 'layr'") as refused:
        export_job(moexport.load(LAYER), options)
    assert "did you mean 'layer'?" in str(refused.value.hint)


def test_a_lowering_of_a_layer_is_refused_before_the_work_begins() -> None:
    options = ExportOptions(layer_lowerings={"layer": ("fused", "")}, lowering="dense")
    with pytest.raises(moexport.LoweringError, match="the target onnx does not support it"):
        export_job(moexport.load(LAYER), options)


def test_a_planned_layer_has_one_form_in_json(tmp_path: Path) -> None:
    """The manifest has it, and a dry run prints it."""
    (layer,) = plan(LAYER, tmp_path / "out", k=2).graphs[0].layers
    assert {*layer.to_json(), "selected", "trained"} == {
        field.name for field in fields(LayerRecord)
    }
    (shown,) = planned(LAYER)["model.onnx"]
    assert shown == layer.to_json() | {"predicted_us": round(layer.predicted_us, 1)}
