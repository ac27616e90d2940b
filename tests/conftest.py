"""Fixtures for all tests."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moexport.tests.command import run
from moexport.tests.recorded import DATA, SOFT_MOE, VIT_SETS, RecordedCase, read_case
from moexport.tests.traces import traced_once

ALONE = importlib.util.find_spec("moexport.plugins") is None
"""The core by itself (`core_alone.py`)."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out tests of plugins where there are none."""
    file = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return (ALONE and file and "moexport.plugins" in collection_path.read_text("utf-8")) or None


@pytest.fixture(params=SOFT_MOE)
def soft_moe_case(request: pytest.FixtureRequest) -> RecordedCase:
    return read_case(request.param)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Networks this small train no faster with more, and wait for them on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Interrupts reach the programs that tests start, in the background of a shell too."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def searches_are_brief() -> Iterator[None]:
    """Searches train substitutes in fewer steps, and time short graphs in as few rounds as long.

    What the training does is tested by itself, and no test depends on these times.
    """
    if ALONE:
        yield
        return
    from moexport.plugins.tune import budget
    from moexport.plugins.tune.substitutes import distill

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "STEPS", 200)
        patch.setattr(budget, "MORE_QUICK", budget.QUICK.rounds)
        patch.setattr(budget, "MORE_CAREFUL", budget.QUICK.rounds)
        yield


@pytest.fixture(autouse=True, scope="session")
def translations_read_once() -> Iterator[None]:
    """PyTorch parses the sources of its 500 translations at every export: here, at the first."""
    registration = importlib.import_module("torch.onnx._internal.exporter._registration")
    apis = registration.onnxscript_apis
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apis, "get_torchlib_ops", functools.cache(apis.get_torchlib_ops))
        yield


@pytest.fixture(autouse=True, scope="session")
def checkpoints_traced_once() -> Iterator[None]:
    """A checkpoint is traced once for the exports of all tests."""
    with traced_once():
        yield


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a ViT with two MoE layers, k = 4 and 2 of 8, in two lowerings; do not write."""
    folder = tmp_path_factory.mktemp("exported")
    weights = DATA / "soft_moe_vit" / "weights.pt"
    outcome = run(
        *("export", weights, *VIT_SETS, "-o", folder / "out", "--k", "4,2"),
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
