"""Carries out a group: cases timed in turn on the same real inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...common import timing
from ...common.console import Progress
from ..data import Array, LabelledData
from ..plan import TimingGroup
from ..results import Results
from ..runners.pytorch import Case, Runner


class Turns:
    """A case that runs the batches of a group in turn."""

    def __init__(self, runner: Runner, batches: Sequence[Array]) -> None:
        self._runner, self._batches = runner, batches

    def __call__(self, index: int) -> object:
        """Runs one of the batches."""
        return self._runner(self._batch(index))

    @property
    def device_ms(self) -> Callable[[int], float] | None:
        """Runs one of the batches and returns its time on the device; None if nobody can tell."""
        tell: Callable[[Array], float] | None = getattr(self._runner, "device_ms", None)
        return None if tell is None else lambda index: tell(self._batch(index))

    def _batch(self, index: int) -> Array:
        return self._batches[index % len(self._batches)]


class Reopened:
    """A case that is opened for its part of each round and closed after: it saves memory."""

    def __init__(self, open_it: Callable[[], Runner], batches: Sequence[Array]) -> None:
        self._open, self._batches = open_it, batches
        self._turns: Turns | None = None

    def __call__(self, index: int) -> object:
        """Runs one of the batches."""
        if self._turns is None:
            self._turns = Turns(self._open(), self._batches)
        return self._turns(index)

    @property
    def device_ms(self) -> Callable[[int], float] | None:
        """As of `Turns`, while the engine is open."""
        return None if self._turns is None else self._turns.device_ms

    def rest(self) -> None:
        """Closes the engine."""
        self._turns = None


def measure_group(
    group: TimingGroup,
    runners: Mapping[Case, Runner],
    data: LabelledData,
    *,
    openers: Mapping[Case, Callable[[], Runner]] | None = None,
    probes: Mapping[str, timing.Case] | None = None,
    progress: Progress | None = None,
    done: Sequence[timing.Round] = (),
    keep: Callable[[timing.Round], None] = lambda found: None,
) -> timing.Measured:
    """Returns the latency of each case by its label, and in words what others failed at.

    `runners` are open; `openers` are opened for each round anew; `probes` of the machine are timed
    beside them, by their own names. Inputs are real: distinct batches of the data, in turn, the
    same for every case.
    """
    batches = group_batches(group, data)
    protocol = replace(group.protocol, inputs=len(batches))
    calls: dict[str, timing.Case] = {c.label: Turns(r, batches) for c, r in runners.items()}
    for case, opener in (openers or {}).items():
        calls[case.label] = Reopened(opener, batches)
    ordered = {c.label: calls[c.label] for c in group.cases if c.label in calls}
    return timing.measure(
        ordered | dict(probes or {}),
        protocol,
        title=f"{group.cases[0].model}, batch {group.batch}: timing",
        progress=progress,
        done=done,
        keep=keep,
    )


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
