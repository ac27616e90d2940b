"""What `run` asks of OpenVINO. Importing this loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...common.option import Panel, option

API = 1

OpenVinoDevice = Literal["cpu", "gpu", "npu"]
"""Where OpenVINO runs a graph."""


@dataclass(frozen=True, kw_only=True)
class OpenVinoOptions:
    """Options of a session (`Bundle.session`) in OpenVINO."""

    device: OpenVinoDevice = option("cpu", "OpenVINO's device.")
    cache: str | Path | None = option(
        None,
        "A folder in which OpenVINO keeps what it compiled, for the next start.",
        unset="none",
        kind=Path,
        metavar="FOLDER",
    )


PANEL = Panel("openvino", "OpenVINO", ("run",), OpenVinoOptions)
