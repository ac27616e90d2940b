"""The command `doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.console import show
from ..common.text import table
from .options import json_text
from .printing import Printing

if TYPE_CHECKING:
    from ..bench.doctor import Diagnosis


def doctor(printing: Printing) -> None:
    """Show what this machine can build and run, and what is missing."""
    from ..bench.engines import doctor as diagnose

    diagnosis = diagnose()
    show(json_text(diagnosis.as_json()) if printing.as_json else diagnosis_text(diagnosis))


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """Returns the output of `doctor` as text."""
    facts = diagnosis.environment
    rows = [("yes" if a.available else "no", a.name, a.detail) for a in diagnosis.abilities]
    return "\n".join(
        (
            table(("", "ability", "details"), rows),
            "",
            f"python {facts['python']}, {facts['cpu']['model']}, {facts['cpu']['cores']} cores",
            ", ".join(f"{name} {version}" for name, version in facts["packages"].items()),
            *diagnosis.outside,
            *diagnosis.plugins,
        )
    )
