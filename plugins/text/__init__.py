"""Generates and serves text with the bundle of a language model."""

from __future__ import annotations

from ...commands.command import Command

API = 1

GENERATE = Command(
    "generate",
    "Continue a text with a bundle's language model, or chat with it.",
    'moexport generate out "Once upon a time" --max-tokens 64',
    "moexport.plugins.text.cli:generate",
    80,
)

SERVE = Command(
    "serve",
    "Serve a bundle's language model to clients of OpenAI's protocol.",
    "moexport serve out --port 8080",
    "moexport.plugins.text.cli:serve",
    90,
)
