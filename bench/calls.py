"""Benchmarks and their reports as Python calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.libraries import check_pytorch
from ..common.option import takes
from ..common.writing import check_folder
from ..errors import UsageError
from ..exporter.requests import AnyPath
from .request import BenchRequest, ReportRequest

if TYPE_CHECKING:
    from torch import nn

    from ..exporter.bundle.bundle import Bundle
    from ..exporter.executors import Executor
    from ..exporter.model import Model
    from .report.compare import ResultsComparison
    from .results import Results

    AnyMeasured = Model | Bundle | nn.Module | AnyPath


@takes(BenchRequest)
def bench(models: AnyMeasured | Sequence[AnyMeasured], request: BenchRequest) -> Results:
    """Measures models and bundles against the unmodified PyTorch model; returns every row.

    `models` is one model or a list: loaded models, networks in memory, bundles, or paths of these.
    A bundle after the model it was made from is compared with that model; a bundle alone loads the
    checkpoint in its manifest. A model is exported for every `k`, `lowering` and `precision`.
    Repeating an interrupted call with the same `out` continues it.

    Raises:
        UsageError: before anything is measured, if an argument is invalid.
        FeedError: before anything is measured, if the data do not fit the model.
    """
    request.check()
    if request.folder is not None:
        check_folder(request.folder)
    check_pytorch("a benchmark")
    from torch import nn

    from .prepare import open_sources
    from .run import sweep

    # Checked before anything is loaded.
    request = replace(request, batch=None if request.batch is None else request.batches)
    is_list = isinstance(models, Iterable) and not isinstance(models, str | nn.Module)
    sources: Sequence[AnyMeasured] = models if is_list else [models]  # type: ignore[list-item,assignment]
    return sweep(open_sources(sources, request), request)


def bench_on_nodes(
    executor: Executor, models: AnyPath | Sequence[AnyPath], request: BenchRequest
) -> dict[str, Results]:
    """Measures models and bundles on other machines; returns results by kind of node.

    Raises the errors of the executor, and `UsageError` before anything is measured.
    """
    request.check()
    check_pytorch("a benchmark")
    sources = [models] if isinstance(models, str | Path) else models
    if not isinstance(sources, Sequence) or not all(isinstance(m, str | Path) for m in sources):
        raise UsageError(
            "nodes of a cluster load models themselves and cannot use a model in memory",
            hint="give paths or URLs that every node can read, or package.module:factory",
        )
    request = replace(request, batch=request.batches)  # checked before anything is loaded
    if request.folder is not None:
        check_folder(request.folder)
    return executor.bench(sources, request)


@takes(ReportRequest)
def report(
    results: Results | AnyPath, output: AnyPath, request: ReportRequest
) -> tuple[tuple[Path, ...], ResultsComparison | None]:
    """Writes the report of results; returns the files and the changes since `compare`.

    `results` is the result of `bench`, or its results.json. `output` is the page, an .html file;
    Markdown, CSV and figures go next to it. The page also shows the results in `beside`.
    """
    from .report.compare import compare as compared
    from .report.page import write_views
    from .report.runs import named_runs
    from .results import Results, read

    def read_run(run: Results | AnyPath) -> Results:
        return run if isinstance(run, Results) else read(Path(run))

    now = read_run(results)
    before = None if request.compare is None else read_run(request.compare)
    comparison = None if before is None else compared(before, now)
    if request.progress is not None:
        request.progress.step(f"writing {output}")
    paths = [None if isinstance(run, Results) else Path(run) for run in request.beside]
    runs = named_runs(paths, [read_run(run) for run in request.beside])
    return write_views(now, Path(output), comparison, runs), comparison
