"""A results file as text: tables for the terminal, Markdown for documents, CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from ...common.text import csv_cell, markdown, markdown_text, printable, table
from ...common.timing import Latency
from ..analyses.findings import studies_in
from ..analyses.report import text as studies_text
from ..measure.latency import disturbance
from ..results import Results, Row
from .compare import Comparison
from .page import method_lines
from .summary import (
    GPU_MS,
    caveat,
    line_name,
    milliseconds,
    over,
    row_name,
    sections,
    summary,
    times,
)


def rows_table(results: Results) -> str:
    """Returns a table per model and batch size, the untouched model first, then by k; analyses."""
    blocks = []
    device = (GPU_MS,) if _has_device_times(results) else ()
    for section in sections(results):
        rows = sorted(
            section.all_rows, key=lambda row: (not row.is_reference, -row.k, line_name(row))
        )
        header = (
            *("k", "engine", "batch", "ms (median)", *device, "vs PyTorch", "× limit"),
            *(section.quality or "accuracy", "kept", "same experts"),
        )
        cells = [_cells(row, section.speedup(row), device=bool(device)) for row in rows]
        blocks.append(f"{section.model}, batch {section.batch}\n{table(header, cells)}")
    found = studies_text(studies_in(results.analyses))
    return "\n\n".join(each for each in (*blocks, "\n".join(_failures(results)), found) if each)


def _has_device_times(results: Results) -> bool:
    return any(row.device_ms is not None for row in results.rows)


def _cells(row: Row, speedup: float | None, *, device: bool) -> tuple[str, ...]:
    quality = _number(row.accuracy.top1 if row.accuracy else None, ".1%")
    if row.perplexity is not None and row.accuracy is None:
        quality = f"{row.perplexity.value:.3f}"
    on_gpu = _number(row.device_ms.median if row.device_ms else None, ".3f")
    return (
        f"{row.k}/{row.experts}",
        line_name(row) + (" (untouched)" if row.is_reference else ""),
        str(row.batch),
        _number(row.median_ms, ".3f"),
        *((on_gpu,) if device else ()),
        "–" if speedup is None else f"{speedup:.2f}×",
        "–" if row.over_limit is None else over(row.over_limit),
        quality,
        _number(row.kept, ".1%"),
        _number(row.routing.exact if row.routing else None, ".1%"),
    )


def _number(value: float | None, form: str, none: str = "–") -> str:
    return none if value is None else format(value, form)


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


def to_markdown(results: Results, comparison: Comparison | None = None) -> str:
    """Returns the summary of each model and batch size, its rows, and how they were measured."""
    lines = []
    device = (GPU_MS,) if _has_device_times(results) else ()
    header = (
        *("engine", "k", "median, ms", *device),
        *("vs PyTorch", "× limit", "spread", "quality", "kept", "same experts"),
    )
    for section in sections(results):
        title = markdown_text(section.model)
        lines += [f"## {title}, batch {section.batch}", "", markdown_text(summary(section)), ""]
        if caveat(section):
            lines += [markdown_text(caveat(section)), ""]
        here = [r for r in results.of_model(section.model) if r.batch == section.batch]
        rows = [_markdown_cells(row, section.speedup(row), device=bool(device)) for row in here]
        rows = [(*map(markdown_text, row), *[""] * (len(header) - len(row))) for row in rows]
        lines += [markdown(header, rows, words=1), ""]
    if comparison is not None:
        lines += ["## What changed", "", markdown_text(comparison.sentence), ""]
        lines += [f"- {markdown_text(change.label)}" for change in comparison.notable]
        lines += [f"- {markdown_text(note)}" for note in comparison.notes] + [""]
    if disturbance(results):
        lines += [f"> {markdown_text(disturbance(results))}", ""]
    lines += ["## How it was measured", ""]
    lines += [f"- {markdown_text(line)}" for line in method_lines(results)]
    absent = (f"not measured: {each.engine} ({each.reason})" for each in results.absent)
    lines += [f"- {markdown_text(line)}" for line in absent]
    if results.command:
        lines += ["", "```sh", printable(results.command), "```"]
    return "\n".join(lines) + "\n"


def _markdown_cells(row: Row, speedup: float | None, *, device: bool) -> tuple[str, ...]:
    name, k = row_name(row), f"{row.k}/{row.experts}"
    if row.error is not None:
        return name, k, f"failed: {row.error.replace('|', '/')}"
    quality = ""
    if row.accuracy is not None:
        quality = f"{row.accuracy.top1:.2%}"
    elif row.perplexity is not None:
        quality = f"ppl {row.perplexity.value:.4g}"
    on_gpu = "" if row.device_ms is None else milliseconds(row.device_ms.median)
    return (
        *(name, k, "" if row.median_ms is None else milliseconds(row.median_ms)),
        *((on_gpu,) if device else ()),
        "" if speedup is None else times(speedup),
        "" if row.over_limit is None else over(row.over_limit),
        _number(row.latency_ms.spread if row.latency_ms else None, ".0%", ""),
        quality,
        _number(row.kept, ".1%", ""),
        _number(row.routing.exact if row.routing else None, ".1%", ""),
    )


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


def to_csv(results: Results) -> str:
    """Returns every row as CSV, one column per number."""
    found = {(section.model, section.batch): section for section in sections(results)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in results.rows:
        writer.writerow(map(csv_cell, _values(row, found[row.model, row.batch].speedup(row))))
    return text.getvalue()


def _values(row: Row, speedup: float | None) -> list[object]:
    t, a = row.latency_ms, row.accuracy
    interval = a and a.top1_interval
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
