"""moexport: deploy trained Soft MoE and muMoE models that choose k of n experts per input.

Each function (`moexport.export` …) does what the command of the same name does, and raises a
`moexport.MoexportError` for errors that a user can cause. Functions and the classes they return are
imported on first use: `import moexport` alone loads neither torch nor ONNX Runtime.
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
    from .bench.calls import bench, report
    from .bench.engines import doctor
    from .exporter.bundle.bundle import Bundle
    from .exporter.bundle.run import run
    from .exporter.calls import build, verify
    from .exporter.checkpoints.load import load
    from .exporter.export import export, plan
    from .exporter.inspect import inspect
    from .exporter.model import Model
    from .exporter.quantization.calls import calibrate, sensitivity
    from .exporter.session import Session
    from .exporter.tensorrt.options import EngineOptions
    from .plugins.cluster.calls import bench_on_ray
    from .plugins.demo.calls import demo
    from .plugins.own_layers.adapters import adapts
    from .plugins.own_layers.descriptions import ExpertsDescription as Experts
    from .plugins.own_layers.descriptions import MuMoEDescription as MuMoE
    from .plugins.own_layers.descriptions import SoftMoEDescription as SoftMoE
    from .plugins.own_layers.first_adapter.calls import adapt
    from .plugins.studies.calls import specialise
    from .plugins.text.calls import generate, serve
    from .plugins.triton.calls import triton
    from .plugins.tune.calls import tune

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

_MODULES = {
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
    "build": ".exporter.calls",
    "calibrate": ".exporter.quantization.calls",
    "demo": ".plugins.demo.calls",
    "doctor": ".bench.engines",
    "export": ".exporter.export",
    "generate": ".plugins.text.calls",
    "inspect": ".exporter.inspect",
    "load": ".exporter.checkpoints.load",
    "plan": ".exporter.export",
    "report": ".bench.calls",
    "run": ".exporter.bundle.run",
    "sensitivity": ".exporter.quantization.calls",
    "serve": ".plugins.text.calls",
    "specialise": ".plugins.studies.calls",
    "triton": ".plugins.triton.calls",
    "tune": ".plugins.tune.calls",
    "verify": ".exporter.calls",
}
"""The module of each name; after a colon, its name in that module if it differs."""

_PYTORCH_ACTIONS = {
    "calibrate": "calibration",
    "export": "export",
    "inspect": "inspecting a model",
    "load": "loading a model",
    "plan": "export",
    "sensitivity": "calibration",
}
"""The names that need PyTorch, with the action that an error about its absence mentions."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'moexport' has no attribute '{name}'")
    from importlib import import_module

    if name in _PYTORCH_ACTIONS:
        from .common.libraries import check_pytorch

        check_pytorch(_PYTORCH_ACTIONS[name])
    module, _, original = _MODULES[name].partition(":")
    return getattr(import_module(module, __name__), original or name)
