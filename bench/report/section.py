"""What the analyses found, as a section of the report's page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..analyses.findings import ExpertStudy
from ..analyses.tables import titled
from .tables import html_row, table

NOTE = (
    "Random: experts drawn anew for each input and layer, once per seed; σ is the seeds' sample "
    "standard deviation. All sets: best per input knows the label; best for all was chosen on the "
    "same labels; distinct best counts the sets with the least loss for some input. Shares are "
    "means over inputs."
)


def analyses_section(studies: Sequence[ExpertStudy]) -> str:
    """Returns the tables of the studies as HTML; empty where there are none."""
    tables = []
    for title, (header, rows) in titled(studies).items():
        groups: dict[str, list[str]] = {}
        for model, *cells in rows:
            groups.setdefault(model, []).append(html_row([escape(cell) for cell in cells]))
        if groups:
            tables.append(f"<h3>{escape(title)}</h3>{table(header[1:], groups)}")
    if not tables:
        return ""
    note = f'<p class="note">{escape(NOTE)}</p>'
    body = f"<h2>Which experts</h2>{''.join(tables)}{note}"
    return f'<section class="card" id="experts">{body}</section>'
