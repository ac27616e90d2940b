"""A benchmark of services: a small Soft MoE in ONNX Runtime, measured by MLPerf's LoadGen."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moexport.bench.calls import bench as bench_as
from moexport.bench.data import LabelledData
from moexport.bench.journal import Journal
from moexport.bench.plan import Candidate, GraphSource
from moexport.bench.report.page import html
from moexport.bench.report.sections import all_sections
from moexport.bench.report.text import rows_table, to_markdown
from moexport.bench.request import BenchRequest
from moexport.bench.results import Results, read
from moexport.bench.run import bench
from moexport.bench.runners.base import Runner, first_of
from moexport.bench.runners.pytorch import PyTorch
from moexport.data.batches import Array
from moexport.errors import ResultsError, UsageError
from moexport.exporter.inputs import Inputs
from moexport.exporter.model import Model
from moexport.plugins.service.charts import service_figure, service_points
from moexport.plugins.service.findings import (
    OfferedRun,
    Service,
    ServiceFindings,
    as_analyses,
    services_in,
)
from moexport.plugins.service.measure import layouts_of, service_of
from moexport.plugins.service.report import answers, service_tables
from moexport.plugins.service.request import ServiceOptions
from moexport.plugins.service.settings import settings_of
from moexport.tests.bench.loaders import Made
from moexport.tests.recorded import DATA

pytest.importorskip("mlperf_loadgen")

WEIGHTS = DATA / "soft_moe_lucidrains" / "weights.pt"
QUICK = BenchRequest(
    k="2", engine="onnxruntime", batch="1,4", round_s=0.0, memory=False, parts=False, limits=False
)
SERVICE = {field.name for field in fields(ServiceOptions)}


def asking(request: BenchRequest, **options: Any) -> BenchRequest:
    """Returns the request with other options, including those of services."""
    service = {name: options.pop(name) for name in [*options] if name in SERVICE}
    of_service = replace(request.asked(ServiceOptions), **service)
    return replace(request, **options).asking(of_service)


SERVED = asking(
    QUICK,
    scenario="server,offline,single-stream,multi-stream",
    latency_bound="50ms",
    duration="0.5s",
    price_per_hour=3.6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("service")
    bench_as(WEIGHTS, replace(SERVED, out=out))
    return out


@pytest.fixture(scope="module")
def found(folder: Path) -> ServiceFindings:
    services = services_in(read(folder / "results.json").analyses)
    assert services is not None
    return services


@pytest.mark.slow
def test_every_case_is_served_in_every_scenario(found: ServiceFindings) -> None:
    for scenario in ("single-stream", "multi-stream", "server", "offline"):
        engines = [(each.engine, each.k) for each in found.of(scenario)]
        assert engines == [("pytorch-eager", 4), ("onnxruntime", 2)]
    assert found.library == 16  # random inputs
    assert found.price_per_hour == 3.6


@pytest.mark.slow
def test_the_figures_of_a_service_are_those_in_loadgens_logs(
    found: ServiceFindings, folder: Path
) -> None:
    for each in found.services:
        told = (folder / each.logs / "mlperf_log_summary.txt").read_text(encoding="utf-8")
        if each.rate is None:  # on a machine that is too busy, the nearest is shown
            assert each.scenario == "server"
            assert each.nearest_ms is not None and each.nearest_ms > 50
            continue
        assert f"Result is : {'VALID' if each.valid else 'INVALID'}" in told
        assert each.valid == (each.reason == "")
        if each.scenario in ("server", "offline"):
            rate = re.search(r"[Ss]amples per second\s*: ([\d.e+]+)", told)
            assert rate is not None
            assert each.rate == pytest.approx(float(rate[1]), rel=0.01)
        if each.scenario == "server":
            assert each.p99_ms is not None and each.p99_ms <= 50
            assert len(each.offered) == 5
            search = folder / each.logs / "search" / "mlperf_log_summary.txt"
            assert "FindPeakPerformance" in search.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_layout_is_the_fastest_of_those_that_were_tried(found: ServiceFindings) -> None:
    for each in found.of("server"):
        fastest = max(each.layouts, key=lambda layout: layout.per_s)
        assert (each.instances, each.threads) == (fastest.instances, fastest.threads)
    assert {each.instances for each in found.of("single-stream")} == {1}


@pytest.mark.slow
def test_compiled_code_does_not_pad_a_single_request_to_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[int] = []
    infer = PyTorch.infer

    def seen(self: PyTorch, x: Inputs, output: int = 0) -> Array:
        ran.append(len(first_of(x)))
        return infer(self, x, output)

    monkeypatch.setattr(PyTorch, "infer", seen)
    request = asking(QUICK, engine="pytorch-compile", batch="4", duration="0.5s")
    found = bench_as(WEIGHTS, asking(request, k="n", scenario="single-stream"))
    services = services_in(found.analyses)
    assert services is not None
    assert [each.reason for each in services.of("single-stream")] == ["", ""]
    assert set(ran[-100:]) == {1}


def test_cores_are_filled_by_instances_of_equal_threads() -> None:
    assert layouts_of(1, 9) == [(1, 1)]
    assert layouts_of(8, 9) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert layouts_of(6, 9) == [(1, 6), (2, 3), (6, 1)]
    assert layouts_of(8, 2) == [(1, 8), (2, 4)]  # no memory for more
    assert layouts_of(8, 0) == [(1, 8)]


class Remembers(Runner):
    """Answers with the inputs; records the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()

    def infer(self, x: Inputs, output: int = 0) -> Array:
        self.sizes.add(len(first_of(x)))
        return first_of(x)


@pytest.mark.path
def test_each_batch_runs_in_the_graph_for_its_size(model: Model, tmp_path: Path) -> None:
    small, large = Remembers(), Remembers()
    graphs = (
        GraphSource(2, "gather", Made(lambda: small), batches=frozenset({1})),
        GraphSource(2, "dense", Made(lambda: large), batches=frozenset({4})),
    )
    candidate = Candidate("digits", model, graphs=graphs, engines=())
    data = LabelledData(np.zeros((8, 1, 28, 28), np.float32), None)
    request = asking(QUICK, batch=(1, 4), scenario="offline", duration="0.1s", out=tmp_path)
    service = service_of(request, data, [candidate])
    assert service is not None
    journal = Journal(tmp_path / "unfinished.jsonl", {})
    untouched = next(case for case in candidate.cases if case.engine == "pytorch-eager")
    service.serve(candidate, {untouched: "not this one"}, journal)
    (only,) = service.services
    assert only.lowering == "gather, dense"
    assert only.rate
    assert small.sizes == {1}
    assert large.sizes == {2, 3, 4}

    again = service_of(request, data, [candidate])
    assert again is not None
    small.sizes.clear()
    kept = Journal(tmp_path / "unfinished.jsonl", {})
    again.serve(candidate, {untouched: "not this one"}, kept)
    assert again.services == service.services  # from the journal, and not run again
    assert not small.sizes


class Breaks(Remembers):
    """Runs batches of the timed sizes, and fails for others."""

    def infer(self, x: Inputs, output: int = 0) -> Array:
        if len(first_of(x)) == 3:
            raise MemoryError("no room for 3")
        return super().infer(x)


@pytest.mark.slow
def test_a_service_that_fails_has_a_reason_and_the_others_continue(model: Model) -> None:
    graphs = (GraphSource(2, "dense", Made(Breaks)), GraphSource(2, "gather", Made(Remembers)))
    candidate = Candidate("digits", model, graphs=graphs, engines=())
    data = LabelledData(np.zeros((8, 1, 28, 28), np.float32), None)
    service = service_of(
        asking(QUICK, batch=(4,), scenario="offline", duration="0.1s"), data, [candidate]
    )
    assert service is not None
    service.serve(candidate, {}, Journal(None, {}))
    told = {each.lowering: (each.rate is None, each.reason) for each in service.services}
    assert told["dense"] == (True, "MemoryError: no room for 3")
    assert told["gather"][0] is False


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scenario": "serve"}, "--scenario serve: there is no such scenario"),
        ({"scenario": "server"}, "--scenario server: the latency bound is missing"),
        (
            {"scenario": "offline", "latency_bound": "5ms"},
            "only --scenario server uses this option",
        ),
        ({"latency_bound": "5ms"}, "--latency-bound: this option needs --scenario"),
        ({"scenario": "server", "latency_bound": "fast"}, "--latency-bound fast: not a time"),
        (
            {"scenario": "server", "latency_bound": "5ms", "offered_rate": 0.0},
            "--offered-rate 0: a number above 0 is expected",
        ),
        ({"scenario": "offline", "price_per_hour": -1.0}, "--price-per-hour -1: a number above 0"),
        (
            {"scenario": "server", "latency_bound": "2s", "duration": "10s"},
            "--duration 10s: too short for a latency bound of 2s",
        ),
    ],
)
def test_invalid_options_are_refused_before_anything_is_run(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        settings_of(asking(QUICK, **changes))


def test_a_library_that_is_larger_than_the_data_is_refused(model: Model) -> None:
    data = LabelledData(np.zeros((8, 1, 28, 28), np.float32), None)
    request = asking(QUICK, scenario="offline", library=100)
    with pytest.raises(UsageError, match="--library 100: the data has only 8 inputs"):
        bench([Candidate("digits", model)], data, request)


@pytest.mark.slow
def test_a_bound_that_nothing_meets_names_the_nearest() -> None:
    request = asking(QUICK, scenario="server", latency_bound="1us", duration="0.2s")
    (sentence,) = answers(bench_as(WEIGHTS, request))
    assert re.search(r"no rate meets p99 ≤ 0.001 ms\. The nearest is .*: [\d.]+ ms\.", sentence)


@pytest.mark.slow
def test_a_rate_that_is_offered_is_not_searched_for(tmp_path: Path) -> None:
    request = asking(
        SERVED, batch="4", scenario="server", offered_rate=50.0, duration="0.5s", out=tmp_path
    )
    found = services_in(bench_as(WEIGHTS, request).analyses)
    assert found is not None
    for each in found.services:
        assert each.fixed_rate == 50
        assert len(each.offered) == 1
        assert not (tmp_path / each.logs / "search").exists()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The server's rate was given." in page
    assert "own search" not in page


# --- the report ----------------------------------------------------------------------------------


def served(k: int, rate: float | None, **changes: Any) -> Service:
    values: dict[str, Any] = {
        **{"model": "digits", "engine": "onnxruntime", "provider": "cpu", "precision": "int8"},
        **{"lowering": "grouped", "k": k, "experts": 16, "scenario": "server", "max_batch": 8},
        **{"instances": 2, "threads": 1, "bound_ms": 20.0, "valid": rate is not None},
        **{"rate": rate, "p50_ms": 4.0, "p90_ms": 9.0, "p99_ms": 19.0},
        "offered": (OfferedRun(offered=100.0, rate=99.0, p50_ms=3.0, p90_ms=4.0, p99_ms=8.0),),
    }
    return Service(**(values | changes))


PYTORCH = {"engine": "pytorch-eager", "precision": "fp32", "lowering": None}


def with_services(results: Results, *services: Service) -> Results:
    found = ServiceFindings(
        services=services, duration_s=10.0, max_delay_ms=0.0, library=64, price_per_hour=1.2
    )
    return replace(results, analyses=as_analyses(found))


def test_the_sentence_has_the_gain_of_k(results: Results) -> None:
    report = with_services(results, served(16, 12.0, **PYTORCH), served(16, 75.6), served(4, 310.0))
    sentence = (
        "digits: k = 4 in INT8 on ONNX Runtime, grouped, INT8 serves 310 requests/s at "
        "p99 ≤ 20 ms: 4.1 times all experts, 26 times PyTorch."
    )
    assert list(answers(report)) == [sentence]
    assert sentence in rows_table(report)
    assert sentence in to_markdown(report)


def test_a_row_that_loses_accuracy_is_not_the_answer_if_another_keeps_it(results: Results) -> None:
    faster = {"precision": "fp32"}  # its row keeps 80%; k = 4 keeps 99.2%
    report = with_services(results, served(4, 310.0, **faster), served(2, 900.0, **faster))
    (sentence,) = answers(report)
    keeps = "keeps 99.2% of the accuracy (at least 99.1%) and serves 310 requests/s"
    assert f"k = 4 in FP32 on ONNX Runtime, grouped {keeps}" in sentence


def test_the_sentence_names_a_run_that_is_not_valid(results: Results) -> None:
    short = served(4, 310.0, valid=False, reason="too short: only 9 queries")
    (sentence,) = answers(with_services(results, short))
    assert sentence.endswith("LoadGen does not call the run valid: too short: only 9 queries")


def test_no_ratio_is_over_a_run_that_is_not_valid(results: Results) -> None:
    short = {"valid": False, "reason": "too short: only 9 queries"}
    whole = served(16, 75.6, **short)
    report = with_services(results, served(16, 12.0, **PYTORCH), whole, served(4, 310.0))
    (sentence,) = answers(report)
    assert "times all experts" not in sentence
    assert (
        "because LoadGen does not call the run of all experts valid, 26 times PyTorch" in sentence
    )
    invalid = with_services(results, served(16, 75.6), served(4, 310.0, **short))
    (table, *_) = service_tables(invalid)
    ratios = {row[1]: row[5] for rows in table[2].values() for row in rows}
    assert ratios == {"16/16": "1.00×", "4/16": "–"}


def test_no_ratio_is_over_runs_that_other_work_disturbed(results: Results) -> None:
    waited = {"waited": [{"model": "digits", "batch": 1, "phase": "", "share": 0.6}]}
    disturbed = replace(results, protocol=results.protocol | waited)
    services = (served(16, 12.0, **PYTORCH), served(16, 75.6), served(4, 310.0))
    (sentence,) = answers(with_services(disturbed, *services))
    assert sentence.endswith(
        "not compared with all experts, because other work disturbed the machine, "
        "not compared with PyTorch, because other work disturbed the machine."
    )
    tables = service_tables(with_services(disturbed, *services))
    rows = next(groups["digits"] for title, _, groups in tables if title.startswith("Server"))
    assert {cell for row in rows for cell in row[5:7]} == {"–"}


def test_a_valid_run_is_the_answer_before_a_faster_one_that_is_not(results: Results) -> None:
    short = served(2, 900.0, valid=False, reason="too short: only 9 queries")
    (sentence,) = answers(with_services(results, short, served(4, 310.0)))
    assert "k = 4 in INT8" in sentence
    assert "310 requests/s" in sentence


def test_there_is_no_ratio_to_others_that_miss_the_bound(results: Results) -> None:
    none = {"reason": "no rate meets it", "nearest_ms": 33.0}
    report = with_services(
        results, served(16, None, **PYTORCH, **none), served(16, None, **none), served(4, 310.0)
    )
    (sentence,) = answers(report)
    assert sentence.endswith(
        "all experts met the bound at no rate, PyTorch met the bound at no rate."
    )
    (sentence,) = answers(with_services(results, served(16, None, **none)))
    assert "no rate meets p99 ≤ 20 ms. The nearest is ONNX Runtime, grouped, INT8" in sentence
    assert "k = 16: 33.0 ms" in sentence


def test_the_section_has_the_cost_and_the_latency_over_the_rate(results: Results) -> None:
    report = with_services(results, served(16, 12.0, **PYTORCH), served(4, 100.0))
    markdown = to_markdown(report)
    assert "## In service" in markdown
    assert "3.33 |" in markdown  # 1.2 an hour, a million at 100 a second
    assert (
        "Latency against the offered rate, digits: ONNX Runtime, grouped, INT8, k = 4" in markdown
    )
    assert "service" in [section.name for section in all_sections()]
    points = service_points(report)
    assert points is not None
    exported, pytorch = points["rates"]
    drawn = {"model": "digits", "line": "digits: ONNX Runtime, INT8", "k": 4, "rate": 100.0}
    assert drawn.items() <= exported.items()
    assert (exported["ink"], exported["open"]) == ("var(--int8)", False)
    assert (pytorch["level"], pytorch["rate"]) == (True, 12.0)
    assert '"line":"digits: ONNX Runtime, INT8"' in html(report)


def test_the_picture_has_the_rates_of_the_page(results: Results, tmp_path: Path) -> None:
    report = with_services(results, served(16, 12.0, **PYTORCH), served(4, 100.0))
    png, svg = service_figure(report, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text(encoding="utf-8")
    for name in ("digits: p99 ≤ 20 ms", "ONNX Runtime, INT8", "PyTorch, untouched"):
        assert f">{name}<" in text, name
    assert text.count("chart0_points_marks") == text.count("chart0_levels_marks") == 1


def test_a_damaged_service_is_named(results: Results) -> None:
    damaged = with_services(results, served(4, 1.0))
    damaged.analyses["service"]["services"][0]["rate"] = "many"
    with pytest.raises(ResultsError, match=r"analyses\.service\.services\[0\]\.rate"):
        services_in(damaged.analyses)
