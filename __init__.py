"""moexport: deploy trained Soft MoE and muMoE models that choose k of n experts per input.

`load`, `calibrate`, `export`, `build`, `bench` and `specialise` do from Python what the command
line does. They, and the classes they return, are imported on first use: `import moexport` alone
loads neither torch nor ONNX Runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import bench, build, calibrate, export, load, specialise
    from .exporter.bundle.bundle import Bundle
    from .exporter.checkpoints.adapters import adapts
    from .exporter.checkpoints.own_layers import MuMoE, SoftMoE
    from .exporter.model import Model
    from .exporter.session import Session
    from .exporter.tensorrt.options import EngineOptions

__all__ = [
    "Bundle",
    "EngineOptions",
    "Model",
    "MuMoE",
    "Session",
    "SoftMoE",
    "adapts",
    "bench",
    "build",
    "calibrate",
    "export",
    "load",
    "specialise",
]

_HOMES = {
    "adapts": ".exporter.checkpoints.adapters",
    "bench": ".api",
    "build": ".api",
    "calibrate": ".api",
    "export": ".api",
    "load": ".api",
    "specialise": ".api",
    "Bundle": ".exporter.bundle.bundle",
    "EngineOptions": ".exporter.tensorrt.options",
    "Model": ".exporter.model",
    "MuMoE": ".exporter.checkpoints.own_layers",
    "Session": ".exporter.session",
    "SoftMoE": ".exporter.checkpoints.own_layers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moexport' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)
