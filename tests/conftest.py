"""Fixtures for all tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from moexport.tests.command import run
from moexport.tests.recorded import DATA, SOFT_MOE, RecordedCase, read_case


@pytest.fixture(params=SOFT_MOE)
def soft_moe_case(request: pytest.FixtureRequest) -> RecordedCase:
    return read_case(request.param)


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a ViT with two MoE layers, k = 4 and 2 of 8, in two lowerings; do not write."""
    folder = tmp_path_factory.mktemp("exported")
    weights = DATA / "soft_moe_vit" / "weights.pt"
    outcome = run(
        *("export", weights, "--set", "num_heads=4", "-o", folder / "out", "--k", "4,2"),
        *("--lowering", "gather,grouped"),
    )
    assert outcome.code == 0, outcome.err
    return folder / "out"


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    """A copy of that bundle."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


@pytest.fixture(autouse=True)
def no_engine_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that a test builds are not taken from the user's cache, and do not go there."""
    monkeypatch.setenv("MOEXPORT_ENGINE_CACHE", "off")
