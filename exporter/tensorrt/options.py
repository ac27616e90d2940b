"""What a user asks of an engine, parsed and checked against the backend before any work."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ...common.text import near_miss
from ...errors import UsageError
from ..inputs import AxisRange
from .backends import Backend, first_gpu, instead

HardwareLevel = Literal["ampere-plus", "same-compute-capability"]
HARDWARE_LEVELS: tuple[HardwareLevel, ...] = get_args(HardwareLevel)

CURRENT = "current"

AUTO = "auto"

_SPELLED = {
    "compute_capabilities": "--compute-capability",
    "profiles": "--profile",
}


def option_name(field: str) -> str:
    """The command line's spelling of a field."""
    return _SPELLED.get(field, "--" + field.replace("_", "-"))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine build; a default is what the backend does by itself.

    `profiles` are ranges by axis, one engine profile each; none means the ranges of the export.
    `workspace` is the scratch memory in bytes that a kernel may take on the GPU. `timing_cache`
    is a file shared by builds. With `weight_streaming` the weights lie in the machine's memory, and
    so many bytes of them on the GPU: a size such as `2GiB`, or `auto` for as much as fits (NVIDIA's
    page "Weight Streaming", TensorRT 11.4.1 and TensorRT-RTX 1.7). `bind_weights` makes experts'
    weights inputs of the engine, `expose_routing` the chosen experts its outputs. `cache` is where
    finished engines are kept for the next time, None for nowhere.
    """

    profiles: tuple[Mapping[str, AxisRange], ...] = ()
    compute_capabilities: tuple[str, ...] = ()
    timing_cache: Path | None = None
    workspace: int | None = None
    optimization_level: int | None = None
    version_compatible: bool = False
    hardware_compatible: HardwareLevel | None = None
    strip_plan: bool = False
    weight_streaming: str | None = None
    bind_weights: bool = False
    expose_routing: bool = False
    tf32: bool = False
    cache: Path | None = None

    def asked(self) -> list[str]:
        """Names of the options that were given, but for where engines are kept."""
        return [
            field.name
            for field in fields(self)
            if field.name != "cache" and getattr(self, field.name) != field.default
        ]

    def check(self, backend: Backend) -> None:
        """Raises `UsageError` for what cannot be meant or what the backend does not honour."""
        for name in self.asked():
            if name not in backend.options:
                why = backend.refused[name]
                raise UsageError(
                    f"{option_name(name)}: {backend.title} does not have it: {why}",
                    hint=f"leave {option_name(name)} out for --target {backend.name}",
                )
        level = self.optimization_level
        if level is not None and not 0 <= level <= backend.max_level:
            raise UsageError(
                f"--optimization-level {level}: {backend.title} has levels 0 to "
                f"{backend.max_level}",
                hint="3 is its default; higher levels build longer",
            )
        if self.workspace is not None and self.workspace < 1:
            raise UsageError(
                f"--workspace {self.workspace}: a number of bytes above 0",
                hint="for example --workspace 2GiB",
            )
        if self.weight_streaming not in (None, AUTO):
            parse_bytes(self.weight_streaming, "--weight-streaming")
        if self.hardware_compatible not in (None, *HARDWARE_LEVELS):
            raise UsageError(
                f"--hardware-compatible {self.hardware_compatible}: there is no such level",
                hint=near_miss(str(self.hardware_compatible), HARDWARE_LEVELS),
            )
        if self.strip_plan and self.bind_weights:
            raise UsageError(
                "--strip-plan and --bind-weights exclude each other: what is bound is in no plan",
                hint="leave --strip-plan out",
            )
        self._check_timing_cache()
        self._check_cards(backend)
        self._check_gpu(backend)

    def _check_timing_cache(self) -> None:
        """The file is written when a build ends, which may be hours from now."""
        file = self.timing_cache
        if file is None:
            return
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise UsageError(
                f"--timing-cache {file}: cannot be written there",
                hint="name a file in a folder that exists and that you may write to",
            )

    def _check_cards(self, backend: Backend) -> None:
        text = ",".join(self.compute_capabilities)
        if len(set(self.compute_capabilities)) < len(self.compute_capabilities):
            raise UsageError(f"--compute-capability {text}: one is repeated", hint="name each once")
        for each in self.compute_capabilities:
            if each != CURRENT and each not in backend.cards:
                raise UsageError(
                    f"--compute-capability {each}: {backend.title} compiles for {backend.served}",
                    hint=instead(each) if _NUMBERS.fullmatch(each) else "for example 8.6,8.9,12.0",
                )
        if CURRENT in self.compute_capabilities and len(self.compute_capabilities) > 1:
            raise UsageError(
                f"--compute-capability {text}: {CURRENT} stands alone",
                hint=f"name capabilities, or give {CURRENT} for the GPU of this machine",
            )

    def _check_gpu(self, backend: Backend) -> None:
        """What needs a GPU to build, where there is none or one that is not served."""
        gpu = first_gpu()
        if gpu is not None and CURRENT in self.compute_capabilities:
            backend.check_serves(gpu, UsageError)
        if not backend.builds_without_gpu or gpu is not None:
            return
        if CURRENT in self.compute_capabilities:
            raise UsageError(
                f"--compute-capability {CURRENT}: there is no NVIDIA GPU here",
                hint=f"name the card's: {', '.join(backend.cards)}",
            )
        if self.strip_plan:
            raise UsageError(
                f"--strip-plan: {backend.title} compiles engines without weights only where there "
                "is an NVIDIA GPU, and there is none here",
                hint="leave --strip-plan out, or build on the machine with the card",
            )

    def as_json(self) -> dict[str, Any]:
        """What was asked, as plain data: all that changes the engine."""
        content = {name: getattr(self, name) for name in self.asked() if name != "timing_cache"}
        if "profiles" in content:
            content["profiles"] = [
                {axis: asdict(sizes) for axis, sizes in each.items()} for each in self.profiles
            ]
        if "compute_capabilities" in content:
            content["compute_capabilities"] = list(self.compute_capabilities)
        return content


_NUMBERS = re.compile(r"\d+\.\d+")
"""A compute capability, whether there is such a GPU or not."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_bytes(text: str, option: str) -> int:
    """Returns bytes from `1073741824`, `512MiB` or `2GiB`; `UsageError` names the option."""
    match = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None or int(match[1]) < 1:
        raise UsageError(
            f"{option} {text}: not a number of bytes", hint=f"for example {option} 2GiB"
        )
    return int(match[1]) * _UNITS[match[2]]
