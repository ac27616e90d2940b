"""Graphs of a benchmark in OpenVINO have PyTorch's values and experts, computed in FP32."""

from __future__ import annotations

import csv
import importlib.util
import io
import re
from pathlib import Path

import moexport
import numpy as np
import pytest
from moexport.bench.engines import KINDS, requirements
from moexport.bench.report.summary import row_name
from moexport.bench.report.text import to_csv
from moexport.bench.request import BenchRequest
from moexport.bench.results import from_json, to_json
from moexport.bench.runners.base import GraphFile
from moexport.bench.runners.candidates import from_bundle
from moexport.bench.runners.graphs import SessionLoader
from moexport.errors import EngineError
from moexport.exporter.session import SessionOptions
from moexport.tests.recorded import read_case

pytestmark = pytest.mark.skipif(
    KINDS["openvino"].missing() is not None, reason=str(KINDS["openvino"].missing())
)

IN_OPENVINO = SessionOptions(runtime="openvino")

CASE = read_case("soft_moe_vit")
X = np.random.default_rng(1).standard_normal((6, *CASE.x.shape[1:])).astype(np.float32)


@pytest.mark.slow
def test_rows_of_openvino_have_pytorchs_values_and_experts_and_show_their_precision() -> None:
    model = moexport.load(CASE.weights, config=CASE.config)
    found = moexport.bench(
        model,
        data=X,
        k=["n", 2],
        lowering="dense,gather,grouped,conditional",
        engine="openvino",
        batch=[3],
        rounds=5,
        round_s=0.001,
        threads=1,
        memory=False,
    )
    rows = [row for row in found.rows if row.engine == "openvino"]
    good = [row for row in rows if row.error is None]
    expected = {(lowering, k) for lowering in ("dense", "gather", "grouped") for k in (8, 2)}
    assert {(row.lowering, row.k) for row in good} >= expected
    for row in good:
        assert row.computed_in == "f32"
        assert row.parity is not None
        assert row.parity.max_abs < 1e-6
        assert (row.routing is None) == (row.k == 8)
        assert row.routing is None or row.routing.exact == 1
        assert row_name(row) == f"OpenVINO (f32), {row.lowering}"
    refused = [row for row in rows if row.error is not None]
    assert {(row.lowering, row.k) for row in refused} == {("conditional", 2), ("conditional", 8)}
    assert all(row.error and "target openvino does not support it" in row.error for row in refused)
    assert from_json(to_json(found)) == found
    lines = csv.DictReader(io.StringIO(to_csv(found)))
    told = {line["engine"]: line["computed_in"] for line in lines if not line["error"]}
    assert told == {"pytorch-eager": "", "openvino": "f32"}


def test_a_bundle_runs_in_openvino_with_every_k_given_as_an_input(tmp_path: Path) -> None:
    model = moexport.load(CASE.weights, config=CASE.config)
    bundle = moexport.export(model, tmp_path / "any", k="input", data=CASE.x)
    ks = (8, 4, 1)
    sweep = BenchRequest(k=ks, engine="openvino", threads=1)
    graphs = {graph.k: graph for graph in from_bundle(bundle, sweep, model=model).graphs}
    assert set(graphs) == set(ks)
    for k, graph in graphs.items():
        with graph.loader() as runner:
            np.testing.assert_allclose(runner.infer(X), bundle.session()(X, k), atol=1e-6)
            experts = runner.selected(X)
        assert experts is not None
        assert all(chosen.shape == (len(X), k) for chosen in experts.values())


def test_a_branch_with_a_dynamic_batch_is_refused(tmp_path: Path) -> None:
    # A skipped expert returns other experts' values in the first call of a batch size.
    model = moexport.load(CASE.weights, config=CASE.config)
    bundle = moexport.export(model, tmp_path / "any", k=2, lowering="conditional", verify=False)
    with pytest.raises(EngineError, match="computes `If` wrongly if the batch is dynamic"):
        bundle.session(runtime="openvino")(X)


def test_a_fixed_batch_runs_in_every_lowering(tmp_path: Path) -> None:
    model = moexport.load(CASE.weights, config=CASE.config)
    place = tmp_path / "fixed"
    bundle = moexport.export(model, place, k=2, lowering="conditional", batch=str(len(X)))
    graph = GraphFile(path=bundle.path / "model.onnx", threads=1)
    with SessionLoader(graph, IN_OPENVINO)() as runner:
        np.testing.assert_allclose(runner.infer(X), bundle.session()(X), atol=1e-6)


def test_an_error_of_loading_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(EngineError, match=re.escape("OpenVINO cannot load model.onnx: ")) as told:
        SessionLoader(GraphFile(path=tmp_path / "model.onnx"), IN_OPENVINO)()
    assert "Exception from" not in told.value.message
    assert "src/" not in told.value.message


def test_without_openvino_doctor_shows_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from moexport.bench.doctor import diagnose

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = (
        each for each in diagnose(requirements()).abilities if each.name == "run in OpenVINO"
    )
    assert not found.available
    assert "pip install '.[openvino]'" in found.detail
