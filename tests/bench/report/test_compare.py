"""Results compared with earlier ones, on the command line too; and the rows as CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from moexport.bench.report.compare import check_regression, compare, parse_slower, read_earlier
from moexport.bench.report.page import html, payload
from moexport.bench.report.sections import all_sections, contents
from moexport.bench.report.text import to_csv, to_markdown
from moexport.bench.results import Results, Row, write
from moexport.common.latency import summarise
from moexport.errors import MoexportError, UsageError
from moexport.tests.command import run

RowMaker = Callable[..., Row]


@pytest.fixture
def slower(results: Results, row: RowMaker) -> Results:
    """k = 4 takes 1.4 ms instead of 1.0; k = 2 is 1% slower, within its spread of 2%."""
    rows = (results.rows[0], row(16, 2.0, 1.0), row(4, 1.4, 0.992), row(2, 0.505, 0.8))
    return replace(results, rows=rows, environment={**results.environment, "threads": 4})


def test_only_what_lies_beyond_the_spread_is_told(results: Results, slower: Results) -> None:
    found = compare(results, slower)
    assert len(found.changes) == 4
    (change,) = found.slower
    assert change.label == ("digits, batch 1: ONNX Runtime, grouped, k = 4: 1.00 → 1.40 ms (+40%)")
    assert found.faster == ()
    assert "0 are faster and 1 slower by more than the spread; 3 show no difference" in (
        found.sentence
    )
    assert "Different machine or setting: threads was None and is now 4." in found.notes
    assert "1 rows are only in the earlier file, 0 only in this one." in found.notes


def test_the_report_tells_what_changed(results: Results, slower: Results) -> None:
    page = html(slower, compare(results, slower))
    assert '"title":"What changed"' in page
    assert "+40%" in page
    assert '"title":"What changed"' not in html(slower)


def test_the_page_and_the_markdown_have_the_same_sections(
    results: Results, slower: Results
) -> None:
    comparison = compare(results, slower)
    shown = [section.title for section, _ in contents(slower, comparison)]
    assert shown == ["What changed", "Parity with PyTorch"]
    assert [card["title"] for card in payload(slower, comparison)["tables"]] == shown
    text = to_markdown(slower, comparison)
    assert [title for title in shown if f"\n## {title}\n" in text] == shown
    assert "| ONNX Runtime, grouped | 4/16 | 1.00 | 1.40 | +40% |" in text
    assert len({section.name for section in all_sections()}) == len(all_sections())


def test_a_row_that_is_slower_than_allowed_fails(results: Results, slower: Results) -> None:
    with pytest.raises(MoexportError, match=r"1 of 4 rows .* k = 4: 1\.00 → 1\.40 ms"):
        check_regression(results, slower, 0.05)
    assert check_regression(results, slower, 0.5)[0].startswith("Of 4 rows")
    assert check_regression(results, results, 0.0)
    noisy = summarise([[0.9], [1.2], [1.4], [1.4], [2.0]])
    rows = tuple(replace(r, latency_ms=noisy) if r.k == 4 else r for r in slower.rows)
    assert check_regression(results, replace(slower, rows=rows), 0.05)


def test_a_row_that_fails_where_it_did_not_counts_as_slower(
    results: Results, row: RowMaker
) -> None:
    broken = row(4, 1.0, None, latency_ms=None, error="MemoryError: no room")
    with pytest.raises(MoexportError, match="MemoryError: no room"):
        check_regression(results, replace(results, rows=(results.rows[0], broken)), 0.05)


def test_results_without_a_row_in_common_are_refused(results: Results, row: RowMaker) -> None:
    other = replace(results, rows=(row(16, 1.0, None, model="another"),))
    with pytest.raises(MoexportError, match="no row in common"):
        check_regression(results, other, 0.05)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("0%", 0.0)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_slower(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["five", "-1%", "1000%", "%", ""])
def test_what_is_no_share_is_refused(text: str) -> None:
    said = "at least 0% and below 1000%" if text in ("-1%", "1000%") else "not a share"
    with pytest.raises(UsageError, match=said):
        parse_slower(text)


def test_the_earlier_results_are_those_of_the_folder(results: Results, tmp_path: Path) -> None:
    assert read_earlier(tmp_path, None, wanted=True) is None
    write(results, tmp_path / "results.json")
    assert read_earlier(tmp_path, None, wanted=True) == results
    assert read_earlier(tmp_path, None, wanted=False) is None
    assert read_earlier(tmp_path / "none", tmp_path / "results.json", wanted=False) == results


def test_report_compares_on_the_command_line(
    results: Results, slower: Results, tmp_path: Path
) -> None:
    write(results, tmp_path / "old.json")
    write(slower, tmp_path / "new.json")
    outcome = run(
        *("report", tmp_path / "new.json", "-o", tmp_path / "page.html"),
        *("--compare", tmp_path / "old.json"),
    )
    assert outcome.code == 0, outcome.err
    assert "k = 4: 1.00 → 1.40 ms (+40%)" in outcome.out
    for name in ("page.html", "page.md", "page.csv", "latency_accuracy.png"):
        assert (tmp_path / name).is_file()
    assert "## What changed" in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_rows_are_csv_and_markdown(results: Results) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(results))))
    assert len(rows) == len(results.rows)
    assert float(rows[2]["median_ms"]) == pytest.approx(1.0)
    assert float(rows[2]["speedup"]) == pytest.approx(3.1)
    assert rows[4]["error"] == "RuntimeError: <no such op>"
    text = to_markdown(results)
    assert (
        "k = 4 of 16 in FP32: 2.0 times the speed of all experts in ONNX Runtime, 3.1 times" in text
    )
    assert "| ONNX Runtime, grouped | 4/16 | 1.00 | 3.1× |" in text
    assert "failed: RuntimeError: &lt;no such op>" in text
