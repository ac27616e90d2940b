"""The chosen tests with other versions: `make compat`. Its results are a table in docs/install.md.

Each row has an environment of its own, made by uv and removed after it; one at a time. PyTorch from
PyPI brings CUDA: some 6 GB. `--small` leaves out the rows that need another PyTorch than the one
of constraints.txt, which may be a build for CPUs (`UV_TORCH_BACKEND=cpu`, or UV_FIND_LINKS).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from moexport.common.libraries import TESTED
from moexport.common.writing import write_text

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "perf" / "results" / "compat.json"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

EXTRAS = ("cpu", "openvino", "transformers")
TOOLS = ("pip>=25", "pytest>=9", "einops>=0.8", "setuptools>=77")

SUITE = (
    "tests/exporter/families/test_recorded.py",  # every family, loaded
    "tests/exporter/test_recorded_mumoe_exports.py",  # exported, run and verified
    "tests/exporter/test_recorded_exports.py::test_every_case_holds_in_every_lowering",
    "tests/exporter/test_recorded_exports.py::test_the_program_itself_runs_verifies_and_inspects",
    "tests/exporter/quantization/test_precision.py",
    "plugins/token_routed/tests/test_routed_precisions.py",
    "plugins/openvino/tests/test_openvino.py",
    "plugins/tune/tests/test_routed.py",
    "tests/test_without_pytorch.py",
    "tests/hard/test_older_versions.py",
)
NEWER = ("plugins/token_routed/tests/test_models.py", "tests/exporter/families/test_cache.py")
"""What needs a newer PyTorch than the oldest: token-routed models, and muMoE with a cache."""


@dataclass(frozen=True, slots=True)
class Row:
    """Versions that the tests are run with: all `oldest`, or all newest, or but for PyTorch."""

    python: str
    oldest: bool = False
    pinned: bool = False

    @property
    def name(self) -> str:
        """What the table calls it."""
        end = "oldest" if self.oldest else "newest"
        return f"the {end} of all but PyTorch" if self.pinned else f"everything at its {end}"

    @property
    def key(self) -> str:
        """What its folder is called."""
        end = "oldest" if self.oldest else "newest"
        return f"{end}{'-but-torch' if self.pinned else ''}-{self.python}"


ROWS = (
    Row("3.11", oldest=True),
    *(Row(python) for python in PYTHONS),
    Row("3.11", oldest=True, pinned=True),
    *(Row(python, pinned=True) for python in PYTHONS),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What the tests of a row said; `why` it was not run, where it was not."""

    row: str
    python: str
    date: str
    why: str | None = None
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)


def result(row: Row, place: Path, *, keep: bool) -> Result:
    """Makes an environment, runs the tests in it and returns what they said."""
    folder = place / row.key
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    today = datetime.now(UTC).date().isoformat()
    try:
        if not (keep and python.exists()):
            try:
                _uv("venv", "--quiet", "--clear", "--python", row.python, folder)
            except subprocess.CalledProcessError:
                return Result(row.name, row.python, today, why="this Python was not there")
        _install(row, python)
        begun = time.monotonic()
        passed, skipped, failed = _tested(row, python)
        versions = _versions(python)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return Result(
        row=row.name,
        python=row.python,
        date=today,
        seconds=round(time.monotonic() - begun),
        versions=versions,
        passed=passed,
        skipped=skipped,
        failed=failed,
    )


def _uv(*arguments: str | Path) -> None:
    subprocess.run(("uv", *arguments), cwd=ROOT, check=True, stderr=subprocess.PIPE, text=True)


def _install(row: Row, python: Path) -> None:
    """Installs what moexport depends on, and moexport itself as it is in the checkout."""
    resolution = "lowest-direct" if row.oldest else "highest"
    extras = [word for name in EXTRAS for word in ("--extra", name)]
    pin = [each for each in _constraints() if each.startswith("torch==")] if row.pinned else []
    asked = ("--upgrade", "--resolution", resolution, "-r", "pyproject.toml", *extras)
    _uv("pip", "install", "--quiet", "--python", python, *asked, *TOOLS, *pin)
    _uv("pip", "install", "--quiet", "--python", python, "--no-deps", "-e", ".")


def _constraints() -> list[str]:
    return (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def _tested(row: Row, python: Path) -> tuple[int, int, list[str]]:
    """How many tests passed and were skipped, and the names of those that failed."""
    files = [*SUITE, *(() if row.oldest and not row.pinned else NEWER)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        asked = ("-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={report}")
        subprocess.run(
            (python, "-m", "pytest", *asked, *files),
            cwd=ROOT,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        cases = ElementTree.parse(report).getroot().iter("testcase")
        states = {f"{c.get('classname')}::{c.get('name')}": {e.tag for e in c} for c in cases}
    failed = [name for name, tags in states.items() if tags & {"failure", "error"}]
    skipped = sum("skipped" in tags for tags in states.values())
    return len(states) - len(failed) - skipped, skipped, failed


def _versions(python: Path) -> dict[str, str]:
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({n: version(n) for n in sys.argv[1:]}))"
    )
    done = subprocess.run(
        (python, "-c", code, *TESTED), capture_output=True, text=True, check=True, cwd=ROOT
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    """Runs the rows that were asked for and keeps their results; exit 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"those alone: {', '.join(r.key for r in ROWS)}")
    parser.add_argument(
        "--small", action="store_true", help="those with PyTorch of constraints.txt"
    )
    parser.add_argument("--place", type=Path, help="the folder in which the environments stay")
    asked = parser.parse_args()
    if "PIP_FIND_LINKS" in os.environ:  # where a machine has wheels of its own: a CPU's PyTorch
        os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
    rows = [row for row in ROWS if row.key in (asked.rows or [row.key])]
    rows = [row for row in rows if row.pinned or not asked.small]
    results = {}
    if RESULTS.exists():
        results = {(each["row"], each["python"]): each for each in json.loads(RESULTS.read_text())}
    bad = False
    for row in rows:
        with tempfile.TemporaryDirectory(prefix="moexport-compat-") as scratch:
            found = result(row, asked.place or Path(scratch), keep=asked.place is not None)
        bad |= bool(found.failed)
        print(json.dumps(asdict(found)), file=sys.stderr, flush=True)
        results[found.row, found.python] = asdict(found)
        ordered = [results[r.name, r.python] for r in ROWS if (r.name, r.python) in results]
        write_text(json.dumps(ordered, indent=1) + "\n", RESULTS)
    sys.exit(bad)


if __name__ == "__main__":
    main()
