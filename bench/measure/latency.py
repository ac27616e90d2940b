"""The latency of cases timed in turn on the same inputs, and how far other work disturbed it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from ...calibration.feeds import Array
from ...common import timing
from ...common.console import Progress
from ..cases import Case, TimingGroup
from ..data import LabelledData
from ..results import Results
from ..runners.base import Loader, Runner

PREPARATIONS = 100
"""How often a call is prepared to learn what that takes: some microseconds each."""


class TimedRunner(timing.TimedCall):
    """The runtime's own call on the batches of a group in turn, prepared before it is timed.

    `wrapper_ms` is what the package's call adds to it, where that is left out. Of a loader the
    runner is opened for its part of each round and closed after: it saves memory.
    """

    def __init__(self, runner: Runner | Loader, batches: Sequence[Array]) -> None:
        self._open = runner if isinstance(runner, Loader) else None
        self._runner = None if isinstance(runner, Loader) else runner
        self._batches = batches
        self._calls: list[Callable[[], object]] = []
        self.wrapper_ms: float | None = None
        self.reopens = self._open is not None

    def __call__(self, index: int) -> object:
        """Runs one of the batches."""
        if not self._calls:
            runner = self._opened()
            self._calls = [runner.bound(batch) for batch in self._batches]
            if runner.wraps and self.wrapper_ms is None:
                self.wrapper_ms = preparing_ms(runner, self._batches[0])
        return self._calls[index % len(self._calls)]()

    def device_ms(self, index: int) -> float | None:
        """Runs one of the batches and returns its time on the device; None if nobody can tell."""
        return self._opened().device_ms(self._batches[index % len(self._batches)])

    def rest(self) -> None:
        """Closes a runner that is opened anew in every round."""
        if self._open is not None and self._runner is not None:
            self._runner.close()
            self._runner = None
            self._calls.clear()  # they hold the engine

    def _opened(self) -> Runner:
        if self._runner is None:
            assert self._open is not None
            self._runner = self._open()
        return self._runner


def preparing_ms(runner: Runner, x: Array) -> float:
    """Returns the median milliseconds of preparing a call: what a wrapper adds to each."""
    times_ns = []
    for _ in range(PREPARATIONS):
        started = time.perf_counter_ns()
        runner.bound(x)
        times_ns.append(time.perf_counter_ns() - started)
    return median(times_ns) / timing.NS_PER_MS


def measure_group(
    group: TimingGroup,
    runners: Mapping[Case, Runner | Loader],
    data: LabelledData,
    *,
    benchmarks: Mapping[str, timing.Call] | None = None,
    progress: Progress | None = None,
    done: Sequence[timing.Round] = (),
    keep: Callable[[timing.Round], None] = lambda found: None,
) -> tuple[timing.Measured, dict[str, float]]:
    """Returns the latency of each case by its label, and what the wrapper adds where that is known.

    `runners` that are loaders are opened for each round anew; `benchmarks` of the machine are timed
    beside them, by their own names. Inputs are real: distinct batches of the data, in turn, the
    same for every case.
    """
    batches = group_batches(group, data)
    protocol = replace(group.protocol, inputs=len(batches))
    calls = {c.label: TimedRunner(runners[c], batches) for c in group.cases if c in runners}
    measured = timing.measure(
        calls | dict(benchmarks or {}),
        protocol,
        title=f"{group.model}, batch {group.batch}: timing",
        progress=progress,
        done=done,
        keep=keep,
    )
    added = {label: call.wrapper_ms for label, call in calls.items()}
    return measured, {label: ms for label, ms in added.items() if ms is not None}


def group_batches(group: TimingGroup, data: LabelledData) -> list[Array]:
    """Returns the distinct batches of a group: what the protocol asks for, if the data give it."""
    inputs = min(group.protocol.inputs, -(-len(data) // group.batch))
    return [data.batch(index, group.batch) for index in range(inputs)]


TASKS = Path("/proc/self/task")

DISTURBED = 0.1
"""From this share on times are those of a shared machine."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Nanoseconds that the threads of this process ran, and waited for a core, by thread."""

    threads: dict[str, tuple[int, int]]

    @staticmethod
    def now() -> Scheduled:
        """Reads the counts; none where the system keeps none."""
        found = {}
        for file in TASKS.glob("*/schedstat"):
            try:
                ran, waited = file.read_text(encoding="ascii").split()[:2]
            except (OSError, ValueError):  # the thread has ended
                continue
            found[file.parent.name] = (int(ran), int(waited))
        return Scheduled(found)

    def waited_share(self, since: Scheduled) -> float | None:
        """Returns the share of waiting in all time that threads wanted a core; None if unknown."""
        ran = waited = 0
        for name, (ran_ns, waited_ns) in self.threads.items():
            ran_before, waited_before = since.threads.get(name, (0, 0))
            ran += ran_ns - ran_before
            waited += waited_ns - waited_before
        return waited / (ran + waited) if ran + waited > 0 else None


def disturbance(results: Results) -> str:
    """Returns a sentence on how far other work disturbed the rows; empty where it did not."""
    shares = [each["share"] for each in results.protocol.get("waited", ())]
    most = max(shares, default=0.0)
    if most < DISTURBED:
        return ""
    return (
        "Other work on the machine disturbed these times: threads waited for a core up to "
        f"{most:.0%} of the time that they wanted one. Measure again on a quiet machine."
    )
