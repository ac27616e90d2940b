"""`moexport demo`: trains networks on real data, then exports, verifies and measures them."""

from __future__ import annotations

from ...commands.command import Command

API = 1

COMMAND = Command(
    "demo",
    "Train small networks, then export, verify and measure them.",
    "moexport demo -o demo",
    "moexport.plugins.demo.cli:demo",
    150,
)
