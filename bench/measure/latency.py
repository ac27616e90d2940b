"""Carries out a heat: contestants timed in turn on the same real inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...common import timing
from ...common.progress import Progress
from ..bench_data import Array, LabelledData
from ..plan import Heat
from ..runners.pytorch import Contestant, Runner


class Turns:
    """A contestant that runs the batches of a heat in turn."""

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
    """A contestant that is opened for its part of each round and closed after: it saves memory."""

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


def measure_heat(
    heat: Heat,
    runners: Mapping[Contestant, Runner],
    data: LabelledData,
    *,
    openers: Mapping[Contestant, Callable[[], Runner]] | None = None,
    probes: Mapping[str, timing.Contestant] | None = None,
    progress: Progress | None = None,
    done: Sequence[timing.Round] = (),
    keep: Callable[[timing.Round], None] = lambda found: None,
) -> timing.Measured:
    """Returns the latency of each contestant by its label, and in words what others failed at.

    `runners` are open; `openers` are opened for each round anew; `probes` of the machine are timed
    beside them, by their own names. Inputs are real: distinct batches of the data, in turn, the
    same for every contestant.
    """
    batches = heat_batches(heat, data)
    protocol = replace(heat.protocol, inputs=len(batches))
    calls: dict[str, timing.Contestant] = {c.label: Turns(r, batches) for c, r in runners.items()}
    for contestant, opener in (openers or {}).items():
        calls[contestant.label] = Reopened(opener, batches)
    ordered = {c.label: calls[c.label] for c in heat.contestants if c.label in calls}
    return timing.measure(
        ordered | dict(probes or {}),
        protocol,
        title=f"{heat.contestants[0].model}, batch {heat.batch}: timing",
        progress=progress,
        done=done,
        keep=keep,
    )


def heat_batches(heat: Heat, data: LabelledData) -> list[Array]:
    """Returns the distinct batches of a heat: what the protocol asks for, if the data give it."""
    inputs = min(heat.protocol.inputs, -(-len(data) // heat.batch))
    return [data.batch(index, heat.batch) for index in range(inputs)]
