"""The documents as the tests see them: their code blocks, and how to run and compare one."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from moexport.docs.sources import ROOT, pages
from moexport.graphs.lowerings import all_names
from moexport.tests.command import run

SITE = pages()
"""The files of the site's pages by their addresses: those of plugins lie with the plugins."""

PAGES = sorted((*ROOT.glob("*.md"), *SITE.values(), ROOT / "perf" / "README.md"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLAIN = re.compile(r"moexport [^|&;<>$`*?~#]*")
"""A command that means the same without a shell."""

LOWERING = re.compile(rf"\b({'|'.join(all_names())})\b")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and the line it begins on."""

    page: Path
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for match in FENCE.finditer(text)
    ]


def lines(block: Block) -> list[str]:
    """The lines of a shell block, each with what continues it."""
    return block.text.replace("\\\n", " ").splitlines()


def type_block(block: Block, folder: Path) -> str:
    """Runs a block where moexport is loaded already, and returns what it printed to stdout.

    Python and plain commands run in this process, each a program's start cheaper; what needs a
    shell gets one.
    """
    if block.language == "python":
        with contextlib.chdir(folder):
            return run_python(block)
    printed = ""
    for plain, typed in itertools.groupby(lines(block), lambda line: bool(PLAIN.fullmatch(line))):
        if not plain:
            printed += run_block(replace(block, text="\n".join(typed)), folder)
            continue
        for line in typed:
            with contextlib.chdir(folder):
                done = run(*shlex.split(line)[1:])
            assert done.code == 0, f"{block} failed:\n{line}\n{done.out}{done.err}"
            printed += done.out
    return printed


def run_python(block: Block) -> str:
    """Runs a Python block in this process and the current folder, and returns its stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
    return stdout.getvalue()


def run_block(block: Block, folder: Path) -> str:
    """Runs a block in a program of its own, as a reader would, and returns its stdout."""
    program = {
        "bash": ["bash", "-euo", "pipefail", "-c"],
        "sh": ["bash", "-euo", "pipefail", "-c"],
        "python": [sys.executable, "-c"],
    }[block.language]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [*program, block.text],
        cwd=folder,
        # The models are small: a second thread would only be waited for.
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


def assert_printed(excerpt: Block, printed: str) -> None:
    """Every line of an excerpt was printed, in order: the words, not the numbers or lowerings."""
    lines = iter(printed.splitlines())
    for line in excerpt.text.splitlines():
        if line.strip() in ("", "…"):
            continue
        wanted = pattern(line)
        assert any(wanted.fullmatch(actual.strip()) for actual in lines), (
            f"{excerpt}: not printed, or not in this place:\n{line}\nprinted was:\n{printed}"
        )


def pattern(line: str) -> re.Pattern[str]:
    tokens = []
    for token in line.split():
        if token == "…":
            tokens.append(".*")
        elif any(character.isdigit() for character in token):
            tokens.append(r"\S+")
        else:
            tokens.append(LOWERING.sub(r"\\w+", re.escape(token)))
    return re.compile(r"\s+".join(tokens))
