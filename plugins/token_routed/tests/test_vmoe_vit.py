"""The networks of google-research/vmoe compute the same as the authors' own code.

The cases are checkpoints, outputs and routing of that code, in JAX. The outputs are without the
rounding to bfloat16 around the experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.verify import checks
from moexport.exporter.checkpoints.load import load
from moexport.exporter.export import write_bundle
from moexport.exporter.job import export_job
from moexport.exporter.options import ExportOptions
from moexport.graphs.layers.base import recorded_choices
from moexport.tests.command import run
from moexport.tests.exporter.bundle.test_bundle import (
    change_manifest,
    change_reference,
    failed_checks,
    manifest,
)
from moexport.tests.recorded import DATA

SOFT = ("jax_soft_gap_p1", "jax_soft_map_sincos_trainstate")
CLOSE = 1e-5
"""Of max|y|: the difference of two frameworks in float32."""

ROUNDED = 1e-3
"""Of max|y|: the effect of rounding to bfloat16."""


@dataclass(frozen=True)
class JaxCase:
    """One recorded case of the authors' code."""

    index: Path
    config: dict[str, Any]
    meta: dict[str, Any]
    io: dict[str, np.ndarray]

    @property
    def batches(self) -> list[int]:
        return [b for b in (1, 4, 16) if f"y_b{b}" in self.io]

    def x(self, batch: int) -> np.ndarray:
        return self.io["x"][:batch]

    def routing(self, batch: int, block: int, what: str) -> np.ndarray:
        return self.io[f"routing_b{batch}/encoderblock_{block}/{what}"]


def read_case(name: str) -> JaxCase:
    folder = DATA / name
    meta = json.loads((folder / "meta.json").read_text())
    with np.load(folder / "io.npz") as arrays:
        io = dict(arrays.items())
    return JaxCase(next(folder.glob("*.index")), meta["config"], meta, io)


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, as a share of the largest value."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def config_file(case: JaxCase, folder: Path, *, whole: bool = True) -> Path:
    """The run's configuration as its code prints it: all of it, or its model."""
    content = {"seed": 0, "model": case.config, "optimizer": {"name": "adam"}}
    file = folder / "config.json"
    file.write_text(json.dumps(content if whole else case.config))
    return file


@pytest.mark.plugins  # reads what JAX wrote
@pytest.mark.parametrize("name", SOFT)
def test_soft_moe_computes_and_weighs_as_the_authors_do(name: str) -> None:
    case = read_case(name)
    model = load(case.index, config=case.config)
    assert model.family == "soft-moe-vmoe-vit"
    for batch in case.batches:
        with torch.no_grad(), recorded_choices(model.module) as records:
            y = model.module(torch.from_numpy(case.x(batch)))
        assert apart(y.numpy(), case.io[f"y_nobf16_b{batch}"]) < CLOSE
        for layer, made in records.items():
            block = int(layer.split(".")[1])
            sums = case.routing(batch, block, "combine_colsum_per_expert")
            assert made.scores is not None
            # Recorded with the rounding, which does not affect the first layer.
            first = layer == next(iter(model.layers))
            assert apart(made.scores.numpy(), sums) < (CLOSE if first else ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOFT)
def test_an_export_needs_a_checkpoint_and_its_configuration_alone(
    name: str, tmp_path: Path
) -> None:
    case = read_case(name)
    prefix = case.index.with_suffix("")
    config = config_file(case, tmp_path, whole=name == SOFT[0])
    outcome = run("export", prefix, "--config", config, "-o", tmp_path / "out", "--k", "input")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert any("from -1 to 1" in note for note in bundle.manifest.notes)
    session = bundle.session()
    for batch in case.batches:
        found = session(case.x(batch), 8)
        assert apart(found, case.io[f"y_nobf16_b{batch}"]) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("name", SOFT)
def test_rounding_to_bfloat16_is_done_where_it_is_asked_for(name: str, tmp_path: Path) -> None:
    case = read_case(name)
    model = load(case.index, config=case.config, sets=["dispatch=bfloat16"])
    for batch in case.batches:
        with torch.no_grad(), recorded_choices(model.module) as records:
            y = model.module(torch.from_numpy(case.x(batch)))
        assert apart(y.numpy(), case.io[f"y_b{batch}"]) < ROUNDED / 4
        assert apart(y.numpy(), case.io[f"y_nobf16_b{batch}"]) > CLOSE
        for layer, made in records.items():
            sums = case.routing(batch, int(layer.split(".")[1]), "combine_colsum_per_expert")
            assert made.scores is not None
            assert apart(made.scores.numpy(), sums) < ROUNDED / 10
    bundle = write_bundle(export_job(model, ExportOptions(destination=tmp_path / "out")))
    assert any("rounded to bfloat16" in note for note in bundle.manifest.notes)
    assert apart(bundle.session()(case.x(16)), case.io["y_b16"]) < ROUNDED
    assert all(check.passed for check in checks(tmp_path / "out", bundle.manifest))


@pytest.mark.slow
def test_verify_holds_what_rounds_to_bfloat16_to_the_bound_of_its_export(tmp_path: Path) -> None:
    """A value of this case is at a rounding boundary, which exceeds the tolerance of FP32."""
    case, out = read_case(SOFT[1]), tmp_path / "out"
    config = config_file(case, tmp_path, whole=False)
    arguments = ("export", case.index.with_suffix(""), "--config", config, "-o", out)
    outcome = run(*arguments, "--set", "dispatch=bfloat16", "--threads", "1")
    assert outcome.code == 0, outcome.err
    parity = manifest(out)["parity"]
    assert 1e-4 < parity["max_rel"] < parity["rtol"] == ROUNDED
    verified = run("verify", out)
    assert verified.code == 0
    assert "the bound is 0.001 of max|y|, since the graph rounds to BF16" in verified.out

    def shift(arrays: dict[str, np.ndarray]) -> None:
        arrays["y"] = arrays["y"] + 2e-3 * np.abs(arrays["y"]).max()

    change_reference(out, shift)
    change_manifest(out, lambda m: m["parity"].update(rtol=0.5))
    assert "the bound is 0.001" in failed_checks(out)["parity of model.onnx"]
