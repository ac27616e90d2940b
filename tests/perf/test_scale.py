"""Exports of large models: what was kept of them, and the page that shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import moexport
import pytest
from moexport.perf.measure import kept, measured_on
from moexport.perf.scale import START, STEPS, seconds_by_step, table

ROOT = Path(str(moexport.__file__)).parent
KEPT = ROOT / "perf" / "results" / "scale-cpu.json"


def test_steps_are_those_that_an_export_says(capsys: pytest.CaptureFixture[str]) -> None:
    said = ["moexport: loading a.pt\n", "note: 196 tokens\n", "moexport: tracing\n"]
    steps = seconds_by_step(said)
    assert list(steps) == [START, "loading", "tracing"]
    assert all(seconds >= 0 for seconds in steps.values())
    assert capsys.readouterr().err == "".join(said)


def test_a_step_that_says_how_far_it_is_stays_one() -> None:
    def said() -> Iterator[str]:
        yield "moexport: checking against PyTorch\n"
        time.sleep(0.05)
        yield "moexport: checking against PyTorch: 8 inputs in 0.1 s\n"

    steps = seconds_by_step(said())
    assert list(steps) == [START, "checking"]
    assert steps["checking"] >= 0.05


def test_an_export_peaked_below_its_weights_and_a_third() -> None:
    exports = kept(KEPT)["exports"]
    assert [one["parameters"] // 10**6 for one in exports] == [512, 512, 2324]
    for one in exports:
        assert set(STEPS) < set(one["steps"])
        assert one["seconds"] == pytest.approx(sum(one["steps"].values()))
        assert one["peak_bytes"] < 1.3 * one["weights_bytes"]


def test_the_page_shows_what_was_kept() -> None:
    page = (ROOT / "docs" / "evidence" / "performance.md").read_text(encoding="utf-8")
    assert f"Measured on {measured_on(kept(KEPT))}." in page
    assert table(kept(KEPT)) in page
