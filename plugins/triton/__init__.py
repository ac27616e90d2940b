"""Writes bundles as a model repository for Triton Inference Server."""

from __future__ import annotations

from ...commands.command import Command

API = 1

COMMAND = Command(
    "triton",
    "Write a model repository for Triton Inference Server.",
    "moexport triton out -o models --name vit",
    "moexport.plugins.triton.cli:triton",
    100,
)
