"""The rows of a results file as text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.text import table
from ..analyses.findings import studies_in
from ..analyses.tables import text
from ..results import Results, Row
from .views import GPU_MS, line_name, over, panels

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
