"""Registers the studies of `--analysis` and `--group-by` with the core."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...bench.studies import Study, StudyRun
from ...common.console import Silent
from ...errors import UsageError
from .request import StudyOptions, requested

if TYPE_CHECKING:
    from ...bench.data import Labelled
    from ...bench.plan import Candidate
    from ...bench.request import BenchRequest
    from ...exporter.bundle.bundle import Bundle
    from ...exporter.model import Model

API = 1


def _check_experts(request: BenchRequest, listed: Sequence[Model | Bundle]) -> None:
    requested(request.asked(StudyOptions))
    for item in listed:
        from ...exporter.model import Model, check_one_input  # PyTorch is imported already

        if isinstance(item, Model):
            check_one_input(item, "--analysis")


def _begin_experts(
    candidates: Sequence[Candidate], data: Labelled, request: BenchRequest
) -> StudyRun:
    from .experts import study_all

    single = [part for candidate in candidates for part in candidate.parts]
    wanted = requested(request.asked(StudyOptions))
    found = study_all(single, data, wanted, request.samples, request.progress or Silent())
    return StudyRun(lambda: found)


def _check_subgroups(request: BenchRequest, listed: Sequence[Model | Bundle]) -> None:
    """Raises `UsageError` if the data are not a file. Its arrays are checked later."""
    name = request.asked(StudyOptions).group_by or ""
    if not isinstance(request.data, str | Path | Mapping):
        raise UsageError(
            f"--group-by {name} names an array of a file, but the data are not a file",
            hint="save the inputs, labels and subgroups in an .npz",
        )


def _begin_subgroups(
    candidates: Sequence[Candidate], data: Labelled, request: BenchRequest
) -> StudyRun:
    from ...bench.data import load_groups
    from .subgroups import compare_subgroups

    name, given = request.asked(StudyOptions).group_by or "", request.data
    assert isinstance(given, str | Path | Mapping), "`_check_subgroups` accepted it"
    labelled = data.head(sys.maxsize)
    source = given if isinstance(given, Mapping) else Path(given)
    groups = load_groups(source, name, labelled.skipped + len(labelled))[labelled.skipped :]
    sample = labelled.head(len(labelled) if request.samples is None else request.samples)
    progress = request.progress or Silent()
    single = [part for candidate in candidates for part in candidate.parts]
    found = compare_subgroups(single, sample, groups[: len(sample)], name, progress)
    return StudyRun(lambda: found)


def _requests_experts(request: BenchRequest) -> bool:
    options = request.asked(StudyOptions)
    return bool(options.analysis) or options.max_subsets is not None


EXPERTS = Study("experts", _requests_experts, _check_experts, _begin_experts)
SUBGROUPS = Study(
    "subgroups",
    lambda request: request.asked(StudyOptions).group_by is not None,
    _check_subgroups,
    _begin_subgroups,
)
