"""Runs an experiment of the papers from a clone: `python examples/studies mnist -o DIR`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import moexport


def main() -> int:
    """Runs the program, which exists only in a clone, not in an installed moexport."""
    if find_spec("moexport.examples") is None:
        moexport.__path__.append(str(Path(__file__).resolve().parents[2]))
    from moexport.examples.studies.program import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
