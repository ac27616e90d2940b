"""The page on engines: what can be run without a GPU runs, and prints what it shows.

What needs a GPU is typed all the same: it must fail for want of one, and for no other reason.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from moexport.docs.sources import ROOT
from moexport.errors import MoexportError
from moexport.exporter.tensorrt.backends import first_gpu
from moexport.tests.command import Outcome, run
from moexport.tests.docs.documents import Block, assert_printed, blocks, lines, run_python
from moexport.tests.exporter.tensorrt.engines import needs_rtx
from moexport.tests.recorded import DATA

ABSENT = re.compile(
    "TensorRT is not installed|there is no NVIDIA GPU here|has no tensorrt engine"
    "|no such engine"
    r"|server/engine-tensorrt\.plan: no such file"
    r"|ONNX Runtime has no \w+ExecutionProvider"
)
"""What a machine lacks that could do the rest of the page."""

PAGE = ROOT / "docs" / "engines.md"


RTX, SERVER = "## An engine for an RTX card", "## An engine on a server"


def part(begin: str, end: str | None = None) -> list[Block]:
    """The blocks of the page between two of its headings."""
    headings = PAGE.read_text(encoding="utf-8").splitlines()
    last = len(headings) if end is None else headings.index(end)
    return [block for block in blocks(PAGE) if headings.index(begin) < block.line <= last]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "written"),
    [
        pytest.param(part(RTX, SERVER), "edge-any/engine-tensorrt-rtx.plan", marks=needs_rtx),
        pytest.param(part(SERVER), "server/model.onnx"),
    ],
    ids=["rtx", "server"],
)
def test_the_page_runs_as_far_as_it_needs_no_gpu(
    typed: list[Block], written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = DATA / "soft_moe_vit"  # a ViT of width 48, which 12 heads divide
    shutil.copy(case / "weights.pt", tmp_path / "vit.pt")
    x = np.load(case / "io.npz")["x"]
    np.savez(tmp_path / "test.npz", input=x, label=np.arange(len(x)) % 10)
    monkeypatch.chdir(tmp_path)
    printed = ""
    for block in typed:
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
        for block in blocks(PAGE)
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


def outcomes(block: Block) -> list[Outcome]:
    """How the commands of a block end here, but for what installs and what measures (minutes)."""
    if block.language == "python":
        try:
            return [Outcome(0, run_python(block), "")]
        except MoexportError as error:
            return [Outcome(1, "", error.message)]
    typed = [shlex.split(line) for line in lines(block) if re.match("moexport (?!bench)", line)]
    return [run(*words[1:]) for words in typed]
