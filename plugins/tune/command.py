"""The command that the search brings."""

from __future__ import annotations

from ...commands.command import Command

API = 1

COMMAND = Command(
    "tune",
    "Find the fastest bundle that keeps an accuracy.",
    "moexport tune vit.pt --data val.npz --keep 99% -o tuned",
    "moexport.plugins.tune.cli:tune",
    130,
)
