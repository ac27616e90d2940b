"""The options of commands for networks of user code."""

from __future__ import annotations

from pathlib import Path

from ...commands.options import options_of, parse_code, parse_weights
from .request import NetworkOptions

network_options = options_of(
    NetworkOptions,
    weights={"metavar": "FILE", "kind": Path, "parser": parse_weights},
    adapter={"metavar": "MODULE:FUNCTION", "kind": list[str], "parser": parse_code},
)
