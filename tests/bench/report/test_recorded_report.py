"""The order and the words of a report's rows, as recorded."""

from __future__ import annotations

from dataclasses import replace

from moexport.bench.report.page import payload
from moexport.bench.report.text import to_csv, to_markdown
from moexport.bench.results import Results
from moexport.tests.golden.golden import check, compared, masked


def shown(results: Results) -> dict[str, object]:
    return {
        "markdown": masked(to_markdown(results).splitlines()),
        "csv": to_csv(results).splitlines()[0],
        "page": list(payload(results)),
    }


def test_the_rows_of_a_report_are_as_recorded(results: Results) -> None:
    check("report", shown(results))


def test_rows_in_another_order_differ(results: Results) -> None:
    turned = replace(results, rows=results.rows[::-1])
    assert compared(shown(results)["markdown"], shown(turned)["markdown"])
