"""`--lowering tune` times the candidates here, takes the fastest and keeps the figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from moexport.exporter import measured_lowerings
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.runtimes import open_graph
from moexport.exporter.checkpoints.load import load
from moexport.exporter.job import export_job
from moexport.exporter.quantization.precision import apply_precision
from moexport.exporter.session import Session, SessionOptions
from moexport.exporter.trace import trace
from moexport.tests.command import Outcome, run
from moexport.tests.recorded import RecordedCase, read_case

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("briefly")]

LAYERS = ["blocks.2.mlp", "blocks.3.mlp"]
STANDARD = {"dense", "gather", "grouped", "conditional"}


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rounds as ever, each as short as it can be."""
    monkeypatch.setattr(
        measured_lowerings, "PROTOCOL", replace(measured_lowerings.PROTOCOL, round_s=0.0)
    )


def export(case: RecordedCase, folder: Path, *options: str) -> Outcome:
    config = folder / "config.json"
    config.write_text(json.dumps(case.config))
    output = ("-o", folder / "out", "--force")
    return run("export", case.weights, "--config", config, *output, "--lowering", "tune", *options)


def tuned(bundle: Bundle) -> list[dict[str, Any]]:
    measured: list[dict[str, Any]] = written(bundle)["measured"]
    return measured


def written(bundle: Bundle) -> dict[str, Any]:
    tuning: dict[str, Any] = json.loads((bundle.path / "manifest.json").read_text())["tuning"]
    return tuning


def medians(group: Mapping[str, Any]) -> dict[str, float]:
    return {each["lowering"]: each["latency_ms"]["median"] for each in group["candidates"]}


def test_the_fastest_measured_is_taken_and_the_figures_are_kept_and_shown(tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    outcome = export(case, tmp_path, "--k", "2", "--batch", "1:3:8", "-v")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    (group,) = tuned(bundle)  # the two layers are alike
    assert group["layers"] == LAYERS
    assert (group["k"], group["batch"], group["precision"]) == (2, 3, "fp32")
    found = medians(group)
    assert found.keys() == STANDARD
    assert list(found.values()) == sorted(found.values())
    assert group["chosen"] == min(found, key=found.__getitem__)
    for layer in bundle.manifest.layers:
        assert layer.lowering == group["chosen"]
        assert f"measured {found[layer.lowering]:.3g} ms" in layer.reason
        assert layer.reason in outcome.err
    facts = written(bundle)
    assert facts["machine"] and facts["threads"] and facts["provider"] == "CPUExecutionProvider"
    assert "random" in facts["inputs"]
    for each in group["candidates"]:
        assert each["latency_ms"]["spread"] >= 0 and len(each["latency_ms"]["rounds"]) == 5
    shown = run("inspect", tmp_path / "out").out
    assert all(f"{median:.3g}" in shown for median in found.values())
    assert run("verify", tmp_path / "out").code == 0


def test_what_is_predicted_to_be_far_slower_is_not_measured() -> None:
    case = read_case("soft_moe_vit")
    job = export_job(load(case.weights, config=case.config), target="ort-cpu", verify=False)
    traced = trace(job.model, opset=job.options.least_opset, fixed=job.fixed)
    numbers = apply_precision(job, traced, None)
    found = {}
    for within in (1.0, 1e9):
        measuring = measured_lowerings.MeasurementOptions(
            measured_lowerings.PROTOCOL, alone=True, within=within
        )
        (group,) = measured_lowerings.measure_lowerings(
            job, traced, numbers, measuring=measuring
        ).measured
        found[within] = {each.lowering for each in group.candidates}
    assert found[1e9] == STANDARD
    assert found[1.0] < STANDARD


def test_scores_that_an_export_shows_are_computed_in_what_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = read_case("soft_moe_vit")
    outputs: dict[str, int] = {}

    def opened(path: Path, options: SessionOptions) -> Session:
        outputs[path.stem] = len(onnx.load(path, load_external_data=False).graph.output)
        return open_graph(path, options)

    monkeypatch.setattr(measured_lowerings, "open_graph", opened)
    loaded = load(case.weights, config=case.config)
    for shown, count in ((False, 1), ("scores", 4)):  # y, then D, C and the sums of its columns
        job = export_job(loaded, k=2, lowering="tune", expose_routing=shown, verify=False)
        traced = trace(job.model, opset=job.options.least_opset, fixed=job.fixed)
        measured_lowerings.measure_lowerings(job, traced, apply_precision(job, traced, None))
        assert outputs == dict.fromkeys(STANDARD, count)


def test_layers_with_another_k_are_measured_apart_and_a_dry_run_tells(tmp_path: Path) -> None:
    outcome = export(read_case("soft_moe_vit"), tmp_path, "--k", "4,2", "--dry-run")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    for layer, kept in zip(LAYERS, ("4/8", "2/8"), strict=True):
        rows = [line.split() for line in lines if line.startswith(f"{layer}  {kept}")]
        assert {row[2] for row in rows[1:]} == STANDARD
        assert rows[0][2] == rows[1][2]  # the plan's choice is the fastest, which is listed first
    assert not (tmp_path / "out").exists()
    data = export(read_case("soft_moe_vit"), tmp_path, "--k", "4,2", "--dry-run", "--json")
    assert [group["k"] for group in json.loads(data.out)["tuning"]["measured"]] == [4, 2]


def test_int8_experts_are_timed_in_int8(tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    np.savez(tmp_path / "x.npz", input=case.x)
    options = ("--k", "2", "--precision", "int8", "--data", str(tmp_path / "x.npz"))
    outcome = export(case, tmp_path, *options, "--method", "minmax", "--target", "ort-cpu")
    assert outcome.code == 0, outcome.err
    (group,) = tuned(Bundle.open(tmp_path / "out"))
    assert group["precision"] == "int8"
    assert medians(group).keys() == STANDARD


def test_with_k_as_an_input_a_quarter_of_the_experts_is_timed(tmp_path: Path) -> None:
    outcome = export(read_case("soft_moe_vit"), tmp_path, "--k", "input")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    (group,) = tuned(bundle)
    assert group["k"] == 2
    assert medians(group).keys() == STANDARD
    assert {layer.k for layer in bundle.manifest.layers} == {None}


def test_what_would_copy_too_much_is_left_out_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_lowerings, "COPY_LIMIT_BYTES", 1000)
    outcome = export(read_case("soft_moe_vit"), tmp_path, "--k", "2")
    assert outcome.code == 0, outcome.err
    (group,) = tuned(Bundle.open(tmp_path / "out"))
    assert medians(group).keys() == STANDARD - {"gather"}
    assert "copy" in group["left_out"]["gather"]


def test_a_layer_with_one_lowering_is_not_timed(tmp_path: Path) -> None:
    outcome = export(read_case("mumoe_cp"), tmp_path)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    (layer,) = bundle.manifest.layers
    (group,) = tuned(bundle)
    assert (layer.lowering, group["chosen"]) == ("factorised", "factorised")
    assert not group["candidates"]
    assert "nothing was measured" in layer.reason


@pytest.mark.parametrize(
    ("options", "why", "advice"),
    [
        (("--target", "tensorrt"), "but this target runs engines", "moexport bench BUNDLE"),
        (("--target", "tensorrt-rtx"), "runs engines", "--lowering gather,conditional"),
        (("--precision", "bf16"), "no BF16 kernels", "another --precision"),
    ],
)
def test_what_cannot_be_timed_in_onnx_runtime_is_refused(
    options: tuple[str, ...], why: str, advice: str, tmp_path: Path
) -> None:
    outcome = export(read_case("soft_moe_vit"), tmp_path, *options)
    assert outcome.code == 2
    assert why in outcome.error
    assert advice in outcome.hint
    assert not (tmp_path / "out").exists()


def test_a_benchmark_measures_what_it_is_told(tmp_path: Path) -> None:
    case = read_case("soft_moe_mnist")
    outcome = run("bench", case.weights, "-o", tmp_path / "report", "--lowering", "tune")
    assert outcome.code == 2
    assert "belongs to export" in outcome.error
