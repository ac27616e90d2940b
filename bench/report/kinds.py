"""Which k on which kind of node: one table over the reports of a sweep on several kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

from ...common.text import table
from ...common.writing import write_text
from ..results import Results
from .summary import headline, line_name, milliseconds, percent, sections, times

HEADS = ("model", "sizes", "nodes", "k", "engine", "ms", "speed", "kept", "on node")

RULE = (
    "The fastest row of each kind of node that keeps 99% of the accuracy; without labels, the "
    "fastest. Its speed is against the untouched PyTorch model on the same node."
)


def folder_of(kind: str) -> str:
    """Returns the name of a kind's folder: `accelerator_type-L4`."""
    return re.sub(r"[^\w.-]", "-", kind)


def kinds_rows(found: Mapping[str, Results]) -> list[tuple[str, ...]]:
    """Returns a row for each model, batch size and kind of node: what to deploy there."""
    rows = []
    for kind, results in found.items():
        for section in sections(results):
            row = headline(section)
            if row is None or row.median_ms is None:
                rows.append((section.model, section.sizes, kind, *("–",) * 6))
                continue
            ratio = section.speedup(row)
            rows.append(
                (
                    *(section.model, section.sizes, kind, f"{row.k}/{row.experts}"),
                    line_name(row),
                    milliseconds(row.median_ms),
                    "–" if ratio is None else times(ratio),
                    "–" if row.kept is None else percent(row.kept),
                    row.node or "",
                )
            )
    return sorted(rows, key=lambda row: row[:2])


def kinds_text(found: Mapping[str, Results]) -> str:
    """Returns the table as text."""
    return f"{table(HEADS, kinds_rows(found))}\n\n{RULE}"


def write_kinds(found: Mapping[str, Results], folder: Path) -> None:
    """Writes the table as `kinds.md` and `kinds.html`, beside the kinds' own folders."""
    rows = kinds_rows(found)
    lines = [HEADS, ("---",) * len(HEADS), *rows]
    markdown = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    write_text(f"# Which k on which kind of node\n\n{markdown}\n\n{RULE}\n", folder / "kinds.md")
    body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in rows)
    head = "".join(f"<th>{escape(each)}</th>" for each in HEADS)
    links = "".join(
        f'<li><a href="{escape(folder_of(kind))}/report.html">{escape(kind)}</a></li>'
        for kind in found
    )
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Which k on which kind of node'
        "</title><style>body{font:16px system-ui;margin:2rem}td,th{padding:.3rem .8rem;text-align:"
        "left;border-bottom:1px solid #8884}</style><h1>Which k on which kind of node</h1>"
        f"<table><tr>{head}</tr>{body}</table><p>{escape(RULE)}</p><ul>{links}</ul></html>\n"
    )
    write_text(page, folder / "kinds.html")
