"""What this machine can build and run, and why not the rest."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from typing import Any

from ..common.environment import environment, versions
from ..errors import ForeignEngineError, MissingExtraError
from .tensorrt.backends import BACKENDS, Backend, Gpu, first_gpu
from .tensorrt.cuda import runtime

GPU_PACKAGE = "pip uninstall onnxruntime, then pip install 'moexport[gpu]'"


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
    return Diagnosis(abilities(first_gpu()), environment())


def abilities(gpu: Gpu | None) -> tuple[Ability, ...]:
    """Returns what works here with this GPU."""
    return (
        _export(),
        _onnxruntime("run on CPU", "CPUExecutionProvider", gpu),
        _onnxruntime("run on CUDA", "CUDAExecutionProvider", gpu),
        _onnxruntime("run on ONNX Runtime's TensorRT", "TensorrtExecutionProvider", gpu),
        *(ability for each in BACKENDS.values() for ability in _engines(each, gpu)),
        _demo(),
    )


def _export() -> Ability:
    name = "export to ONNX"
    try:
        from ..common.onnx_runtime import ort
    except MissingExtraError as error:
        return Ability(name, False, f"{error.message}: {error.hint}")
    del ort
    both = versions(("onnxruntime", "onnxruntime-gpu"))
    if len(both) == 2:
        return Ability(name, True, f"but {' and '.join(both)} overwrite one another: keep one")
    return Ability(name, True, "PyTorch traces, ONNX Runtime checks parity")


def _onnxruntime(name: str, provider: str, gpu: Gpu | None) -> Ability:
    try:
        from ..common.onnx_runtime import ort
    except MissingExtraError as error:
        return Ability(name, False, f"{error.message}: {error.hint}")
    if provider not in ort.get_available_providers():
        instead = "" if provider.startswith("CPU") else f": {GPU_PACKAGE}"
        return Ability(name, False, f"this ONNX Runtime was built without {provider}{instead}")
    if not provider.startswith("CPU") and not gpu:
        return Ability(name, False, f"{provider} is installed, but there is no NVIDIA GPU")
    return Ability(name, True, f"ONNX Runtime {ort.__version__}, {provider}")


def _engines(chosen: Backend, gpu: Gpu | None) -> tuple[Ability, Ability]:
    return _builds(chosen, gpu), _runs(chosen, gpu)


def _builds(chosen: Backend, gpu: Gpu | None) -> Ability:
    """Whether engines can be compiled here."""
    name = f"build {chosen.title} engines"
    try:
        chosen.check_installed()
        version = chosen.version()
    except MissingExtraError as error:
        return Ability(name, False, f"{error.message}: {error.hint}")
    if chosen.builds_without_gpu:
        return Ability(name, True, f"{chosen.title} {version}, for {chosen.served}")
    if not gpu:
        return Ability(name, False, "it compiles for the GPU it runs on, and there is none here")
    return _on(chosen, gpu, name)


def _runs(chosen: Backend, gpu: Gpu | None) -> Ability:
    """Whether engines can be run here."""
    name = f"run {chosen.title} engines"
    if importlib.util.find_spec(chosen.module) is None:
        return Ability(name, False, f"{chosen.title} is not installed: {chosen.install}")
    try:
        runtime()
    except MissingExtraError as error:
        return Ability(name, False, f"{error.message}: {error.hint}")
    if not gpu:
        return Ability(name, False, "there is no NVIDIA GPU, or no driver for it")
    return _on(chosen, gpu, name)


def _on(chosen: Backend, gpu: Gpu, name: str) -> Ability:
    """Whether a backend that is installed serves the GPU."""
    try:
        chosen.check_serves(gpu)
    except ForeignEngineError as error:
        return Ability(name, False, f"{error.message}: {error.hint}")
    version = f"{chosen.title} {chosen.version()}"
    return Ability(name, True, f"{version}, on {gpu.name} ({gpu.compute_capability})")


def _demo() -> Ability:
    present = importlib.util.find_spec("sklearn") is not None
    detail = (
        "scikit-learn's digits are installed"
        if present
        else "scikit-learn is missing: pip install 'moexport[demo]'"
    )
    return Ability("demo", present, detail)
