"""The pages on engines: what can be run without a GPU runs, and prints what they show.

What needs a GPU is typed all the same: it must fail for want of one, and for no other reason.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from moexport.common.text import markdown
from moexport.docs.refresh import rtx_table
from moexport.errors import MoexportError
from moexport.exporter.tensorrt.backends import first_gpu
from moexport.tests.command import Outcome, run
from moexport.tests.docs.documents import ROOT, Block, assert_printed, blocks, lines, run_python
from moexport.tests.exporter.tensorrt.engines import needs_rtx
from moexport.tests.recorded import DATA

ABSENT = re.compile(
    "TensorRT is not installed|there is no NVIDIA GPU here|holds no tensorrt engine|no such engine"
    r"|ONNX Runtime has no \w+ExecutionProvider"
)
"""What a machine lacks that could do the rest of these pages."""


@pytest.mark.parametrize(
    ("page", "written"),
    [
        pytest.param("edge.md", "edge/engine-tensorrt-rtx.plan", marks=needs_rtx),
        ("servers.md", "server/model.onnx"),
    ],
)
def test_the_page_runs_as_far_as_it_needs_no_gpu(
    page: str, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = DATA / "soft_moe_vit"  # a ViT of width 48, which 12 heads divide
    shutil.copy(case / "weights.pt", tmp_path / "vit.pt")
    x = np.load(case / "io.npz")["x"]
    np.savez(tmp_path / "test.npz", input=x, label=np.arange(len(x)) % 10)
    monkeypatch.chdir(tmp_path)
    printed = ""
    for block in blocks(ROOT / "docs" / page):
        if block.language == "bash":
            done = outcomes(block)
            assert [outcome.code for outcome in done] == [0] * len(done), f"{block}: {done}"
            printed = "".join(outcome.out for outcome in done)
        elif block.language == "text":
            assert_printed(block, printed)
        elif first_gpu() is None:
            for outcome in outcomes(block):
                absent = outcome.code in (1, 2) and ABSENT.search(outcome.err)
                assert outcome.code == 0 or absent, f"{block}: {outcome.err}"
    assert (tmp_path / written).is_file()


@pytest.mark.parametrize("version", ["10.3", "11.1"])
def test_trtexec_has_the_options_of_the_recipe(version: str) -> None:
    known = json.loads((DATA / "trtexec_flags.json").read_text())[version]
    typed = [
        shlex.split(line)
        for block in blocks(ROOT / "docs" / "servers.md")
        for line in lines(block)
        if line.startswith("trtexec ")
    ]
    assert len(typed) == 2
    for words in typed:
        flags = {word.partition("=")[0] for word in words[1:]}
        assert flags <= set(known["flags"])
    ends = [word.partition("=") for words in typed for word in words if "Shapes=" in word]
    for name, _, shapes in ends:
        assert re.fullmatch(r"input:\d+(x\d+)+,k:\d+", shapes), name


def listed_checks() -> str:
    """The named checks of a GPU as a table: what each would show."""
    whole, part = "exporter/tensorrt/test_gpu.py", "bench/runners/test_on_gpu.py"
    checks = [
        (f"`{each.name.removeprefix('test_')}`", ast.get_docstring(each) or "")
        for file in (whole, part)
        for each in ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")).body
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
        if file == whole or "pytest.mark.gpu" in map(ast.unparse, each.decorator_list)
    ]
    return markdown(("check", "what it shows"), checks) + "\n"


def test_the_page_lists_every_check_of_a_gpu_and_says_that_none_was_run() -> None:
    page = (ROOT / "docs" / "servers.md").read_text(encoding="utf-8")
    assert f"<!-- checks -->\n{listed_checks()}<!-- /checks -->" in page
    assert "none of these was run yet" in page


def test_the_page_shows_what_was_compiled() -> None:
    page = (ROOT / "docs" / "edge.md").read_text(encoding="utf-8")
    assert f"<!-- rtx -->\n{rtx_table()}<!-- /rtx -->" in page


def outcomes(block: Block) -> list[Outcome]:
    """How the commands of a block end here, but for what installs and what measures (minutes)."""
    if block.language == "python":
        try:
            return [Outcome(0, run_python(block), "")]
        except MoexportError as error:
            return [Outcome(1, "", error.message)]
    typed = [shlex.split(line) for line in lines(block) if re.match("moexport (?!bench)", line)]
    return [run(*words[1:]) for words in typed]
