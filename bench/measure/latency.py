"""Latency of cases timed in turn on the same inputs, and the time of a graph's parts.

The parts come from ONNX Runtime's profile: nodes of a layer are named `LAYER/part/…`
(`graphs.builder`), which separates routing from experts. The runtime's clock around each node makes
small nodes appear slower: the parts are comparable with each other, but the latency is measured
without that clock.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ...common import timing
from ...common.console import Progress
from ...exporter.inputs import Inputs
from ...graphs.names import PARTS, part_of
from ..data import LabelledData
from ..plan import Case, TimingGroup
from ..results import PartTime
from ..runners.base import Loader, Runner

PREPARATIONS = 100  # repetitions that measure how long it takes to prepare a call


class TimedRunner(timing.TimedCall):
    """The runtime's own call on the batches of a group in turn, prepared before it is timed.

    `wrapper_ms` is the time that moexport's own call adds, if that is not timed. A loader's
    runner is only open during its part of each round, to save memory.
    """

    def __init__(self, runner: Runner | Loader, batches: Sequence[Inputs]) -> None:
        self._source, self._batches = runner, batches
        self._runner: Runner | None = None
        self._calls: list[Callable[[], object]] = []
        self.wrapper_ms: float | None = None
        self.reopens = isinstance(runner, Loader)

    def __call__(self, index: int) -> object:
        if not self._calls:
            runner = self._open_runner()
            self._calls = [runner.bound(batch) for batch in self._batches]
            if runner.wraps and self.wrapper_ms is None:
                self.wrapper_ms = preparation_ms(runner, self._batches[0])
        return self._calls[index % len(self._calls)]()

    def device_ms(self, index: int) -> float | None:
        return self._open_runner().device_ms(self._batches[index % len(self._batches)])

    def rest(self) -> None:
        """Closes a runner that is opened again in every round."""
        if self.reopens and self._runner is not None:
            self._runner.close()
            self._runner = None
            self._calls.clear()  # they keep the engine alive

    def _open_runner(self) -> Runner:
        if self._runner is None:
            source = self._source
            self._runner = source() if isinstance(source, Loader) else source
        return self._runner


def preparation_ms(runner: Runner, x: Inputs) -> float:
    """Returns the median time in ms to prepare a call, which is the time a wrapper adds."""
    times_ns = []
    for _ in range(PREPARATIONS):
        started = time.perf_counter_ns()
        runner.bound(x)
        times_ns.append(time.perf_counter_ns() - started)
    return median(times_ns) / timing.NS_PER_MS


def measure_group(
    group: TimingGroup,
    runners: Mapping[Case, Runner | Loader],
    batches: Sequence[Inputs],
    *,
    benchmarks: Mapping[str, timing.IndexedCall],
    progress: Progress | None = None,
    done: Sequence[timing.Round] = (),
    keep: Callable[[timing.Round], None] = lambda timed: None,
) -> tuple[timing.Measured, dict[str, float]]:
    """Returns the latency of each case by its label, and the wrapper's additional time, if known.

    `runners` that are loaders are opened again for each round; `benchmarks` of the machine are
    timed with them, by their own names. The `batches` are used in turn, equally for every case.
    """
    protocol = replace(group.protocol, inputs=len(batches))
    calls = {c.label: TimedRunner(runners[c], batches) for c in group.cases if c in runners}
    measured = timing.measure(
        calls | dict(benchmarks),
        protocol,
        title=f"{group.title}: timing",
        progress=progress,
        done=done,
        keep=keep,
    )
    added = {label: call.wrapper_ms for label, call in calls.items()}
    return measured, {label: ms for label, ms in added.items() if ms is not None}


def group_batches(group: TimingGroup, data: LabelledData) -> list[Inputs]:
    """Returns distinct batches of real inputs, up to the number in a group's protocol."""
    inputs = min(group.protocol.inputs, -(-len(data) // group.batch))
    return [data.batch(index, group.batch) for index in range(inputs)]


TASKS = Path("/proc/self/task")


def scheduled_ns() -> dict[str, tuple[int, int]]:
    """Returns for how long each thread of this process ran and waited; empty if unknown."""
    threads = {}
    for file in TASKS.glob("*/schedstat"):
        try:
            ran, waited = file.read_text(encoding="ascii").split()[:2]
        except (OSError, ValueError):  # the thread has ended
            continue
        threads[file.parent.name] = (int(ran), int(waited))
    return threads


def waited_share(
    before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]
) -> float | None:
    """Returns the share of time that threads waited for a core; None if unknown."""
    ran = waited = 0
    for name, (ran_ns, waited_ns) in after.items():
        ran_before, waited_before = before.get(name, (0, 0))
        ran += ran_ns - ran_before
        waited += waited_ns - waited_before
    return waited / (ran + waited) if ran + waited > 0 else None


WARMUP = 2  # the first calls, which allocate, are left out
PASSES = 3


@dataclass(frozen=True, slots=True)
class Event:
    """A timed span of a profile, in microseconds; spans of nodes may be nested."""

    name: str
    start: float
    end: float
    thread: int

    def within(self, outer: Event) -> bool:
        return self.thread == outer.thread and outer.start <= self.start and self.end <= outer.end


def parts_of(
    loader: Loader, batches: Sequence[Inputs], layers: Sequence[str]
) -> tuple[PartTime, ...]:
    """Returns the parts of a graph with these MoE layers, as medians over calls with batches."""
    events = loader.profile(batches, WARMUP + PASSES * len(batches))
    return parts_of_profile(events, layers, skip=WARMUP)


def parts_of_profile(
    profile: Iterable[Mapping[str, Any]], layers: Sequence[str], *, skip: int = 0
) -> tuple[PartTime, ...]:
    """Returns the median time in ms of each part per call, without the first `skip` calls."""
    events = list(profile)
    runs = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "model_run")[
        skip:
    ]
    if not runs:
        return ()
    first_start = runs[0][0]
    nodes = [
        Event(e["name"].removesuffix("_kernel_time"), e["ts"], e["ts"] + e["dur"], e.get("tid", 0))
        for e in events
        if e.get("cat") == "Node" and e["name"].endswith("_kernel_time") and e["ts"] >= first_start
    ]
    starts = [start for start, _ in runs]
    sums: dict[tuple[str | None, str], list[float]] = defaultdict(lambda: [0.0] * len(runs))
    inside = [0.0] * len(runs)
    for event, own_us in own_times(nodes):
        run = bisect_right(starts, event.start) - 1
        sums[part_of_node(event.name, layers)][run] += own_us
        inside[run] += own_us
    sums[None, "runtime"] = [
        max(0.0, end - start - busy) for (start, end), busy in zip(runs, inside, strict=True)
    ]
    layer_parts = ((layer, part) for layer in layers for part in PARTS)
    order = (*layer_parts, (None, "host"), (None, "runtime"))
    return tuple(
        PartTime(layer, part, median(sums[layer, part]) / 1e3)
        for layer, part in order
        if (layer, part) in sums
    )


def own_times(events: Sequence[Event]) -> Iterable[tuple[Event, float]]:
    """Yields each event with its time outside nested events: an `If` contains its branch."""
    open_events: list[tuple[Event, list[float]]] = []  # each with the times of nested events
    for event in sorted(events, key=lambda e: (e.thread, e.start, -e.end)):
        while open_events and not event.within(open_events[-1][0]):
            outer, inside = open_events.pop()
            yield outer, outer.end - outer.start - sum(inside)
        if open_events:
            open_events[-1][1].append(event.end - event.start)
        open_events.append((event, []))
    for outer, inside in reversed(open_events):
        yield outer, outer.end - outer.start - sum(inside)


def part_of_node(name: str, layers: Sequence[str]) -> tuple[str | None, str]:
    """Returns the layer and part of a node by its name; `host` is the backbone."""
    parts = ((layer, part_of(name, layer)) for layer in layers)
    return next(((layer, part) for layer, part in parts if part is not None), (None, "host"))
