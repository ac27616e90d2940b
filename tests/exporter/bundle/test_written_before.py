"""Bundles of version 0.1.0, as its first users have them: they open, verify and run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import moexport
import numpy as np
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import Manifest
from moexport.exporter.bundle.parity import Parity
from moexport.tests.recorded import DATA

BUNDLE = DATA / "bundle_0_1_0"
ENGINE_MANIFEST = DATA / "manifest_with_engine_0_1_0.json"


def test_a_bundle_verifies_and_runs() -> None:
    bundle = moexport.Bundle.open(BUNDLE)
    checks = list(bundle.verify())
    assert all(check.passed for check in checks), checks
    assert {"hash of manifest.json", "parity of model.onnx"} <= {check.name for check in checks}
    with np.load(BUNDLE / "parity.npz") as reference:
        y = bundle.session()(reference["x"][:4])
    assert y.shape[0] == 4 and np.isfinite(y).all()


def test_its_manifest_is_written_again_as_it_was() -> None:
    assert Manifest.read(BUNDLE).to_json() == (BUNDLE / "manifest.json").read_text()


def test_the_result_of_its_comparison_is_read_and_written_where_it_was() -> None:
    """The bounds stand among the results, in the places that they had."""
    record = Manifest.read(BUNDLE).parity
    assert record is not None
    again = json.loads(json.dumps(Parity.of(record).record()))
    assert [name for name in again if name in record] == list(record)
    assert {name: again[name] for name in record} == record


def test_its_edits_and_measurements_are_read() -> None:
    manifest = Manifest.read(BUNDLE)
    assert manifest.edits and manifest.tuning
    assert {graph.file for graph in manifest.graphs} == {"model.onnx"}
    assert manifest.layers[0].precision == "fp16"


def test_the_record_of_an_engine_is_read_and_written_again(tmp_path: Path) -> None:
    shutil.copy(ENGINE_MANIFEST, tmp_path / "manifest.json")
    manifest = Manifest.read(tmp_path)
    assert manifest.to_json() == ENGINE_MANIFEST.read_text()
    record = Bundle(tmp_path, manifest).engine_record("tensorrt-rtx")
    assert (record.file, record.compute_capabilities) == ("engine-tensorrt-rtx.plan", ["8.9"])
    record.check_fits((8, 16, 24), k=2)
