"""`--time` is kept: steps that cannot be interrupted start only if they still end in time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import moexport
import pytest
from moexport.exporter.model import Model
from moexport.plugins.demo.digits import Training, load_digits, save, train
from moexport.plugins.tune.budget import Clock
from moexport.plugins.tune.request import TuneRequest
from moexport.plugins.tune.tune import search_and_export

COSTS = {"trace": 2.0, "forms": 1.0, "effect": 0.2, "trial": 1.0}
COSTS |= {"open": 0.5, "run": 0.5, "lowerings": 1.0}
"""Seconds that a step takes; one within another adds to it."""


class Simulated(Clock):
    """A clock on which only steps take time, each as long as in `COSTS`."""

    def __init__(self, seconds: float) -> None:
        self.at = 0.0
        self.done: list[str] = []
        super().__init__(seconds, lambda: self.at)

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        with super().step(kind):
            self.at += COSTS[kind]
            self.done.append(kind)
            yield


def test_a_step_begins_only_where_one_like_the_longest_still_ends_in_time() -> None:
    clock = Simulated(10.0)
    assert not clock.over()
    with clock.step("trace"):
        pass
    assert clock.left == 8.0
    assert not clock.over(1.0, "trace")
    clock.reserve = 7.0  # three seconds for searching, of which two are used
    assert not clock.over(1.0, "forms")
    assert clock.over(1.0, "trace")
    assert clock.over(0.5)
    assert not clock.over()


def test_without_a_limit_nothing_is_over() -> None:
    clock = Clock(None)
    with clock.step("trial"):
        pass
    assert not clock.over(0.0, "trial")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("clock") / "digits.pt"
    asked = Training(16, hidden=16, normalise=True, scale=16.0, epochs=3, batch=64)
    save(train(asked, load_digits(test_share=0.5).train), path)
    return moexport.load(path)


@pytest.mark.slow
def test_the_shorter_the_time_the_fewer_looks_and_a_bundle_all_the_same(
    model: Model, tmp_path: Path
) -> None:
    data = load_digits(test_share=0.5).test
    trials = []
    for seconds in (15.0, 45.0):
        clock = Simulated(seconds)
        request = TuneRequest(
            keep=0.95, time=seconds, precision="fp32", all_experts=True, threads=1
        )
        found = search_and_export(model, data, tmp_path / str(seconds), request, clock=clock)
        assert clock.at <= 1.2 * seconds
        assert (found.bundle.path / "model.onnx").is_file()
        trials.append(clock.done.count("trial"))
    assert 1 <= trials[0] < trials[1]
