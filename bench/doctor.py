"""Reports what this machine can build and run, and the reasons for what it cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ForeignEngineError, MissingExtraError, PluginError, install

if TYPE_CHECKING:
    from ..exporter.tensorrt.backends import Backend, Gpu

GPU_PACKAGE = f"pip uninstall onnxruntime, then {install('gpu')}"


@dataclass(frozen=True, slots=True)
class Ability:
    """A capability of moexport, and whether its requirements are met."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Requirement:
    """A line of `moexport doctor`: a capability, and how to test it.

    `works` receives the machine's GPU; it returns a description or raises an error.
    """

    name: str
    works: Callable[[Gpu | None], str]

    def ability(self, gpu: Gpu | None) -> Ability:
        """Returns whether it works on this machine with this GPU, and why or why not."""
        try:
            return Ability(self.name, True, self.works(gpu))
        except (MissingExtraError, ForeignEngineError, PluginError) as error:
            hint = f": {error.hint}" if error.hint else ""
            return Ability(self.name, False, f"{error.message}{hint}")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `moexport doctor`.

    `outside` lists packages whose versions are untested, `plugins` the additions, failures and
    clashes of other distributions.
    """

    abilities: tuple[Ability, ...]
    environment: dict[str, Any]
    outside: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(required: Iterable[Requirement]) -> Diagnosis:
    """Returns a report on the installed packages and the hardware; builds nothing."""
    from ..common.environment import environment
    from ..common.libraries import untested_versions
    from ..common.registry import foreign_plugins, plugin_problems
    from ..exporter.tensorrt.backends import first_gpu

    gpu = first_gpu()
    lines = (EXPORT, *dict.fromkeys(required), DEMO)
    abilities = tuple(line.ability(gpu) for line in lines)
    plugins = tuple(f"plugin {n}: {'; '.join(items)}" for n, items in foreign_plugins().items())
    outside = tuple(untested_versions())
    return Diagnosis(abilities, environment(), outside, (*plugins, *plugin_problems()))


def installed(name: str, package: str, title: str, extra: str) -> Requirement:
    """Returns the requirement of a package that an extra of moexport installs."""

    def version(_: Gpu | None) -> str:
        from ..common.environment import versions

        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(f"{title} is not installed", hint=install(extra))
        return f"{title} {versions((package,)).get(package, '')}".rstrip()

    return Requirement(name, version)


def _exports(gpu: Gpu | None) -> str:
    from ..common.environment import versions
    from ..common.libraries import check_pytorch
    from ..common.onnx_runtime import ort

    del ort  # importing it reports what is missing
    check_pytorch("export")
    runtimes = versions(("onnxruntime", "onnxruntime-gpu"))
    if len(runtimes) == 2:
        return f"{' and '.join(runtimes)} overwrite each other: keep one of them"
    return "PyTorch traces and ONNX Runtime checks parity"


def has_provider(provider: str, gpu: Gpu | None) -> str:
    """Checks for an ONNX Runtime provider: a name in `session.PROVIDERS`."""
    from ..common.onnx_runtime import ort
    from ..exporter.session import CPU, PROVIDERS, TENSORRT

    provider = PROVIDERS[provider]
    on_cpu = provider == CPU
    if provider not in ort.get_available_providers():
        message = f"this ONNX Runtime was built without {provider}"
        raise MissingExtraError(message, hint=None if on_cpu else GPU_PACKAGE)
    if not on_cpu and not gpu:
        raise MissingExtraError(f"{provider} is installed, but there is no NVIDIA GPU")
    if provider == TENSORRT:
        # Imported late: the module loads everything that builds engines.
        from ..exporter.tensorrt.ort_provider import load_libraries

        load_libraries()
    return f"ONNX Runtime {ort.__version__}, {provider}"


def replays_cuda_graphs(gpu: Gpu | None) -> str:
    """Checks whether repeated runs are replayed as CUDA graphs."""
    from ..exporter.bundle.gpu_runs import UNCAPTURED

    has_provider("cuda", gpu)
    return (
        f"repeated shapes and k; not the lowerings {', '.join(UNCAPTURED)}, which wait for the CPU"
    )


def builds_engines(name: str, gpu: Gpu | None) -> str:
    """Checks for the compiler of a TensorRT backend."""
    from ..exporter.tensorrt.backends import BACKENDS

    backend = BACKENDS[name]
    backend.check_installed()
    version = backend.version()
    if backend.builds_without_gpu:
        return f"{backend.title} {version}, for {backend.served}"
    if not gpu:
        raise MissingExtraError("it compiles for this machine's GPU, but there is none")
    return _backend_on(backend, gpu)


def runs_engines(name: str, gpu: Gpu | None) -> str:
    """Checks for the runtime of a TensorRT backend."""
    from ..exporter.tensorrt.backends import BACKENDS
    from ..exporter.tensorrt.cuda import driver_problem, runtime

    backend = BACKENDS[name]
    if importlib.util.find_spec(backend.module) is None:
        raise MissingExtraError(f"{backend.title} is not installed", hint=backend.install)
    runtime()
    if not gpu:
        raise MissingExtraError("there is no NVIDIA GPU, or no driver for it")
    problem = driver_problem()
    if problem is not None:
        raise MissingExtraError(problem)
    return _backend_on(backend, gpu)


def _backend_on(backend: Backend, gpu: Gpu) -> str:
    backend.check_serves(gpu)
    return f"{backend.title} {backend.version()}, on {gpu.name} ({gpu.compute_capability})"


def _demo(gpu: Gpu | None) -> str:
    from ..common.libraries import check_pytorch

    check_pytorch("the demo")
    if importlib.util.find_spec("sklearn") is None:
        raise MissingExtraError("scikit-learn is missing", hint=install("demo"))
    return "scikit-learn and its digits are installed"


EXPORT = Requirement("export to ONNX", _exports)

DEMO = Requirement("demo", _demo)
