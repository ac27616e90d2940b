"""The options of commands for networks of user code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...commands.options import option_for, typed_code, typed_weights
from .request import NetworkOptions


def network_options(
    *,
    weights: Annotated[
        Path | None, option_for(NetworkOptions, "weights", metavar="FILE", parser=typed_weights)
    ] = None,
    adapter: Annotated[
        list[str] | None,
        option_for(NetworkOptions, "adapter", metavar="MODULE:FUNCTION", parser=typed_code),
    ] = None,
) -> NetworkOptions:
    """Returns the options of every command that reads a model."""
    return NetworkOptions(weights=weights, adapter=adapter or ())
