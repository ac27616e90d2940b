"""`pytest -m gpu` needs only moexport, a GPU and pytest, and no packages for developers."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ABSENT = ("jsonschema", "einops", "entmax", "openai", "optuna", "markdown", "allpairspy", "sklearn")
"""Import names of the packages in the extras `dev` and `demo`."""


@pytest.mark.slow
def test_tests_for_a_gpu_are_collected_with_only_the_packages_of_a_run() -> None:
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in ABSENT)
    options = ["-m", "gpu", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    code = f"import sys; {hidden}; import pytest; sys.exit(pytest.main({options!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    marked = {
        str(file.relative_to(ROOT))
        for folder in ("tests", "plugins")
        for file in (ROOT / folder).glob("**/test_*.py")
        if re.search(r"^(@|    )pytest\.mark\.gpu", file.read_text("utf-8"), re.MULTILINE)
    }
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert marked and collected == marked


def test_the_hidden_packages_are_those_that_developers_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    extras = project["optional-dependencies"]
    further = {re.split(r"[^\w-]", each)[0] for each in (*extras["dev"], *extras["demo"])}
    names = {"sklearn": "scikit-learn"}
    hidden = {names.get(name, name) for name in ABSENT}
    assert hidden <= further
    assert not hidden & needed
