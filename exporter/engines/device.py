"""The NVIDIA GPUs of this machine, as far as an engine depends on them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from dataclasses import dataclass

from ..environment import NVIDIA_SMI_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Gpu:
    """Name, compute capability (`8.9`) and driver version of one GPU."""

    name: str
    compute_capability: str
    driver: str


@functools.cache
def first_gpu() -> Gpu | None:
    """Returns the first NVIDIA GPU as the driver's own tool tells it, or None without one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):  # installed, but no driver to talk to
        return None
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3:
            return Gpu(*parts)
    return None
