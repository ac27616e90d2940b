"""Experts with routers: models of `transformers`, and routers of a user's own."""

CONFIG_FILE = "config.json"
"""The settings of a model of `transformers`, in its folder."""

GENERATION_FILE = "generation_config.json"
"""How that model generates text."""
