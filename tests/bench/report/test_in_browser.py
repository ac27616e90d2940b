"""The report as a reader sees it, in headless Chromium: answer, charts, filters, paper, widths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from moexport.common.latency import Latency, summarise
from moexport.tests.bench.conftest import accuracy
from moexport.tests.bench.report.browser import Browser, browser, missing

RowMaker = Callable[..., Row]
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
CHARTS = ("deploy", "overk", "overk-kept", "throughput", "percentiles", "parts", "layers", "memory")

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
    marks = f"#{chart} .chart_points_marks path, #{chart} .mark-rect.chart_bars_marks path"
    return int(window.run("return document.querySelectorAll(arguments[0]).length", marks))


BLOCKS = "main p, main h1, main h2, main figcaption, .chart, table, .tiles"
UNFOLDED = (
    "return [...document.querySelectorAll('details:not([hidden]) .chart')]"
    ".every(each => !each.view || each.querySelector('svg').clientWidth === each.clientWidth)"
)
DRAWN = "return document.documentElement.dataset.drawnMs"


def shown(window: Browser, page: Path, width: str = "desktop", state: str = "") -> Browser:
    """Opens a page anew with a state in its address, and waits until it is drawn."""
    window.resize(*WIDTHS[width])
    window.open(page, state)
    assert window.wait(DRAWN)
    window.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert window.wait(UNFOLDED)
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


def ring(window: Browser, chart: str, x: str, y: str) -> list[list[float]]:
    """Where a chart marks the answer: x and y of every ring."""
    found: list[list[float]] = window.run(
        "return [...document.querySelectorAll(`#${arguments[0]} .chart_ring_marks path`)]"
        ".map(ring => ring.__data__.datum).map(row => [row[arguments[1]], row[arguments[2]]])",
        *(chart, x, y),
    )
    return found


def drawn(window: Browser, chart: str, keep: str) -> list[dict[str, Any]]:
    """The rows of a chart for which an expression of JavaScript holds."""
    found: list[dict[str, Any]] = window.run(
        "return document.getElementById(arguments[0]).view.data('rows')"
        f".filter(row => {keep}).map(row => ({{...row}}))",
        chart,
    )
    return found


def domain(window: Browser, chart: str, axis: str) -> list[float]:
    """Where an axis of a chart begins and ends."""
    scale = "return document.getElementById(arguments[0]).view.scale(`chart_${arguments[1]}`)"
    ends: list[float] = window.run(f"{scale}.domain()", chart, axis)
    return ends


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
    for chart in ("deploy", "overk", "overk-kept", "throughput"):
        assert overlaps(window, f"#{chart} text:not([opacity='0'])") == [], chart
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
    assert ring(window, "deploy", "ms", "kept") == [[1.0, 0.992]]
    assert ring(window, "overk", "x", "ms") == [[4, 1.0]]
    assert ring(window, "overk-kept", "x", "kept") == [[4, 0.992]]
    assert "--k 4 " in text(window, "command")
    choose(window, "at", "75", "input")
    assert text(window, "summary").startswith("Deploy k = 2 of 16 in FP32: 4.0 times the speed")
    assert ring(window, "deploy", "ms", "kept") == [[0.5, 0.8]]
    assert ring(window, "overk", "x", "ms") == [[2, 0.5]]
    assert ring(window, "overk-kept", "x", "kept") == [[2, 0.8]]
    assert "--k 2 " in text(window, "command")
    choose(window, "at", "100.5", "input")
    assert text(window, "summary").startswith("No row keeps 100.5%. Closest: k = 16 of 16")
    choose(window, "goal", "latency")
    choose(window, "at", "0.7", "input")
    assert text(window, "summary").startswith("Deploy k = 2 of 16")
    choose(window, "at", "0.1", "input")
    told = text(window, "summary")
    assert told.startswith("No row takes 0.1 ms or less. Closest: k = 2 of 16")
    assert told.endswith("in 0.500 ms.")
    choose(window, "slider", "1000", "input")
    assert text(window, "summary").startswith("Deploy k = 16 of 16 (all experts)")
    assert window.console() == []


def test_a_chart_joins_what_nothing_beats(window: Browser, page: Path) -> None:
    shown(window, page)
    front = sorted((row["ms"], row["kept"]) for row in drawn(window, "deploy", "row.front"))
    assert front == [(1.0, 0.992), (2.0, 1.0)]  # k = 2 keeps 80% and is no choice
    lines = "return document.querySelectorAll('#deploy .chart_front_marks path').length"
    assert window.run(lines) == 1
    kind = "return document.getElementById('deploy').view.scale('chart_x').type"
    assert window.run(kind) == "log"


def test_the_chart_of_the_decision_is_zoomed_to_what_can_be_deployed(
    window: Browser, page: Path
) -> None:
    shown(window, page)
    (left, right), (low, high) = domain(window, "deploy", "x"), domain(window, "deploy", "y")
    assert 0.9 < left < 1.0 and 3.1 < right < 3.5
    assert 0.98 < low < 0.99 and 1.0 < high < 1.01
    assert text(window, "deploy-away") == "Outside the chart: grouped, k = 2 (0.500 ms, 80%)."
    for axis in "xy":
        bars = f"return document.querySelectorAll('#deploy .chart_bars_{axis}_marks line').length"
        assert window.run(bars) >= 5
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
        *("k", "Median msmean ± std", "vs all experts", "Kept", "Accuracy", "p99 ms", "Inputs/s"),
        *("vs PyTorch", "Memory"),
    ]
    assert [line[0] for line in lines] == ["PyTorch", "16 of 16", "4 of 16"]
    assert lines[2] == [
        *("4 of 16", "1.001.00 ± 0.01", "2.0×", "99.2%≥ 99.1%", "89.3%85.5% to 92%"),
        *("1.01", "1,000", "3.1×", "64 MB"),
    ]
    # What is the same for every k is said once.
    assert text(window, "decision-same") == (
        "The same for every k: on disk 1.3 MB; runs in ONNX Runtime, grouped."
    )
    assert text(window, "decision-far") == ""


def test_no_cell_of_the_decision_is_empty(window: Browser, page: Path) -> None:
    shown(window, page)
    assert all(cell.strip() for line in cells(window, "decision") for cell in line)


def test_a_phone_shows_what_runs_beside_latency(window: Browser, page: Path) -> None:
    shown(window, page, "phone")
    ends = window.run(
        "return [...document.querySelectorAll('#rows thead th')].slice(0, 3)"
        ".map(each => [each.textContent, each.getBoundingClientRect().right])"
    )
    assert [name for name, _ in ends] == ["k", "Median ms", "Engine"]
    assert all(right <= WIDTHS["phone"][0] for _, right in ends)


TICKS = (
    "return [...document.querySelectorAll(`#${arguments[0]} .role-axis`)]"
    ".map(axis => [...axis.querySelectorAll('.role-axis-label text')]).filter(all => all.length)"
    "[arguments[1]].filter(each => each.getAttribute('opacity') !== '0')"
    ".map(each => each.textContent)"
)


@pytest.mark.parametrize("least_ms", [0.0471, 0.93, 180.0])
@pytest.mark.parametrize("factor", [1.04, 1.5, 3.0, 40.0])
def test_axes_have_ticks_that_differ(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path, least_ms: float, factor: float
) -> None:
    wide = replace(accuracy(1.0), retention_interval=Interval(0.975, 1.016))
    rows = (
        results.rows[0],
        row(16, least_ms * factor, 1.0, accuracy=wide),
        row(4, least_ms, 0.99, accuracy=wide),
    )
    write_report(replace(results, rows=rows), tmp_path / "report.html")
    shown(window, tmp_path / "report.html")
    for chart in ("deploy", "overk", "overk-kept", "percentiles"):
        for axis in (0, 1):
            ticks = window.run(TICKS, chart, axis)
            assert len(set(ticks)) == len(ticks), (chart, axis, ticks)
            least = {"overk": 2, "overk-kept": 2, "percentiles": 1}.get(chart, 3)
            assert len(ticks) >= least, (chart, axis, ticks)
        labels = f"#{chart} .role-axis-label text:not([opacity='0'])"
        assert overlaps(window, labels) == [], chart


def test_what_lies_outside_of_the_chart_is_listed_in_short(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    far = [row(k, 0.1 * k, 0.5) for k in (1, 2, 3, 5, 6, 7)]
    write_report(replace(results, rows=(*results.rows[:2], *far)), tmp_path / "report.html")
    shown(window, tmp_path / "report.html")
    assert text(window, "deploy-away") == (
        "Outside the chart: grouped, k = 1 (0.100 ms, 50%); grouped, k = 2 (0.200 ms, 50%); "
        "grouped, k = 3 (0.300 ms, 50%); and 4 others in the table of rows."
    )


def test_names_of_points_do_not_lie_on_their_bars(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    wide = replace(accuracy(1.0), retention_interval=Interval(0.97, 1.02))
    rows = [results.rows[0], row(16, 2.0, 1.0, accuracy=wide)]
    rows += [
        row(8, ms, 0.99, accuracy=replace(wide, retention=kept), precision=name)
        for ms, kept, name in ((1.0, 0.992, "fp32"), (1.02, 0.99, "int8"))
    ]
    write_report(replace(results, rows=tuple(rows)), tmp_path / "report.html")
    shown(window, tmp_path / "report.html")
    on_bars = window.run(
        "const boxes = name => [...document.querySelectorAll(`#deploy ${name}`)]"
        ".map(each => each.getBoundingClientRect());"
        "return boxes('.chart_labels_marks text').filter(r => boxes('.chart_bars_y_marks line')"
        ".some(s =>"
        " r.left + 1 < s.right && s.left < r.right - 1 && r.top + 3 < s.bottom"
        " && s.top < r.bottom - 3)).length"
    )
    named = "return [...document.querySelectorAll('#deploy .chart_labels_marks text')]"
    named += ".filter(each => each.getAttribute('opacity') !== '0').length"
    assert window.run(named) == 3
    assert on_bars == 0


def test_the_page_names_its_model_and_machine(
    window: Browser, results: Results, tmp_path: Path
) -> None:
    other = [replace(each, model="other") for each in results.rows]
    machine = results.environment | {"cpu": {"model": "A CPU"}, "threads": 2}
    both = replace(results, rows=(*results.rows, *other), environment=machine)
    write_report(both, tmp_path / "report.html")
    shown(window, tmp_path / "report.html")
    head = "return document.querySelector('.eyebrow').textContent"
    assert "digits" in window.run(head)
    assert "A CPU, 2 threads" in window.run(head)
    choose(window, "model", "other")
    assert text(window, "subject") == "other"
    # The answers of all models stand before the charts, and are not folded.
    place = "return document.getElementById(arguments[0]).getBoundingClientRect().top"
    assert window.run(place, "models") < window.run(place, "charts")
    window.open(tmp_path / "report.html")
    assert window.wait(DRAWN)
    assert window.run("return document.getElementById('models').open")


def test_a_phone_shows_latency_gain_and_what_is_kept(window: Browser, page: Path) -> None:
    shown(window, page, "phone")
    ends = window.run(
        "return [...document.querySelectorAll('#decision thead th')].slice(0, 4)"
        ".map(each => [each.textContent, each.getBoundingClientRect().right])"
    )
    assert [name for name, _ in ends] == ["k", "Median msmean ± std", "vs all experts", "Kept"]
    assert all(right <= WIDTHS["phone"][0] for _, right in ends)


def test_details_are_folded_until_they_are_asked_for_or_printed(
    window: Browser, page: Path
) -> None:
    window.resize(*WIDTHS["desktop"])
    window.open(page, "")
    assert window.wait(DRAWN)
    folded = "return [...document.querySelectorAll('details:not([open])')].map(each => each.id)"
    closed = window.run(folded)
    assert {"parts-card", "memory-card", "parity", "method-card"} <= {*closed}
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert window.run(folded) == []
    window.run("dispatchEvent(new Event('afterprint'))")
    assert window.run(folded) == closed


def test_the_limits_lie_inside_the_chart_and_the_answer_has_its_reason(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    rows = (
        results.rows[0],
        *(row(k, ms, 1.0, limit_ms=ms / 40) for k, ms in ((16, 2.0), (4, 0.2), (2, 0.1))),
    )
    write_report(replace(results, rows=rows), tmp_path / "report.html")
    shown(window, tmp_path / "report.html")
    low, _ = domain(window, "overk", "y")
    least = min(row["limit"] for row in drawn(window, "overk", "row.limit"))
    assert low <= least == pytest.approx(0.1 / 40)
    lines = "return document.querySelectorAll('#overk .chart_limits_marks path').length"
    assert window.run(lines) == 1
    assert "Why: of 3 rows, 3 are shown to keep 99%" in text(window, "detail")


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
    assert "Why" not in text(window, "detail")


def test_one_row_has_a_histogram_of_its_calls(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    calls = [1.0] * 50 + [1.1] * 30 + [1.3] * 5 + [4.0]
    rows = (*results.rows[:2], row(4, 1.0, 1.0, latency_ms=summarise([calls] * 5)))
    write_report(replace(results, rows=rows), tmp_path / "report.html")
    shown(window, tmp_path / "report.html")
    bins = drawn(window, "percentiles", "row.calls")
    assert points(window, "percentiles") == len(bins) > 2
    assert sum(each["calls"] for each in bins) == 5 * len(calls)
    marks = "return [...document.querySelectorAll('#percentiles .chart_labels_marks text')]"
    assert window.run(f"{marks}.map(a => a.textContent)") == ["median 1.00", "p99 3.22"]


def test_other_runs_are_drawn_beside(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    faster = [row(16, 1.8, 1.0), row(4, 0.7, 0.994)]
    other = replace(results, rows=(results.rows[0], *faster), environment={"threads": 4})
    write_views(results, tmp_path / "report.html", runs=[NamedRun("laptop", other)])
    shown(window, tmp_path / "report.html")
    beside = drawn(window, "deploy", "row.run === 'laptop' && row.front")
    assert sorted((row["ms"], row["kept"]) for row in beside) == [(0.7, 0.994), (1.8, 1.0)]
    lines = "return document.querySelectorAll('#deploy .chart_front_marks path').length"
    assert window.run(lines) == 2
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
    assert ring(window, "deploy", "ms", "kept") == [[0.5, 0.8]]
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
    width = "return [...document.querySelectorAll('.chart svg, #rows, .tiles, pre')]"
    assert all(0 < each <= 720 for each in window.run(f"{width}.map(e => e.clientWidth || 1)"))
    assert window.run("return document.getElementById('rows').getBoundingClientRect().right") <= 720
    assert window.run("return getComputedStyle(document.getElementById('controls')).display") == (
        "none"
    )
    window.screenshot(pictures / "report-paper.png")
    heights = "return ['deploy', 'overk'].map(each => document.getElementById(each))"
    beyond = f"{heights}.map(e => e.querySelector('svg').clientHeight - e.clientHeight)"
    assert window.run(beyond) == [0, 0]
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
        "const mark = document.querySelector('#deploy .chart_points_marks path');"
        "const box = mark.getBoundingClientRect(), place = { bubbles: true,"
        " clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };"
        "mark.dispatchEvent(new PointerEvent('pointerover', place));"
        "mark.dispatchEvent(new PointerEvent('pointermove', place));"
    )
    told = window.wait("return document.querySelector('.hint:not([hidden])')?.textContent")
    assert "k = " in told
    assert "ms" in told


def test_bars_and_marks_lie_within_their_charts(
    window: Browser, results: Results, row: RowMaker, tmp_path: Path
) -> None:
    disturbed = summarise([[1.0], [1.1], [1.0], [1.0], [90.0]])
    wide = Accuracy(
        0.7, 0.78, 40, top1_interval=Interval(0.45, 0.99), retention_interval=Interval(0.5, 1.1)
    )
    rows = (*results.rows, row(1, 1.0, None, accuracy=wide, latency_ms=disturbed))
    write_report(replace(results, rows=rows), tmp_path / "report.html")
    outside = (
        "const areas = [...document.querySelectorAll(`#${arguments[0]} .root > g > .background`)]"
        ".map(a => a.getBoundingClientRect());"
        "return [...document.querySelectorAll(`#${arguments[0]} ${arguments[1]}`)]"
        ".map(each => each.getBoundingClientRect())"
        ".filter(r => !areas.some(a => r.top >= a.top - 1 && r.bottom <= a.bottom + 1"
        " && r.left >= a.left - 1 && r.right <= a.right + 1)).length"
    )
    for width in WIDTHS:
        shown(window, tmp_path / "report.html", width, "#log=0")
        for chart in ("deploy", "overk", "overk-kept"):
            assert points(window, chart) > 1, chart
            assert window.run(outside, chart, ".chart_points_marks path") == 0, chart
            assert window.run(outside, chart, "[class*=chart_bars] line") == 0, chart
    cut = "return document.querySelectorAll('#overk .chart_cut_marks path').length"
    assert window.run(cut) == 1  # the arrow that ends the long bar
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


def test_what_is_served_is_told_at_its_chart_and_each_line_has_its_k(
    window: Browser, results: Results, tmp_path: Path
) -> None:
    found = of_plugins(results)
    service = found.analyses["service"]
    reason = "no rate meets p99 ≤ 20 ms: the nearest p99 is 42 ms"
    lost = service["services"][0] | {
        "k": 2,
        "rate": None,
        "valid": False,
        "reason": reason,
        "offered": [],
    }
    service = service | {"services": [*service["services"], lost]}
    write_report(
        replace(found, analyses=found.analyses | {"service": service}), tmp_path / "all.html"
    )
    for width in WIDTHS:
        shown(window, tmp_path / "all.html", width)
        assert "serves 310 requests/s at p99 ≤ 20 ms" in text(window, "service-answer")
        # Both lines end in the same point.
        words = "#service-latency .chart_labels_marks text:not([opacity='0'])"
        ticks = "#service-latency .role-axis-label text:not([opacity='0'])"
        assert overlaps(window, f"{words}, {ticks}") == []
        read = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        read += ".filter(Boolean).sort()"
        assert window.run(read, words) == ["k = 16", "k = 4"]
        outside = (
            "const area = document.querySelector('#service-latency .root > g > .background')"
            ".getBoundingClientRect();"
            "return [...document.querySelectorAll(arguments[0])]"
            ".map(e => e.getBoundingClientRect())"
            ".filter(r => r.right > area.right + 1 || r.left < area.left).length"
        )
        assert window.run(outside, words) == 0
    # Reasons are broken into lines; a table stands below the chart that draws it.
    shown(window, tmp_path / "all.html")
    frames = "return [...document.querySelectorAll('#service .scroll')]"
    cut = f"{frames}.map(f => f.scrollWidth - f.clientWidth)"
    assert max(window.run(cut)) <= 0
    for section, chart in (("service", "service-card"), ("search", "search-card")):
        follows = "return document.getElementById(arguments[0]).nextElementSibling.id"
        assert window.run(follows, chart) == section


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
