"""Token-routed experts: models from `transformers`, V-MoE, and users' own routers."""

from __future__ import annotations

CONFIG_FILE = "config.json"
"""The file in the folder of a `transformers` model that contains its configuration."""

GENERATION_FILE = "generation_config.json"
"""The file next to it that contains the model's settings for generating text."""
