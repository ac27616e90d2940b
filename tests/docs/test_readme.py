"""What the documents show exists: commands and options, files, and the README's own example."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from moexport.cli import app
from moexport.docs.sources import ROOT
from moexport.tests.docs.documents import PAGES, Block, blocks, lines, type_block
from moexport.tests.recorded import DATA

COMMANDS = [
    (block, line)
    for page in PAGES
    for block in blocks(page)
    if block.language in ("sh", "bash")
    for line in lines(block)
    if line.startswith("moexport ")
]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_shown_commands_and_their_options_exist(block: Block, line: str) -> None:
    program: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)
    command = words[1]
    assert command in program.commands, block
    _, called, _ = program.resolve_command(typer.Context(program), [command])
    options = {
        name for parameter in called.params for name in (*parameter.opts, *parameter.secondary_opts)
    }
    for word in words[2:]:
        if word in ("||", "&&", "|"):
            break
        if word.startswith("-"):
            assert word.split("=")[0] in options, f"{block}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, heading in LINK.findall(page.read_text(encoding="utf-8")):
        place = page.parent / target if target else page
        assert place.exists(), f"{page.name}: {target}"
        if heading:
            assert heading in anchors(place), f"{page.name}: {target}#{heading}"


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.slow
def test_the_readme_s_use_section_runs(tmp_path: Path) -> None:
    case = DATA / "soft_moe_vit"  # a ViT of width 48, which 12 heads divide
    shutil.copy(case / "weights.pt", tmp_path / "vit.pt")
    x = np.load(case / "io.npz")["x"]
    np.savez(tmp_path / "test.npz", input=x, label=np.arange(len(x)) % 10)
    used = [block for block in blocks(ROOT / "README.md") if "vit.pt" in block.text]
    assert {block.language for block in used} == {"sh", "python"}
    for block in used:
        type_block(block, tmp_path)
    written = ("vit-k4/manifest.json", "scores.npz", "report/report.html", "vit-quarter/model.onnx")
    for name in written:
        assert (tmp_path / name).is_file(), name
