"""How soon the program answers: its help, and what a large checkpoint holds."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from moexport.common.text import markdown, size
from safetensors.torch import save_file

from .record import keep, kept, measured_on
from .scale import vit_checkpoint

RUNS = 15


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command took, from its start to its end: each run in seconds of wall clock."""

    command: str
    seconds: tuple[float, ...]


def measure(file: Path) -> None:
    """Times the help, and `inspect` of 2 GB in both kinds of file, a process for each run."""
    with tempfile.TemporaryDirectory(prefix="moexport-startup-") as folder:
        pickled, flat = Path(folder) / "vit.pt", Path(folder) / "vit.safetensors"
        vit_checkpoint(pickled, experts=128, hidden=384)
        save_file(torch.load(pickled, mmap=True, weights_only=True), flat)
        answers = [_answer("moexport --help")]
        answers += [
            _answer(
                f"moexport inspect {checkpoint.name} --set num_heads=12 --set rest=default",
                f"{size(checkpoint.stat().st_size)} in {checkpoint.suffix}",
                folder,
            )
            for checkpoint in (pickled, flat)
        ]
    keep(file, "startup", answers=[asdict(answer) for answer in answers])


def _answer(command: str, about: str = "", folder: str | None = None) -> Answer:
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        seconds.append(time.perf_counter() - began)
    return Answer(f"`{command}`" + (f" ({about})" if about else ""), tuple(seconds))


def table(file: Path) -> str:
    """The results as Markdown, with the machine they were measured on."""
    body = kept(file)
    rows = []
    for each in body["answers"]:
        seconds = each["seconds"]
        times = (statistics.median(seconds), min(seconds), max(seconds))
        rows.append((each["command"], *(f"{t:.2f} s" for t in times)))
    listed = markdown(("command", "median", "quickest", "slowest"), rows)
    return f"Measured on {measured_on(body)}; {RUNS} runs each.\n\n{listed}"
