"""Registers the study of `--scenario` with the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...bench.studies import Study, StudyRun
from ...common.option import changed
from .request import ServiceOptions

if TYPE_CHECKING:
    from ...bench.data import Labelled
    from ...bench.plan import Candidate
    from ...bench.request import BenchRequest
    from ...exporter.bundle.bundle import Bundle
    from ...exporter.model import Model

API = 1


def _check(request: BenchRequest, listed: Sequence[Model | Bundle]) -> None:
    from .settings import settings_of

    del listed
    settings_of(request)


def _begin(candidates: Sequence[Candidate], data: Labelled, request: BenchRequest) -> StudyRun:
    from .findings import SERVICE, as_analyses
    from .measure import service_of

    service = service_of(request, data, candidates)
    assert service is not None, "a scenario is requested"
    return StudyRun(lambda: as_analyses(service.findings)[SERVICE], service.serve)


def _asked(request: BenchRequest) -> bool:
    return bool(changed(request.asked(ServiceOptions)))


STUDY = Study("service", _asked, _check, _begin, on_nodes=False)
