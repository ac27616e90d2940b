"""Experts with routers: models of `transformers`, and users' own routers."""

from __future__ import annotations

CONFIG_FILE = "config.json"
"""The file in the folder of a `transformers` model that contains its configuration."""

GENERATION_FILE = "generation_config.json"
"""The file beside it with the model's settings for generating text."""
