"""What a gain is against, and of what no gain is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import moexport
import numpy as np
import pytest
from moexport.bench.data import LabelledData
from moexport.bench.plan import Candidate
from moexport.bench.report.page import payload
from moexport.bench.report.summary import claim, headline, sections, summary
from moexport.bench.report.text import rows_table, to_csv
from moexport.bench.request import BenchRequest
from moexport.bench.results import Results, Row
from moexport.bench.run import bench
from moexport.exporter.model import Model
from moexport.tests.recorded import read_case

RowMaker = Callable[..., Row]


def with_rows(results: Results, *rows: Row) -> Results:
    return replace(results, rows=(results.rows[0], *rows))


def test_a_gain_is_over_all_experts_in_the_same_precision(results: Results, row: RowMaker) -> None:
    few = row(4, 1.0, 0.995, precision="int8")
    floats = row(16, 4.0, 1.0)
    (section,) = sections(with_rows(results, floats, few))
    assert section.gain(few) is None  # of another precision
    assert "all experts" not in claim(section, few)
    slow, fast = (
        row(16, ms, 1.0, precision="int8", lowering=name)
        for ms, name in ((3.0, "dense"), (2.0, "grouped"))
    )
    (section,) = sections(with_rows(results, floats, slow, fast, few))
    assert section.gain(few) == pytest.approx(2.0)  # the best of them
    assert claim(section, few).startswith("k = 4 of 16 in INT8: 2.0 times the speed of all experts")


def test_no_ratio_is_told_of_disturbed_rows(results: Results, row: RowMaker) -> None:
    rows = (row(16, 4.0, 1.0), row(4, 1.0, 0.999))
    quiet = with_rows(results, *rows)
    waits = [{"model": "digits", "batch": 1, "share": 0.23}]
    loud = replace(quiet, protocol=quiet.protocol | {"waited": waits})
    (section,) = sections(loud)
    assert section.speedup(rows[1]) is None
    assert section.gain(rows[1]) is None
    assert summary(section).startswith("No verdict: threads spent 23% of their time waiting")
    assert "×" not in rows_table(loud).replace("× limit", "")
    assert {row["speed"] for row in payload(loud)["rows"]} == {None}
    speedups = [line.split(",")[-1] for line in to_csv(loud).splitlines()]
    assert "4.0" not in speedups
    # Another section of the file was not disturbed.
    elsewhere = [{"model": "digits", "batch": 8, "share": 0.23}]
    (section,) = sections(replace(quiet, protocol=quiet.protocol | {"waited": elsewhere}))
    assert section.gain(rows[1]) == pytest.approx(4.0)


def test_the_stacked_form_of_pytorch_stands_beside_the_loop(
    results: Results, row: RowMaker
) -> None:
    few = row(4, 1.0, 0.999)
    stacked = row(16, 2.0, 1.0, engine="pytorch-stacked", lowering=None)
    (section,) = sections(with_rows(results, stacked, few))
    assert headline(section) is few
    assert "2.0 times that of PyTorch with stacked experts" in claim(section, few)


def test_a_model_that_loops_over_its_experts_is_measured_with_stacked_ones() -> None:
    case = read_case("soft_moe_mnist")
    model = moexport.load(case.weights, config=case.config)
    request = BenchRequest(
        engine="pytorch-stacked", k="n", round_s=0.0, memory=False, limits=False, threads=1
    )
    data = LabelledData(np.asarray(case.x, np.float32), None, "input", None)
    candidate = Candidate("m", model, engines=("pytorch-stacked",))
    found = {row.engine: row for row in bench([candidate], data, request).rows}
    assert found.keys() == {"pytorch-eager", "pytorch-stacked"}
    parity = found["pytorch-stacked"].parity
    assert parity is not None
    assert parity.max_abs < 1e-5 * np.abs(case.y()).max()
    assert found["pytorch-stacked"].k == found["pytorch-eager"].k == 16


def test_a_model_whose_experts_are_stacked_has_no_such_row(model: Model) -> None:
    cases = Candidate("m", model, engines=("pytorch-stacked",)).cases
    assert [case.engine for case in cases] == ["pytorch-eager"]
