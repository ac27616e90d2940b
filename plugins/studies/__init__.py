"""What experts are for: their analyses, subgroups, specialisation."""

from __future__ import annotations

from ...commands.command import Command

API = 1

COMMAND = Command(
    "specialise",
    "Show which classes each expert serves.",
    "moexport specialise digits.pt --data test.npz -o experts",
    "moexport.plugins.studies.cli:specialise",
    120,
)
