"""Other work on the machine is noticed, and said in the report and where results are compared."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
from moexport.bench.measure.latency import TASKS, scheduled_ns, waited_share
from moexport.bench.report.compare import compare
from moexport.bench.report.page import html
from moexport.bench.report.text import to_markdown
from moexport.bench.results import Results
from moexport.common.environment import usable_cores


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.skipif(not list(TASKS.glob("*/schedstat")), reason="this system counts no waiting")
def test_threads_wait_while_other_programs_take_the_cores() -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(2 * usable_cores())]
    try:
        time.sleep(0.2)
        before = scheduled_ns()
        busy(1.0)
        share = waited_share(before, scheduled_ns())
    finally:
        for each in others:
            each.kill()
            each.wait()
    assert share is not None
    assert 0.3 < share < 1


def test_a_count_of_nothing_is_no_share() -> None:
    assert waited_share({}, {}) is None
    later = {"1": (400, 300), "2": (50, 50)}  # the second thread began meanwhile
    assert waited_share({"1": (200, 0)}, later) == 350 / 600


def test_disturbed_times_are_called_so_wherever_they_are_shown(results: Results) -> None:
    calm = replace(results, protocol=results.protocol | {"waited": [{"share": 0.02}]})
    assert calm.disturbance == results.disturbance == ""
    assert "disturbed" not in to_markdown(calm)
    waits = [{"share": 0.02}, {"share": 0.75}]
    shared = replace(results, protocol=results.protocol | {"waited": waits})
    said = "threads spent up to 75% of their time waiting for a core"
    assert said in shared.disturbance
    assert said in to_markdown(shared)
    assert said in html(shared)
    assert any("The earlier file: Other programs" in note for note in compare(shared, calm).notes)
