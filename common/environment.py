"""The machine and the versions behind a file: for manifests and results."""

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
    """Returns what a reader needs to judge numbers: versions, CPU, GPUs, memory, platform.

    Keys: `python`, `platform`, `packages` (name to version, installed ones only), `cpu` (`model`,
    `cores` usable by this process, `architecture`, `instructions`), `memory_bytes` and `gpu`
    (a list of `name`, `memory`, `driver`; null without one). Imports none of the packages.
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
    """Returns system, architecture and C library; a kernel's own name would tell of one machine."""
    library = " ".join(part for part in platform.libc_ver() if part)
    return " ".join(part for part in (platform.system(), platform.machine(), library) if part)


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Returns the installed version of each distribution that is installed."""
    installed = {}
    for name in names:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the CPU's marketing name, or the architecture where no name is to be had."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def cpu_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the flags of the CPU's instructions as Linux names them; empty on other systems."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return frozenset()
    flags = (line.partition(":") for line in text.splitlines())
    words = next((v for key, _, v in flags if key.strip() in ("flags", "Features")), "")
    return frozenset(words.split())


KERNEL_INSTRUCTIONS = (
    *("sse4_2", "avx", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_int8", "amx_bf16"),
    *("asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)
"""Those by which runtimes choose what they multiply matrices with, of x86 and of ARM."""


def kernel_instructions() -> list[str]:
    """Returns those of `KERNEL_INSTRUCTIONS` that this CPU has; none where Linux does not tell."""
    found = cpu_instructions()
    return [name for name in KERNEL_INSTRUCTIONS if name in found]


def cpu_features() -> str:
    """Returns the CPU's architecture and what runtimes choose their kernels by, in words."""
    names = ", ".join(kernel_instructions())
    return f"{platform.machine()} with {names}" if names else platform.machine()


def usable_cores() -> int:
    """Returns how many logical cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Returns the machine's memory in bytes."""
    import psutil

    return psutil.virtual_memory().total


def available_bytes() -> int:
    """Returns the memory that this machine has left."""
    import psutil

    return int(psutil.virtual_memory().available)


class EnergyCounters:
    """The energy that the packages of a machine's CPUs take, by Linux's powercap (RAPL)."""

    def __init__(self, place: Path = Path("/sys/class/powercap")) -> None:
        """Raises `OSError` that says why where the counters are not there or cannot be read."""
        zones = [zone for zone in place.glob("*-rapl:*") if zone.name.count(":") == 1]
        if not zones:
            raise FileNotFoundError("this machine has no counters of energy (RAPL)")
        # A zone starts again from 0 at its end.
        self._ends = {
            zone / "energy_uj": int((zone / "max_energy_range_uj").read_text()) for zone in zones
        }
        self._last = {file: int(file.read_text()) for file in self._ends}

    def joules(self) -> float:
        """Returns the energy since the last call, all packages together."""
        now = {file: int(file.read_text()) for file in self._ends}
        used = sum((now[file] - self._last[file]) % end for file, end in self._ends.items())
        self._last = now
        return used / 1e6


def energy_counters() -> tuple[EnergyCounters | None, str]:
    """Returns the machine's counters of energy, or None and why there are none that can be read."""
    try:
        return EnergyCounters(), ""
    except PermissionError:
        return None, "only root may read this machine's counters of energy (RAPL)"
    except OSError as error:
        return None, str(error)


def peak_memory_bytes() -> int:
    """Returns the most memory that this process has held; 0 on Windows, which is not asked.

    Linux tells it of this program alone; what `getrusage` tells begins with the size of whoever
    started it.
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
    """By how much the memory of this process grew within a block, at its largest."""

    nbytes: int = 0


@contextmanager
def grown_memory() -> Iterator[Growth]:
    """Within the block the growth of memory is measured; 0 where the system does not tell it."""
    growth, peak = Growth(), Path("/proc/self/clear_refs")
    try:
        peak.write_text("5", encoding="utf-8")  # the peak begins anew, with what is held now
    except OSError:  # another system, or a kernel that does not let it
        yield growth
        return
    before = peak_memory_bytes()
    yield growth
    growth.nbytes = max(0, peak_memory_bytes() - before)


def gpus() -> list[dict[str, str]] | None:
    """Returns name, memory and driver of each NVIDIA GPU by `nvidia-smi`; None without one."""
    rows = nvidia_smi("name", "memory.total", "driver_version")
    return [{"name": row[0], "memory": row[1], "driver": row[2]} for row in rows] or None


def nvidia_smi(*fields: str) -> list[list[str]]:
    """Returns these fields of each GPU, as the driver's own tool tells them; empty without one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):  # installed, but no driver to talk to
        return []
    rows = ([part.strip() for part in line.split(",")] for line in done.stdout.splitlines())
    return [row for row in rows if len(row) == len(fields)]
