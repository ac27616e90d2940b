"""The two TensorRTs: for servers and Jetson (`tensorrt`), and for RTX cards (`tensorrt-rtx`).

Both have the same interface. Their differences are data here; no other code distinguishes them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any

from ...common.environment import nvidia_smi
from ...errors import (
    EngineError,
    ForeignEngineError,
    MissingExtraError,
    MoexportError,
    UsageError,
    install,
)
from . import cuda


@dataclass(frozen=True, slots=True)
class Gpu:
    """The name, compute capability (`8.9`) and driver of a GPU.

    `driver` is the version that nvidia-smi reports, or the newest CUDA that the driver supports.
    """

    name: str
    compute_capability: str
    driver: str


@functools.cache
def first_gpu() -> Gpu | None:
    """Returns the NVIDIA GPU on which engines are built and run, or None.

    CUDA selects it (by `CUDA_VISIBLE_DEVICES` and its own order), also on a Jetson. Without CUDA's
    Python binding, it is the first GPU in nvidia-smi.
    """
    if gpu := _by_cuda():
        return gpu
    rows = nvidia_smi("name", "compute_cap", "driver_version")
    return Gpu(*rows[0]) if rows else None


def _by_cuda() -> Gpu | None:
    try:
        cuda.check_device()
        properties = cuda.call("cudaGetDeviceProperties", 0)
        supported = int(cuda.call("cudaDriverGetVersion"))
    except (EngineError, MissingExtraError):
        return None
    name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
    driver = f"CUDA {supported // 1000}.{supported % 1000 // 10}"
    return Gpu(
        name=name, compute_capability=f"{properties.major}.{properties.minor}", driver=driver
    )


def gpu_memory_bytes() -> int | None:
    """Returns the memory of the first GPU; None without one, or without CUDA's Python binding."""
    try:
        return int(cuda.call("cudaGetDeviceProperties", 0).totalGlobalMem)
    except (EngineError, MissingExtraError):
        return None


RTX_CARDS: Mapping[str, str] = MappingProxyType(
    {
        "7.5": "RTX 20 series",
        "8.0": "A100",
        "8.6": "RTX 30 series",
        "8.9": "RTX 40 series",
        "12.0": "RTX 50 series",
        "12.1": "GB10",
    }
)
"""The compute capabilities that TensorRT-RTX supports, each with an example.

They are those of `ComputeCapability` in 1.7.1, as a test checks. The runtime lists them when it
refuses any other, as on an H100: "Supported compute capabilities: 8.0 8.6 8.9 12.0 12.1 >12.0".
NVIDIA's support matrix (deeplearning/tensorrt-rtx/latest/getting-started/support-matrix.html on
docs.nvidia.com, read for 1.0 to 1.6) has no 8.0. No other data-centre card (9.0, 10.0, 10.3) and no
Jetson (8.7, 11.0) is supported.
"""


@dataclass(frozen=True, slots=True)
class Backend:
    """One TensorRT, as data.

    `index` is the package index, if it is not the default one. `versions` has the first supported
    version and the first one that is too new. `options` names the build options that it honours;
    others are refused rather than silently dropped, and `refused` has the reasons. `max_level` is
    its highest optimisation level (it silently lowers a higher one). `cards` has the only compute
    capabilities that it supports, each with an example; an engine can be built for any of them. It
    is empty if an engine is for the GPU on which it is built, whose compute capability is at least
    `oldest`. With `records_itself`, the runtime records CUDA graphs itself.
    """

    name: str
    title: str
    module: str
    extra: str
    distributions: tuple[str, ...]
    versions: tuple[tuple[int, ...], tuple[int, ...]]
    options: frozenset[str]
    max_level: int
    cards: Mapping[str, str]
    refused: Mapping[str, str]
    oldest: str
    index: str | None = None
    records_itself: bool = False

    @property
    def install(self) -> str:
        return install(self.extra, index=self.index)

    def install_version(self, versions: str) -> str:
        """Returns the command that installs these `versions`, such as `==10.16.1`."""
        index = f"--extra-index-url {self.index} " if self.index else ""
        return f"pip install {index}'{self.distributions[0]}{versions}'"

    @property
    def builds_without_gpu(self) -> bool:
        return bool(self.cards)

    def installed(self) -> bool:
        """Whether the package and Polygraphy, which drives it, are installed; imports neither."""
        return all(importlib.util.find_spec(name) for name in (self.module, "polygraphy"))

    def version(self) -> str:
        """Returns the installed version; `MissingExtraError` if there is none."""
        if importlib.util.find_spec(self.module) is None:
            raise self.missing(self.title)
        for name in self.distributions:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return str(self.load().__version__)  # installed by the system's package manager

    def load(self) -> Any:
        """Returns the module; `MissingExtraError` with the command that installs it."""
        if importlib.util.find_spec(self.module) is None:
            raise self.missing(self.title)
        try:
            return importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            raise MissingExtraError(
                f"{self.title} is installed but cannot be loaded: {str(error).splitlines()[0]}",
                hint=f"install it again: {self.install}",
            ) from error

    def check_installed(self) -> None:
        """Raises `MissingExtraError` if a package for building an engine is missing."""
        for name, title in ((self.module, self.title), ("polygraphy", "Polygraphy")):
            if importlib.util.find_spec(name) is None:
                raise self.missing(title)
        self.check_version(self.version())

    def check_version(self, version: str) -> None:
        """Raises `MissingExtraError` for a version that is too old or too new."""
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        first, last = self.versions
        if not first <= release < last:
            raise MissingExtraError(
                f"{self.title} {version} is installed, but moexport works with "
                f"{'.'.join(map(str, first))} to {last[0] - 1}",
                hint=self.install,
            )

    def serves(self, compute_capability: str) -> bool:
        if self.cards:
            return compute_capability in self.cards
        return _sort_key(compute_capability) >= _sort_key(self.oldest)

    @property
    def served(self) -> str:
        if not self.cards:
            return f"compute capability {self.oldest} and newer"
        listed = ", ".join(f"{name} ({card})" for name, card in self.cards.items())
        return f"compute capability {listed}"

    def check_serves(self, gpu: Gpu, error: type[MoexportError] = ForeignEngineError) -> None:
        """Raises an error for an unsupported GPU; the hint names alternatives."""
        if not self.serves(gpu.compute_capability):
            raise error(
                f"{self.title} does not support {gpu.name} (compute capability "
                f"{gpu.compute_capability}); it supports {self.served}",
                hint=alternative(gpu.compute_capability),
            )

    def missing(self, what: str) -> MissingExtraError:
        return MissingExtraError(f"{what} is not installed", hint=self.install)


_COMMON = frozenset(
    {
        "profiles",
        "workspace",
        "optimization_level",
        "tf32",
        "strip_plan",
        "weight_streaming",
        "bind_weights",
        "expose_routing",
    }
)

TENSORRT = Backend(
    name="tensorrt",
    title="TensorRT",
    module="tensorrt",
    extra="tensorrt",
    distributions=("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt_cu13", "tensorrt_cu12"),
    versions=((10, 12), (12,)),
    options=_COMMON | {"timing_cache", "version_compatible", "hardware_compatible"},
    max_level=5,
    cards=MappingProxyType({}),
    # NVIDIA's support matrix of TensorRT (10.14 and 11.3): compute capability 7.5 or higher.
    oldest="7.5",
    refused=MappingProxyType(
        {
            "compute_capabilities": "an engine is for the GPU on which it is built "
            "(--hardware-compatible supports others)"
        }
    ),
    index="https://pypi.nvidia.com",
)

TENSORRT_RTX = Backend(
    name="tensorrt-rtx",
    title="TensorRT-RTX",
    module="tensorrt_rtx",
    extra="rtx",
    distributions=("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx"),
    versions=((1, 7), (2,)),
    # The other options were tried with 1.7.1: see `refused`.
    options=_COMMON | {"compute_capabilities"},
    max_level=5,
    cards=RTX_CARDS,
    oldest="7.5",
    refused=MappingProxyType(
        {
            "timing_cache": "it times no kernels in a build; its runtime keeps a cache of "
            "compiled kernels instead",
            "version_compatible": "its engines run only in the version that built them",
            "hardware_compatible": "--compute-capability selects the GPUs that its engines support",
        }
    ),
    records_itself=True,
)

BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {backend.name: backend for backend in (TENSORRT, TENSORRT_RTX)}
)


def backend_named(name: str) -> Backend:
    """Returns the backend of a target; `UsageError` for a target without engines."""
    if name not in BACKENDS:
        raise UsageError(
            f"--target {name}: engines are built for {' and '.join(BACKENDS)}",
            hint="ONNX Runtime runs the graph without an engine",
        )
    return BACKENDS[name]


def alternative(compute_capability: str) -> str:
    """Returns an alternative for GPUs of a compute capability that a backend does not support."""
    others = [backend for backend in BACKENDS.values() if backend.serves(compute_capability)]
    if others:
        command = "" if others[0].installed() else f", installed with {others[0].install}"
        return (
            f"use {others[0].title} there (--target {others[0].name}){command}, or run the graph "
            "in ONNX Runtime (--provider cuda)"
        )
    return "run the graph in ONNX Runtime there: --provider cuda if its CUDA supports it, or cpu"


def _sort_key(compute_capability: str) -> tuple[int, ...]:
    """Returns a compute capability as a sort key: 12.0 follows 8.9."""
    return tuple(int(part) for part in compute_capability.split("."))
