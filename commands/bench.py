"""The command `bench`, locally or on a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..bench.calls import bench as measure
from ..bench.calls import bench_on_nodes
from ..bench.request import BenchRequest
from ..bench.studies import check_studies
from ..common.console import Console, show
from ..common.option import changed, declared, panels_of, refuse_changed
from ..errors import UsageError
from ..exporter.executors import Executor, executor_of
from ..exporter.requests import LoadRequest
from .options import (
    READING,
    command_line,
    json_text,
    options_of,
    output_option,
    parse_data,
    parse_feed,
    parse_path,
    parse_source,
    parse_table,
)
from .printing import Printing
from .reading import LOADING

OPTIONS = options_of(
    BenchRequest,
    {
        READING: [*LOADING],
        "What is measured": (
            *("k", "lowering", "precision", "engine", "target", "batch", "quantize"),
        ),
        "Data": ("data", "calibrate_data", "calibration"),
        "How it is measured": ("rounds", "samples", "threads", "memory", "pixels", "tokens"),
    },
    data={"metavar": "DATA", "kind": str, "parser": parse_data},
    calibrate_data={"metavar": "FEED", "kind": str, "parser": parse_feed},
    calibration={"metavar": "TABLE.JSON", "parser": parse_table},
    rounds={"min": 5},
    samples={"min": 1},
    threads={"min": 1},
    tokens={"min": 1},
    **LOADING,
)


def bench(
    *,
    output: Annotated[Path, output_option("DIR", "The folder for the results and the report.")],
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|BUNDLE…",
            parser=parse_source,
            help="A model, bundles, or a model and its bundles.",
        ),
    ] = None,
    request: Annotated[BenchRequest, OPTIONS],
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD.JSON",
            parser=parse_path,
            rich_help_panel="Comparison",
            help="Compare with these results [default: those in -o].",
        ),
    ] = None,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            metavar="5%",
            rich_help_panel="Comparison",
            help="Exit with 3 if a row is slower than before by more than this.",
        ),
    ] = None,
    printing: Printing,
) -> None:
    """Measure accuracy and latency for every k; write a report.

    After an interruption, run the same command again to continue where it stopped.
    """
    console = printing.console()
    request = replace(request, out=output, command=command_line(), progress=console)
    if not models:
        raise UsageError("bench: no model to measure", hint="moexport bench vit.pt -o report")
    from ..exporter.bundle.manifest import is_bundle

    if all(map(is_bundle, models)):
        why = ": a bundle's manifest describes its model"
        refuse_changed(request, declared(LoadRequest).keys() - {"progress"}, why)
        for panel in panels_of(LoadRequest):
            options = request.asked(panel.options)
            refuse_changed(options, changed(options), why)
    else:
        request.check_ranges()
    request.check()
    check_studies(request)
    from ..bench.report.compare import check_regression, parse_slower, read_earlier
    from ..bench.report.text import rows_table
    from ..bench.results import to_json

    share = None if fail_if_slower is None else parse_slower(fail_if_slower)
    executor = executor_of(request)
    if executor is not None:
        _bench_on_nodes(
            executor, models, compare, request, share, output, console, as_json=printing.as_json
        )
        return
    before = read_earlier(output, compare, wanted=share is not None)
    results = measure(models, replace(request, before=before))
    console.finish()
    if printing.as_json:
        show(to_json(results))
    else:
        page, file = output / "report.html", output / "results.json"
        where = f"report: {page}" if results.rows else f"results: {file}"
        show(f"{rows_table(results)}\n\n{where}")
    if before is not None:
        for line in check_regression(before, results, share):
            console.note(line)
    elif share is not None:
        console.note(f"--fail-if-slower: {output} has no earlier results to compare with")


def _bench_on_nodes(
    executor: Executor,
    models: list[str],
    compare: Path | None,
    request: BenchRequest,
    share: float | None,
    output: Path,
    console: Console,
    *,
    as_json: bool,
) -> None:
    from ..bench.results import as_json as plain

    before = executor.read_earlier(output, compare, request, wanted=share is not None)
    reports = bench_on_nodes(executor, models, replace(request, before=before))
    console.finish()
    if as_json:
        show(json_text({kind: plain(results) for kind, results in reports.items()}))
    else:
        show(executor.as_table(reports, output, request))
    if before:
        lines, failure = executor.compare(before, reports, share)
        for line in lines:
            console.note(line)
        if failure is not None:
            raise failure
    elif share is not None:
        console.note(f"--fail-if-slower: {output} has no earlier results to compare with")
