"""Commands that are killed leave a whole destination or none, and the next run cleans up."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="kills copies of a process")
def test_what_a_killed_command_leaves_is_whole_or_goes() -> None:
    # A process of its own: this one has threads, of which no copy can be made.
    program = [sys.executable, "-m", "moexport.tests.killing", "export", "run"]
    done = subprocess.run(
        [*program, "--kills", "2", "--phases", "1", "--seed", "1"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
