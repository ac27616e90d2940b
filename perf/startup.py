"""Measures how quickly the program shows its help and the contents of a large checkpoint."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from moexport.common.console import Progress
from moexport.common.text import markdown, size
from safetensors.torch import save_file

from .measure import measured_on
from .scale import vit_checkpoint

RUNS = 15


def measure(progress: Progress) -> dict[str, object]:
    """Times the help, and `inspect` of 2 GB in both kinds of file, with a process for each run.

    `seconds` is the wall-clock time from the start of each run to its end.
    """
    with tempfile.TemporaryDirectory(prefix="moexport-startup-") as folder:
        pickled, flat = Path(folder) / "vit.pt", Path(folder) / "vit.safetensors"
        vit_checkpoint(pickled, experts=128, hidden=384)
        save_file(torch.load(pickled, mmap=True, weights_only=True), flat)
        commands = {"moexport --help": ""}
        for file in (pickled, flat):
            inspect = f"moexport inspect {file.name} --set num_heads=12 --set rest=default"
            commands[inspect] = f" ({size(file.stat().st_size)} in {file.suffix})"
        answers = []
        for command, about in commands.items():
            progress.step(command)
            seconds = [_seconds(command, folder) for _ in range(RUNS)]
            answers.append({"command": f"`{command}`{about}", "seconds": seconds})
    return {"answers": answers}


def _seconds(command: str, folder: str) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - began


def table(body: Any) -> str:
    """Returns the results as Markdown, with the machine that measured them."""
    rows = []
    for each in body["answers"]:
        seconds = each["seconds"]
        times = (statistics.median(seconds), min(seconds), max(seconds))
        rows.append((each["command"], *(f"{t:.2f} s" for t in times)))
    listed = markdown(("command", "median", "quickest", "slowest"), rows)
    return f"Measured on {measured_on(body)}; {RUNS} runs each.\n\n{listed}"
