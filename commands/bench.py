"""The command `bench`, locally or on a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..bench.calls import bench as measure
from ..bench.calls import bench_on_nodes
from ..bench.request import BenchRequest, CpuTarget
from ..bench.studies import check_studies
from ..common.console import Console, show
from ..common.option import changed, declared, panels_of, refuse_changed
from ..errors import UsageError
from ..exporter.executors import Executor, executor_of
from ..exporter.requests import LoadRequest
from ..graphs.targets import Scope
from .options import (
    AsJson,
    Quiet,
    Verbose,
    json_text,
    option_for,
    output_option,
    typed_command,
    typed_data,
    typed_feed,
    typed_path,
    typed_source,
    typed_table,
)
from .panels import further
from .reading import ConfigOption, FamilyOption, SetOption

if TYPE_CHECKING:
    from ..bench.results import Results


def bench(
    context: typer.Context,
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
    family: FamilyOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    k: Annotated[str | None, option_for(BenchRequest, "k", "What is measured")] = None,
    lowering: Annotated[
        str | None, option_for(BenchRequest, "lowering", "What is measured")
    ] = None,
    precision: Annotated[
        str | None, option_for(BenchRequest, "precision", "What is measured")
    ] = None,
    engine: Annotated[str, option_for(BenchRequest, "engine", "What is measured")] = "all",
    target: Annotated[
        CpuTarget | None, option_for(BenchRequest, "target", "What is measured")
    ] = None,
    batch: Annotated[str | None, option_for(BenchRequest, "batch", "What is measured")] = None,
    data: Annotated[
        str | None, option_for(BenchRequest, "data", "Data", metavar="DATA", parser=typed_data)
    ] = None,
    calibrate_data: Annotated[
        str | None,
        option_for(BenchRequest, "calibrate_data", "Data", metavar="FEED", parser=typed_feed),
    ] = None,
    calibration: Annotated[
        Path | None,
        option_for(BenchRequest, "calibration", "Data", metavar="TABLE.JSON", parser=typed_table),
    ] = None,
    quantize: Annotated[
        Scope | None, option_for(BenchRequest, "quantize", "What is measured")
    ] = None,
    rounds: Annotated[int, option_for(BenchRequest, "rounds", "How it is measured", min=5)] = 5,
    samples: Annotated[
        int | None, option_for(BenchRequest, "samples", "How it is measured", min=1)
    ] = None,
    threads: Annotated[
        int | None, option_for(BenchRequest, "threads", "How it is measured", min=1)
    ] = None,
    memory: Annotated[bool, option_for(BenchRequest, "memory", "How it is measured")] = True,
    pixels: Annotated[str | None, option_for(BenchRequest, "pixels", "How it is measured")] = None,
    tokens: Annotated[
        int | None, option_for(BenchRequest, "tokens", "How it is measured", min=1)
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD.JSON",
            parser=typed_path,
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
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Measure accuracy and latency for every k; write a report.

    After an interruption, run the same command again to continue where it stopped.
    """
    console = Console(verbose=verbose, quiet=quiet)
    request = BenchRequest(
        k=k,
        lowering=lowering,
        precision=precision,
        engine=engine,
        target=target,
        batch=batch,
        data=data,
        calibrate_data=calibrate_data,
        calibration=calibration,
        quantize=quantize,
        rounds=rounds,
        samples=samples,
        threads=threads,
        memory=memory,
        pixels=pixels,
        tokens=tokens,
        family=family,
        config=config,
        sets=sets or (),
        out=output,
        command=typed_command(),
        progress=console,
        further=further(context, BenchRequest),
    )
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
    from ..bench.report.compare import check_regression, earlier, parse_slower
    from ..bench.report.text import rows_table

    share = None if fail_if_slower is None else parse_slower(fail_if_slower)
    executor = executor_of(request)
    if executor is not None:
        _bench_on_nodes(executor, models, compare, request, share, output, console, as_json=as_json)
        return
    before = earlier(output, compare, wanted=share is not None)
    results = measure(models, replace(request, before=before))
    console.finish()
    _print_results(results, rows_table(results), output, as_json=as_json)
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

    before = executor.earlier(output, compare, request, wanted=share is not None)
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
        console.note(f"--fail-if-slower: {output} has no earlier results to compare with")


def _print_results(results: Results, text: str, output: Path, *, as_json: bool) -> None:
    from ..bench.results import to_json

    page = output / "report.html"
    where = f"report: {page}" if results.rows else f"results: {output / 'results.json'}"
    show(to_json(results) if as_json else f"{text}\n\n{where}")
