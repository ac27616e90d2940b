"""Benchmarks and their reports as Python calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.libraries import check_pytorch
from ..common.option import takes
from ..exporter.requests import AnyPath
from .request import BenchRequest, ReportRequest

if TYPE_CHECKING:
    from ..exporter.bundle.bundle import Bundle
    from ..exporter.model import Model
    from .executors import Executor
    from .report.compare import ResultsComparison
    from .results import Results


def bench_as(
    models: Model | Bundle | AnyPath | Sequence[Model | Bundle | AnyPath], request: BenchRequest
) -> Results:
    """Measures models and bundles against the untouched PyTorch model; returns every row.

    `models` are loaded models, bundles, or what names them; one or a list. A bundle that follows
    the model it was made from is compared with that; alone it loads the checkpoint that its
    manifest names. A model is exported for every `k`, `lowering` and `precision`. A call that was
    interrupted goes on where it stopped, if `out` is the same.

    Raises:
        UsageError: before anything is measured, if an argument is invalid.
        FeedError: before anything is measured, if the data do not fit the model.
    """
    check_pytorch("a benchmark")
    from ..common.writing import check_folder
    from ..exporter.bundle.bundle import Bundle
    from ..exporter.model import Model
    from .prepare import opened
    from .run import sweep

    # Refused before anything is loaded.
    request = replace(request, batch=None if request.batch is None else request.batches)
    if request.folder is not None:
        check_folder(request.folder)
    listed = [models] if isinstance(models, Model | Bundle | str | Path) else models
    return sweep(opened(listed, request), request)


def bench_on_nodes(
    executor: Executor, models: AnyPath | Sequence[AnyPath], request: BenchRequest
) -> dict[str, Results]:
    """Measures models and bundles on other machines; returns results by kind of node.

    Raises what the executor raises, and `UsageError` before anything is measured.
    """
    check_pytorch("a benchmark")
    from ..common.writing import check_folder

    listed = [models] if isinstance(models, str | Path) else models
    request = replace(request, batch=request.batches)  # refused before anything is loaded
    if request.folder is not None:
        check_folder(request.folder)
    return executor.bench(listed, request)


def report_as(
    results: Results | AnyPath, output: AnyPath, request: ReportRequest
) -> tuple[tuple[Path, ...], ResultsComparison | None]:
    """Writes the report of results again; returns the files and what changed since `compare`.

    `results` is what `bench` returned, or its results.json; `output` the page, .html: Markdown, CSV
    and figures go beside it. The page draws further results `beside` it.
    """
    from .report.compare import compare as compared
    from .report.page import write_views
    from .report.runs import named_runs
    from .results import Results, read

    def known(run: Results | AnyPath) -> Results:
        return run if isinstance(run, Results) else read(Path(run))

    now = known(results)
    before = None if request.compare is None else known(request.compare)
    comparison = None if before is None else compared(before, now)
    if request.progress is not None:
        request.progress.step(f"writing {output}")
    places = [None if isinstance(run, Results) else Path(run) for run in request.beside]
    runs = named_runs(places, [known(run) for run in request.beside])
    return write_views(now, Path(output), comparison, runs), comparison


bench = takes(BenchRequest)(bench_as)
report = takes(ReportRequest)(report_as)
