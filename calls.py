"""The Python calls: those of `api` with the fields of their requests as keywords."""

from __future__ import annotations

from . import api
from .bench.request import BenchRequest, ReportRequest
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
bench = takes(BenchRequest)(api.bench)
bench_on_ray = takes(BenchRequest)(api.bench_on_ray)
report = takes(ReportRequest)(api.report)

doctor = api.doctor
