"""`report.html`: one self-contained page about a results file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from .page import PAGE, SCRIPT, STYLE
from .results import Results, Row
from .views import KEPT, Panel, caveat, choice, line_name, panels, percent, summary, times

RULE = (
    f"The sentence is about the fastest row that keeps at least {KEPT:.0%} of the untouched "
    "PyTorch model's accuracy; where none does, about the one that keeps most."
)
CHART_NOTE = (
    "Bars reach from the fastest to the slowest round (medians). The dashed line is the untouched "
    "PyTorch model with all experts. Differences smaller than the bars are no difference. A bar "
    "that leaves the chart belongs to a much slower round; the table has its spread."
)
ROUTING_NOTE = (
    "Against PyTorch with the same k: the share of samples for which every layer chose the same "
    "experts, the mean Jaccard index of the chosen sets, and the outputs. There is nothing to "
    "compare where all experts are kept, and in PyTorch's own rows."
)
UNTOUCHED = "PyTorch, untouched"
DASH = '<span class="quiet">–</span>'


def write_report(results: Results, path: Path) -> None:
    """Writes the page, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(html(results), encoding="utf-8")
    partial.replace(path)


def html(results: Results) -> str:
    """Returns the page: summary, charts, agreement, every row, environment and method."""
    shown = panels(results)
    names = [model.name for model in results.models]
    parts = {
        "TITLE": escape(f"moexport benchmark: {', '.join(names)}"),
        "STYLE": STYLE,
        "CREATED": escape(results.created.replace("T", " ").replace("+00:00", " UTC")),
        "SUMMARY": escape(summary(shown[0]) if shown else "No rows were measured."),
        "CAVEAT": escape(caveat(shown[0]) if shown else ""),
        "RULE": escape(RULE),
        "TILES": tiles(shown[0]) if shown else "",
        "CHART_NOTE": escape(CHART_NOTE),
        "ROUTING": routing_table(shown),
        "ROWS": rows_table(shown, results),
        "ENVIRONMENT": environment_list(results),
        "METHOD": method(results),
        "DATA": embedded_json([payload(panel) for panel in shown if panel.ks]),
        "PLOTLY": get_plotlyjs(),
        "SCRIPT": SCRIPT,
    }
    # Cut once, so that text inside one part is never taken for a placeholder.
    pieces = PAGE.split("%%")
    return "".join(parts[p] if index % 2 else p for index, p in enumerate(pieces))


def embedded_json(value: Any) -> str:
    """Returns JSON that cannot end the script element it stands in."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def payload(panel: Panel) -> dict[str, Any]:
    """Returns what the page's script draws for one model and batch size."""
    reference = panel.reference
    return {
        "model": panel.model,
        "batch": panel.batch,
        "experts": panel.experts,
        "ks": list(panel.ks),
        "top": panel.top_ms,
        "summary": summary(panel),
        "caveat": caveat(panel),
        "tiles": tiles(panel),
        "reference": None if reference is None else _point(panel, reference, UNTOUCHED),
        "lines": [
            {
                "name": line.name,
                "look": line.look,
                "points": [_point(panel, row, line.name) for row in line.rows],
            }
            for line in panel.lines
        ],
    }


def _point(panel: Panel, row: Row, name: str) -> dict[str, Any]:
    latency, accuracy = row.latency_ms, row.accuracy
    point: dict[str, Any] = {"name": name, "k": row.k, "median": None, "above": 0, "below": 0}
    point |= {"latency": "", "top1": None, "accuracy": ""}
    if latency is not None:
        ratio = panel.speedup(row)
        speed = "" if ratio is None or row.is_reference else f", {times(ratio)}"
        point["median"] = latency.median
        point["above"] = max(0.0, max(latency.rounds) - latency.median)
        point["below"] = max(0.0, latency.median - min(latency.rounds))
        point["latency"] = (
            f"{milliseconds(latency.median)} ms{speed} (p90 {milliseconds(latency.p90)})"
        )
    if accuracy is not None:
        kept = "" if accuracy.retention is None else f", {accuracy.retention:.1%} kept"
        point["top1"] = accuracy.top1
        point["accuracy"] = f"{accuracy.top1:.2%}{kept}"
    return point


def tiles(panel: Panel) -> str:
    """Returns the four numbers of the row that the summary is about, as HTML."""
    row = choice(panel)
    if row is None:
        return ""
    ratio = panel.speedup(row)
    about = "" if panel.faster_or_slower(row) else "≈ "
    kept = None if row.accuracy is None else row.accuracy.retention
    speed = "–" if ratio is None else about + times(ratio)
    found = [
        ("Experts computed", f"{row.k} of {row.experts}", line_name(row)),
        (
            "Speed",
            speed,
            "against the untouched PyTorch model",
        ),
        (
            "Accuracy kept",
            "–" if kept is None else percent(kept),
            "no labels" if row.accuracy is None else f"top-1 {row.accuracy.top1:.2%}",
        ),
        (
            "Same experts chosen",
            "–" if row.routing is None else percent(row.routing.exact),
            "of samples, as in PyTorch" if row.routing else _why_no_routing(row),
        ),
    ]
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for name, value, detail in found
    )


def _why_no_routing(row: Row) -> str:
    return "all are computed" if row.k == row.experts else "not measured"


def table(heads: Sequence[str], groups: Mapping[str, Sequence[str]]) -> str:
    """Returns an HTML table that scrolls sideways where the page is narrow.

    The first column holds text. `groups` are HTML rows under a heading each; empty ones are left
    out.
    """
    head = "".join(
        f'<th scope="col"{_text_class(index)}>{escape(name)}</th>'
        for index, name in enumerate(heads)
    )
    bodies = "".join(
        f'<tbody><tr><th scope="rowgroup" colspan="{len(heads)}">{escape(name)}</th></tr>'
        f"{''.join(rows)}</tbody>"
        for name, rows in groups.items()
        if rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>{bodies}</table></div>'


def _text_class(index: int) -> str:
    return ' class="text"' if index == 0 else ""


def _html_row(cells: Sequence[str], kind: str = "", rest: str = "") -> str:
    body = "".join(f"<td{_text_class(index)}>{cell}</td>" for index, cell in enumerate(cells))
    return f'<tr class="{kind}">{body}{rest}</tr>' if kind else f"<tr>{body}{rest}</tr>"


def routing_table(shown: Sequence[Panel]) -> str:
    """Returns, per graph and k, whether PyTorch's experts were chosen and its values computed."""
    groups: dict[str, list[str]] = {}
    for panel in shown:
        # Agreement does not depend on the batch size: it is taken once, and told once.
        if panel.model in groups:
            continue
        groups[panel.model] = [
            _routing_row(line.name, row)
            for line in panel.lines
            for row in line.rows
            if row.parity is not None or row.routing is not None
        ]
    if not any(groups.values()):
        return '<p class="note">Not measured.</p>'
    heads = ("Engine", "k", "Same experts", "Jaccard", "Largest difference", "Cosine")
    return table(heads, groups) + f'<p class="note">{escape(ROUTING_NOTE)}</p>'


def _routing_row(name: str, row: Row) -> str:
    routing, parity = row.routing, row.parity
    agreement = [DASH, DASH]
    if routing is not None:
        agreement = [f"{routing.exact:.2%}", f"{routing.jaccard:.4f}"]
    values = [DASH, DASH]
    if parity is not None:
        values = [f"{parity.max_abs:.2g}", f"{parity.cosine:.7f}"]
    return _html_row([escape(name), f"{row.k}/{row.experts}", *agreement, *values])


def rows_table(shown: Sequence[Panel], results: Results) -> str:
    """Returns every row of the results, failed ones too."""
    heads = ["Engine", "k", "Median ms", "Speed", "Spread", "Top-1", "Kept", "p90", "p95", "p99"]
    heads += ["Min", "Max", "Mean", "Std", "Calls", "Inputs/s", "Memory MB"]
    groups = {
        f"{panel.model}, batch {panel.batch}": [
            _result_row(panel, row, len(heads))
            for row in results.of_model(panel.model)
            if row.batch == panel.batch
        ]
        for panel in shown
    }
    return table(heads, groups)


def _result_row(panel: Panel, row: Row, columns: int) -> str:
    kind = "reference" if row.is_reference else ""
    first = [escape(UNTOUCHED if row.is_reference else line_name(row)), f"{row.k}/{row.experts}"]
    if row.error is not None:
        rest = f'<td class="error" colspan="{columns - len(first)}">{escape(row.error)}</td>'
        return _html_row(first, kind, rest)
    accuracy, latency = row.accuracy, row.latency_ms
    kept = None if accuracy is None else accuracy.retention
    cells = [
        DASH if latency is None else milliseconds(latency.median),
        _speed_cell(panel, row),
        DASH if latency is None else f"{latency.spread:.0%}",
        DASH if accuracy is None else f"{accuracy.top1:.2%}",
        DASH if kept is None else f"{kept:.1%}",
    ]
    if latency is None:
        cells += [DASH] * 8
    else:
        parts = (latency.p90, latency.p95, latency.p99, latency.min, latency.max)
        cells += [milliseconds(value) for value in (*parts, latency.mean, latency.std)]
        cells.append(f"{latency.n:,}")
    cells.append(DASH if row.throughput is None else f"{row.throughput:,.0f}")
    cells.append(DASH if row.peak_memory_mb is None else f"{row.peak_memory_mb:,.0f}")
    return _html_row([*first, *cells], kind)


def _speed_cell(panel: Panel, row: Row) -> str:
    ratio = panel.speedup(row)
    if ratio is None or row.is_reference:
        return DASH if ratio is None else "1×"
    if panel.faster_or_slower(row):
        return times(ratio)
    return f'<span class="quiet" title="within the spread: no difference">≈ {times(ratio)}</span>'


def milliseconds(value: float) -> str:
    """Returns three significant digits: `0.0712`, `4.15`, `212`."""
    if value <= 0:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def environment_list(results: Results) -> str:
    """Returns the machine and the versions as a list of names and values."""
    facts: list[tuple[str, str]] = []
    for name, value in results.environment.items():
        if name == "packages" and isinstance(value, dict):
            facts += [(str(package), str(version)) for package, version in value.items()]
        elif name == "memory_bytes" and isinstance(value, int):
            facts.append(("memory", f"{value / 2**30:.1f} GiB"))
        else:
            facts.append((name, _plain(value)))
    return _facts(facts)


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_plain(item) for item in value)
    return str(value)


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f'<dl class="facts">{items}</dl>'


def method(results: Results) -> str:
    """Returns how the rows were measured, the models, and the command that does it again."""
    p = results.protocol
    lines = []
    if "rounds" in p:
        lines.append(
            f"{p['rounds']} interleaved rounds in random order, at least {p['round_s']:g} s per "
            f"engine and round, after {p['warmup']} calls of warm-up; no call is left out."
        )
    lines.append("Latency is wall clock from host array to host array, on real inputs in turn.")
    if "samples" in p:
        labelled = "labelled" if p.get("labelled") else "unlabelled"
        lines.append(f"Accuracy, routing and parity on {p['samples']:,} {labelled} samples.")
    lines.append("Spread is the range of the round medians relative to their median.")
    for model in results.models:
        size = "" if model.parameters is None else f", {model.parameters:,} parameters"
        lines.append(f"{model.name}: {model.family or 'model'}{size}, from {model.source or '–'}.")
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    again = f"<pre>{escape(results.command)}</pre>" if results.command else ""
    return f"<ul>{listed}</ul>{again}"
