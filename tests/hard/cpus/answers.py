"""Runs bundles on this CPU and writes what they give: `answers.py OUT.npz BUNDLE…`.

It needs what requirements-run.txt installs. A bundle that does not run is a line on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from moexport.errors import MoexportError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.parity import PARITY_FILE, Reference
from moexport.exporter.session import SessionOptions


def answer(folder: Path) -> np.ndarray:
    """What a bundle's main graph gives for the inputs that it was checked with, as typed."""
    bundle = Bundle.open(folder)
    expected = Reference.load(folder / PARITY_FILE)
    record = bundle.manifest
    session = bundle.session(record.graphs[0].file, SessionOptions())
    feeds = expected.feeds(record.inputs[0].name)
    k = expected.main_k if record.k == "input" else None
    y: np.ndarray = session(feeds, k)
    return y


def main(output: Path, folders: list[Path]) -> None:
    """Writes the answers by the folders' names."""
    given = {}
    for folder in folders:
        try:
            given[folder.name] = answer(folder)
        except MoexportError as error:
            print(f"{folder.name}: {error.message}", file=sys.stderr)
    np.savez(output, **given)  # type: ignore[arg-type]  # names of bundles


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
