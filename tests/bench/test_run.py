"""A whole benchmark on a small network: rows, agreement, failures, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.bench.calls import bench as bench_as
from moexport.bench.data import LabelledData
from moexport.bench.plan import Candidate, GraphSource, describe, plan
from moexport.bench.report.text import method_lines
from moexport.bench.request import BenchRequest
from moexport.bench.results import Results, Row, read
from moexport.bench.run import bench, sweep
from moexport.bench.runners.base import Runner, first_of
from moexport.bench.runners.candidates import with_distinct_names
from moexport.bench.runners.pytorch import with_algorithm_1
from moexport.common.console import Silent
from moexport.common.threads import with_threads
from moexport.data.batches import Array
from moexport.errors import FeedError, UsageError
from moexport.exporter.inputs import Inputs
from moexport.exporter.model import Model
from moexport.plugins.demo.digits import Digits
from moexport.tests.bench.loaders import Made
from moexport.tests.command import run, run_program
from moexport.tests.recorded import DATA, VIT_SETS
from moexport.tests.threads import SlowOnManyThreads

QUICK = BenchRequest(batch=(1, 3), warmup=1, round_s=0.0, inputs=2, samples=100)


class Told(Silent):
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        self.lines.append(text)


class InPlaceOfAGraph(Runner):
    """Computes what a graph would, with PyTorch; `shift` makes it choose other experts."""

    def __init__(self, model: Model, k: int, shift: int = 0) -> None:
        self.torch, self.k = with_algorithm_1(model, k, "masked"), k
        self.shift = shift

    def infer(self, x: Inputs, output: int = 0) -> Array:
        return self.torch.infer(x)

    def selected(self, x: Inputs) -> dict[str, Array]:
        chosen = self.torch.with_routing(x).chosen
        return {name: (experts + self.shift) % 4 for name, experts in chosen.items() if self.k < 4}


def source(model: Model, k: int, lowering: str, shift: int = 0) -> GraphSource:
    return GraphSource(k, lowering, Made(lambda: InPlaceOfAGraph(model, k, shift)))


def unopened() -> InPlaceOfAGraph:
    raise RuntimeError("INVALID_GRAPH:\n  node If_3")


class FailsAt(Runner):
    """Runs until it meets a batch of a size, then raises."""

    def __init__(self, model: Model, size: int) -> None:
        self.torch, self.size = with_algorithm_1(model, 2, "masked"), size

    def infer(self, x: Inputs, output: int = 0) -> Array:
        if len(first_of(x)) == self.size:
            raise MemoryError("no room")
        return self.torch.infer(x)

    def selected(self, x: Inputs) -> dict[str, Array]:
        return self.torch.with_routing(x).chosen


@pytest.fixture(scope="module")
def found(model: Model, digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("bench")
    candidate = Candidate(
        "digits",
        model,
        ks=(4, 2, 1),
        graphs=(
            source(model, 4, "dense"),
            source(model, 2, "dense"),
            source(model, 2, "shifted", shift=1),
            GraphSource(2, "unopened", Made(unopened)),
            GraphSource(2, "crashes", Made(lambda: FailsAt(model, 3))),
        ),
    )
    told = Told()
    results = bench([candidate], digits.test, replace(QUICK, out=folder, progress=told))
    assert any(line.startswith("failed: digits: onnxruntime unopened") for line in told.lines)
    assert read(folder / "results.json") == results
    assert sorted(path.name for path in folder.iterdir()) == [
        "latency_accuracy.png",
        "latency_accuracy.svg",
        "latency_accuracy_batch3.png",
        "latency_accuracy_batch3.svg",
        "report.csv",
        "report.html",
        "report.md",
        "results.json",
    ]
    return results


Pick = Callable[..., Row]


@pytest.fixture(scope="module")
def pick(found: Results) -> Pick:
    def one(**wanted: object) -> Row:
        rows = [
            row
            for row in found.rows
            if all(getattr(row, name) == value for name, value in wanted.items())
        ]
        assert len(rows) == 1
        return rows[0]

    return one


def test_the_untouched_model_is_a_row_at_every_batch_size(pick: Pick) -> None:
    for batch in (1, 3):
        row = pick(engine="pytorch-eager", batch=batch)
        assert row.k == row.experts == 4
        assert row.accuracy is not None
        assert row.accuracy.retention == 1.0
        assert row.accuracy.n == 100
        assert row.latency_ms is not None
        assert row.latency_ms.n >= 10
        assert row.throughput == pytest.approx(1000 * batch / row.latency_ms.median)


def test_algorithm_2_has_a_row_for_each_k_below_n(found: Results) -> None:
    ks = [r.k for r in found.rows if r.engine == "pytorch-algorithm-2" and r.batch == 1]
    assert ks == [2, 1]


def test_parity_and_routing_are_against_pytorch_with_the_same_k(pick: Pick) -> None:
    row = pick(lowering="dense", k=2, batch=1)
    assert row.routing is not None
    assert row.parity is not None
    assert (row.routing.jaccard, row.routing.exact) == (1.0, 1.0)
    assert row.parity.max_abs <= 1e-5
    assert pick(lowering="dense", k=4, batch=1).routing is None
    shifted = pick(lowering="shifted", batch=1)
    assert shifted.routing is not None
    assert shifted.routing.exact < 1


def test_fewer_experts_keep_what_algorithm_1_keeps(
    pick: Pick, model: Model, digits: Digits
) -> None:
    assert digits.test.labels is not None
    scores = with_algorithm_1(model, 2, "masked").infer(digits.test.inputs[:100])
    top1 = float((scores.argmax(1) == digits.test.labels[:100]).mean())
    for row in (
        pick(lowering="dense", k=2, batch=3),
        pick(engine="pytorch-algorithm-2", k=2, batch=1),
    ):
        assert row.accuracy is not None
        assert row.accuracy.top1 == top1


def test_a_failure_is_a_row_with_its_error(pick: Pick) -> None:
    row = pick(lowering="unopened", batch=1)
    assert row.error == "RuntimeError: INVALID_GRAPH: node If_3"
    assert row.latency_ms is None
    assert pick(lowering="crashes", batch=1).error is None
    assert pick(lowering="crashes", batch=3).error == "MemoryError: no room"


def test_every_row_has_its_work_and_the_least_time_for_it(found: Results, pick: Pick) -> None:
    rows = [row for row in found.rows if row.error is None]
    for row in rows:
        assert row.no_limit is None
        assert row.latency_ms is not None and row.limit_ms is not None
        assert row.over_limit == pytest.approx(row.latency_ms.median / row.limit_ms)
    full, half = (pick(lowering="dense", k=k, batch=1).work for k in (4, 2))
    assert full is not None and half is not None
    assert half.operations < full.operations and half.bytes < full.bytes
    assert pick(engine="pytorch-eager", batch=1).work == full
    rates = found.protocol["rates"]
    assert [(each["model"], each["batch"]) for each in rates] == [("digits", 1), ("digits", 3)]
    assert all(each["stream_gb_s"] > 0 and each["matmul_gflop_s"] > 0 for each in rates)
    assert all(each["int8_gop_s"] is None for each in rates)


def test_unlabelled_data_give_latency_and_parity_only(model: Model, digits: Digits) -> None:
    data = LabelledData(digits.test.inputs[:10], None)
    results = bench([Candidate("d", model)], data, replace(QUICK, batch=(1,)))
    assert results.rows[0].accuracy is None
    assert results.rows[0].parity is not None
    assert results.rows[0].latency_ms is not None


def test_algorithm_1_shares_the_weights_and_leaves_the_model_alone(model: Model) -> None:
    pruned = with_algorithm_1(model, 1, "selected")
    assert [p.data_ptr() for p in pruned.module.parameters()] == [
        p.data_ptr() for p in model.module.parameters()
    ]
    assert all(layer.keep is None for layer in model.layers.values())


def test_threads_are_set_for_the_run_and_put_back(model: Model, digits: Digits) -> None:
    before = torch.get_num_threads()
    settings = replace(QUICK, batch=(1,), threads=before + 1, samples=5)
    results = bench([Candidate("d", model)], digits.test, settings)
    assert results.environment["threads"] == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_everything_is_timed_with_the_threads_of_the_fastest_untouched_model(
    model: Model, digits: Digits, tmp_path: Path
) -> None:
    slow = SlowOnManyThreads(model.module)
    own = replace(model, module=slow)
    asked = replace(QUICK, batch=(1,), out=tmp_path, engine="onnxruntime", k="2", samples=5)
    with with_threads(3):
        results = sweep([own], replace(asked, memory=False))
        assert results.environment["threads"] == 1
        slow.had.clear()
        given = sweep([own], replace(asked, memory=False, threads=2))
    assert {*slow.had} - {3} == {2}  # tracing runs it as the caller does
    assert given.environment["threads"] == 2
    (told,) = [line for line in method_lines(results) if "thread" in line]
    assert re.match(r"Every engine: 1 thread, with which the untouched model is fastest \(", told)
    (told,) = [line for line in method_lines(given) if "thread" in line]
    assert told == "Every engine: 2 threads."


def test_a_number_alone_is_a_list_of_one(model: Model) -> None:
    request = BenchRequest(
        k=2,
        batch=3,
        engine="onnxruntime",
        threads=1,
        round_s=0.01,
        limits=False,
        parts=False,
        memory=False,
    )
    found = bench_as(model, request)
    assert [(row.k, row.batch) for row in found.rows if not row.is_reference] == [(2, 3)]
    assert BenchRequest(k=0.5).ks == BenchRequest(k="0.5").ks


def test_an_interrupted_run_goes_on_with_the_threads_that_it_had(
    model: Model, tmp_path: Path
) -> None:
    slow = SlowOnManyThreads(model.module)
    asked = replace(QUICK, batch=(1,), out=tmp_path, engine="onnxruntime", k="2", samples=5)
    asked = replace(asked, memory=False)

    class Ended(Told):
        def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
            super().step(text, total, unit)
            if ": timing: " in text:
                raise KeyboardInterrupt

    with with_threads(2), pytest.raises(KeyboardInterrupt):
        sweep([replace(model, module=slow)], replace(asked, progress=Ended()))
    told = Told()
    with with_threads(4):  # what a busy machine might find now
        results = sweep([replace(model, module=slow)], replace(asked, progress=told))
    assert results.environment["threads"] == 1
    assert any(line.startswith("continuing an unfinished run") for line in told.lines)
    assert not any("fastest" in line for line in told.lines)


@pytest.mark.slow
def test_the_program_itself_measures(tmp_path: Path) -> None:
    outcome = run_program(
        *("bench", DATA / "soft_moe_lucidrains" / "weights.pt", "-o", "report", "--k", "2"),
        *("--engine", "onnxruntime", "--no-memory", "--threads", "1"),
        cwd=tmp_path,
    )
    assert outcome.code == 0, outcome.err
    assert "report: report/report.html" in outcome.out
    rows = read(tmp_path / "report" / "results.json").rows
    assert [(row.engine, row.k) for row in rows] == [("pytorch-eager", 4), ("onnxruntime", 2)]
    assert [row.error for row in rows] == [None, None]
    (wrapper,) = read(tmp_path / "report" / "results.json").protocol["wrapper"]
    assert (wrapper["model"], wrapper["batch"]) == ("weights", 1)
    assert wrapper["case"].startswith("weights: onnxruntime") and 0 < wrapper["ms"] < 10


def test_models_of_one_name_are_told_apart_by_their_folders(model: Model) -> None:
    places = [Path(*parts) for parts in (("a", "x", "m.pt"), ("b", "x", "m.pt"), ("c", "n.pt"))]
    candidates = [Candidate(place.stem, model) for place in places]
    named = with_distinct_names(candidates, places)
    assert [candidate.name for candidate in named] == ["a/x/m", "b/x/m", "n"]
    assert len(plan(named, QUICK)) == len(plan([Candidate("d", model)], QUICK)) * 3
    twice = with_distinct_names(candidates[:1] * 2, places[:1] * 2)
    assert [candidate.name for candidate in twice] == ["m", "m"]


def test_the_plan_says_what_and_how_long(model: Model) -> None:
    settings = BenchRequest(batch=(1, 8), round_s=0.5)
    groups = plan([Candidate("d", model, ks=(2,), graphs=(source(model, 2, "dense"),))], settings)
    text = describe(groups)
    assert "6 rows; the timing takes at least" in text
    assert "at least 17 s" in text  # each turn begins when the threads of the one before sleep
    assert "onnxruntime dense fp32 k=2" in text
    assert hash(groups[0]) == hash(groups[0])


def test_what_cannot_be_measured_is_refused_first(model: Model, digits: Digits) -> None:
    for k in (0, 5):
        with pytest.raises(UsageError, match=f"k = {k}"):
            plan([Candidate("d", model, ks=(k,))], QUICK)
    with pytest.raises(UsageError, match="same name"):
        plan([Candidate("d", model), Candidate("d", model)], QUICK)
    twice = Candidate("d", model, graphs=(source(model, 2, "dense"),) * 2)
    with pytest.raises(UsageError, match="same rows"):
        plan([twice], QUICK)
    with pytest.raises(UsageError, match="no model"):
        plan([], QUICK)
    with pytest.raises(UsageError, match="not a list of sizes"):
        plan([Candidate("d", model)], replace(QUICK, batch=(0,)))
    flat = LabelledData(digits.test.inputs.reshape(360, -1), digits.test.labels)
    with pytest.raises(
        FeedError,
        match=r"d: input 'input' needs float32 \(batch, 1, 28, 28\), not float32 \(6, 784\)",
    ):
        bench([Candidate("d", model)], flat, QUICK)
    assert digits.test.labels is not None
    wrong = LabelledData(digits.test.inputs, digits.test.labels + np.int64(1), "input", "label")
    with pytest.raises(FeedError, match=r"labels outside 0\.\.9"):
        bench([Candidate("d", model)], wrong, QUICK)


def test_nothing_is_written_when_the_data_do_not_fit(model: Model, tmp_path: Path) -> None:
    data = LabelledData(np.zeros((2, 3), np.float32), None)
    with pytest.raises(FeedError):
        bench([Candidate("d", model)], data, replace(QUICK, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_bundle_with_fixed_tokens_is_measured_on_so_many(tmp_path: Path) -> None:
    weights = DATA / "soft_moe_lucidrains" / "weights.pt"
    out = tmp_path / "out"
    done = run("export", weights, "-o", out, "--k", "2", "--tokens", "16", "--set", "seq_len=16")
    assert done.code == 0, done.err
    request = BenchRequest(engine="onnxruntime", round_s=0.0, memory=False, parts=False, threads=1)
    rows = bench_as(out, request).rows
    assert "onnxruntime" in {row.engine for row in rows}
    assert [row.error for row in rows] == [None] * len(rows)


@pytest.mark.parametrize("k", ["4,2", "2,8"])
def test_a_bundle_with_a_k_for_each_layer_is_compared_with_so_many_of_each(
    k: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run("export", DATA / "soft_moe_vit" / "weights.pt", *VIT_SETS, "-o", out, "--k", k)
    assert done.code == 0, done.err
    request = BenchRequest(engine="onnxruntime", round_s=0.0, memory=False, parts=False, threads=1)
    rows = bench_as(out, request).rows
    (graph,) = (row for row in rows if row.engine == "onnxruntime")
    assert graph.error is None
    assert graph.parity is not None and graph.parity.cosine > 1 - 1e-6


FKODOM = (DATA / "soft_moe_fkodom" / "weights.pt", "--set", "version=0.2.0", "--k", "2")


@pytest.mark.slow
def test_a_bundle_of_one_batch_size_is_measured_in_whole_batches_of_it(tmp_path: Path) -> None:
    out, data, report = tmp_path / "out", tmp_path / "x.npz", tmp_path / "report"
    done = run("export", *FKODOM, "-o", out, "--batch", "3", "--tokens", "5")
    assert done.code == 0, done.err
    x = np.random.default_rng(0).standard_normal((7, 5, 24)).astype(np.float32)
    np.savez(data, input=x)
    quick = ("--engine", "onnxruntime", "--rounds", "5", "--threads", "1")
    done = run("bench", out, "-o", report, "--data", data, *quick)
    assert done.code == 0, done.err
    assert "of 6 inputs; 1 left over: each batch has 3" in done.err
    results = read(report / "results.json")
    assert {row.batch for row in results.rows} == {3}
    assert results.protocol["samples"] == 6
    (graph,) = (row for row in results.rows if row.engine == "onnxruntime")
    assert graph.error is None
    assert graph.peak_memory_mb is not None
    assert graph.parity is not None and graph.parity.cosine > 1 - 1e-6
    np.savez(data, input=x[:2])
    few = run("bench", out, "-o", tmp_path / "few", "--data", data, *quick)
    assert "only runs batches of 3 inputs, but the data have 2" in few.error


@pytest.mark.parametrize("sizes", ["1", "1,3"])
def test_other_batch_sizes_than_the_one_of_a_bundle_are_refused(sizes: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("export", *FKODOM, "-o", out, "--batch", "3")
    assert done.code == 0, done.err
    refused = run("bench", out, "-o", tmp_path / "report", "--batch", sizes)
    assert refused.code == 2
    assert f"--batch {sizes}: {out} was exported with --batch 3" in refused.error
    assert refused.hint == "use --batch 3, or export the bundle with a range: --batch 1:3:32"
    assert not [*(tmp_path / "report").glob("*.json")]


@pytest.mark.slow
def test_bundles_of_several_batch_sizes_are_measured_at_their_own(tmp_path: Path) -> None:
    for size in ("3", "4"):
        done = run("export", *FKODOM, "-o", tmp_path / size, "--batch", size)
        assert done.code == 0, done.err
    request = BenchRequest(engine="onnxruntime", round_s=0.0, memory=False, parts=False, threads=1)
    rows = bench_as([tmp_path / "3", tmp_path / "4"], request).rows
    assert {(row.model, row.batch, row.error) for row in rows} == {("3", 3, None), ("4", 4, None)}
