"""Options of OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...commands.options import option_for, typed_path
from .request import OpenVinoDevice, OpenVinoOptions


def openvino_options(
    *,
    device: Annotated[OpenVinoDevice, option_for(OpenVinoOptions, "device")] = "cpu",
    cache: Annotated[
        Path | None, option_for(OpenVinoOptions, "cache", metavar="FOLDER", parser=typed_path)
    ] = None,
) -> OpenVinoOptions:
    """Returns the options of `run` for OpenVINO."""
    return OpenVinoOptions(device=device, cache=cache)
