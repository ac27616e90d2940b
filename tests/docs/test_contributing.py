"""The package in CONTRIBUTING.md, written as it stands there, adds all that it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.graphs.targets import TargetRecord
from moexport.tests.test_structure import ROOT
from torch.nn.functional import gelu

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = TEXT[TEXT.index("## A plugin of your own") : TEXT.index("## To add a family")]


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    return str(found)


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., str]:
    """Runs a command in a folder where the package is installed."""
    (tmp_path / "mine.py").write_text(block("python"))
    project = tomllib.loads(block("toml"))["project"]
    info = tmp_path / "my_moexport-1.0.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(about)
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(tmp_path)])

    def run(words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words.split()],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def soft_moe(
    x: torch.Tensor, slots: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The layer by its definition, in float64."""
    logits = torch.einsum("bmd,dnp->bmnp", x, slots)
    dispatch = logits.softmax(dim=1)
    combine = logits.flatten(2).softmax(dim=2).view_as(logits)
    rows = torch.einsum("bmnp,bmd->bnpd", dispatch, x)
    outputs = torch.einsum("bnph,nhd->bnpd", gelu(torch.einsum("bnpd,ndh->bnph", rows, up)), down)
    return torch.einsum("bmnp,bnpd->bmd", combine, outputs)


@pytest.mark.slow
def test_a_package_with_what_the_page_shows_adds_a_family_a_lowering_a_runtime_and_a_target(
    program: Callable[..., str], tmp_path: Path
) -> None:
    made = torch.Generator().manual_seed(1)
    sizes = {"slots": (8, 4, 2), "up": (4, 8, 16), "down": (4, 16, 8)}
    weights = {name: torch.randn(size, generator=made) / 3 for name, size in sizes.items()}
    torch.save({f"mix.{name}": weight for name, weight in weights.items()}, tmp_path / "model.pt")
    x = torch.randn(3, 5, 8, generator=made)
    np.savez(tmp_path / "x.npz", input=x.numpy())
    expected = soft_moe(x.double(), *(weights[name].double() for name in sizes)).numpy()
    assert "my-mixture" in program("moexport inspect model.pt")
    program("moexport export model.pt -o out --lowering my-way")
    program("moexport run out -i x.npz -o y.npz --engine my-runtime")
    program("moexport export model.pt -o for-mine --target my-target")
    program("moexport verify for-mine")
    program("moexport run for-mine -i x.npz -o z.npz")
    for file in ("y.npz", "z.npz"):
        with np.load(tmp_path / file) as arrays:
            y = arrays["output"]
        assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()
    told = program("moexport doctor")
    assert "my-moexport" in told
    assert "cannot be loaded" not in told


def test_every_field_of_a_target_is_on_the_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", SECTION, re.MULTILINE)
    assert rows == [field.name for field in fields(TargetRecord)]


def test_what_the_page_shows_needs_no_private_name() -> None:
    assert re.findall(r"\b(?:self|\w+)\.(_\w+)", block("python").replace("__init__", "")) == []
