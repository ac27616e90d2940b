"""The NVIDIA GPUs of this machine, as far as an engine depends on them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...common.environment import nvidia_smi
from ...errors import EngineError, MissingExtraError
from . import cuda


@dataclass(frozen=True, slots=True)
class Gpu:
    """Name, compute capability (`8.9`) and driver of one GPU.

    The driver is its version as its own tool tells it, or the newest CUDA that it serves.
    """

    name: str
    compute_capability: str
    driver: str


@functools.cache
def first_gpu() -> Gpu | None:
    """Returns the NVIDIA GPU that engines are built and run on, or None without one.

    CUDA knows best which one that is (`CUDA_VISIBLE_DEVICES`, its own order), and a Jetson has no
    other to ask; without its Python binding the driver's own tool tells.
    """
    return _by_cuda() or _by_tool()


def _by_cuda() -> Gpu | None:
    try:
        cuda.check_device()
        found = cuda.call("cudaGetDeviceProperties", 0)
        served = int(cuda.call("cudaDriverGetVersion"))
    except (EngineError, MissingExtraError):
        return None
    name = found.name.decode() if isinstance(found.name, bytes) else str(found.name)
    driver = f"CUDA {served // 1000}.{served % 1000 // 10}"
    return Gpu(name, f"{found.major}.{found.minor}", driver)


def _by_tool() -> Gpu | None:
    rows = nvidia_smi("name", "compute_cap", "driver_version")
    return Gpu(*rows[0]) if rows else None
