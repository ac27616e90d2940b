"""A results file as CSV and Markdown, for spreadsheets and documents."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from ...common.text import table
from ...common.timing import Latency
from ..analyses.findings import studies_in
from ..analyses.report import text
from ..measure.latency import disturbance
from ..results import Results, Row
from .compare import Comparison
from .page import method_lines
from .summary import GPU_MS, caveat, line_name, milliseconds, over, panels, summary, times

LATENCY = (
    *("median_ms", "spread", "p90_ms", "p95_ms", "p99_ms", "min_ms", "max_ms", "mean_ms"),
    "std_ms",
)

COLUMNS = (
    *("model", "engine", "provider", "precision", "lowering", "k", "experts", "batch", "scope"),
    *(*LATENCY, *(f"device_{name}" for name in LATENCY)),
    *("calls", "inputs_per_s", "speedup", "top1", "top1_low", "top1_high", "top5", "perplexity"),
    *("kept", "same_experts", "jaccard", "max_abs", "cosine", "peak_memory_mb"),
    *("operations", "int8_operations", "bytes", "limit_ms", "over_limit", "no_limit", "error"),
)

MARKDOWN_LEAD = ("engine", "k", "median, ms")

MARKDOWN_REST = ("vs PyTorch", "× limit", "spread", "quality", "kept", "same experts")


def to_csv(results: Results) -> str:
    """Returns every row as CSV, one column per number."""
    speedups = {
        row.identity: panel.speedup(row)
        for panel in panels(results)
        for row in results.rows
        if (row.model, row.batch) == (panel.model, panel.batch)
    }
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in results.rows:
        writer.writerow(_values(row, speedups.get(row.identity)))
    return text.getvalue()


def _values(row: Row, speedup: float | None) -> list[object]:
    t, a, interval = row.latency_ms, row.accuracy, None
    if a is not None:
        interval = a.top1_interval
    return [
        *(row.model, row.engine, row.provider, row.precision, row.lowering, row.k, row.experts),
        *(row.batch, row.scope, *_times(t), *_times(row.device_ms)),
        *(t and t.n, row.throughput, speedup, a and a.top1),
        *(interval and interval.low, interval and interval.high, a and a.top5),
        *(row.perplexity and row.perplexity.value, row.kept),
        *(row.routing and row.routing.exact, row.routing and row.routing.jaccard),
        *(row.parity and row.parity.max_abs, row.parity and row.parity.cosine),
        row.peak_memory_mb,
        *(row.work and row.work.operations, row.work and row.work.int8_operations),
        *(row.work and row.work.bytes, row.limit_ms, row.over_limit, row.no_limit, row.error),
    ]


def _times(t: Latency | None) -> list[object]:
    if t is None:
        return [None] * len(LATENCY)
    return [t.median, t.spread, t.p90, t.p95, t.p99, t.min, t.max, t.mean, t.std]


def to_markdown(results: Results, comparison: Comparison | None = None) -> str:
    """Returns the summary of each model and batch size, its rows, and how they were measured."""
    lines = []
    device = any(row.device_ms is not None for row in results.rows)
    header = (*MARKDOWN_LEAD, *((GPU_MS,) if device else ()), *MARKDOWN_REST)
    for panel in panels(results):
        lines += [f"## {panel.model}, batch {panel.batch}", "", summary(panel), ""]
        if caveat(panel):
            lines += [caveat(panel), ""]
        lines.append(f"| {' | '.join(header)} |")
        lines.append("|---" + "|--:" * (len(header) - 1) + "|")
        here = [r for r in results.of_model(panel.model) if r.batch == panel.batch]
        lines += [_line(row, panel.speedup(row), device=device) for row in here]
        lines.append("")
    if comparison is not None:
        lines += ["## What changed", "", comparison.sentence, ""]
        lines += [f"- {change.label}" for change in comparison.told]
        lines += [f"- {note}" for note in comparison.notes] + [""]
    if disturbance(results):
        lines += [f"> {disturbance(results)}", ""]
    lines += ["## How it was measured", ""]
    lines += [f"- {line}" for line in method_lines(results)]
    lines += [f"- not measured: {each.engine} ({each.reason})" for each in results.absent]
    if results.command:
        lines += ["", "```sh", results.command, "```"]
    return "\n".join(lines) + "\n"


def _line(row: Row, speedup: float | None, *, device: bool) -> str:
    name = "PyTorch, untouched" if row.is_reference else line_name(row)
    k = f"{row.k}/{row.experts}"
    if row.error is not None:
        empty = " |" * (len(MARKDOWN_REST) + device)
        return f"| {name} | {k} | failed: {row.error.replace('|', '/')} |{empty}"
    quality = ""
    if row.accuracy is not None:
        quality = f"{row.accuracy.top1:.2%}"
    elif row.perplexity is not None:
        quality = f"ppl {row.perplexity.value:.4g}"
    t, routing = row.latency_ms, row.routing
    cells = (
        name,
        k,
        "" if t is None else milliseconds(t.median),
        *(("" if row.device_ms is None else milliseconds(row.device_ms.median),) if device else ()),
        "" if speedup is None else times(speedup),
        "" if row.over_limit is None else over(row.over_limit),
        "" if t is None else f"{t.spread:.0%}",
        quality,
        "" if row.kept is None else f"{row.kept:.1%}",
        "" if routing is None else f"{routing.exact:.1%}",
    )
    return f"| {' | '.join(cells)} |"


LEAD = ("k", "engine", "batch", "ms (median)")

REST = ("vs PyTorch", "× limit")


def rows_table(results: Results) -> str:
    """Returns a table per model and batch size, the untouched model first, then by k; analyses."""
    blocks = []
    device = (GPU_MS,) if any(row.device_ms is not None for row in results.rows) else ()
    for panel in panels(results):
        rows = [] if panel.reference is None else [panel.reference]
        for line in panel.lines:
            rows += list(line.rows)
        rows.sort(key=lambda row: (not row.is_reference, -row.k, line_name(row)))
        cells = [_cells(row, panel.speedup(row), device=bool(device)) for row in rows]
        header = (*LEAD, *device, *REST, panel.quality or "accuracy", "kept", "same experts")
        blocks.append(f"{panel.model}, batch {panel.batch}\n{table(header, cells)}")
    found = text(studies_in(results.analyses))
    return "\n\n".join(each for each in (*blocks, "\n".join(_failures(results)), found) if each)


def _failures(results: Results) -> list[str]:
    """A line for each reason, with the rows that failed for it."""
    by_reason: dict[str, list[Row]] = {}
    for row in results.rows:
        if row.error:
            by_reason.setdefault(row.error, []).append(row)
    return [f"failed: {_listed(rows)}: {reason}" for reason, rows in by_reason.items()]


def _listed(rows: Sequence[Row]) -> str:
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(line_name(row), []).append(str(row.k))
    return "; ".join(f"{name}, k = {', '.join(dict.fromkeys(ks))}" for name, ks in names.items())


def _cells(row: Row, speedup: float | None, *, device: bool) -> tuple[str, ...]:
    on_gpu = "–" if row.device_ms is None else f"{row.device_ms.median:.3f}"
    return (
        f"{row.k}/{row.experts}",
        line_name(row) + (" (untouched)" if row.is_reference else ""),
        str(row.batch),
        "–" if row.latency_ms is None else f"{row.latency_ms.median:.3f}",
        *((on_gpu,) if device else ()),
        "–" if speedup is None else f"{speedup:.2f}×",
        "–" if row.over_limit is None else over(row.over_limit),
        _quality(row),
        "–" if row.kept is None else f"{row.kept:.1%}",
        "–" if row.routing is None else f"{row.routing.exact:.1%}",
    )


def _quality(row: Row) -> str:
    """The accuracy, or a token model's perplexity."""
    if row.accuracy is not None:
        return f"{row.accuracy.top1:.1%}"
    return "–" if row.perplexity is None else f"{row.perplexity.value:.3f}"
