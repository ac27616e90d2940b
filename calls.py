"""The Python calls: those of `api` with the fields of their requests as keywords."""

from __future__ import annotations

from . import api
from .bench.request import BenchRequest, DemoRequest, ReportRequest, SpecialiseRequest
from .common.option import takes
from .exporter.requests import (
    AdaptRequest,
    BuildRequest,
    CalibrateRequest,
    ExportRequest,
    GenerateRequest,
    InspectRequest,
    LoadRequest,
    RunRequest,
    SensitivityRequest,
    ServeRequest,
    TritonRequest,
    VerifyRequest,
)
from .tune.request import TuneRequest

load = takes(LoadRequest)(api.load)
inspect = takes(InspectRequest)(api.inspect)
adapt = takes(AdaptRequest)(api.adapt)
calibrate = takes(CalibrateRequest)(api.calibrate)
sensitivity = takes(SensitivityRequest)(api.sensitivity)
export = takes(ExportRequest)(api.export)
plan = takes(ExportRequest)(api.plan)
build = takes(BuildRequest)(api.build)
verify = takes(VerifyRequest)(api.verify)
run = takes(RunRequest)(api.run)
generate = takes(GenerateRequest)(api.generate)
serve = takes(ServeRequest)(api.serve)
triton = takes(TritonRequest)(api.triton)
bench = takes(BenchRequest)(api.bench)
bench_on_ray = takes(BenchRequest)(api.bench_on_ray)
report = takes(ReportRequest)(api.report)
demo = takes(DemoRequest)(api.demo)
tune = takes(TuneRequest)(api.tune)
tune_plan = takes(TuneRequest)(api.tune_plan)
specialise = takes(SpecialiseRequest)(api.specialise)

doctor = api.doctor
