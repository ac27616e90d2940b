"""Studies of experts: analyses, subgroups, specialisation."""

from __future__ import annotations

from ...commands.command import Command

API = 1

COMMAND = Command(
    "specialise",
    "Show which classes each expert serves, and how often it is chosen.",
    "moexport specialise digits.pt --data test.npz -o experts",
    "moexport.plugins.studies.cli:specialise",
    120,
    calls=("load",),
)
