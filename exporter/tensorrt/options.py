"""The options of engine builds, parsed and checked against the backend before any work."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...common.option import option, spelled
from ...common.text import near_miss, parse_size, split_list
from ...errors import UsageError

if TYPE_CHECKING:
    from ...graphs.sizes import AxisRange
    from .backends import Backend

HardwareLevel = Literal["ampere-plus", "same-compute-capability"]
HARDWARE_LEVELS: tuple[HardwareLevel, ...] = get_args(HardwareLevel)

CURRENT = "current"

AUTO = "auto"


def parsed_capabilities(text: str) -> tuple[str, ...]:
    return tuple(split_list(text))


def parsed_workspace(text: str) -> int:
    return parse_size(text, "--workspace")


def parsed_profile(text: str) -> Mapping[str, AxisRange]:
    from .profiles import parse_profile

    return parse_profile(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of an engine build; the defaults are those of the backend.

    Each of `profiles` maps axes to ranges; without profiles, the ranges of the export apply.
    `workspace` is the scratch memory in bytes that a kernel may use on the GPU. `timing_cache` is a
    file that builds share. `weight_streaming` keeps the weights in host memory except for this part
    on the GPU: a size such as `2GiB`, or `auto` for as much as fits (NVIDIA's page "Weight
    Streaming", TensorRT 11.4.1 and TensorRT-RTX 1.7). `bind_weights` makes the experts' weights
    inputs of the engine, and `expose_routing` makes the chosen experts outputs. `cache` is the
    folder for finished engines, or None.
    """

    profiles: tuple[Mapping[str, AxisRange], ...] = option(
        (),
        "An engine profile: batch=1:8:32,k=1:4:16. Repeat it for several profiles.",
        unset="the ranges of the export",
        flag="--profile",
    )
    compute_capabilities: tuple[str, ...] = option(
        (),
        "Compute capabilities for TensorRT-RTX, or current.",
        unset="8.6,8.9,12.0",
        flag="--compute-capability",
    )
    timing_cache: Path | None = option(
        None, "Share TensorRT's kernel timings between builds.", unset="none", is_path=True
    )
    workspace: int | None = option(
        None, "Limit on a kernel's scratch memory: 2GiB (binary) or 2GB (decimal).", unset="none"
    )
    optimization_level: int | None = option(
        None, "How long to search for kernels: 0 to 5.", unset="3"
    )
    version_compatible: bool = option(False, "Also run in later versions of TensorRT.")
    hardware_compatible: HardwareLevel | None = option(
        None, "Also run on other GPUs: ampere-plus or same-compute-capability.", unset="none"
    )
    tf32: bool = option(False, "Compute FP32 products in TF32: faster, less precise.")
    cache: Path | None = option(
        None,
        "The folder that caches finished engines; off disables it.",
        unset="in a shell the user's cache, in Python none",
        flag="--engine-cache",
        is_path=True,
    )
    strip_plan: bool = option(False, "Leave the weights out of the engine, and load the bundle's.")
    weight_streaming: str | None = option(
        None, "Keep weights in host memory, except this much on the GPU.", unset="off"
    )
    bind_weights: bool = option(
        False, "Bind the experts' weights from the bundle's file as inputs."
    )
    expose_routing: bool = option(
        False, "The chosen experts are outputs of the engine.", in_shell=False
    )

    def changed(self) -> list[str]:
        """Returns the names of options that differ from the defaults, except the engine cache."""
        return [
            field.name
            for field in fields(self)
            if field.name != "cache" and getattr(self, field.name) != field.default
        ]

    def check(self, backend: Backend) -> None:
        """Raises `UsageError` for options that are invalid or that the backend does not support."""
        for name in self.changed():
            if name not in backend.options:
                why = backend.refused[name]
                raise UsageError(
                    f"{spelled(EngineOptions, name)}: {backend.title} does not support it: {why}",
                    hint=f"leave {spelled(EngineOptions, name)} out for --target {backend.name}",
                )
        level = self.optimization_level
        if level is not None and not 0 <= level <= backend.max_level:
            raise UsageError(
                f"--optimization-level {level}: {backend.title} has levels 0 to "
                f"{backend.max_level}",
                hint="3 is its default; builds at higher levels take longer",
            )
        if self.workspace is not None and self.workspace < 1:
            raise UsageError(
                f"--workspace {self.workspace}: the number of bytes must be above 0",
                hint="for example --workspace 2GiB",
            )
        if self.weight_streaming not in (None, AUTO):
            parse_size(self.weight_streaming, "--weight-streaming")
        if self.hardware_compatible not in (None, *HARDWARE_LEVELS):
            raise UsageError(
                f"--hardware-compatible {self.hardware_compatible}: there is no such level",
                hint=near_miss(str(self.hardware_compatible), HARDWARE_LEVELS),
            )
        if self.strip_plan and self.bind_weights:
            raise UsageError(
                "--strip-plan and --bind-weights exclude each other: plans have no bound weights",
                hint="leave --strip-plan out",
            )
        # The file is written when a build ends, which may be hours later.
        file = self.timing_cache
        if file is not None and (
            file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)
        ):
            raise UsageError(
                f"--timing-cache {file} cannot be written",
                hint="name a file in a folder that exists and that you may write to",
            )
        self._check_cards(backend)
        self._check_gpu(backend)

    def _check_cards(self, backend: Backend) -> None:
        from .backends import alternative

        text = ",".join(self.compute_capabilities)
        if len(set(self.compute_capabilities)) < len(self.compute_capabilities):
            raise UsageError(f"--compute-capability {text} has duplicates", hint="give each once")
        for card in self.compute_capabilities:
            if card != CURRENT and card not in backend.cards:
                raise UsageError(
                    f"--compute-capability {card}: {backend.title} compiles for {backend.served}",
                    hint=alternative(card)
                    if re.fullmatch(_CAPABILITY, card)
                    else "for example 8.6,8.9,12.0",
                )
        if CURRENT in self.compute_capabilities and len(self.compute_capabilities) > 1:
            raise UsageError(
                f"--compute-capability {text}: {CURRENT} cannot be combined with others",
                hint=f"give compute capabilities, or only {CURRENT} for the GPU of this machine",
            )

    def _check_gpu(self, backend: Backend) -> None:
        from .backends import first_gpu

        gpu = first_gpu()
        if gpu is not None and CURRENT in self.compute_capabilities:
            backend.check_serves(gpu, UsageError)
        if not backend.builds_without_gpu or gpu is not None:
            return
        if CURRENT in self.compute_capabilities:
            raise UsageError(
                f"--compute-capability {CURRENT}: there is no NVIDIA GPU here",
                hint=f"give the card's compute capability: {', '.join(backend.cards)}",
            )
        if self.strip_plan:
            raise UsageError(
                f"--strip-plan: {backend.title} compiles engines without weights only with an "
                "NVIDIA GPU, but there is none here",
                hint="leave --strip-plan out, or build on the machine with the card",
            )

    def as_json(self) -> dict[str, Any]:
        """Returns the options that affect the engine, as plain data."""
        plain = asdict(replace(self, profiles=tuple(map(dict, self.profiles))))
        content = {name: plain[name] for name in self.changed() if name != "timing_cache"}
        as_read: dict[str, Any] = json.loads(json.dumps(content))
        return as_read


_CAPABILITY = r"[0-9]{1,4}\.[0-9]{1,4}"
"""The form of a compute capability, whether such a GPU exists or not."""
