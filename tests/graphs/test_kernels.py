"""ONNX Runtime's kernels take every form in which graphs hold its own ops, and give its value."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from moexport.graphs.names import MICROSOFT
from moexport.tests.graphs.kernel_cases import CASES
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

ROOT = Path(__file__).parents[2]


@pytest.mark.plugins
def test_every_op_of_onnx_runtimes_own_that_graphs_hold_has_its_forms() -> None:
    texts = {
        node.value
        for file in (*(ROOT / "graphs").rglob("*.py"), *(ROOT / "plugins").rglob("lowerings/*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    standard = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    own = {each.name for each in get_all_operator_schema() if each.domain == MICROSOFT}
    both = {"Attention"}  # the name of an op of each domain, and graphs hold both
    written = texts & own & (both | (own - standard))
    assert {op for domain, op in CASES if domain == MICROSOFT} == written


@pytest.mark.slow
@pytest.mark.parametrize("op", ["/".join(key).lstrip("/") for key in CASES])
def test_a_kernel_takes_all_forms(op: str) -> None:
    """In a process of its own, which a kernel may end."""
    done = subprocess.run(
        (sys.executable, "-m", "moexport.tests.graphs.kernel_cases", op),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, (done.returncode, last, done.stderr[-2000:])
    assert last[0].endswith(" forms") and int(last[0].split()[0]) > 0
