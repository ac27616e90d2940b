"""The Python calls: those of `api` with the fields of their requests as keywords."""

from __future__ import annotations

from typing import Any

from . import api
from .common.option import takes
from .exporter.requests import (
    BuildRequest,
    CalibrateRequest,
    ExportRequest,
    InspectRequest,
    LoadRequest,
    RunRequest,
    SensitivityRequest,
    VerifyRequest,
)

load = takes(LoadRequest)(api.load)
inspect = takes(InspectRequest)(api.inspect)
calibrate = takes(CalibrateRequest)(api.calibrate)
sensitivity = takes(SensitivityRequest)(api.sensitivity)
export = takes(ExportRequest)(api.export)
plan = takes(ExportRequest)(api.plan)
build = takes(BuildRequest)(api.build)
verify = takes(VerifyRequest)(api.verify)
run = takes(RunRequest)(api.run)
doctor = api.doctor


def __getattr__(name: str) -> Any:
    """Finds the calls of benchmarks, whose options name every engine, when one is asked for."""
    if name not in ("bench", "report"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from .bench import calls

    return getattr(calls, name)
