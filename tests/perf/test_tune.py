"""The benchmark of `tune`: what it refuses before it trains anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from moexport.common.console import Silent
from moexport.perf import tune
from moexport.perf.__main__ import main

pytestmark = pytest.mark.slow


class Steps(Silent):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        self.told.append(text)


def test_without_optuna_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    steps = Steps()
    tune.measure(tmp_path / "tune.json", steps)
    assert not [*tmp_path.iterdir()]
    assert steps.told == ["optuna is not installed: pip install optuna"]


def test_a_network_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(SystemExit, match=r"no network resnet: use mnist-16, .*, language"):
        main(["tune", "--network=resnet"])
