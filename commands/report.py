"""The command `report`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..bench.calls import report_as
from ..bench.request import ReportRequest
from ..common.console import show
from .options import AsJson, Verbosity, json_text, output_option, typed_path


def report(
    *,
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS.JSON…",
            parser=typed_path,
            help="What bench wrote; further runs or machines are drawn beside the first.",
        ),
    ],
    output: Annotated[
        Path, output_option("REPORT.HTML", "The page; Markdown, CSV and figures go next to it.")
    ],
    request: ReportRequest,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Rebuild the report of a results file, compare two, or draw several in one."""
    from ..bench.report.page import can_draw

    console = verbosity.console()
    first, *others = results
    paths, comparison = report_as(first, output, replace(request, beside=others))
    result = {"files": [str(path) for path in paths]}
    if not any(path.suffix == ".png" for path in paths) and not can_draw():
        console.note("no figures beside the page: Matplotlib is not installed")
    if comparison is not None:
        changes = [change.label for change in comparison.notable]
        result |= {"changed": [comparison.sentence, *changes, *comparison.notes]}
        if not as_json:
            show("\n  ".join(result["changed"]))
    if as_json:
        show(json_text(result))
    console.note(f"wrote {', '.join(str(path) for path in paths)}")
