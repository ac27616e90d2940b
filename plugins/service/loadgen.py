"""Runs MLPerf's LoadGen, which sends queries to a queue and judges the result.

The four scenarios are MLPerf's: `single-stream` (one query at a time), `multi-stream` (one query of
eight samples at a time), `server` (queries arrive at random times, at a given average rate and with
a latency bound) and `offline` (all samples at once).
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...common.libraries import library
from ...common.timing import NS_PER_MS
from ...common.writing import make_folder
from ...errors import MoexportError, QueueFullError, install
from .queue import Submits

Scenario = Literal["single-stream", "multi-stream", "server", "offline"]

NAMES: dict[Scenario, str] = {
    "single-stream": "SingleStream",
    "multi-stream": "MultiStream",
    "server": "Server",
    "offline": "Offline",
}
"""LoadGen's names for the scenarios."""

MIN_QUERIES: dict[Scenario, int] = {
    "single-stream": 100,
    "multi-stream": 662,
    "server": 662,
    "offline": 1,
}
"""The number of queries that LoadGen needs to judge a percentile (`single-stream`: the 90th)."""

SEARCH_QUERIES = 100  # per run of a search, whose result is measured again
PER_QUERY = 8  # samples per query of multi-stream
MAX_DURATION_FACTOR = 3  # a run takes at most this multiple of its minimum duration
WAIT_S = 0.001

DETAIL = "mlperf_log_detail.txt"
_PERCENTILE = re.compile(r"result_(\d+\.\d+)_percentile_(per_query_)?latency_ns")
_PEAK = re.compile(r"Found peak performance field: ([\d.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The load of a run: a scenario and the minimum duration.

    `rate` is in samples per second: the offered rate in `server`, the expected rate in the other
    scenarios. In `server`, 99% of the queries must be answered within `bound_s`.
    """

    scenario: Scenario
    duration_s: float
    rate: float
    bound_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """LoadGen's judgement of a run.

    The run is `valid`, or invalid for a `reason`. `met_bound` is whether it met the latency bound,
    and `long_enough` whether it lasted as required. `rate` is in samples per second; percentiles
    are of query latencies. `refused` samples found the queue full and count as later than the
    bound. `peak` is the rate that a search found.
    """

    valid: bool
    met_bound: bool
    long_enough: bool
    reason: str
    rate: float
    queries: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    refused: int = 0
    peak: float | None = None


def loadgen() -> Any:
    """Returns the module of LoadGen; raises `MissingExtraError` if it is not installed."""
    hint = f"{install('loadgen')}; wheels exist for Linux only"
    return library("mlperf_loadgen", "--scenario needs MLPerf's LoadGen", hint)


def run_loadgen(
    queue: Submits[int], sample_count: int, load: Traffic, logs: Path, *, search: bool = False
) -> Judgement:
    """Returns LoadGen's judgement of a queue of requests, which are indices of samples.

    LoadGen draws from `sample_count` samples and writes its logs to the folder `logs`. With
    `search`, it looks for the highest rate of `server` within the bound, starting at the load's
    rate. After the run, raises the first error of an instance, if any.
    """
    lg = loadgen()
    make_folder(logs)
    system = _System(lg, queue, load)
    sut = lg.ConstructSUT(system.issue, system.flush)
    qsl = lg.ConstructQSL(sample_count, sample_count, _no_loading, _no_loading)
    log = lg.LogSettings()
    log.log_output.outdir = str(logs)
    log.log_output.copy_summary_to_stdout = False
    log.enable_trace = False
    settings = _settings(lg, load, search=search)

    def start() -> None:
        lg.StartTestWithLogSettings(sut, qsl, settings, log, "")

    # An exception in a callback would end the process. Ctrl-C raises one in the main thread, so
    # LoadGen runs in a separate thread, which an interrupt ends early.
    thread = threading.Thread(target=start, name="LoadGen")
    try:
        thread.start()
        thread.join()
    except BaseException as error:
        system.error = error
        thread.join()
        raise
    finally:
        lg.DestroyQSL(qsl)
        lg.DestroySUT(sut)
    if system.error is not None:
        raise system.error
    return read_log(logs / DETAIL, load, refused=system.refused)


def _no_loading(samples: Sequence[int]) -> None:
    """Does nothing: all samples are in memory."""


def _settings(lg: Any, load: Traffic, *, search: bool) -> Any:
    settings = lg.TestSettings()
    settings.scenario = getattr(lg.TestScenario, NAMES[load.scenario])
    settings.mode = lg.TestMode.FindPeakPerformance if search else lg.TestMode.PerformanceOnly
    settings.min_duration_ms = max(1, round(1e3 * load.duration_s))
    settings.max_duration_ms = MAX_DURATION_FACTOR * settings.min_duration_ms
    settings.min_query_count = SEARCH_QUERIES if search else MIN_QUERIES[load.scenario]
    settings.single_stream_expected_latency_ns = 1e9 / load.rate
    settings.multi_stream_expected_latency_ns = 1e9 * PER_QUERY / load.rate
    settings.multi_stream_samples_per_query = PER_QUERY
    settings.offline_expected_qps = load.rate
    settings.server_target_qps = load.rate
    if load.bound_s < math.inf:
        settings.server_target_latency_ns = round(1e9 * load.bound_s)
    # A search ends when its two rates differ by at most a few percent of the first rate.
    decimals = max(0, 1 - math.floor(math.log10(load.rate)))
    settings.server_find_peak_qps_decimals_of_precision = decimals
    return settings


class _System:
    """The system under test, which answers every query.

    In `server`, a refused or failed query is answered after the bound, and so counts as a miss.
    """

    def __init__(self, lg: Any, queue: Submits[int], load: Traffic) -> None:
        self._lg, self._queue = lg, queue
        self._is_server, self._bound_s = load.scenario == "server", load.bound_s
        self._late: list[int] = []
        self._open = 0
        self._changed = threading.Condition()
        self.refused = 0
        self.error: BaseException | None = None

    def issue(self, queries: Sequence[Any]) -> None:
        """Submits the samples of queries to the queue."""
        for sample in queries:
            number = sample.id
            if self.error is not None:
                time.sleep(WAIT_S)  # otherwise millions of queries would be issued
                self._missed(number)
                continue
            try:
                answer = self._queue.submit(sample.index, wait=not self._is_server)
            except QueueFullError:
                self.refused += 1
                self._missed(number)
            except MoexportError as error:
                self.error = error
                self._missed(number)
            else:
                with self._changed:
                    self._open += 1
                answer.add_done_callback(partial(self._done, number))

    def flush(self) -> None:
        """Answers the refused and failed queries after all others, later than the bound."""
        with self._changed:
            while self._open:
                self._changed.wait()
        if self._late:
            time.sleep(self._bound_s + WAIT_S)
            late, self._late = self._late, []
            self._complete(late)

    def _done(self, number: int, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            self._complete([number])
        else:
            self.error = self.error or error
            self._missed(number)
        with self._changed:
            self._open -= 1
            if not self._open:
                self._changed.notify_all()

    def _missed(self, number: int) -> None:
        if self._is_server:
            self._late.append(number)
        else:
            self._complete([number])  # the next query waits for the answer

    def _complete(self, numbers: Sequence[int]) -> None:
        response = self._lg.QuerySampleResponse
        self._lg.QuerySamplesComplete([response(number, 0, 0) for number in numbers])


def read_log(detail: Path, load: Traffic, *, refused: int = 0) -> Judgement:
    """Returns the judgement of the last run in LoadGen's detailed log."""
    entries: dict[str, Any] = {}
    peak = None
    for line in detail.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(":::MLLOG "):
            entry = json.loads(line.removeprefix(":::MLLOG "))
            entries[entry["key"]] = entry["value"]
            if entry["key"] == "generic_message" and (match := _PEAK.search(entry["value"])):
                peak = float(match[1])
    ms = {
        (float(match[1]), bool(match[2])): value / NS_PER_MS
        for key, value in entries.items()
        if (match := _PERCENTILE.fullmatch(key))
    }
    per_query = load.scenario == "multi-stream"
    p50, p90, p99 = (ms.get((percentile, per_query), 0.0) for percentile in (50.0, 90.0, 99.0))
    met_bound = bool(entries.get("result_perf_constraints_met", True))
    lasted = bool(entries.get("result_min_duration_met")) and bool(
        entries.get("result_min_queries_met")
    )
    valid = entries.get("result_validity") == "VALID"
    reason = ""
    if not valid and not met_bound:
        reason = f"99% took up to {p99:.3g} ms, but the bound is {1e3 * load.bound_s:g} ms"
    elif not valid:
        message = str(
            entries.get("early_stopping_result") or entries.get("result_invalid_reason") or ""
        )
        words = " ".join(message.replace("*", "").split())
        reason = f"too short: {words or 'LoadGen requires a longer run'}"
    queries = int(entries.get("result_query_count", 0))
    rates: dict[Scenario, float] = {
        "single-stream": entries.get("result_qps_with_loadgen_overhead", 0.0),
        "multi-stream": 1e3 * PER_QUERY / entries["result_mean_query_latency_ns"] * NS_PER_MS
        if "result_mean_query_latency_ns" in entries
        else 0.0,
        "server": entries.get("result_completed_samples_per_sec", 0.0),
        "offline": entries.get("result_samples_per_second", 0.0),
    }
    return Judgement(
        valid=valid,
        met_bound=met_bound,
        long_enough=lasted,
        reason=reason,
        rate=float(rates[load.scenario]),
        queries=queries,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        refused=refused,
        peak=peak,
    )
