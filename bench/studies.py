"""The door for studies: what a benchmark finds beside its rows, where options ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..common.option import changed, spelled
from ..common.registry import PLUGINS, Registry
from ..errors import PluginError

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

    `options` are the options of `bench` that ask for it. `check` raises a `MoexportError` for what
    cannot be meant of these models and bundles, before anything is measured. `begin` measures what
    does not need the rows; it raises a `MoexportError` for data that do not fit.
    """

    name: str
    options: tuple[str, ...]
    check: Callable[[BenchRequest, Sequence[Model | Bundle]], None]
    begin: Callable[[Sequence[Candidate], Labelled, BenchRequest], StudyRun]


STUDIES = Registry("moexport.studies", Study)
"""All are plugins'."""

BRINGS: Mapping[str, tuple[str, ...]] = {
    "studies": ("analysis", "max_subsets", "group_by"),
    "service": (
        *("scenario", "latency_bound", "offered_rate", "max_delay", "duration", "library"),
        *("triton", "price_per_hour"),
    ),
}
"""The plugins of moexport's own that bring studies, and the options of `bench` that need each."""


def asked(request: BenchRequest) -> list[Study]:
    """Returns the studies that a request asks for.

    Raises `PluginError` for an option whose study is not installed.
    """
    given = changed(request)
    if not any(name in options for options in BRINGS.values() for name in given):
        return []
    studies = [study for study in STUDIES if not set(study.options).isdisjoint(given)]
    known = {option for study in studies for option in study.options}
    for plugin, options in BRINGS.items():
        for name in given:
            if name in options and name not in known:
                raise _not_loaded(spelled(type(request), name), plugin)
    return studies


def _not_loaded(option: str, plugin: str) -> PluginError:
    return PluginError(
        f"{option} needs moexport's plugin '{plugin}', which is not loaded",
        hint=f"is {PLUGINS}=off set? Else install moexport again; `moexport doctor` names plugins "
        "that fail",
    )


def check_studies(request: BenchRequest, listed: Sequence[Model | Bundle] = ()) -> None:
    """Raises a `MoexportError` where what is asked of studies cannot be meant, or is no plugin's.

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
