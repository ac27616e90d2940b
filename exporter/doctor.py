"""What this machine can build and run, and why not the rest."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from typing import Any

from .environment import environment


@dataclass(frozen=True, slots=True)
class Ability:
    """One thing that moexport can do where its parts are present."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `moexport doctor`."""

    abilities: tuple[Ability, ...]
    environment: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The diagnosis as plain data."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Returns what works here; looks at the installed packages and the hardware, builds nothing."""
    facts = environment()
    gpu = facts["gpu"]
    return Diagnosis(
        abilities=(
            Ability("export to ONNX", True, "PyTorch traces, ONNX Runtime checks parity"),
            _onnxruntime("run on CPU", "CPUExecutionProvider", gpu),
            _onnxruntime("run on CUDA", "CUDAExecutionProvider", gpu),
            _tensorrt("TensorRT", "tensorrt", gpu),
            _tensorrt("TensorRT-RTX", "tensorrt_rtx", gpu),
            _demo(),
        ),
        environment=facts,
    )


def _onnxruntime(name: str, provider: str, gpu: object) -> Ability:
    import onnxruntime

    present = provider in onnxruntime.get_available_providers()
    if not present:
        return Ability(name, False, f"this ONNX Runtime was built without {provider}")
    if provider.startswith("CUDA") and not gpu:
        return Ability(name, False, f"{provider} is installed, but there is no NVIDIA GPU")
    return Ability(name, True, f"ONNX Runtime {onnxruntime.__version__}, {provider}")


def _tensorrt(name: str, module: str, gpu: object) -> Ability:
    """Graphs for TensorRT are written without it; this version does not build engines."""
    target = name.lower()
    if importlib.util.find_spec(module) is None:
        where = f"{name} is not installed here"
    elif gpu:
        where = f"{name} is installed"
    else:
        where = f"{name} is installed; without an NVIDIA GPU an engine can be built, not run"
    detail = f"written with --target {target}; engines are built with its own tools ({where})"
    return Ability(f"graphs for {name}", True, detail)


def _demo() -> Ability:
    present = importlib.util.find_spec("sklearn") is not None
    detail = (
        "scikit-learn's digits are installed"
        if present
        else "scikit-learn is missing: pip install 'moexport[demo]'"
    )
    return Ability("demo", present, detail)
