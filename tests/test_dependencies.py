"""Every import is a declared dependency; nothing is installed only by chance."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from moexport.common.onnx_runtime import INSTALL
from moexport.tests.recorded import DATA
from moexport.tests.test_wheel import ROOT, package_files

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MODULES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx-cu13", "cuda": "cuda-bindings"}
"""The packages of modules that few machines have installed, and cannot be looked up."""


def imported(file: Path) -> set[str]:
    """Returns top-level modules of other packages that a file imports, even inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            top = node.module.partition(".")[0]
            found.add("protobuf" if node.module.startswith("google.protobuf") else top)
    return found - sys.stdlib_module_names - {"moexport"}


def named(requirements: list[str]) -> set[str]:
    """Returns the names of distributions in requirements, normalised as on PyPI."""
    return {
        re.split(r"[^\w.-]", each)[0].lower().replace("_", "-")
        for each in requirements
        if not each.startswith("moexport[")
    }


def distributions(modules: set[str]) -> set[str]:
    known = metadata.packages_distributions()
    return {
        MODULES.get(module, known.get(module, [module])[0]).lower().replace("_", "-")
        for module in modules
    }


EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
RUNTIME = named(EXTRAS["cpu"] + EXTRAS["gpu"])
SOURCES = [*ROOT.glob("*.py"), *package_files("*.py")]


def test_every_import_of_the_package_is_a_declared_dependency_and_every_dependency_is_used() -> (
    None
):
    wanted = distributions({name for file in SOURCES for name in imported(file)})
    wanted -= {"setuptools"}  # only in setup.py
    required = named(PROJECT["dependencies"])
    optional = named(
        [each for name in (*EXTRAS.keys() - {"dev", "docs"},) for each in EXTRAS[name]]
    )
    assert wanted <= required | optional | RUNTIME, wanted - required - optional - RUNTIME
    assert required <= wanted, required - wanted
    assert not RUNTIME & required  # the user chooses one of the two


def test_imports_of_tests_and_benchmarks_are_in_the_extra_for_developers() -> None:
    folders = (*(ROOT / name for name in ("tests", "perf", "docs")), *ROOT.glob("plugins/*/tests"))
    files = [file for folder in folders for file in folder.rglob("*.py")]
    found = {name for file in files for name in imported(file)}
    # scipy is installed with scikit-learn; modules that are not installed are written by tests.
    wanted = distributions(found & metadata.packages_distributions().keys()) - {"scipy"}
    extras = [each for name in EXTRAS for each in EXTRAS[name]]
    assert wanted <= named(PROJECT["dependencies"] + extras), wanted


WITHOUT = """
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
sys.modules["onnxruntime"] = {left}
from moexport.tests.command import run
export = run("export", {model!r}, "-o", "out")
assert export.code == 1, export
print(export.err)
assert run("inspect", {model!r}).code == 0  # which needs none
print(run("doctor").out)
"""


@pytest.mark.parametrize(
    "left",
    ["None", "module_from_spec(ModuleSpec('onnxruntime', None))"],
    ids=["nothing", "an empty folder"],
)
def test_without_onnx_runtime_the_hint_names_its_packages(left: str, tmp_path: Path) -> None:
    code = WITHOUT.format(left=left, model=str(DATA / "soft_moe_mnist" / "weights.pt"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"error: ONNX Runtime is not installed, or only partly\nhint: {INSTALL}" in done.stdout
    assert re.search(rf"no +export to ONNX .*{re.escape(INSTALL)}", done.stdout)
