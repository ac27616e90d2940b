"""Experts with routers: models of `transformers`, and users' own routers."""

from __future__ import annotations

from ...graphs.lowering_names import LoweringNames

API = 1

LOWERINGS = LoweringNames(
    "experts", ("dense", "grouped", "conditional", "block-grouped", "fused", "slots")
)
"""The names of their lowerings, listed without loading any."""

CONFIG_FILE = "config.json"
"""The settings of a `transformers` model, in its folder."""

GENERATION_FILE = "generation_config.json"
"""The settings with which that model generates text."""
