"""`report.html`: one self-contained page about a results file.

The page fetches nothing: plotly.js, style, script and data are in it. Its parts lie in `assets/`;
placeholders are `%%NAME%%`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from ...common.writing import write_text
from ..analyses.findings import studies_in
from ..measure.disturbance import disturbance
from ..results import Results, Row
from .compare import Comparison
from .report_method import environment_list, method
from .section import analyses_section
from .tables import comparison_section, parity_table, rows_table
from .views import (
    KEPT,
    Panel,
    caveat,
    choice,
    empty_charts,
    front,
    limit_lines,
    line_name,
    milliseconds,
    panels,
    percent,
    short_name,
    summary,
    times,
)

RULE = (
    f"The sentence is about the fastest row that keeps at least {KEPT:.0%} of the untouched "
    "PyTorch model's accuracy or perplexity; where none does, about the one that keeps most. "
    "Without labels it is about the fastest."
)
CHART_NOTE = (
    "Latency bars reach from the fastest to the slowest round (medians); differences smaller than "
    "the bars are no difference. Accuracy bars are 95% confidence intervals. The dashed line is "
    "the untouched PyTorch model on the CPU with all experts, the band around it its rounds. An "
    "arrow at the upper edge ends a bar that goes on: one round was much slower. The thin line is "
    "the least time that this machine needs for the work, by its own bandwidth and matmul rate."
)
PARETO_NOTE = (
    "What speed costs: every row by its latency and by what it keeps of the untouched model; those "
    "on the dotted line are beaten by none in both."
)
ROUTING_NOTE = (
    "Routing agreement: against PyTorch with the same k, the share of samples for which every "
    "layer chose the same experts."
)
PARTS_NOTE = (
    "By ONNX Runtime's profile of every node, on the same inputs; its clock makes small nodes look "
    "slower than they are, so compare the parts with each other and take the latency from above. "
    "“Between nodes” is what the runtime spends outside of them."
)
MEMORY_NOTE = (
    "The largest resident set of a process that opens this engine alone and runs batches of this "
    "size, mapped weights included (10⁶ bytes); on a GPU the host's part of it. “Runtime alone” is "
    "what the process held before it opened the model."
)
ROWS_NOTE = (
    "A click on a heading sorts. Grey “≈” speeds are within the spread: no difference. Rows on a "
    "GPU are compared with PyTorch there, where it was measured. “× limit” "
    "is the time over the least time that this machine needs; rest the pointer on it for the work."
)
UNTOUCHED = "PyTorch, untouched"


def write_report(results: Results, path: Path, comparison: Comparison | None = None) -> None:
    """Writes the page, whole or not at all."""
    write_text(html(results, comparison), path)


def html(results: Results, comparison: Comparison | None = None) -> str:
    """Returns the page: summary, charts, every row, environment and method.

    With a `comparison` it also says what changed since an earlier file.
    """
    shown = panels(results)
    names = [model.name for model in results.models]
    parts = {
        "TITLE": escape(f"moexport benchmark: {', '.join(names)}"),
        "STYLE": _asset("report.css"),
        "CREATED": escape(results.created.replace("T", " ").replace("+00:00", " UTC")),
        "DISTURBED": escape(disturbance(results)),
        "EMPTY": escape(" ".join(empty_charts(shown[0]).values()) if shown else ""),
        "SUMMARY": escape(summary(shown[0]) if shown else "No rows were measured."),
        "CAVEAT": escape(caveat(shown[0]) if shown else ""),
        "RULE": escape(RULE),
        "TILES": tiles(shown[0]) if shown else "",
        "COMPARISON": comparison_section(comparison),
        "CHART_NOTE": escape(CHART_NOTE),
        "PARETO_NOTE": escape(PARETO_NOTE),
        "ROUTING_NOTE": escape(ROUTING_NOTE),
        "PARTS_NOTE": escape(PARTS_NOTE),
        "MEMORY_NOTE": escape(MEMORY_NOTE),
        "ANALYSES": analyses_section(studies_in(results.analyses)),
        "ROUTING": parity_table(shown),
        "ROWS": rows_table(shown, results),
        "ROWS_NOTE": escape(ROWS_NOTE),
        "ENVIRONMENT": environment_list(results),
        "METHOD": method(results),
        "DATA": embedded_json([payload(panel) for panel in shown if panel.ks]),
        "PLOTLY": get_plotlyjs(),
        "SCRIPT": _asset("report.js"),
    }
    # Cut once, so that text inside one part is never taken for a placeholder.
    pieces = _asset("report.html").split("%%")
    return "".join(parts[p] if index % 2 else p for index, p in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def embedded_json(value: Any) -> str:
    """Returns JSON that cannot end the script element it stands in."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def payload(panel: Panel) -> dict[str, Any]:
    """Returns what the page's script draws for one model and batch size."""
    reference = panel.reference
    best = front(panel)
    return {
        "model": panel.model,
        "batch": panel.batch,
        "experts": panel.experts,
        "ks": list(panel.ks),
        "top": panel.top_ms,
        "quality": panel.quality,
        "summary": summary(panel),
        "caveat": caveat(panel),
        "tiles": tiles(panel),
        "empty": empty_charts(panel),
        "reference": None if reference is None else _point(panel, reference, UNTOUCHED, best),
        "limits": [
            {"name": line.name, "points": [{"k": k, "ms": ms} for k, ms in line.points]}
            for line in limit_lines(panel)
        ],
        "lines": [
            {
                "name": line.name,
                "short": short_name(line.rows[0]),
                "look": line.look,
                "points": [_point(panel, row, line.name, best) for row in line.rows],
            }
            for line in panel.lines
        ],
    }


def _point(panel: Panel, row: Row, name: str, best: Sequence[Row]) -> dict[str, Any]:
    return {
        "name": name,
        "k": row.k,
        "kept": row.kept,
        "front": row in best,
        "memory": row.peak_memory_mb,
        "runtime": row.runtime_memory_mb,
        "parts": [{"layer": p.layer, "part": p.part, "ms": p.ms} for p in row.parts],
        **_latency(panel, row),
        **_quality(row),
        **_agreement(row),
        "row": "<br>".join(_lines(panel, row, name)),
    }


def _latency(panel: Panel, row: Row) -> dict[str, Any]:
    latency = row.latency_ms
    if latency is None:
        return {"median": None, "above": 0, "below": 0, "cut": False, "latency": ""}
    ratio = panel.speedup(row)
    speed = "" if ratio is None or panel.base(row) is row else f", {times(ratio)}"
    device = "" if row.device_ms is None else f", on the GPU {milliseconds(row.device_ms.median)}"
    return {
        "median": latency.median,
        "above": max(0.0, max(latency.rounds) - latency.median),
        "below": max(0.0, latency.median - min(latency.rounds)),
        "cut": panel.bar(latency).cut,
        "latency": f"{milliseconds(latency.median)} ms{speed} (p90 {milliseconds(latency.p90)}"
        f"{device})",
    }


def _quality(row: Row) -> dict[str, Any]:
    accuracy, perplexity = row.accuracy, row.perplexity
    if accuracy is not None:
        value, interval = accuracy.top1, accuracy.top1_interval
        text = f"{value:.2%}"
        if interval is not None:
            text += f" ({interval.low:.1%} to {interval.high:.1%})"
    elif perplexity is not None:
        value, interval = perplexity.value, perplexity.interval
        text = f"{value:.4g}"
        if interval is not None:
            text += f" ({interval.low:.4g} to {interval.high:.4g})"
    else:
        return {"quality": None, "quality_above": 0, "quality_below": 0, "accuracy": ""}
    kept = "" if row.kept is None else f", {row.kept:.1%} kept"
    return {
        "quality": value,
        "quality_above": 0 if interval is None else interval.high - value,
        "quality_below": 0 if interval is None else value - interval.low,
        "accuracy": text + kept,
    }


def _agreement(row: Row) -> dict[str, Any]:
    if row.routing is None:
        return {"exact": None, "agreement": ""}
    text = f"{row.routing.exact:.2%} of samples, Jaccard {row.routing.jaccard:.4f}"
    return {"exact": row.routing.exact, "agreement": text}


def _lines(panel: Panel, row: Row, name: str) -> list[str]:
    """A row in a few lines, for where the pointer rests on it."""
    lines = [f"<b>{escape(name)}</b>", f"k = {row.k} of {row.experts}, batch {row.batch}"]
    latency = _latency(panel, row)["latency"]
    quality = _quality(row)["accuracy"]
    lines += [str(text) for text in (latency, quality) if text]
    if row.routing is not None:
        lines.append(f"same experts: {row.routing.exact:.1%}")
    if row.peak_memory_mb is not None:
        lines.append(f"peak memory: {row.peak_memory_mb:,.0f} MB")
    return lines


def tiles(panel: Panel) -> str:
    """Returns the numbers of the row that the summary is about, as HTML."""
    row = choice(panel)
    if row is None:
        return ""
    ratio = panel.speedup(row)
    about = "" if panel.faster_or_slower(row) else "≈ "
    reference = panel.reference
    found = [
        ("Experts computed", f"{row.k} of {row.experts}", line_name(row)),
        (
            "Speed",
            "–" if ratio is None else about + times(ratio),
            f"against the untouched PyTorch model{panel.place(row)}",
        ),
        (
            "Perplexity kept" if row.perplexity is not None else "Accuracy kept",
            "–" if row.kept is None else percent(row.kept),
            _kept_detail(row),
        ),
        (
            "Same experts chosen",
            "–" if row.routing is None else percent(row.routing.exact),
            "of samples, as in PyTorch" if row.routing else _why_no_routing(row),
        ),
    ]
    if row.peak_memory_mb is not None:
        before = None if reference is None else reference.peak_memory_mb
        found.append(
            (
                "Peak memory",
                f"{row.peak_memory_mb:,.0f} MB",
                "of a process" if before is None else f"PyTorch: {before:,.0f} MB",
            )
        )
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for name, value, detail in found
    )


def _kept_detail(row: Row) -> str:
    interval = row.kept_interval
    if interval is not None:
        return f"{percent(interval.low)} to {percent(interval.high)} (95%)"
    if row.perplexity is not None:
        return f"perplexity {row.perplexity.value:.4g}"
    return "no labels" if row.accuracy is None else f"top-1 {row.accuracy.top1:.2%}"


def _why_no_routing(row: Row) -> str:
    return "all are computed" if row.k == row.experts else "not measured"
