"""Experts with routers: models of `transformers`, and users' own routers."""

from __future__ import annotations

CONFIG_FILE = "config.json"
"""The settings of a `transformers` model, in its folder."""

GENERATION_FILE = "generation_config.json"
"""The settings with which that model generates text."""
