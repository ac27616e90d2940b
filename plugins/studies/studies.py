"""What `--analysis` and `--group-by` ask of a benchmark: the records by which the core finds it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...bench.studies import Study, StudyRun
from ...common.console import Silent
from ...errors import UsageError
from .request import StudyOptions

if TYPE_CHECKING:
    from ...bench.data import Labelled
    from ...bench.plan import Candidate
    from ...bench.request import BenchRequest
    from ...exporter.bundle.bundle import Bundle
    from ...exporter.model import Model
    from .experts import Wanted

API = 1


def _wanted(request: BenchRequest) -> Wanted:
    """Which analyses of experts are asked for; `UsageError` for what are none."""
    from .experts import Wanted, parse_analyses

    options = request.asked(StudyOptions)
    most = options.max_subsets
    names = parse_analyses(options.analysis) if options.analysis else ()
    if most is not None and "subsets" not in names:
        raise UsageError(
            f"--max-subsets {most}: no subsets are tried", hint="add --analysis subsets"
        )
    return Wanted(names, max_subsets=most)


def _check_experts(request: BenchRequest, listed: Sequence[Model | Bundle]) -> None:
    from ...exporter.model import Model, check_one_input

    _wanted(request)
    for item in listed:
        if isinstance(item, Model):
            check_one_input(item, "--analysis")


def _begin_experts(
    candidates: Sequence[Candidate], data: Labelled, request: BenchRequest
) -> StudyRun:
    from .experts import studied

    watcher = request.progress or Silent()
    found = studied(candidates, data, _wanted(request), request.samples, watcher)
    return StudyRun(lambda: found)


def _check_subgroups(request: BenchRequest, listed: Sequence[Model | Bundle]) -> None:
    """Nothing is known before the data are read."""


def _begin_subgroups(
    candidates: Sequence[Candidate], data: Labelled, request: BenchRequest
) -> StudyRun:
    from ...bench.data import load_groups
    from .subgroups import compared

    name = request.asked(StudyOptions).group_by or ""
    if not isinstance(request.data, str | Path):
        raise UsageError(
            f"--group-by {name}: names an array of a file, and the data are none",
            hint="save inputs, labels and subgroups in an .npz",
        )
    held = data.head(sys.maxsize)
    groups = load_groups(Path(request.data), name, len(held))
    seen = held.head(len(held) if request.samples is None else request.samples)
    watcher = request.progress or Silent()
    found = compared(candidates, seen, groups[: len(seen)], name, watcher)
    return StudyRun(lambda: found)


def _asks_of_experts(request: BenchRequest) -> bool:
    options = request.asked(StudyOptions)
    return bool(options.analysis) or options.max_subsets is not None


def _asks_of_subgroups(request: BenchRequest) -> bool:
    return request.asked(StudyOptions).group_by is not None


EXPERTS = Study("experts", _asks_of_experts, _check_experts, _begin_experts)
SUBGROUPS = Study("subgroups", _asks_of_subgroups, _check_subgroups, _begin_subgroups)
