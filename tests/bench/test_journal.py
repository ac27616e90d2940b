"""Sweeps: a killed one goes on where it stopped, another one begins anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from moexport.bench.data import LabelledData
from moexport.bench.journal import FILE, Journal
from moexport.bench.measure.latency import TASKS
from moexport.bench.plan import Candidate, GraphSource
from moexport.bench.request import BenchRequest
from moexport.bench.run import bench
from moexport.bench.runners.base import Runner, first_of
from moexport.bench.runners.pytorch import with_algorithm_1
from moexport.common.console import Silent
from moexport.common.timing import Protocol, Round, measure
from moexport.common.writing import exclusive_folder
from moexport.data.batches import Array
from moexport.errors import OutputError
from moexport.exporter.inputs import Inputs
from moexport.exporter.model import Model
from moexport.plugins.demo.digits import Digits
from moexport.tests.bench.loaders import Made

SETTINGS = BenchRequest(
    batch=(1, 3), warmup=1, round_s=0.0, inputs=2, samples=50, memory=False, limits=False
)


class KilledError(BaseException):
    """What ends a process."""


class KilledAfter(Silent):
    """Ends the run at a step."""

    def __init__(self, step: str) -> None:
        self.word = step

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        if self.word in text:
            raise KilledError


class Steps(Silent):
    """Remembers the steps."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        self.lines.append(text)


class CountingGraph(Runner):
    """Counts what it computes."""

    def __init__(self, model: Model) -> None:
        self.torch = with_algorithm_1(model, 2, "masked")
        self.inputs = 0

    def infer(self, x: Inputs, output: int = 0) -> Array:
        self.inputs += len(first_of(x))
        return self.torch.infer(x)

    def selected(self, x: Inputs) -> dict[str, Array]:
        return self.torch.with_routing(x).chosen


def candidate(model: Model, graph: CountingGraph) -> Candidate:
    return Candidate("digits", model, graphs=(GraphSource(2, "dense", Made(lambda: graph)),))


def killed(model: Model, digits: Digits, out: Path, settings: BenchRequest = SETTINGS) -> None:
    with pytest.raises(KilledError):
        bench(
            [candidate(model, CountingGraph(model))],
            digits.test,
            replace(settings, out=out, progress=KilledAfter("batch 3: timing")),
        )
    assert not (out / "results.json").exists()


def test_a_killed_sweep_goes_on_where_it_stopped(
    model: Model, digits: Digits, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, limits=True)
    killed(model, digits, tmp_path, settings)
    steps, graph = Steps(), CountingGraph(model)
    request = replace(settings, out=tmp_path, progress=steps)
    again = bench([candidate(model, graph)], digits.test, request)
    # One evaluation, five rounds of batch 1 and, where the system tells, how long they waited.
    pieces = 6 + any(TASKS.glob("*/schedstat"))
    assert f"continuing an unfinished run: {pieces} measurements are done" in steps.lines
    batches = [each["batch"] for each in again.protocol.get("waited", [])]
    assert batches == ([1, 3] if pieces > 6 else [])
    # PyTorch, the graph and three probes of the machine.
    assert "digits, batch 1: timing: 0 rounds of 5 cases" in steps.lines
    assert all(row.limit_ms is not None for row in again.rows)
    # Five rounds of two inputs and one more, and one call of warm-up, in batches of three.
    assert graph.inputs == 3 * (5 * 3 + 1)
    assert all(row.error is None and row.accuracy is not None for row in again.rows)
    assert not (tmp_path / FILE).exists()


def test_a_second_benchmark_in_the_same_folder_is_refused_at_once(
    model: Model, digits: Digits, tmp_path: Path
) -> None:
    graph = CountingGraph(model)
    another = pytest.raises(OutputError, match="another moexport process is writing")
    with exclusive_folder(tmp_path), another:
        bench([candidate(model, graph)], digits.test, replace(SETTINGS, out=tmp_path))
    assert not graph.inputs


@pytest.mark.parametrize(
    ("change", "named"),
    [("settings", "settings"), ("data", "data"), ("model", "models"), ("rows", "rows")],
)
def test_a_sweep_of_something_else_begins_anew(
    model: Model, digits: Digits, tmp_path: Path, change: str, named: str
) -> None:
    killed(model, digits, tmp_path)
    settings, data, name = SETTINGS, digits.test, "digits"
    ks: tuple[int, ...] = ()
    if change == "settings":
        settings = replace(SETTINGS, samples=40)
    elif change == "data":
        data = LabelledData(digits.test.inputs + np.float32(1e-3), digits.test.labels)
    elif change == "model":
        name = "others"
    else:
        ks = (1,)
    steps, graph = Steps(), CountingGraph(model)
    changed = replace(candidate(model, graph), name=name, ks=ks)
    bench([changed], data, replace(settings, out=tmp_path, progress=steps))
    (line,) = [line for line in steps.lines if "discarded" in line]
    assert named in line


def test_pieces_of_another_format_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "unfinished.jsonl"
    Journal(path, {"data": 1}).add("round", ms=2.0)
    assert Journal(path, {"data": 1}).resumed == 1
    first, *rest = path.read_text().splitlines()
    what = {"what": {"data": json.loads(first)["what"]["data"]}}  # as versions without one wrote it
    path.write_text("\n".join([json.dumps(what), *rest]) + "\n")
    again = Journal(path, {"data": 1})
    assert again.resumed == 0
    assert again.discarded == ("format",)


def test_half_a_line_of_a_journal_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / FILE
    journal = Journal(path, {"a": 1})
    journal.add("round", batch=1)
    journal.add("round", batch=2)
    path.write_text(path.read_text()[:-4])
    again = Journal(path, {"a": 1})
    assert again.pieces("round") == [{"kind": "round", "batch": 1}]
    assert [json.loads(line) for line in path.read_text().splitlines()][1:] == [
        {"kind": "round", "batch": 1}
    ]


def test_rounds_that_are_done_count_and_a_failure_stays_one() -> None:
    done = [Round({"a": [1.0]}), Round({"a": [2.0]}, {"b": "MemoryError: no room"})]
    kept: list[Round] = []
    calls = {"a": lambda index: None, "b": lambda index: None}
    protocol = Protocol(warmup=0, round_s=0.0)
    measured = measure(calls, protocol, done=done, keep=kept.append)
    assert len(kept) == 3
    assert measured.latencies["a"].rounds[:2] == (1.0, 2.0)
    assert measured.failures == {"b": "MemoryError: no room"}
