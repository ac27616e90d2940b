"""Registers Ray as an executor with the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.console import Silent
from ...common.option import Request
from ...errors import UsageError
from ...exporter.executors import Executor
from ...exporter.requests import AnyPath, CalibrateRequest, LoadRequest
from .paths import absolute, with_paths_everywhere
from .request import ClusterOptions

if TYPE_CHECKING:
    from ...bench.request import BenchRequest
    from ...bench.results import Results
    from ...calibration.table import CalibrationTable

API = 1


def _calibrate(model: object, data: object, request: CalibrateRequest) -> CalibrationTable:
    from .calibrate import CalibrationSource, calibrate_on_ray

    options = request.asked(ClusterOptions)
    if not isinstance(model, str | Path) or not isinstance(data, str | Path):
        raise UsageError(
            f"--ray {options.ray}: the model and the data must be paths or URLs, because the nodes "
            "read them",
            hint="save the model and the data, and pass their paths",
        )
    source = CalibrationSource(
        model=str(absolute(model)),
        loading=replace(with_paths_everywhere(request.loading), progress=None),
        data=str(absolute(data)),
        options=replace(request, progress=None, further=(), loading=LoadRequest()),
    )
    return calibrate_on_ray(
        source,
        address=str(options.ray),
        on=options.kind,
        out=None if request.out is None else Path(request.out),
        force=request.force,
        progress=request.progress,
    )


def _bench(models: Sequence[AnyPath], request: BenchRequest) -> dict[str, Results]:
    from ...bench.report.compare import compare
    from ...bench.report.page import write_all
    from ...bench.results import Results
    from ...common.writing import make_folder
    from .bench import sweep_on_ray
    from .kinds import folder_of, write_kinds

    options = request.asked(ClusterOptions)
    kinds, out, before = options.kinds, request.folder, request.before

    def keep(kind: str, results: Results) -> None:
        if out is not None:
            folder = out if len(kinds) == 1 else out / folder_of(kind)
            make_folder(folder)
            old = before if isinstance(before, Results | None) else before.get(kind)
            write_all(results, folder, None if old is None else compare(old, results))

    results_by_kind = sweep_on_ray(
        [str(absolute(name)) for name in models],
        replace(with_paths_everywhere(request), data=absolute(request.data)),
        address=options.ray or "auto",
        on=kinds,
        keep=keep,
    )
    if out is not None and len(results_by_kind) > 1:
        write_kinds(results_by_kind, out)
    return results_by_kind


def _shown(reports: Mapping[str, Results], output: Path, request: BenchRequest) -> str:
    from .kinds import folder_of, kinds_text

    kinds = request.asked(ClusterOptions).kinds
    folders = {kind: output / folder_of(kind) if len(kinds) > 1 else output for kind in reports}
    pages = [f"report: {folder / 'report.html'}" for folder in folders.values()]
    return "\n".join([kinds_text(reports), "", *pages])


def _earlier(
    folder: Path, compare: Path | None, request: BenchRequest, *, wanted: bool
) -> Mapping[str, Results]:
    from .kinds import earlier_kinds

    return earlier_kinds(folder, compare, request.asked(ClusterOptions).kinds, wanted=wanted)


def _evaluating(request: Request) -> Any:
    from .evaluate import evaluating_on_ray

    options = request.asked(ClusterOptions)
    return evaluating_on_ray(str(options.ray), options.kind, request.progress or Silent())


def _asked(request: Request) -> bool:
    options = request.asked(ClusterOptions)
    if options.on is not None and options.ray is None:
        raise UsageError(f"--on {options.on}: there is no cluster", hint="name one with --ray")
    return options.ray is not None


def _compared(
    before: Mapping[str, Results], now: Mapping[str, Results], share: float | None
) -> tuple[list[str], Exception | None]:
    from .kinds import compare_kinds

    return compare_kinds(before, now, share)


RAY = Executor("ray", _asked, _calibrate, _bench, _earlier, _shown, _compared, _evaluating)
