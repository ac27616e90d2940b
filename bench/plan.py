"""What a benchmark will measure, as plain frozen data that can be printed, counted and shipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import UsageError
from . import timing
from .engines import Contestant, Subject, contestants


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure: the batch sizes, how long, and on how much.

    Accuracy, routing and parity are taken over the first `samples` inputs (None: all), in batches
    of `evaluation_batch`. `threads` is PyTorch's; None leaves it as it is. Graphs bring their own.
    """

    batches: tuple[int, ...] = (1,)
    protocol: timing.Protocol = field(default_factory=lambda: timing.Protocol(inputs=8))
    evaluation_batch: int = 64
    samples: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.batches:
            raise UsageError("no batch size to measure")
        if any(size < 1 for size in (*self.batches, self.evaluation_batch)):
            raise UsageError(f"batch sizes {self.batches}: every one must be at least 1")


@dataclass(frozen=True, slots=True)
class Heat:
    """Contestants that are measured together, in turn, at one batch size."""

    contestants: tuple[Contestant, ...]
    batch: int
    protocol: timing.Protocol

    @property
    def seconds(self) -> float:
        """The least time it takes."""
        return len(self.contestants) * self.protocol.rounds * self.protocol.round_s


def plan(subjects: Sequence[Subject], settings: Settings) -> tuple[Heat, ...]:
    """Returns the heats of a benchmark: one per model and batch size.

    Raises UsageError for a k that a model does not have, for no models, or two of one name.
    """
    if not subjects:
        raise UsageError("no model to measure")
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise UsageError(f"two models have the same name: {', '.join(names)}")
    for subject in subjects:
        for k in (*subject.ks, *(graph.k for graph in subject.graphs)):
            if not 1 <= k <= subject.experts:
                raise UsageError(f"k = {k}, and {subject.name} has {subject.experts} experts")
    return tuple(
        Heat(tuple(contestants(subject)), batch, settings.protocol)
        for subject in subjects
        for batch in settings.batches
    )


def describe(heats: Sequence[Heat]) -> str:
    """Returns the plan in words, with the least time that it takes."""
    rows = sum(len(heat.contestants) for heat in heats)
    seconds = math.ceil(sum(heat.seconds for heat in heats))
    lines = [f"{rows} rows in {len(heats)} heats; the timing takes at least {seconds} s"]
    for heat in heats:
        first = heat.contestants[0]
        kinds: dict[str, list[str]] = {}
        for c in heat.contestants:
            name = c.engine if c.lowering is None else f"{c.engine} {c.lowering} {c.precision}"
            kinds.setdefault(name, []).append(str(c.k))
        listed = "; ".join(f"{name} k={','.join(ks)}" for name, ks in kinds.items())
        lines.append(f"  {first.model}, n={first.experts}, batch {heat.batch}: {listed}")
    return "\n".join(lines)
