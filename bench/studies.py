"""The registry of studies: additional analyses in a benchmark, requested by options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..common.registry import Registry

if TYPE_CHECKING:
    from ..exporter.bundle.bundle import Bundle
    from ..exporter.model import Model
    from .data import Labelled
    from .journal import Journal
    from .plan import Candidate, Case
    from .request import BenchRequest


@dataclass(frozen=True, slots=True)
class StudyRun:
    """A study of the candidates of one benchmark.

    `findings` returns the results as plain data for `results.json`. `follow` measures a candidate
    after its rows, given the failed cases; it is None if the study needs no rows.
    """

    findings: Callable[[], Any]
    follow: Callable[[Candidate, Mapping[Case, str], Journal], None] | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """A study: its name is the key of its findings among the analyses of `results.json`.

    `requested` returns whether a plugin's options request it (`Request.asked`). `check` raises a
    `MoexportError` for options that do not fit these models and bundles, before anything is
    measured. `begin` measures what does not need the rows; it raises a `MoexportError` for data
    that do not fit. `on_nodes` says whether a node of a cluster can run it.
    """

    name: str
    requested: Callable[[BenchRequest], bool]
    check: Callable[[BenchRequest, Sequence[Model | Bundle]], None]
    begin: Callable[[Sequence[Candidate], Labelled, BenchRequest], StudyRun]
    on_nodes: bool = True


STUDIES = Registry("moexport.studies", Study)
"""Every study comes from a plugin."""


def requested_studies(request: BenchRequest) -> list[Study]:
    """Returns the studies that options of plugins request."""
    return [study for study in STUDIES if study.requested(request)] if request.further else []


def check_studies(request: BenchRequest, sources: Sequence[Model | Bundle] = ()) -> None:
    """Raises a `MoexportError` for invalid options of studies.

    `sources` are the models and bundles, if known.
    """
    for study in requested_studies(request):
        study.check(request, sources)


def begin_studies(
    candidates: Sequence[Candidate], data: Labelled, request: BenchRequest
) -> dict[str, StudyRun]:
    """Begins the requested studies and returns them by name.

    Studies that need no rows come first, also in `results.json`.
    """
    studies = {
        study.name: study.begin(candidates, data, request) for study in requested_studies(request)
    }
    return dict(sorted(studies.items(), key=lambda each: each[1].follow is not None))
