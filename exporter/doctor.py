"""What this machine can build and run, and why not the rest."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import MissingExtraError
from .engines.cuda import runtime
from .engines.device import first_gpu
from .engines.flavours import FLAVOURS, Flavour
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
    gpu = first_gpu()
    return Diagnosis(
        abilities=(
            Ability("export to ONNX", True, "PyTorch traces, ONNX Runtime checks parity"),
            _onnxruntime("run on CPU", "CPUExecutionProvider", gpu),
            _onnxruntime("run on CUDA", "CUDAExecutionProvider", gpu),
            _onnxruntime("run on ONNX Runtime's TensorRT", "TensorrtExecutionProvider", gpu),
            *(ability for each in FLAVOURS.values() for ability in _engines(each, gpu)),
            _demo(),
        ),
        environment=facts,
    )


def _onnxruntime(name: str, provider: str, gpu: object) -> Ability:
    import onnxruntime

    present = provider in onnxruntime.get_available_providers()
    if not present:
        return Ability(name, False, f"this ONNX Runtime was built without {provider}")
    if not provider.startswith("CPU") and not gpu:
        return Ability(name, False, f"{provider} is installed, but there is no NVIDIA GPU")
    return Ability(name, True, f"ONNX Runtime {onnxruntime.__version__}, {provider}")


def _engines(chosen: Flavour, gpu: object) -> tuple[Ability, Ability]:
    return _builds(chosen, gpu), _runs(chosen, gpu)


def _builds(chosen: Flavour, gpu: object) -> Ability:
    """Whether engines can be compiled here."""
    name = f"build {chosen.title} engines"
    try:
        chosen.check_installed()
        version = chosen.version()
    except MissingExtraError as error:
        return Ability(name, False, f"{error.message}: {error.hint}")
    if chosen.builds_without_gpu:
        cards = ", ".join(chosen.cards)
        return Ability(name, True, f"{chosen.title} {version}, for compute capability {cards}")
    if not gpu:
        return Ability(name, False, "it compiles for the GPU it runs on, and there is none here")
    return Ability(name, True, f"{chosen.title} {version}")


def _runs(chosen: Flavour, gpu: object) -> Ability:
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
    return Ability(name, True, f"{chosen.title} {chosen.version()}")


def _demo() -> Ability:
    present = importlib.util.find_spec("sklearn") is not None
    detail = (
        "scikit-learn's digits are installed"
        if present
        else "scikit-learn is missing: pip install 'moexport[demo]'"
    )
    return Ability("demo", present, detail)
