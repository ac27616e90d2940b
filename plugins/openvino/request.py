"""The options of `run` for OpenVINO. This module imports no large library."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from ...common.option import Panel, option
from ...errors import UsageError

API = 1

OpenVinoDevice = Literal["cpu", "gpu", "npu"]
"""The devices of OpenVINO."""


@dataclass(frozen=True, kw_only=True)
class OpenVinoOptions:
    """The options of OpenVINO's sessions, for `run` and `Bundle.session`."""

    device: OpenVinoDevice = option("cpu", "OpenVINO's device.")
    cache: str | Path | None = option(
        None,
        "A folder in which OpenVINO caches compiled graphs for the next start.",
        unset="none",
        is_path=True,
    )
    streams: int | None = option(
        None,
        "The number of calls that run in parallel, each from its own thread.",
        unset="1",
        in_shell=False,
    )

    def __post_init__(self) -> None:
        """Raises `UsageError` for an invalid number of calls."""
        streams: Any = self.streams
        if streams is not None and (not isinstance(streams, Integral) or streams < 1):
            raise UsageError(
                f"streams={streams!r} is not a number of calls", hint="for example streams=2"
            )


PANEL = Panel(
    "openvino",
    "OpenVINO",
    ("run",),
    OpenVinoOptions,
    "moexport.plugins.openvino.cli:openvino_options",
)
