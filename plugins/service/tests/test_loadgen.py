"""MLPerf's LoadGen on a queue judges runs, and no failure leaves it waiting."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from moexport.errors import MissingExtraError
from moexport.plugins.service.loadgen import (
    DETAIL,
    Scenario,
    Traffic,
    loadgen,
    read_log,
    run_loadgen,
)
from moexport.plugins.service.queue import Queue

pytest.importorskip("mlperf_loadgen")


def quick(numbers: Sequence[int]) -> Sequence[int]:
    time.sleep(0.001)
    return numbers


def fails(numbers: Sequence[int]) -> Sequence[int]:
    raise MemoryError("no room")


def summary(logs: Path) -> str:
    return (logs / "mlperf_log_summary.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("scenario", ["single-stream", "multi-stream", "server", "offline"])
def test_loadgen_judges_each_scenario_and_leaves_its_logs(
    scenario: Scenario, tmp_path: Path
) -> None:
    load = Traffic(scenario=scenario, duration_s=0.2, rate=200.0, bound_s=0.5)
    with Queue([quick, quick], max_batch=8, capacity=1000) as queue:
        found = run_loadgen(queue, 16, load, tmp_path / "logs")
    told = summary(tmp_path / "logs")
    assert f"Result is : {'VALID' if found.valid else 'INVALID'}" in told
    assert found.valid == (found.reason == "")
    assert found.rate > 0
    assert 0 < found.p50_ms <= found.p90_ms <= found.p99_ms
    assert "performance_sample_count : 16" in told
    assert read_log(tmp_path / "logs" / DETAIL, load) == found


def test_a_run_that_loadgen_finds_too_short_has_this_reason(tmp_path: Path) -> None:
    load = Traffic(scenario="server", duration_s=0.05, rate=100.0, bound_s=30.0)
    with Queue([quick], max_batch=8, capacity=1000) as queue:
        found = run_loadgen(queue, 4, load, tmp_path)
    assert not found.valid
    assert found.met_bound
    assert found.reason.startswith("too short: ")


def test_a_refused_request_counts_as_later_than_the_bound(tmp_path: Path) -> None:
    def slow(numbers: Sequence[int]) -> Sequence[int]:
        time.sleep(0.05)
        return numbers

    load = Traffic(scenario="server", duration_s=0.3, rate=300.0, bound_s=0.1)
    with Queue([slow], max_batch=1, capacity=1) as queue:
        found = run_loadgen(queue, 4, load, tmp_path)
        assert queue.submit(7).result(30) == 7  # it recovers
    assert found.refused > 0
    assert not found.met_bound
    assert found.reason.startswith("99% took up to ")
    assert found.p99_ms > 100


@pytest.mark.slow
def test_loadgens_own_search_ends_at_a_rate_that_is_too_high(tmp_path: Path) -> None:
    def four_at_a_time(numbers: Sequence[int]) -> Sequence[int]:
        time.sleep(0.02)
        return numbers

    load = Traffic(scenario="server", duration_s=0.4, rate=50.0, bound_s=0.1)
    with Queue([four_at_a_time], max_batch=4, capacity=200) as queue:
        found = run_loadgen(queue, 4, load, tmp_path, search=True)
    assert "FindPeakPerformance" in summary(tmp_path)
    if found.met_bound:  # or the machine is too busy for 50 a second
        assert found.peak is not None
        assert 50 <= found.peak < 400  # of 200 that can be computed


@pytest.mark.parametrize("scenario", ["single-stream", "server", "offline"])
def test_an_error_of_an_instance_is_raised_and_the_run_ends(
    scenario: Scenario, tmp_path: Path
) -> None:
    load = Traffic(scenario=scenario, duration_s=0.1, rate=100.0, bound_s=0.05)
    for search in {False, scenario == "server"}:
        with (
            Queue([fails], max_batch=4, capacity=100) as queue,
            pytest.raises(MemoryError, match="no room"),
        ):
            run_loadgen(queue, 4, load, tmp_path, search=search)


def test_without_loadgen_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", None)
    with pytest.raises(
        MissingExtraError, match="MLPerf's LoadGen, which is not installed"
    ) as found:
        loadgen()
    assert "[loadgen]" in str(found.value.hint)
