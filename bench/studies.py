"""The door for studies: what a benchmark finds beside its rows, where options ask for it."""

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

    `findings` returns what was found, as plain data for `results.json`. `follow` measures a
    candidate after its rows, of which the cases failed that it is told; None where all was found
    before the rows.
    """

    findings: Callable[[], Any]
    follow: Callable[[Candidate, Mapping[Case, str], Journal], None] | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """One study: its name is where its findings stand among the analyses of `results.json`.

    `asked` returns whether options of a plugin ask for it (`Request.asked`). `check` raises a
    `MoexportError` for what cannot be meant of these models and bundles, before anything is
    measured. `begin` measures what does not need the rows; it raises a `MoexportError` for data
    that do not fit. `on_nodes` says whether a node of a cluster can do it by itself.
    """

    name: str
    asked: Callable[[BenchRequest], bool]
    check: Callable[[BenchRequest, Sequence[Model | Bundle]], None]
    begin: Callable[[Sequence[Candidate], Labelled, BenchRequest], StudyRun]
    on_nodes: bool = True


STUDIES = Registry("moexport.studies", Study)
"""All are plugins'."""


def asked(request: BenchRequest) -> list[Study]:
    """Returns the studies that a request asks for."""
    return [study for study in STUDIES if study.asked(request)] if request.further else []


def check_studies(request: BenchRequest, listed: Sequence[Model | Bundle] = ()) -> None:
    """Raises a `MoexportError` where what is asked of studies cannot be meant.

    `listed` are the models and bundles, where they are known.
    """
    for study in asked(request):
        study.check(request, listed)


def begun(
    candidates: Sequence[Candidate], data: Labelled, request: BenchRequest
) -> dict[str, StudyRun]:
    """Begins the studies that are asked for, and returns them by name.

    Those that found everything come first: so `results.json` has them.
    """
    studies = {study.name: study.begin(candidates, data, request) for study in asked(request)}
    return dict(sorted(studies.items(), key=lambda each: each[1].follow is not None))
