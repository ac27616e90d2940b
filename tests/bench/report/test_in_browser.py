"""The report as a reader sees it, in headless Chromium: answer, charts, filters, paper, widths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from moexport.bench.report.compare import compare
from moexport.bench.report.page import write_report, write_views
from moexport.bench.report.runs import NamedRun
from moexport.bench.report.summary import caveat, sections, summary
from moexport.bench.report.text import to_csv
from moexport.bench.results import (
    Absent,
    Accuracy,
    Interval,
    ModelInfo,
    PartTime,
    Results,
    Row,
    from_json,
    write,
)
from moexport.common.timing import Latency, summarise
from moexport.tests.bench.report.browser import Browser, browser, missing

RowMaker = Callable[..., Row]
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
CHARTS = ("deploy", "overk", "throughput", "percentiles", "parts", "layers", "memory")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=f"Chromium: {missing()}"),
]


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
        PartTime(layer, part, ms)
        for layer in ("blocks.2.mlp", "blocks.3.mlp")
        for part, ms in (("router", 0.05), ("dispatch", 0.02), ("experts", 0.3), ("combine", 0.03))
    )
    parts += (PartTime(None, "host", 0.2), PartTime(None, "runtime", 0.05))
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
    absent = (Absent("tensorrt", "not installed: pip install '.[tensorrt]'"),)
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


BLOCKS = "main p, main h1, main h2, main figcaption, .chart, table, .tiles"
DRAWN = "return document.documentElement.dataset.drawnMs"


def shown(window: Browser, page: Path, width: str = "desktop", state: str = "") -> Browser:
    """Opens a page anew with a state in its address, and waits until it is drawn."""
    window.resize(*WIDTHS[width])
    window.open(page, state)
    assert window.wait(DRAWN)
    return window


def text(window: Browser, name: str) -> str:
    """What an element says."""
    return str(window.run("return document.getElementById(arguments[0]).textContent", name))


def choose(window: Browser, name: str, value: str, event: str = "change") -> None:
    """Sets a control as its user would."""
    window.run(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event(arguments[2]));",
        *(name, value, event),
    )


def ring(window: Browser, chart: str) -> list[list[float]]:
    """Where a chart marks the answer: [x, y] of every ring."""
    found: list[list[float]] = window.run(
        "return document.getElementById(arguments[0]).data.filter(t => t.name === 'answer')"
        ".map(t => [t.x[0], t.y[0]])",
        chart,
    )
    return found


def overlaps(window: Browser, scope: str) -> list[str]:
    """Which blocks of the page, or texts of a chart, cover each other."""
    found: list[str] = window.run(
        "const all = [...document.querySelectorAll(arguments[0])].filter(e => e.textContent.trim()"
        " || e.tagName === 'svg').map(e => [e, e.getBoundingClientRect()])"
        ".filter(([e, r]) => r.width && r.height);"
        "return all.flatMap(([a, r], i) => all.slice(i + 1).filter(([b, s]) => !a.contains(b)"
        " && !b.contains(a) && r.left < s.right - 2 && s.left < r.right - 2"
        " && r.top < s.bottom - 2 && s.top < r.bottom - 2)"
        ".map(([b]) => a.textContent.slice(0, 40) + ' | ' + b.textContent.slice(0, 40)))",
        scope,
    )
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_drawn_and_the_console_is_clean(
    window: Browser, page: Path, pictures: Path, width: str, scheme: str
) -> None:
    window.colour_scheme(scheme)
    shown(window, page, width)
    for chart in CHARTS:
        assert points(window, chart) > 1, chart
    assert window.console() == []
    # Nothing leaves the page sideways: wide tables scroll in their own frame.
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert window.run(overflow) <= 0
    assert overlaps(window, BLOCKS) == []
    for chart in ("deploy", "overk"):
        words = (
            ".annotation-text",
            ".xtick",
            ".ytick",
            ".textpoint text",
            ".g-ytitle",
            ".g-y2title",
        )
        assert overlaps(window, ", ".join(f"#{chart} {each}" for each in words)) == [], chart
    shot = pictures / f"report-{width}-{scheme}.png"
    window.screenshot(shot)
    picture = matplotlib.image.imread(shot)
    assert picture.shape[0] > 1500
    assert (picture[5, 5, :3].mean() < 0.5) == (scheme == "dark")


def test_the_first_answer_is_that_of_the_other_views(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    unlabelled = tuple(replace(each, accuracy=None) for each in results.rows)
    cases = (
        results.rows,
        (results.rows[0], row(8, 2.0, 0.95), row(4, 1.0, 0.9)),
        (results.rows[0], row(16, 2.0, 1.0), row(8, 1.0, 0.95)),
        (results.rows[0], row(4, 3.08, 1.0)),
        unlabelled,
    )
    for rows in cases:
        one = replace(results, rows=rows)
        write_report(one, tmp_path / "report.html")
        shown(window, tmp_path / "report.html")
        assert text(window, "summary") == summary(sections(one)[0])
    assert window.console() == []


def test_the_threshold_moves_the_answer_its_mark_and_the_command(
    window: Browser, page: Path
) -> None:
    shown(window, page)
    assert text(window, "summary").startswith("Deploy k = 4 of 16 in FP32: 2.0 times the speed")
    assert ring(window, "deploy") == [[1.0, 0.992]]
    assert ring(window, "overk") == [[4, 1.0], [4, 0.992]]
    assert "--k 4 " in text(window, "command")
    choose(window, "at", "75", "input")
    assert text(window, "summary").startswith("Deploy k = 2 of 16 in FP32: 4.0 times the speed")
    assert ring(window, "deploy") == [[0.5, 0.8]]
    assert ring(window, "overk") == [[2, 0.5], [2, 0.8]]
    assert "--k 2 " in text(window, "command")
    choose(window, "at", "100.5", "input")
    assert text(window, "summary").startswith("Nothing here keeps 100.5%. Nearest: k = 16 of 16")
    choose(window, "goal", "latency")
    choose(window, "at", "0.7", "input")
    assert text(window, "summary").startswith("Deploy k = 2 of 16")
    choose(window, "at", "0.1", "input")
    told = text(window, "summary")
    assert told.startswith("Nothing here takes 0.1 ms or less. Nearest: k = 2 of 16")
    assert told.endswith("in 0.500 ms.")
    choose(window, "slider", "1000", "input")
    assert text(window, "summary").startswith("Deploy k = 16 of 16 (all experts)")
    assert window.console() == []


def test_a_chart_joins_what_nothing_beats(window: Browser, page: Path) -> None:
    shown(window, page)
    front = window.run(
        "const t = document.getElementById('deploy').data.find(t => t.name === 'front');"
        "return [t.x, t.y]"
    )
    assert front == [[1.0, 2.0], [0.992, 1.0]]  # k = 2 keeps 80% and is no choice
    assert window.run("return document.getElementById('deploy').layout.xaxis.type") == "log"


def test_the_chart_of_the_decision_is_zoomed_to_what_can_be_deployed(
    window: Browser, page: Path
) -> None:
    shown(window, page)
    axes = window.run(
        "const l = document.getElementById('deploy').layout;"
        "return [l.xaxis.range.map(v => 10 ** v), l.yaxis.range]"
    )
    (left, right), (low, high) = axes
    assert 0.9 < left < 1.0 and 3.1 < right < 3.5
    assert 0.98 < low < 0.99 and 1.0 < high < 1.01
    assert text(window, "deploy-away") == "Outside of the chart: grouped, k = 2 (0.500 ms, 80%)."
    for direction in ("xerror", "yerror"):
        drawn = f"return document.querySelectorAll('#deploy path.{direction}').length"
        assert window.run(drawn) >= 5
    choose(window, "at", "75", "input")
    assert "k = 2" not in text(window, "deploy-away")


def cells(window: Browser, name: str) -> list[list[str]]:
    """The texts of a table, row by row."""
    found: list[list[str]] = window.run(
        "return [...document.querySelectorAll(`#${arguments[0]} tr`)].map(r => [...r.cells]"
        ".map(c => c.textContent))",
        name,
    )
    return found


def test_the_decision_is_one_table_with_a_row_for_each_k(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    untouched = replace(results.rows[0], disk_bytes=1_300_000, peak_memory_mb=300.0)
    rows = [untouched]
    for k, ms, kept in ((16, 2.0, 1.0), (4, 1.0, 0.992)):
        rows.append(row(k, ms, kept, disk_bytes=1_280_000, peak_memory_mb=60.0 + k))
        rows.append(row(k, 1.5 * ms, kept, lowering="dense", disk_bytes=1_280_000))
    write_report(replace(results, rows=tuple(rows)), tmp_path / "report.html")
    shown(window, tmp_path / "report.html")
    head, *lines = cells(window, "decision")
    assert head == [
        *("k", "Accuracy", "Kept", "Median ms", "p99 ms", "Inputs/s", "vs all experts"),
        *("vs PyTorch", "Memory"),
    ]
    assert [line[0] for line in lines] == ["PyTorch", "16 of 16", "4 of 16"]
    assert lines[2] == [
        *("4 of 16", "89.3%85.5% to 92%", "99.2%at least 99.1%", "1.00", "1.01", "1,000"),
        *("2.0×", "3.1×", "64 MB"),
    ]
    # What is the same for every k is said once.
    assert text(window, "decision-same") == (
        "The same for every k: on disk 1.3 MB; runs in ONNX Runtime, grouped."
    )
    assert text(window, "decision-far") == ""


@pytest.mark.parametrize("name", ["decision", "rows"])
def test_no_table_is_cut_on_a_desktop(window: Browser, page: Path, name: str) -> None:
    shown(window, page)
    cut = "const f = document.getElementById(arguments[0]).parentElement;"
    assert window.run(f"{cut} return f.scrollWidth - f.clientWidth", name) <= 0


def test_a_call_that_takes_thousands_of_times_as_long_is_flagged(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    slow = summarise([[0.048] * 60 + [96.3] * 3] * 5)
    rows = (*results.rows[:2], row(4, 1.0, 1.0, latency_ms=slow))
    write_report(replace(results, rows=rows), tmp_path / "report.html")
    shown(window, tmp_path / "report.html")
    assert text(window, "decision-far").startswith(
        "Some calls took more than 10 times the median: 0.0480 ms, p99 96.3 ms (k = 4)."
    )
    bad = "return [...document.querySelectorAll('#decision td.bad')].map(c => c.textContent)"
    assert window.run(bad) == ["96.3"]


def test_disturbed_times_give_no_verdict_on_the_page_either(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    disturbed = summarise([[1.0], [1.0], [1.0], [1.0], [1.75]])
    rows = (*results.rows[:2], row(4, 1.0, 0.995, latency_ms=disturbed))
    changed = replace(results, rows=rows)
    write_report(changed, tmp_path / "report.html")
    shown(window, tmp_path / "report.html")
    verdict = "No verdict: times disagree by 75%. Close other programs, or run again."
    assert text(window, "summary") == verdict == summary(sections(changed)[0])
    assert text(window, "caveat") == caveat(sections(changed)[0])
    chosen = next(line for line in cells(window, "decision") if line[0] == "4 of 16")
    assert "×" not in "".join(chosen)


def test_one_row_has_a_histogram_of_its_calls(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    calls = [1.0] * 50 + [1.1] * 30 + [1.3] * 5 + [4.0]
    rows = (*results.rows[:2], row(4, 1.0, 1.0, latency_ms=summarise([calls] * 5)))
    write_report(replace(results, rows=rows), tmp_path / "report.html")
    shown(window, tmp_path / "report.html")
    drawn = window.run(
        "const t = document.getElementById('percentiles').data; return [t[0].type, t[0].y]"
    )
    assert drawn[0] == "bar"
    assert sum(drawn[1]) == 5 * len(calls)
    marks = "return [...document.querySelectorAll('#percentiles .annotation-text')]"
    assert window.run(f"{marks}.map(a => a.textContent)") == ["median 1.00", "p99 3.22"]


def test_other_runs_are_drawn_beside(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    faster = [row(16, 1.8, 1.0), row(4, 0.7, 0.994)]
    other = replace(results, rows=(results.rows[0], *faster), environment={"threads": 4})
    write_views(results, tmp_path / "report.html", runs=[NamedRun("laptop", other)])
    shown(window, tmp_path / "report.html")
    lines = window.run(
        "return document.getElementById('deploy').data.filter(t => t.name === 'laptop')"
        ".map(t => [t.x, t.y])"
    )
    assert lines[0] == [[0.7, 1.8], [0.994, 1.0]]
    assert "laptop" in text(window, "legend")
    assert "4 threads" in window.run("return document.getElementById('runs').textContent")
    assert window.console() == []


def test_filters_hold_for_charts_and_table_and_stay_in_the_address(
    window: Browser, page: Path
) -> None:
    shown(window, page)
    lines = "return document.querySelectorAll('#rows tbody tr').length"
    marked = points(window, "deploy")
    assert window.run(lines) == 8
    choose(window, "lowering", "dense")
    assert window.run(lines) == 4
    assert points(window, "deploy") < marked
    assert text(window, "summary").startswith(
        "Deploy k = 16 of 16 (all experts) in FP32: 1.3 times"
    )
    choose(window, "batch", "32")
    window.run("document.getElementById('all').click()")
    assert window.run(lines) == 8
    state = str(window.run("return location.hash"))
    assert {"lowering=dense", "batch=32", "all=1"} <= set(state[1:].split("&"))
    before = text(window, "summary"), text(window, "detail")
    shown(window, page, state=state)
    assert (text(window, "summary"), text(window, "detail")) == before
    assert window.run("return document.getElementById('lowering').value") == "dense"
    assert window.run(lines) == 8
    window.run("document.getElementById('reset').click()")
    assert window.run("return document.getElementById('lowering').value") == ""
    assert window.console() == []


def test_rows_are_searched_sorted_and_chosen(window: Browser, page: Path) -> None:
    shown(window, page, state="#all=1")
    assert text(window, "count") == "16 of 16 rows"
    choose(window, "search", "dense", "input")
    assert text(window, "count") == "6 of 16 rows"
    choose(window, "search", "", "input")
    column = (
        "[...document.querySelectorAll('#rows th')].find(h => h.textContent === 'Median ms')"
        ".querySelector('button').click();"
        "return [...document.querySelectorAll('#rows tbody tr')].map(r => r.cells[1].dataset.v)"
    )
    ascending = [float(value) for value in window.run(column) if value]
    assert ascending == sorted(ascending)
    descending = [float(value) for value in window.run(column) if value]
    assert descending == sorted(descending, reverse=True)
    sort = "return document.querySelector('#rows th[aria-sort]').getAttribute('aria-sort')"
    assert window.run(sort) == "descending"
    window.run(
        "[...document.querySelectorAll('#rows .pick')].findLast(b => b.textContent === '2/16')"
        ".click()"
    )
    assert text(window, "summary").startswith("Selected: k = 2 of 16")
    assert "--k 2 " in text(window, "command")
    assert ring(window, "deploy") == [[0.5, 0.8]]
    assert window.console() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_k_and_latency_stay_in_view(window: Browser, page: Path, width: str) -> None:
    shown(window, page, width, "#more=1")
    left = window.run(
        "const frame = document.querySelector('#rows-card .scroll'); frame.scrollLeft = 9999;"
        "const edge = frame.getBoundingClientRect();"
        "return [frame.scrollLeft, ...[...document.querySelector('#rows tbody tr').cells]"
        ".slice(0, 2).map(c => c.getBoundingClientRect().left - edge.left)]"
    )
    assert left[0] > 100
    assert all(0 <= each < 120 for each in left[1:])


def test_downloads_hold_the_rows(
    window: Browser, results: Results, page: Path, tmp_path: Path
) -> None:
    write_report(results, tmp_path / "one.html")
    shown(window, tmp_path / "one.html")
    # What the buttons hand over, without a folder of downloads.
    window.run(
        "window.saved = {}; const make = URL.createObjectURL;"
        "URL.createObjectURL = blob => { window.last = blob; return make(blob); };"
        "HTMLAnchorElement.prototype.click = function () {"
        " const name = this.download; window.last.text().then(t => window.saved[name] = t); };"
        "document.getElementById('csv').click(); document.getElementById('json').click();"
    )
    assert window.wait("return Object.keys(window.saved).length === 2")
    saved = window.run("return window.saved")
    assert saved["results.csv"] == to_csv(results)
    assert from_json(saved["results.json"]) == results
    assert from_json(saved["results.json"]) == results


def test_paper_has_no_overlap(window: Browser, page: Path, pictures: Path) -> None:
    window.colour_scheme("dark")
    shown(window, page)
    window.paper(True)
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert overlaps(window, BLOCKS) == []
    width = "return [...document.querySelectorAll('.chart .main-svg, #rows, .tiles, pre')]"
    assert all(0 < each <= 720 for each in window.run(f"{width}.map(e => e.clientWidth || 1)"))
    assert window.run("return document.getElementById('rows').getBoundingClientRect().right") <= 720
    assert window.run("return getComputedStyle(document.getElementById('controls')).display") == (
        "none"
    )
    window.screenshot(pictures / "report-paper.png")
    background = "return getComputedStyle(document.body).backgroundColor"
    assert window.run(background) == "rgb(255, 255, 255)"
    window.run("dispatchEvent(new Event('afterprint'))")
    window.paper(False)
    assert window.run(background) == "rgb(18, 22, 28)"
    window.colour_scheme("light")
    assert window.console() == []


def test_a_chart_is_told_to_who_cannot_see_it_and_controls_have_names(
    window: Browser, page: Path
) -> None:
    shown(window, page)
    told = window.run(
        "return [...document.querySelectorAll('.chart[role=img]')].map(c => c.ariaLabel)"
    )
    assert all(told)
    assert "k = 4 1.00 ms 99.2%" in told[0]
    unnamed = window.run(
        "return [...document.querySelectorAll('input, select, button')].filter(e =>"
        " !(e.labels?.length || e.textContent.trim() || e.ariaLabel)).map(e => e.id)"
    )
    assert unnamed == []


def test_a_row_is_told_where_the_pointer_rests(window: Browser, page: Path) -> None:
    shown(window, page)
    window.run(
        "const g = document.getElementById('deploy');"
        "const n = g.data.findIndex(t => t.mode === 'markers');"
        "Plotly.Fx.hover(g, [{curveNumber: n, pointNumber: 0}])"
    )
    told = window.wait("return document.querySelector('#deploy .hoverlayer').textContent")
    assert "k = " in told
    assert "ms" in told


def test_bars_and_marks_lie_within_their_charts(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    disturbed = summarise([[1.0], [1.1], [1.0], [1.0], [90.0]])
    wide = Accuracy(
        0.7,
        0.78,
        40,
        top1_interval=Interval(0.45, 0.99),
        retention_interval=Interval(0.5, 1.1),
    )
    rows = (*results.rows, row(1, 1.0, None, accuracy=wide, latency_ms=disturbed))
    write_report(replace(results, rows=rows), tmp_path / "report.html")
    outside = (
        "const areas = [...document.querySelectorAll(`#${arguments[0]} .nsewdrag`)]"
        ".map(a => a.getBoundingClientRect());"
        "return [...document.querySelectorAll(`#${arguments[0]} ${arguments[1]}`)]"
        ".map(each => each.getBoundingClientRect())"
        ".filter(r => !areas.some(a => r.top >= a.top - 1 && r.bottom <= a.bottom + 1"
        " && r.left >= a.left - 1 && r.right <= a.right + 1)).length"
    )
    for width in WIDTHS:
        shown(window, tmp_path / "report.html", width, "#log=0")
        for chart in ("deploy", "overk"):
            assert window.run(outside, chart, ".scatterlayer .point") == 0, chart
            assert window.run(outside, chart, "path.yerror") == 0, chart
    cut = "return document.getElementById('overk').data.filter(t => t.name === 'cut')"
    assert len(window.run(cut)) == 1  # the arrow that ends the long bar
    assert window.console() == []


def test_a_chart_with_nothing_in_it_is_hidden_and_a_sentence_says_why(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    def opened(*rows: Row) -> None:
        write_report(replace(results, rows=rows), tmp_path / "report.html")
        shown(window, tmp_path / "report.html")

    opened(*results.rows)
    assert text(window, "empty") == ""
    assert text(window, "routing") == (
        "Routing: every row selected the same experts as PyTorch for every sample."
    )
    everything = (results.rows[0], row(16, 1.0, 1.0, routing=None))
    opened(*everything)
    assert "every row here computes all its experts" in text(window, "routing")
    opened(*everything, row(4, 1.0, None, routing=None))
    assert text(window, "routing").endswith("ONNX Runtime does not show which experts it chose.")
    failed = replace(row(4, 1.0, None), accuracy=None, latency_ms=None, error="no memory")
    opened(results.rows[0], failed)
    assert text(window, "empty") == ""
    opened(*(replace(each, accuracy=None) for each in results.rows))
    assert text(window, "empty") == "Accuracy is not known: the inputs had no labels."
    width = "return document.getElementById(arguments[0]).getBoundingClientRect().width"
    assert window.run(width, "deploy-figure") == 0
    assert window.run(width, "throughput-figure") == 0  # one batch size
    assert window.run(width, "percentiles") > 900  # has its neighbour's room
    opened()
    assert text(window, "summary") == "Nothing could be measured within these filters."
    assert window.console() == []


def test_text_from_a_results_file_is_text(
    window: Browser, results: Results, tmp_path: Path
) -> None:
    evil = "</script><img src=x onerror=alert(1)><b>%{x}"
    rows = tuple(
        replace(r, model=evil, lowering=evil, error=r.error and evil) for r in results.rows
    )
    now = replace(results, models=(ModelInfo(evil),), rows=rows, command=evil)
    write_report(now, tmp_path / "report.html", compare(now, now))
    shown(window, tmp_path / "report.html")
    assert window.run("return document.querySelectorAll('img, main b').length") == 0
    assert evil in text(window, "rows")
    assert evil in text(window, "method")
    assert window.console() == []


def of_plugins(results: Results) -> Results:
    """The same with what a search and services have found."""
    point = {
        **{"ms": 1.0, "predicted_ms": 1.0, "bytes": 10, "kept": 0.99, "layers": []},
        **{"searched": {"low": 0.98, "high": 1.0}, "text": "8 of 16 experts", "front": True},
    }
    search = {
        **{"model": "digits", "metric": "accuracy", "batch": 1, "searching": 9, "confirming": 9},
        **{"seconds": 9.0, "keep": 0.97, "max_latency_ms": None, "max_bytes": None},
        **{"recipe": "recipe.yaml", "points": [point, point | {"ms": 2.0, "kept": 1.0}]},
    }
    offered = {"offered": 9.0, "rate": 9.0, "p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0}
    service = {
        **{"model": "digits", "engine": "onnxruntime", "provider": "cpu", "precision": "fp32"},
        **{"lowering": "grouped", "experts": 16, "scenario": "server", "max_batch": 8},
        **{"instances": 1, "threads": 1, "bound_ms": 20.0, "valid": True, "p50_ms": 1.0},
        **{"p99_ms": 3.0, "offered": [offered, offered | {"offered": 20.0}]},
    }
    services = [service | {"k": k, "rate": rate} for k, rate in ((16, 75.0), (4, 310.0))]
    served = {"services": services, "duration_s": 9.0, "max_delay_ms": 0.0, "library": 8}
    return replace(results, analyses={"tuning": search, "service": served})


OF_PLUGINS = ("search-chart", "service-rate", "service-latency")


def test_what_plugins_found_is_drawn_on_cards_of_their_own(
    window: Browser, results: Results, tmp_path: Path
) -> None:
    write_report(of_plugins(results), tmp_path / "all.html")
    shown(window, tmp_path / "all.html")
    for chart in OF_PLUGINS:
        assert points(window, chart) > 1, chart
    assert window.console() == []


def test_a_page_without_plugins_is_drawn_and_names_what_it_leaves_out(
    window: Browser, results: Results, tmp_path: Path
) -> None:
    write(of_plugins(results), tmp_path / "results.json")
    words = (sys.executable, "-m", "moexport", "report", tmp_path / "results.json")
    done = subprocess.run(
        [*words, "-o", tmp_path / "core.html"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MOEXPORT_PLUGINS": "off"},
    )
    assert done.returncode == 0, done.stderr
    shown(window, tmp_path / "core.html")
    assert points(window, "deploy") > 1
    assert "Left out: tuning, service." in str(window.run("return document.body.textContent"))
    for chart in OF_PLUGINS:
        assert window.run("return document.getElementById(arguments[0])", chart) is None
    assert window.console() == []
