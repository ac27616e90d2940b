"""Where a graph's time goes, by ONNX Runtime's profile: the parts of each MoE layer, and the rest.

The nodes of a layer are named `LAYER/what/…` (`graphs.builder`), so a profile tells routing from
experts. The runtime's clock around every node makes small nodes look slower than they are: the
parts are for comparing with each other, the latency is measured without it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...calibration.feeds import Array
from ...graphs.names import PARTS, part_of
from ..results import Part
from ..runners.base import Loader

WARMUP = 2
PASSES = 3


@dataclass(frozen=True, slots=True)
class Event:
    """One timed span of a profile, in microseconds; its nodes may lie within one another."""

    name: str
    start: float
    end: float
    thread: int


def parts_of(loader: Loader, batches: Sequence[Array], layers: Sequence[str]) -> tuple[Part, ...]:
    """Returns the parts of a graph, as medians over calls with these batches in turn.

    `layers` are the names of its MoE layers. The first calls are left out: they allocate.
    """
    events = loader.profile(batches, WARMUP + PASSES * len(batches))
    return parts_of_profile(events, layers, skip=WARMUP)


def parts_of_profile(
    profile: Iterable[Mapping[str, Any]], layers: Sequence[str], *, skip: int = 0
) -> tuple[Part, ...]:
    """Returns the median milliseconds of each part per call, the first `skip` calls left out."""
    events = list(profile)
    runs = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "model_run")[
        skip:
    ]
    if not runs:
        return ()
    began = runs[0][0]
    nodes = [
        Event(e["name"].removesuffix("_kernel_time"), e["ts"], e["ts"] + e["dur"], e.get("tid", 0))
        for e in events
        if e.get("cat") == "Node" and e["name"].endswith("_kernel_time") and e["ts"] >= began
    ]
    starts = [start for start, _ in runs]
    sums: dict[tuple[str | None, str], list[float]] = defaultdict(lambda: [0.0] * len(runs))
    inside = [0.0] * len(runs)
    for event, own_us in own_times(nodes):
        run = bisect_right(starts, event.start) - 1
        sums[part_of_node(event.name, layers)][run] += own_us
        inside[run] += own_us
    sums[None, "runtime"] = [
        max(0.0, end - start - own) for (start, end), own in zip(runs, inside, strict=True)
    ]
    order = [*((layer, part) for layer in layers for part in PARTS), (None, "host")]
    order.append((None, "runtime"))
    return tuple(
        Part(layer, part, median(sums[layer, part]) / 1e3)
        for layer, part in order
        if (layer, part) in sums
    )


def own_times(events: Sequence[Event]) -> Iterable[tuple[Event, float]]:
    """Yields each event with the time that no event within it takes: an `If` holds its branch."""
    open_events: list[list[Any]] = []

    for event in sorted(events, key=lambda e: (e.thread, e.start, -e.end)):
        while open_events and not _within(event, open_events[-1][0]):
            outer, inside = open_events.pop()
            yield outer, outer.end - outer.start - inside
        if open_events:
            open_events[-1][1] += event.end - event.start
        open_events.append([event, 0.0])
    for outer, inside in reversed(open_events):
        yield outer, outer.end - outer.start - inside


def _within(event: Event, outer: Event) -> bool:
    return event.thread == outer.thread and event.start >= outer.start and event.end <= outer.end


def part_of_node(name: str, layers: Sequence[str]) -> tuple[str | None, str]:
    """Returns the layer and part of a node by its name; `host` is the backbone."""
    for layer in layers:
        part = part_of(name, layer)
        if part is not None:
            return layer, part
    return None, "host"
