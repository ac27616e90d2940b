"""`bench`, on this machine and on others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..bench.calls import bench_as, bench_on_nodes
from ..bench.executors import Executor, executor_of
from ..bench.request import BenchRequest
from ..common.console import Console, show
from ..common.option import Request, changed, declared, option, panels_of, refuse_changed
from ..errors import UsageError
from ..exporter.requests import LoadRequest
from .options import (
    AsJson,
    Verbosity,
    json_text,
    output_option,
    typed_command,
    typed_source,
)

if TYPE_CHECKING:
    from ..bench.results import Results


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags(Request):
    """What the results are compared with."""

    compare: Path | None = option(
        None,
        "Compare with these results.",
        unset="those in -o",
        heading="Comparison",
        metavar="OLD.JSON",
    )
    fail_if_slower: str | None = option(
        None, "Exit with 3 if a row is slower than before by more.", unset="none", metavar="5%"
    )


def bench(
    *,
    output: Annotated[Path, output_option("DIR", "The folder for results and report.")],
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|BUNDLE…",
            parser=typed_source,
            help="A model, bundles, or a model and its bundles.",
        ),
    ] = None,
    request: BenchRequest,
    flags: BenchFlags,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Measure accuracy and latency for every k; write a report.

    After an interruption, repeat the command: it continues where it stopped.
    """
    console = verbosity.console()
    request = replace(request, out=output, command=typed_command(), progress=console)
    if not models:
        raise UsageError("bench: no model to measure", hint="moexport bench vit.pt -o report")
    from ..exporter.bundle.manifest import is_bundle

    if all(map(is_bundle, models)):
        why = ": a bundle says itself what it was made from"
        refuse_changed(request, declared(LoadRequest).keys() - {"progress"}, why)
        for panel in panels_of(LoadRequest):
            options = request.asked(panel.options)
            refuse_changed(options, changed(options), why)
    from ..bench.report.compare import check_regression, earlier, parse_slower
    from ..bench.report.text import rows_table

    share = None if flags.fail_if_slower is None else parse_slower(flags.fail_if_slower)
    executor = executor_of(request)
    if executor is not None:
        _bench_on_nodes(executor, models, flags, request, share, output, console, as_json=as_json)
        return
    before = earlier(output, flags.compare, wanted=share is not None)
    results = bench_as(models, replace(request, before=before))
    console.finish()
    _print_results(results, rows_table(results), output, as_json=as_json)
    if before is not None:
        for line in check_regression(before, results, share):
            console.note(line)
    elif share is not None:
        console.note(f"--fail-if-slower: {output} holds no earlier results to compare with")


def _bench_on_nodes(
    executor: Executor,
    models: list[str],
    flags: BenchFlags,
    request: BenchRequest,
    share: float | None,
    output: Path,
    console: Console,
    *,
    as_json: bool,
) -> None:
    from ..bench.results import as_json as plain

    before = executor.earlier(output, flags.compare, request, wanted=share is not None)
    reports = bench_on_nodes(executor, models, replace(request, before=before))
    console.finish()
    if as_json:
        show(json_text({kind: plain(results) for kind, results in reports.items()}))
    else:
        show(executor.shown(reports, output, request))
    if before:
        lines, failure = executor.compared(before, reports, share)
        for line in lines:
            console.note(line)
        if failure is not None:
            raise failure
    elif share is not None:
        console.note(f"--fail-if-slower: {output} holds no earlier results to compare with")


def _print_results(results: Results, text: str, output: Path, *, as_json: bool) -> None:
    from ..bench.results import to_json

    page = output / "report.html"
    where = f"report: {page}" if results.rows else f"results: {output / 'results.json'}"
    show(to_json(results) if as_json else f"{text}\n\n{where}")
