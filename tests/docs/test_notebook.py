"""The notebooks in examples/ run from their first cell to their last, and print what they show."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from moexport.docs.sources import ROOT
from moexport.tests.docs.documents import Block, assert_printed

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_and_prints_what_it_shows(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compile("".join(cell["source"]), f"{file.name}, {cell['id']}", "exec"), names)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert_printed(Block(file, "text", shown, number), stdout.getvalue())
        assert bool(shown) == bool(stdout.getvalue()), cell["id"]
    assert Path("report/report.html").is_file()
    assert Path("digits-bundle/model.onnx").is_file()
