"""Lowerings that cannot serve a precision are rows with the reason; the others are measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import moexport
import pytest
from moexport.bench.plan import Candidate, GraphSource, plan
from moexport.bench.request import BenchRequest
from moexport.bench.runners.base import Refused
from moexport.bench.runners.candidates import from_bundle
from moexport.bench.runners.exported import exported
from moexport.bench.runners.graphs import SessionLoader
from moexport.errors import LoweringError
from moexport.exporter.export import plan_job
from moexport.exporter.job import export_job
from moexport.exporter.model import Model
from moexport.exporter.options import ExportOptions
from moexport.graphs.sizes import AxisRange
from moexport.tests.recorded import many_experts, read_case

ASKED = BenchRequest(k=(2,), lowering=("gather", "fused"), engine="onnxruntime", target="ort-cpu")


@pytest.fixture(scope="module")
def model() -> Model:
    case = read_case("soft_moe_mnist_normalized")
    return moexport.load(case.weights, config=case.config)


def test_k_in_python_may_be_the_list_that_the_command_line_takes() -> None:
    assert BenchRequest(k="n,0.5,4").ks == BenchRequest(k=["n", 0.5, 4]).ks


def opened_by(source: GraphSource) -> type:
    return type(source.loader)


def test_a_lowering_without_a_kernel_does_not_take_the_others_with_it(model: Model) -> None:
    with exported(model, replace(ASKED, precision=("fp32", "fp16"))) as candidate:
        found = {(s.precision, s.lowering): opened_by(s) for s in candidate.graphs}
        assert found == {
            ("fp32", "gather"): SessionLoader,
            ("fp32", "fused"): SessionLoader,
            ("fp16", "gather"): SessionLoader,
            ("fp16", "fused"): Refused,
        }
        (refused,) = (s for s in candidate.graphs if isinstance(s.loader, Refused))
        with pytest.raises(LoweringError, match=r"com\.microsoft\.MoE has no FP16 kernel"):
            refused.loader()


def test_where_nothing_can_be_exported_that_is_said_at_once(model: Model) -> None:
    nothing = replace(ASKED, lowering=("fused",), precision=("fp16",))
    with pytest.raises(LoweringError, match="no FP16 kernel"), exported(model, nothing):
        pass


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A layer whose fastest lowering is another for one input than for many."""
    return moexport.load(many_experts(tmp_path_factory.mktemp("layer")))


def timed(candidate: Candidate, batches: tuple[int, ...]) -> list[tuple[str | None, ...]]:
    """The lowerings whose graphs are timed at each batch size."""
    groups = plan((candidate,), BenchRequest(batch=batches))
    return [tuple(c.lowering for c in g.cases if c.engine == "onnxruntime") for g in groups]


MANY = BenchRequest(k=(8,), batch=(1, 512), engine="onnxruntime")


def test_what_auto_chose_for_a_batch_is_timed_at_that_alone(many: Model) -> None:
    with exported(many, MANY) as candidate:
        one, large = timed(candidate, MANY.batches)
        assert len(one) == len(large) == 1
        assert one != large
    # It is what an export for that batch writes.
    for size, names in zip(MANY.batches, (one, large), strict=True):
        options = ExportOptions(k=8, batch=AxisRange(size, size, size))
        (graph,) = plan_job(export_job(many, options)).graphs
        assert names == (graph.title,)
    named = replace(MANY, lowering=("auto", *map(str, large)))
    with exported(many, named) as candidate:
        assert timed(candidate, MANY.batches) == [(*one, *large), large]
    with exported(many, replace(MANY, batch=(1,))) as candidate:
        assert timed(candidate, (1,)) == [one]


def test_of_a_bundle_each_batch_is_timed_with_its_own_graph(many: Model, tmp_path: Path) -> None:
    bundle = moexport.export(many, tmp_path / "out", k=8, batch="1:1:512", verify=False)
    record = bundle.manifest
    assert len(record.graphs) > 1
    candidate = from_bundle(bundle, MANY, model=many)
    own = [tuple(set(record.graph_for(size).lowerings.values())) for size in MANY.batches]
    assert timed(candidate, MANY.batches) == own
    assert own[0] != own[1]
    alone = from_bundle(bundle, replace(MANY, batch=(512,)), model=many)
    assert timed(alone, (512,)) == [own[1]]
