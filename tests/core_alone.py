"""Runs the core's own tests on a copy of the package without `plugins/`: `make test-core`.

Tests that need a plugin are skipped: files that import one, and tests marked `plugins`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]

TESTS = ("tests/calibration", "tests/common", "tests/graphs", "tests/exporter")

WITHOUT_FINDER = """
import sys

def editable(finder):
    return "editable" in getattr(finder, "__module__", "") + getattr(finder, "__name__", "")

sys.meta_path[:] = [finder for finder in sys.meta_path if not editable(finder)]
"""
"""Without this, an editable install would find modules in the clone that the copy lacks."""


def copied(folder: Path) -> None:
    """Writes the package without its plugins and their entry points."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        if not name.startswith("plugins/") and (ROOT / name).is_file():
            place = folder / "moexport" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, place)
    metadata = distribution("moexport").read_text("METADATA") or ""
    about = folder / "moexport-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(metadata)
    # These have no plugins, and are read in place of an installed package's.
    points = "[moexport.none]\n[console_scripts]\nmoexport = moexport.__main__:main\n"
    (about / "entry_points.txt").write_text(points)
    (folder / "sitecustomize.py").write_text(WITHOUT_FINDER)


def main() -> int:
    """Returns the exit code of the tests."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        words = ("-q", "-n", "auto", "-p", "no:cacheprovider", "-m", "not slow and not plugins")
        return subprocess.run(
            [sys.executable, "-m", "pytest", *words, *sys.argv[1:], *TESTS],
            cwd=folder / "moexport",
            env={**os.environ, "PYTHONPATH": name},
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
