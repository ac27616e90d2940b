"""The wheel holds all that the installed package needs: code, the report's page, the schema."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("bench", "calibration", "commands", "common", "exporter", "graphs")
"""All that is part of the package below its root; tests, documents and benchmarks stay behind."""


def test_the_wheel_holds_every_module_and_what_they_read(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    source.mkdir()
    hidden = shutil.ignore_patterns("__pycache__", ".*")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=hidden)
    top = [*ROOT.glob("*.py"), *(ROOT / n for n in ("pyproject.toml", "README.md", "LICENSE"))]
    for file in (*top, ROOT / "py.typed"):
        shutil.copy(file, source)
    wanted = {
        f"moexport/{file.relative_to(source)}"
        for file in source.rglob("*")
        if file.is_file() and file.name not in ("pyproject.toml", "README.md", "LICENSE")
    }
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--disable-pip-version-check", "-w", tmp_path, source),
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("moexport-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "moexport = moexport.__main__:main" in archive.read(entry).decode()
    assert {name for name in names if name.startswith("moexport/")} == wanted
    page = ("report.html", "report.js", "plotly-basic.min.js", "plotly-basic.LICENSE.txt")
    for asset in (*(f"report/assets/{name}" for name in page), "results.schema.json"):
        assert f"moexport/bench/{asset}" in names
    assert "moexport/py.typed" in names
