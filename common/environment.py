"""The machine and the package versions, as manifests and results record them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "moexport",
    "torch",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "mlcommons-loadgen",
    "tensorrt",
    "tensorrt-rtx-cu13",
    "numpy",
)

NVIDIA_SMI_TIMEOUT_S = 10.0


def environment() -> dict[str, Any]:
    """Returns what measurements depend on: versions, CPU, GPUs, memory and platform.

    Keys: `python`, `platform`, `packages` (versions of installed packages by name), `cpu` (`model`,
    `cores` usable by this process, `architecture`, `instructions`), `memory_bytes` and `gpu` (a
    list of `name`, `memory`, `driver`; null without a GPU). Imports none of the packages.
    """
    return {
        "python": platform.python_version(),
        "platform": platform_name(),
        "packages": versions(PACKAGES),
        "cpu": {
            "model": cpu_model(),
            "cores": usable_cores(),
            "architecture": platform.machine(),
            "instructions": kernel_instructions(),
        },
        "memory_bytes": memory_bytes(),
        "gpu": gpus(),
    }


def platform_name() -> str:
    """Returns the system, architecture and C library, but not the version of the kernel."""
    library = " ".join(part for part in platform.libc_ver() if part)
    return " ".join(part for part in (platform.system(), platform.machine(), library) if part)


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of the distributions that are installed."""
    installed = {}
    for name in names:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the CPU's marketing name, or its architecture if that name is unknown."""
    return _cpu_fact(cpuinfo, "model name") or platform.processor() or platform.machine()


def cpu_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the CPU's instruction flags as Linux names them; empty on other systems."""
    return frozenset(_cpu_fact(cpuinfo, "flags", "Features").split())


def _cpu_fact(cpuinfo: Path, *keys: str) -> str:
    """Returns the first nonempty value of one of the keys; empty on systems other than Linux."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    facts = (line.partition(":") for line in lines)
    return next((v.strip() for key, _, v in facts if key.strip() in keys and v.strip()), "")


KERNEL_INSTRUCTIONS = (
    *("sse4_2", "avx", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_int8", "amx_bf16"),
    *("asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)
"""The x86 and ARM instructions by which runtimes choose kernels for matrix products."""


def kernel_instructions() -> list[str]:
    """Returns the `KERNEL_INSTRUCTIONS` that this CPU has; empty on systems other than Linux."""
    found = cpu_instructions()
    return [name for name in KERNEL_INSTRUCTIONS if name in found]


def cpu_features() -> str:
    """Returns the CPU's architecture and kernel instructions as text."""
    names = ", ".join(kernel_instructions())
    return f"{platform.machine()} with {names}" if names else platform.machine()


def python_environment(**extra: str) -> dict[str, str]:
    """Returns environment variables for a Python process with the import paths of this one.

    The package's own folder is left out, since its modules are not top-level modules.
    """
    package = Path(__file__).resolve().parents[1]
    paths = (path for path in sys.path if path and Path(path).resolve() != package)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra}


def usable_cores() -> int:
    """Returns the number of logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Returns the machine's total memory."""
    import psutil

    return psutil.virtual_memory().total


def available_bytes() -> int:
    """Returns the memory that is free on this machine."""
    import psutil

    return int(psutil.virtual_memory().available)


def peak_memory_bytes() -> int:
    """Returns the peak memory of this process; 0 on Windows, which is not supported.

    On Linux it is read from /proc: `getrusage` starts from the size of the parent process.
    """
    if sys.platform == "win32":
        return 0
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage * (1 if sys.platform == "darwin" else 1024)


@dataclass
class Growth:
    """The peak growth of this process's memory within a block."""

    nbytes: int = 0


@contextmanager
def grown_memory() -> Iterator[Growth]:
    """Measures the growth of memory within the block; 0 if the system does not report it."""
    growth, clear_refs = Growth(), Path("/proc/self/clear_refs")
    try:
        clear_refs.write_text("5", encoding="utf-8")  # resets the peak to the current use
    except OSError:  # another system, or a kernel that forbids it
        yield growth
        return
    before = peak_memory_bytes()
    yield growth
    growth.nbytes = max(0, peak_memory_bytes() - before)


def gpus() -> list[dict[str, str]] | None:
    """Returns name, memory and driver of each NVIDIA GPU from `nvidia-smi`; None without a GPU."""
    rows = nvidia_smi("name", "memory.total", "driver_version")
    return [{"name": row[0], "memory": row[1], "driver": row[2]} for row in rows] or None


def nvidia_smi(*fields: str) -> list[list[str]]:
    """Returns the given fields of each GPU from `nvidia-smi`; empty without a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        result = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):  # nvidia-smi is installed, but no driver
        return []
    rows = ([part.strip() for part in line.split(",")] for line in result.stdout.splitlines())
    return [row for row in rows if len(row) == len(fields)]
