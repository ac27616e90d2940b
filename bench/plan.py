"""What a benchmark will measure, as plain frozen data that can be printed, counted and shipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..common import timing
from ..errors import UsageError
from .cases import Candidate, TimingGroup
from .results import PYTORCH_COMPILE
from .runners.pytorch import cases

COMPILE_S = 30.0
"""What compiling a small network for one batch size takes."""

MACHINE_PROBES = 3
"""Cases of each group that measure the machine's own rates (`limits`)."""

PROCESS_S = 4.0
"""What starting a process and loading a runtime takes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure: the batch sizes, how long, and on how much.

    Accuracy, routing and parity are taken over the first `samples` inputs (None: all), in batches
    of `evaluation_batch`. `threads` is every engine's; None takes PyTorch's count, and the graphs
    must have been opened with the same. `memory` measures each row's peak memory in a process of
    its own; `parts` where a graph's time goes; `limits` the least time that the machine needs.
    `calibration` names the file that INT8 took its ranges from, for the report.
    """

    batches: tuple[int, ...] = (1,)
    protocol: timing.Protocol = field(default_factory=lambda: timing.Protocol(inputs=8))
    evaluation_batch: int = 64
    samples: int | None = None
    threads: int | None = None
    memory: bool = True
    parts: bool = True
    limits: bool = True
    calibration: str | None = None

    def __post_init__(self) -> None:
        if not self.batches:
            raise UsageError("no batch size to measure")
        if any(size < 1 for size in (*self.batches, self.evaluation_batch)):
            raise UsageError(f"batch sizes {self.batches}: every one must be at least 1")


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Milliseconds of single calls of the untouched models, which an estimate multiplies.

    `call` is keyed by model and batch size, `evaluation` (a batch of the evaluation) by model.
    """

    call: Mapping[tuple[str, int], float]
    evaluation: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that the parts of a sweep will take, if every engine were as fast as PyTorch."""

    timing: float
    quality: float
    compiling: float
    memory: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.timing + self.quality + self.compiling + self.memory

    def __str__(self) -> str:
        parts = (
            ("timing", self.timing),
            ("accuracy and parity", self.quality),
            ("compiling", self.compiling),
            ("memory", self.memory),
        )
        listed = ", ".join(f"{name} {duration(s)}" for name, s in parts if s >= 1)
        return f"about {duration(self.total)}" + (f" ({listed})" if listed else "")


def plan(candidates: Sequence[Candidate], settings: Settings) -> tuple[TimingGroup, ...]:
    """Returns the groups of a benchmark: one per model and batch size.

    Raises UsageError for a k that a model does not have, for no models, or two of one name.
    """
    if not candidates:
        raise UsageError("no model to measure")
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two models have the same name: {', '.join(names)}",
            hint="rename one of the files or folders: results are told apart by it",
        )
    for candidate in candidates:
        for k in (*candidate.ks, *(graph.k for graph in candidate.graphs)):
            if not 1 <= k <= candidate.experts:
                raise UsageError(
                    f"k = {k}, and {candidate.name} has {candidate.experts} experts",
                    hint=f"use 1 ≤ k ≤ {candidate.experts}",
                )
    return tuple(
        TimingGroup(tuple(cases(candidate, settings.batches)), batch, settings.protocol)
        for candidate in candidates
        for batch in settings.batches
    )


def estimate(
    groups: Sequence[TimingGroup],
    settings: Settings,
    samples: int,
    times: CallTimes,
    *,
    workers: int = 1,
) -> Estimate:
    """Returns how long the groups and the evaluation over so many samples will take."""
    by_model = {group.model: group.cases for group in groups}
    batches = math.ceil(samples / settings.evaluation_batch)
    quality = compiling = memory = 0.0
    for model, listed in by_model.items():
        # Every case, the untouched model, and a reference for every k.
        passes = len(listed) + 1 + len({c.k for c in listed})
        quality += passes * batches * times.evaluation[model] / 1e3
        compiled = sum(c.engine == PYTORCH_COMPILE for c in listed)
        compiling += compiled * len(settings.batches) * COMPILE_S
        if settings.memory:
            memory += len(listed) * PROCESS_S / workers
    timed = sum(group.seconds(times.call[group.model, group.batch]) for group in groups)
    if settings.limits:
        timed += len(groups) * MACHINE_PROBES * settings.protocol.rounds * settings.protocol.round_s
    return Estimate(timed, quality, compiling, memory)


def describe(groups: Sequence[TimingGroup], expected: Estimate | None = None) -> str:
    """Returns the plan in words, with the time that it will take."""
    rows = sum(len(group.cases) for group in groups)
    least = math.ceil(sum(group.seconds(0.0) for group in groups))
    takes = f"the timing takes at least {least} s" if expected is None else str(expected)
    lines = [f"{rows} rows; {takes}"]
    for group in groups:
        first = group.cases[0]
        kinds: dict[str, list[str]] = {}
        for c in group.cases:
            kinds.setdefault(c.runs_in, []).append(str(c.k))
        listed = "; ".join(f"{name} k={','.join(ks)}" for name, ks in kinds.items())
        lines.append(f"  {first.model}, n={first.experts}, batch {group.batch}: {listed}")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Returns seconds as a reader wants them: `40 s`, `3 min`, `1.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
