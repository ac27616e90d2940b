"""Commands that are killed, or run at once, leave a whole destination or none, and clean up."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="makes copies of a process"),
]


def done(*options: str) -> None:
    # A process of its own: this one has threads, of which no copy can be made.
    program = [sys.executable, "-m", "moexport.tests.hard.killing", "export", "run", "--seed", "1"]
    process = subprocess.run([*program, *options], check=False, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_a_killed_command_leaves_complete_files_or_none() -> None:
    done("--kills", "2", "--phases", "1")


def test_two_commands_at_once_leave_one_complete_destination() -> None:
    done("--kills", "0", "--phases", "0", "--pairs", "2")
