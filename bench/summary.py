"""The rows of a results file as text, for a terminal."""

from __future__ import annotations

from ..console import table
from .analyses.findings import studies_in
from .analyses.tables import text
from .results import Results, Row
from .views import line_name, panels

HEADER = ("k", "engine", "batch", "ms (median)", "vs PyTorch", "accuracy", "kept", "same experts")


def rows_table(results: Results) -> str:
    """Returns a table per model and batch size, the untouched model first, then by k; analyses."""
    blocks = []
    for panel in panels(results):
        rows = [] if panel.reference is None else [panel.reference]
        for line in panel.lines:
            rows += list(line.rows)
        rows.sort(key=lambda row: (not row.is_reference, -row.k, line_name(row)))
        cells = [_cells(row, panel.speedup(row)) for row in rows]
        blocks.append(f"{panel.model}, batch {panel.batch}\n{table(HEADER, cells)}")
    failed = [
        f"failed: {line_name(row)}, k = {row.k}: {row.error}" for row in results.rows if row.error
    ]
    found = text(studies_in(results.analyses))
    return "\n\n".join([*blocks, *failed, *([found] if found else [])])


def _cells(row: Row, speedup: float | None) -> tuple[str, ...]:
    accuracy, routing = row.accuracy, row.routing
    return (
        f"{row.k}/{row.experts}",
        line_name(row) + (" (untouched)" if row.is_reference else ""),
        str(row.batch),
        "–" if row.latency_ms is None else f"{row.latency_ms.median:.3f}",
        "–" if speedup is None else f"{speedup:.2f}×",
        "–" if accuracy is None else f"{accuracy.top1:.1%}",
        "–" if accuracy is None or accuracy.retention is None else f"{accuracy.retention:.1%}",
        "–" if routing is None else f"{routing.exact:.1%}",
    )
