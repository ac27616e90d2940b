"""Fixtures for all tests of the core and of plugins; `pyproject.toml` loads them."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moexport.tests.command import run
from moexport.tests.recorded import DATA, SOFT_MOE, VIT_SETS, RecordedCase, read_case
from moexport.tests.traces import traced_once

ALONE = importlib.util.find_spec("moexport.plugins") is None
"""Whether the core is tested without plugins (`core_alone.py`)."""

if not ALONE:
    import moexport.plugins as found

    # pytest names a test after its path, and imports the packages along it, which import each
    # other by the name moexport.
    for folder in Path(found.__file__).parent.glob("*/tests"):
        name = folder.parent.name
        sys.modules[f"plugins.{name}"] = importlib.import_module(f"moexport.plugins.{name}")


FURTHER = ("tests/docs", "tests/examples", "tests/hard", "tests/perf")
"""Folders of tests for neither the core nor a plugin, which `--brief` skips."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run as `make test` does: each test of the core once, and one path through each plugin"
    parser.addoption("--brief", action="store_true", help=text)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips tests of plugins if there are none, and files without a test for `-m gpu`.

    A machine with a GPU therefore needs only moexport's own dependencies.
    """
    brief = config.getoption("brief")
    place = collection_path.relative_to(config.rootpath).as_posix() if brief else ""
    if place in FURTHER:
        return True
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    content = collection_path.read_text("utf-8")
    if place.startswith("plugins/") and "mark.path" not in content:
        return True
    other = config.getoption("markexpr") == "gpu" and "mark.gpu" not in content
    return other or (ALONE and "moexport.plugins" in content) or None


def in_brief(item: pytest.Item, seen: set[str]) -> bool:
    """Whether `--brief` runs a case: the first of a fast test, or a path through a plugin."""
    test = item.nodeid.partition("[")[0]
    if item.nodeid.startswith("plugins/"):
        wanted = item.get_closest_marker("path") is not None
    else:
        wanted = item.get_closest_marker("slow") is None
    first = wanted and test not in seen
    if first:
        seen.add(test)
    return first


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("brief"):
        return
    seen: set[str] = set()
    chosen = [item for item in items if in_brief(item, seen)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


@pytest.fixture(params=SOFT_MOE)
def soft_moe_case(request: pytest.FixtureRequest) -> RecordedCase:
    return read_case(request.param)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small networks train no faster with more threads, and wait for them on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Interrupts reach the programs that tests start, even in the background of a shell."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def searches_are_brief() -> Iterator[None]:
    """Searches train substitutes in fewer steps, and time short graphs in as few rounds as others.

    Separate tests cover the training, and no test depends on these times.
    """
    if ALONE:
        yield
        return
    from moexport.plugins.tune import budget
    from moexport.plugins.tune.substitutes import distill

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "MAX_STEPS", 200)
        patch.setattr(budget, "MORE_QUICK", budget.QUICK.rounds)
        patch.setattr(budget, "MORE_CAREFUL", budget.QUICK.rounds)
        yield


@pytest.fixture(autouse=True, scope="session")
def translations_read_once() -> Iterator[None]:
    """PyTorch parses the sources of its 500 translations once, instead of at every export."""
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
    """A read-only bundle of a ViT with two MoE layers, k = 4 and 2 of 8, in two lowerings."""
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
    """Tests neither read engines from the user's cache nor write them there."""
    monkeypatch.setenv("MOEXPORT_ENGINE_CACHE", "off")
