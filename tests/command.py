"""Runs the command line in this process, or as the program that a user starts."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from moexport.__main__ import main

PROGRAM = (sys.executable, "-m", "moexport")


@dataclass(frozen=True)
class Outcome:
    """The result of a command: its exit code and both output streams."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The text of its `error:` line."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        return line.removeprefix("error: ")

    @property
    def hint(self) -> str:
        """The text of its `hint:` line."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("hint: ")]
        return line.removeprefix("hint: ")


def run(*arguments: str | Path) -> Outcome:
    """Runs a command in this process through the program's entry point."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["moexport", *map(str, arguments)]),
        _kept_signals(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())


def start(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Starts the program and returns at once; both output streams are pipes."""
    return subprocess.Popen(
        [*PROGRAM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def run_program(*arguments: str | Path, cwd: Path | None = None) -> Outcome:
    """Runs the program to its end."""
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=600)
    return Outcome(process.returncode, out, err)


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.getsignal(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
