"""The report as a reader sees it, in headless Chromium: charts, filters, console, both widths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from moexport.bench.report.compare import compare
from moexport.bench.report.page import write_report
from moexport.bench.results import Absent, Accuracy, Interval, Part, Results, Row
from moexport.common.timing import Latency, summarise
from moexport.tests.bench.report.browser import Browser, browser, missing

RowMaker = Callable[..., Row]
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
CHARTS = ("latency", "accuracy", "pareto", "routing", "parts", "layers", "memory")

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"Chromium: {missing()}")


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots are kept: MOEXPORT_SCREENSHOTS names a folder that stays."""
    folder = Path(os.environ.get("MOEXPORT_SCREENSHOTS", tmp_path / "screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def page(results: Results, row: RowMaker, tmp_path: Path) -> Path:
    """A report with two batch sizes, two graphs and PyTorch's loop, memory and parts."""
    parts = tuple(
        Part(layer, part, ms)
        for layer in ("blocks.2.mlp", "blocks.3.mlp")
        for part, ms in (("router", 0.05), ("dispatch", 0.02), ("experts", 0.3), ("combine", 0.03))
    )
    parts += (Part(None, "host", 0.2), Part(None, "runtime", 0.05))
    rows = []
    for batch in (1, 32):
        for each in results.rows:
            graph = each.engine == "onnxruntime"
            memory, alone = (66.0, 52.0) if graph else (300.0, 240.0)
            has = parts if graph and each.error is None else ()
            one = replace(each, batch=batch, parts=has, peak_memory_mb=memory)
            rows.append(replace(one, runtime_memory_mb=alone))
        for k, ms in ((16, 2.4), (4, 1.4), (2, 1.1)):
            dense = row(k, ms, 1.0 if k == 16 else 0.99, lowering="dense", parts=parts)
            rows.append(replace(dense, batch=batch, peak_memory_mb=66.0, runtime_memory_mb=52.0))
    absent = (Absent("tensorrt", "not installed: pip install 'moexport[tensorrt]'"),)
    now = replace(results, rows=tuple(rows), absent=absent)
    before = replace(now, rows=tuple(replace(r, latency_ms=_slower(r)) for r in now.rows))
    write_report(now, tmp_path / "report.html", compare(before, now))
    return tmp_path / "report.html"


def _slower(row: Row) -> Latency | None:
    latency = row.latency_ms
    if latency is None:
        return None
    return replace(latency, median=2 * latency.median, rounds=tuple(2 * r for r in latency.rounds))


def points(window: Browser, chart: str) -> int:
    """How many marks and bars a chart shows."""
    marks = f"#{chart} .scatterlayer .point, #{chart} .barlayer .point path"
    return int(window.run("return document.querySelectorAll(arguments[0]).length", marks))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_drawn_and_the_console_is_clean(
    window: Browser, page: Path, pictures: Path, width: str, scheme: str
) -> None:
    window.resize(*WIDTHS[width])
    window.colour_scheme(scheme)
    window.open(page)
    window.wait("return document.querySelectorAll('.main-svg').length >= 7")
    for chart in CHARTS:
        assert points(window, chart) > 1, chart
    assert window.console() == []
    # Nothing leaves the page sideways: wide tables scroll in their own frame.
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert window.run(overflow) <= 0
    shot = pictures / f"report-{width}-{scheme}.png"
    window.screenshot(shot)
    picture = matplotlib.image.imread(shot)
    assert picture.shape[0] > 1500
    assert (picture[5, 5, :3].mean() < 0.5) == (scheme == "dark")


def test_what_is_kept_fills_its_axis(window: Browser, page: Path) -> None:
    window.resize(*WIDTHS["desktop"])
    window.open(page)
    window.wait("return document.querySelector('#pareto .scatterlayer .point') !== null")
    (low, high), kept = window.run(
        "const p = document.getElementById('pareto');"
        "return [p.layout.yaxis.range, p.data.flatMap(t => [...t.y])];"
    )
    assert low <= min(kept) <= max(kept) <= high
    assert high - low <= 1.12 * (max(kept) - min(kept)) + 0.02 + 1e-9


def test_rows_are_filtered_and_sorted(window: Browser, page: Path) -> None:
    window.resize(*WIDTHS["desktop"])
    window.open(page)
    shown = "return [...document.querySelectorAll('#rows tbody tr')].filter(r => !r.hidden).length"
    everything = window.run(shown)
    assert everything == 16
    choose = (
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event(arguments[2]));"
    )
    window.run(choose, "filter-batch", "32", "change")
    assert window.run(shown) == 8
    window.run(choose, "search", "dense", "input")
    assert window.run(shown) == 3
    assert window.run("return document.getElementById('count').textContent") == "3 of 16 rows"
    window.run(choose, "search", "", "input")
    window.run(choose, "filter-batch", "", "change")
    column = (
        "const n = [...document.querySelectorAll('#rows th')]"
        ".findIndex(h => h.textContent === 'Median ms');"
        "document.querySelectorAll('#rows th button')[n].click();"
        "return [...document.querySelectorAll('#rows tbody tr')]"
        ".map(r => r.cells[n] ? r.cells[n].dataset.v ?? '' : '')"
    )
    ascending = [float(value) for value in window.run(column) if value]
    assert ascending == sorted(ascending)
    descending = [float(value) for value in window.run(column) if value]
    assert descending == sorted(descending, reverse=True)
    assert window.console() == []


def test_the_reader_chooses_batch_lines_and_scale(window: Browser, page: Path) -> None:
    window.resize(*WIDTHS["desktop"])
    window.open(page)
    window.wait("return document.querySelectorAll('#batches button').length === 2")
    before = points(window, "latency")
    window.run("document.querySelectorAll('#batches button')[1].click()")
    assert "batch 32" in window.run("return document.getElementById('summary').textContent")
    window.run("document.querySelector('#legend button').click()")
    assert points(window, "latency") < before
    window.run("document.getElementById('log').click()")
    assert window.run("return document.getElementById('latency').layout.yaxis.type") == "log"
    window.run(
        "const s = document.getElementById('graph'); s.selectedIndex = 1;"
        "s.dispatchEvent(new Event('change'))"
    )
    assert points(window, "layers") > 1
    assert window.console() == []


def test_a_row_is_told_where_the_pointer_rests(window: Browser, page: Path) -> None:
    window.resize(*WIDTHS["desktop"])
    window.open(page)
    window.wait("return document.querySelector('#pareto .scatterlayer .point') !== null")
    window.run(
        "const g = document.getElementById('pareto');"
        "const n = g.data.findIndex(t => t.mode === 'markers');"
        "Plotly.Fx.hover(g, [{curveNumber: n, pointNumber: 0}])"
    )
    told = window.wait("return document.querySelector('#pareto .hoverlayer').textContent")
    assert "k = " in told
    assert "ms" in told


def test_bars_and_marks_lie_within_their_charts(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    disturbed = summarise([[1.0], [1.1], [1.0], [1.0], [90.0]])
    wide = Accuracy(0.7, 0.78, 40, top1_interval=Interval(0.45, 0.99))
    rows = (*results.rows, row(1, 1.0, None, accuracy=wide, latency_ms=disturbed))
    write_report(replace(results, rows=rows), tmp_path / "report.html")
    outside = (
        "const area = document.querySelector(`#${arguments[0]} .nsewdrag`).getBoundingClientRect();"
        "return [...document.querySelectorAll(`#${arguments[0]} ${arguments[1]}`)]"
        ".map(each => each.getBoundingClientRect())"
        ".filter(r => r.top < area.top - 1 || r.bottom > area.bottom + 1"
        " || r.left < area.left - 1 || r.right > area.right + 1).length"
    )
    for width in WIDTHS.values():
        window.resize(*width)
        window.open(tmp_path / "report.html")
        window.wait("return document.querySelector('#routing .scatterlayer .point') !== null")
        for chart in ("latency", "accuracy", "routing"):
            assert window.run(outside, chart, ".scatterlayer .point") == 0, chart
            assert window.run(outside, chart, "path.yerror") == 0, chart
    cut = "return document.getElementById('latency').data.filter(t => t.cliponaxis === false)"
    assert len(window.run(cut)) == 1  # the arrow that ends the long bar
    assert window.console() == []


def test_a_chart_with_nothing_in_it_is_hidden_and_a_sentence_says_why(
    window: Browser, results: Results, tmp_path: Path
) -> None:
    weighed = replace(results, rows=tuple(replace(r, routing=None) for r in results.rows))
    write_report(weighed, tmp_path / "report.html")
    window.resize(*WIDTHS["desktop"])
    window.open(tmp_path / "report.html")
    window.wait("return document.querySelector('#pareto .scatterlayer .point') !== null")
    width = "return document.getElementById(arguments[0]).getBoundingClientRect().width"
    assert window.run(width, "routing-figure") == 0
    assert window.run(width, "pareto") > 900  # its neighbour has the room
    assert window.run("return document.querySelector('#pareto .nsewdrag').getBBox().width") > 800
    said = window.run("return document.getElementById('empty').textContent")
    assert said.startswith("Routing agreement is not drawn: ")
    assert window.console() == []
