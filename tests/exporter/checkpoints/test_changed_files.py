"""A checkpoint that is cut short, removed or replaced while it is exported is told."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from moexport.common.files import sha256
from moexport.errors import CalibrationError, CheckpointError
from moexport.exporter.checkpoints.load import load
from moexport.tests.exporter.families.states import lucidrains_state

PROGRAM = """
import os, sys
import moexport

class Cutting:
    def step(self, text, **_):
        if text.startswith("tracing"):
            os.truncate(sys.argv[1], os.path.getsize(sys.argv[1]) // 3)
    def __getattr__(self, name):
        return lambda *_, **__: None

model = moexport.load(sys.argv[1])
try:
    moexport.export(model, sys.argv[2], progress=Cutting())
except moexport.errors.CheckpointError as error:
    print(error.message)
"""


def saved(folder: Path) -> Path:
    path = folder / "w.pt"
    torch.save(lucidrains_state(n=8, d=128, h=512), path)
    assert path.stat().st_size > 4 << 20
    return path


@pytest.mark.slow
def test_a_checkpoint_that_is_cut_short_during_an_export_is_reported(tmp_path: Path) -> None:
    path, out = saved(tmp_path), tmp_path / "out"
    command = [sys.executable, "-c", PROGRAM, str(path), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # touching what is no more ends the process
    assert "w.pt was changed while it was being read" in done.stdout
    assert not out.exists()


WRITER = """
import os, sys
from pathlib import Path
import numpy as np
from moexport.common.files import Reading, Watched
from moexport.errors import CheckpointError
from moexport.exporter.bundle.weights import WeightsWriter

source = Path(sys.argv[1])
np.ones(1 << 20, np.float32).tofile(source)
watched, mapped = Watched.now([source]), np.memmap(source, np.float32, "r")

def parts():
    os.truncate(source, 1 << 20)
    yield mapped[: 1 << 18]
    yield mapped[1 << 18 :]  # is no more: to touch it would end the process

with WeightsWriter(source.parent, reading=Reading([source], watched)) as writer:
    try:
        writer.add(parts(), mapped.shape)
    except CheckpointError as error:
        print(error.message)
"""


@pytest.mark.slow
def test_what_is_written_straight_from_a_file_that_is_cut_short_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'source'} was changed while it was being read\n"


@pytest.mark.parametrize(
    "error",
    [CalibrationError("a tensor is zero for all inputs"), OSError(errno.EFAULT, "Bad address")],
)
def test_an_error_that_comes_of_a_changed_checkpoint_says_so(
    error: Exception, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    model = load(path)
    replaced(path)
    with (
        pytest.raises(CheckpointError, match=r"w\.pt was changed while it was being read"),
        model.source.reporting_changes(),
    ):
        raise error


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"x" * 64)


def replaced(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes()[:-1] + b"x")
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "what"), [(Path.unlink, "removed"), (replaced, "changed"), (overwritten, "changed")]
)
def test_a_checkpoint_that_changes_after_it_was_loaded_is_told(
    change: Callable[[Path], None], what: str, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    model = load(path)
    change(path)
    with pytest.raises(CheckpointError, match=rf"w\.pt was {what} while it was being read"):
        model.source.sha256()


def touched(path: Path) -> None:
    os.utime(path, (1, 1))


def moved_and_back(path: Path) -> None:
    copy = path.read_bytes()
    path.unlink()
    path.write_bytes(copy)


@pytest.mark.parametrize("change", [touched, moved_and_back])
def test_a_checkpoint_with_the_same_contents_is_the_same(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "w.pt"
    torch.save(lucidrains_state(), path)
    model = load(path)
    change(path)
    assert model.source.sha256() == sha256(path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="was changed while it was being read"):
        model.source.sha256()
