"""The command `report`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..bench.calls import report as write_report
from ..bench.request import ReportRequest
from ..common.console import show
from .options import json_text, options_of, output_option, parse_path
from .printing import Printing


def report(
    *,
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS.JSON…",
            parser=parse_path,
            help="Results of bench; the report shows all files side by side.",
        ),
    ],
    output: Annotated[
        Path, output_option("REPORT.HTML", "The page; Markdown, CSV and figures go next to it.")
    ],
    request: Annotated[ReportRequest, options_of(ReportRequest, compare={"metavar": "OLD.JSON"})],
    printing: Printing,
) -> None:
    """Rebuild the report of a results file, compare two files, or show several."""
    from ..bench.report.page import can_draw

    console = printing.console()
    first, *others = results
    paths, comparison = write_report(first, output, replace(request, beside=others))
    result = {"files": [str(path) for path in paths]}
    if not any(path.suffix == ".png" for path in paths) and not can_draw():
        console.note("no figures were written: vl-convert is not installed")
    if comparison is not None:
        changes = [change.label for change in comparison.notable]
        result |= {"changed": [comparison.sentence, *changes, *comparison.notes]}
        if not printing.as_json:
            show("\n  ".join(result["changed"]))
    if printing.as_json:
        show(json_text(result))
    console.note(f"wrote {', '.join(str(path) for path in paths)}")
