"""moexport: deploy trained Soft MoE and muMoE models that choose k of n experts per input.

The functions (`moexport.export` …) do from Python what the commands of their names do, and raise a
`moexport.MoexportError` for what a user can cause. They, and the classes they return, are imported
on first use: `import moexport` alone loads neither torch nor ONNX Runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .common.libraries import turn_off_reports
from .errors import (
    BundleError,
    CacheMemoryError,
    CalibrationError,
    CheckError,
    CheckpointError,
    ClusterError,
    EngineError,
    FamilyError,
    FeedError,
    ForeignEngineError,
    LocationError,
    LoweringError,
    MissingExtraError,
    MissingSettingsError,
    MoexportError,
    OutputError,
    ParityError,
    PluginError,
    QueueFullError,
    ResultsError,
    TraceError,
    UntrustedEngineError,
    UsageError,
)

if TYPE_CHECKING:
    from dataclasses import dataclass

    from . import api
    from .bench.calls import bench_as, report
    from .bench.request import BenchRequest
    from .calls import (
        build,
        doctor,
        sensitivity,
        verify,
    )
    from .common.option import takes
    from .exporter.bundle.bundle import Bundle
    from .exporter.model import Model
    from .exporter.requests import (
        CalibrateRequest,
        ExportRequest,
        InspectRequest,
        LoadRequest,
        RunRequest,
    )
    from .exporter.session import Session
    from .exporter.tensorrt.options import EngineOptions
    from .plugins.cluster.calls import bench_on_ray_as
    from .plugins.cluster.request import ClusterOptions
    from .plugins.demo.calls import demo
    from .plugins.openvino.request import OpenVinoOptions
    from .plugins.own_layers.adapters import adapts
    from .plugins.own_layers.descriptions import ExpertsDescription as Experts
    from .plugins.own_layers.descriptions import MuMoEDescription as MuMoE
    from .plugins.own_layers.descriptions import SoftMoEDescription as SoftMoE
    from .plugins.own_layers.first_adapter.calls import adapt
    from .plugins.own_layers.request import NetworkOptions
    from .plugins.service.request import ServiceOptions
    from .plugins.studies.calls import specialise
    from .plugins.studies.request import EditOptions, StudyOptions
    from .plugins.text.calls import generate, serve
    from .plugins.text.request import LayoutOptions
    from .plugins.triton.calls import triton
    from .plugins.tune.calls import tune_as
    from .plugins.tune.request import RecipeOptions, TuneRequest

    # What plugins of our own add to calls: type checkers know these keywords, too.
    @dataclass(frozen=True, slots=True, kw_only=True)
    class _Bench(BenchRequest, NetworkOptions, StudyOptions, ServiceOptions, ClusterOptions):
        """Everything that `bench` takes."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class _Calibrate(CalibrateRequest, ClusterOptions):
        """Everything that `calibrate` takes."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class _Export(ExportRequest, EditOptions, RecipeOptions, LayoutOptions):
        """Everything that `export` and `plan` take."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class _Inspect(InspectRequest, NetworkOptions):
        """Everything that `inspect` takes."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class _Load(LoadRequest, NetworkOptions):
        """Everything that `load` takes."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class _Run(RunRequest, OpenVinoOptions):
        """Everything that `run` takes."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class _Tune(TuneRequest, ClusterOptions):
        """Everything that `tune` takes."""

    bench = takes(_Bench)(bench_as)
    bench_on_ray = takes(_Bench)(bench_on_ray_as)
    calibrate = takes(_Calibrate)(api.calibrate)
    export = takes(_Export)(api.export)
    inspect = takes(_Inspect)(api.inspect)
    load = takes(_Load)(api.load)
    plan = takes(_Export)(api.plan)
    run = takes(_Run)(api.run)
    tune = takes(_Tune)(tune_as)

__all__ = [
    "Bundle",
    "BundleError",
    "CacheMemoryError",
    "CalibrationError",
    "CheckError",
    "CheckpointError",
    "ClusterError",
    "EngineError",
    "EngineOptions",
    "Experts",
    "FamilyError",
    "FeedError",
    "ForeignEngineError",
    "LocationError",
    "LoweringError",
    "MissingExtraError",
    "MissingSettingsError",
    "Model",
    "MoexportError",
    "MuMoE",
    "OutputError",
    "ParityError",
    "PluginError",
    "QueueFullError",
    "ResultsError",
    "Session",
    "SoftMoE",
    "TraceError",
    "UntrustedEngineError",
    "UsageError",
    "adapt",
    "adapts",
    "bench",
    "bench_on_ray",
    "build",
    "calibrate",
    "demo",
    "doctor",
    "export",
    "generate",
    "inspect",
    "load",
    "plan",
    "report",
    "run",
    "sensitivity",
    "serve",
    "specialise",
    "triton",
    "tune",
    "verify",
]

turn_off_reports()

_ELSEWHERE = {
    "adapts": ".plugins.own_layers.adapters",
    "Bundle": ".exporter.bundle.bundle",
    "EngineOptions": ".exporter.tensorrt.options",
    "Experts": ".plugins.own_layers.descriptions:ExpertsDescription",
    "Model": ".exporter.model",
    "MuMoE": ".plugins.own_layers.descriptions:MuMoEDescription",
    "Session": ".exporter.session",
    "SoftMoE": ".plugins.own_layers.descriptions:SoftMoEDescription",
    "adapt": ".plugins.own_layers.first_adapter.calls",
    "bench": ".bench.calls",
    "bench_on_ray": ".plugins.cluster.calls",
    "demo": ".plugins.demo.calls",
    "generate": ".plugins.text.calls",
    "report": ".bench.calls",
    "serve": ".plugins.text.calls",
    "specialise": ".plugins.studies.calls",
    "triton": ".plugins.triton.calls",
    "tune": ".plugins.tune.calls",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'moexport' has no attribute '{name}'")
    from importlib import import_module

    module, _, other = _ELSEWHERE.get(name, ".calls").partition(":")
    return getattr(import_module(module, __name__), other or name)
