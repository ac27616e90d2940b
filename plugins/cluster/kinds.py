"""Compares kinds of node: the best k on each, and the changes since earlier runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ...bench.report.compare import check_regression
from ...bench.report.summary import headline, line_name, milliseconds, percent, sections, times
from ...bench.results import Results, read
from ...common.text import markdown, markdown_text, table
from ...common.writing import write_text
from ...errors import CheckError, MoexportError, UsageError

HEADS = ("model", "sizes", "nodes", "k", "engine", "ms", "speed", "kept", "on node")

RULE = (
    "For each kind of node, the fastest row proven to keep 99% of the accuracy or, if there "
    "is none, the row closest to a proof; without labels, the fastest. The speed is relative to "
    "untouched PyTorch on the same node."
)


def folder_of(kind: str) -> str:
    """Returns the name of a kind's folder, such as `accelerator_type-L4`."""
    return re.sub(r"[^\w.-]", "-", kind)


def kinds_rows(measured: Mapping[str, Results]) -> list[tuple[str, ...]]:
    """Returns the row to deploy for each model, batch size and kind of node."""
    rows = []
    for kind, results in measured.items():
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


def kinds_text(measured: Mapping[str, Results]) -> str:
    """Returns the table as text."""
    return f"{table(HEADS, kinds_rows(measured))}\n\n{RULE}"


def write_kinds(measured: Mapping[str, Results], folder: Path) -> None:
    """Writes the table as `kinds.md` and `kinds.html`, next to the kinds' own folders."""
    rows = kinds_rows(measured)
    shown = [tuple(map(markdown_text, row)) for row in rows]
    text = f"# Which k on which kind of node\n\n{markdown(HEADS, shown)}\n\n{RULE}\n"
    write_text(text, folder / "kinds.md")
    body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in rows)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADS)
    links = "".join(
        f'<li><a href="{escape(folder_of(kind))}/report.html">{escape(kind)}</a></li>'
        for kind in measured
    )
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Which k on which kind of node'
        "</title><style>body{font:16px system-ui;margin:2rem}td,th{padding:.3rem .8rem;text-align:"
        "left;border-bottom:1px solid #8884}</style><h1>Which k on which kind of node</h1>"
        f"<table><tr>{head}</tr>{body}</table><p>{escape(RULE)}</p><ul>{links}</ul></html>\n"
    )
    write_text(page, folder / "kinds.html")


def earlier_kinds(
    out: Path, named: Path | None, kinds: Sequence[str], *, wanted: bool
) -> dict[str, Results]:
    """Returns the earlier results of each kind, from the named run or otherwise from `out`.

    Omits kinds that the run did not measure. Raises `UsageError` for one file of results with
    several kinds, and for a folder without results of these kinds.
    """
    if named is not None and not named.is_dir():
        results = read(named)
        if len(kinds) > 1:
            raise UsageError(
                f"--compare {named}: this is one file, but the run has {len(kinds)} kinds of node",
                hint="name the folder of an earlier run on these kinds",
            )
        return {kinds[0]: results}
    if named is None and not wanted:
        return {}
    folder = named or out
    before = {}
    for kind in kinds:
        # A run on one kind of node has no folder per kind.
        folders = [folder / folder_of(kind), *([folder] if len(kinds) == 1 else [])]
        files = [file for path in folders if (file := path / "results.json").is_file()]
        if files:
            before[kind] = read(files[-1])
    if named is not None and not before:
        raise UsageError(
            f"--compare {named}: the folder has no results of {' or '.join(kinds)}",
            hint="name the folder of an earlier run on these kinds",
        )
    return before


def compare_kinds(
    before: Mapping[str, Results], measured: Mapping[str, Results], share: float | None
) -> tuple[list[str], MoexportError | None]:
    """Returns the changes on each kind as lines, and an error if a kind became too slow.

    The error names every kind that is slower than allowed or has no row in common with its earlier
    results.
    """
    lines: list[str] = []
    failures: list[MoexportError] = []
    for kind, results in measured.items():
        if kind not in before:
            lines.append(f"{kind}: not compared: the earlier run has no results of this kind")
            continue
        try:
            lines += [f"{kind}: {line}" for line in check_regression(before[kind], results, share)]
        except MoexportError as error:
            error.message = f"{kind}: {error.message}"
            failures.append(error)
    if not failures:
        return lines, None
    slower = any(isinstance(failure, CheckError) for failure in failures)
    message = "; ".join(failure.message for failure in failures)
    return lines, (CheckError if slower else MoexportError)(message, hint=failures[0].hint)
