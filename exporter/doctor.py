"""What this machine can build and run, and why not the rest."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ..common.environment import environment, versions
from ..common.pytorch import check_pytorch
from ..errors import ForeignEngineError, MissingExtraError, install
from .tensorrt.backends import BACKENDS, Backend, Gpu, first_gpu
from .tensorrt.cuda import driver_problem, runtime

GPU_PACKAGE = f"pip uninstall onnxruntime, then {install('gpu')}"


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
    engines = (
        _ability(f"{verb} {backend.title} engines", partial(works, backend, gpu))
        for backend in BACKENDS.values()
        for verb, works in (("build", _builds), ("run", _runs))
    )
    return (
        _ability("export to ONNX", _exports),
        _ability("run on CPU", partial(_serves, "CPUExecutionProvider", gpu)),
        _ability("run on CUDA", partial(_serves, "CUDAExecutionProvider", gpu)),
        _ability(
            "run on ONNX Runtime's TensorRT", partial(_serves, "TensorrtExecutionProvider", gpu)
        ),
        _ability("run in OpenVINO", _openvino),
        *engines,
        _ability("demo", _demo),
    )


def _ability(name: str, works: Callable[[], str]) -> Ability:
    """An ability; `works` tells by what it is there, or raises what is missing."""
    try:
        return Ability(name, True, works())
    except (MissingExtraError, ForeignEngineError) as error:
        hint = f": {error.hint}" if error.hint else ""
        return Ability(name, False, f"{error.message}{hint}")


def _exports() -> str:
    from ..common.onnx_runtime import ort

    del ort
    check_pytorch("export")
    both = versions(("onnxruntime", "onnxruntime-gpu"))
    if len(both) == 2:
        return f"but {' and '.join(both)} overwrite one another: keep one"
    return "PyTorch traces, ONNX Runtime checks parity"


def _serves(provider: str, gpu: Gpu | None) -> str:
    from ..common.onnx_runtime import ort

    cpu = provider.startswith("CPU")
    if provider not in ort.get_available_providers():
        without = f"this ONNX Runtime was built without {provider}"
        raise MissingExtraError(without, hint=None if cpu else GPU_PACKAGE)
    if not cpu and not gpu:
        raise MissingExtraError(f"{provider} is installed, but there is no NVIDIA GPU")
    if provider.startswith("Tensorrt"):
        from .tensorrt.ort_provider import load_libraries  # which loads all that builds engines

        load_libraries()
    return f"ONNX Runtime {ort.__version__}, {provider}"


def _openvino() -> str:
    if importlib.util.find_spec("openvino") is None:
        raise MissingExtraError("OpenVINO is not installed", hint=install("openvino"))
    return f"OpenVINO {versions(('openvino',))['openvino']}, on the CPU"


def _builds(backend: Backend, gpu: Gpu | None) -> str:
    backend.check_installed()
    version = backend.version()
    if backend.builds_without_gpu:
        return f"{backend.title} {version}, for {backend.served}"
    if not gpu:
        raise MissingExtraError("it compiles for the GPU it runs on, and there is none here")
    return _on(backend, gpu)


def _runs(backend: Backend, gpu: Gpu | None) -> str:
    if importlib.util.find_spec(backend.module) is None:
        raise MissingExtraError(f"{backend.title} is not installed", hint=backend.install)
    runtime()
    if not gpu:
        raise MissingExtraError("there is no NVIDIA GPU, or no driver for it")
    problem = driver_problem()
    if problem is not None:
        raise MissingExtraError(problem)
    return _on(backend, gpu)


def _on(backend: Backend, gpu: Gpu) -> str:
    backend.check_serves(gpu)
    return f"{backend.title} {backend.version()}, on {gpu.name} ({gpu.compute_capability})"


def _demo() -> str:
    check_pytorch("the demo")
    if importlib.util.find_spec("sklearn") is None:
        raise MissingExtraError("scikit-learn is missing", hint=install("demo"))
    return "scikit-learn's digits are installed"
