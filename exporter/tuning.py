"""What measuring the lowerings found (`--lowering tune`): figures, and the choices they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..common.timing import Latency, differs
from ..graphs.lowerings import lowering
from ..graphs.lowerings.base import AnyWork
from ..graphs.lowerings.choice import Choice
from ..graphs.lowerings.cost import machine_for, predict_us
from ..graphs.targets import Target


@dataclass(frozen=True, slots=True)
class Candidate:
    """One lowering of a layer and what one batch took, in milliseconds."""

    lowering: str
    latency_ms: Latency


@dataclass(frozen=True, slots=True)
class TunedLayers:
    """Layers of one shape and k, measured once: each candidate's latency, the fastest first.

    `layers` are their names and `k` what was kept, also where k is a graph input. `left_out` says
    why a lowering that could serve was not timed. Without candidates there was nothing to compare:
    `chosen` is the only one.
    """

    layers: tuple[str, ...]
    experts: int
    k: int
    batch: int
    tokens: int
    precision: str
    chosen: str
    candidates: tuple[Candidate, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def choice(self, work: AnyWork, target: Target) -> Choice:
        """The choice for one of the layers, with the figures as its reason."""
        chosen = lowering(self.chosen)
        predicted_us = predict_us(chosen, work, machine_for(target, work.precision))
        return Choice(chosen, self._reason(), predicted_us)

    def _reason(self) -> str:
        if not self.candidates:
            return "the only lowering for this layer and target: nothing was measured"
        best, *others = self.candidates
        listed = [
            f"{other.lowering} {other.latency_ms.median:.3g} ms"
            + ("" if differs(best.latency_ms, other.latency_ms) else ", no difference")
            for other in others
        ] + list(self.left_out)
        return (
            f"measured {best.latency_ms.median:.3g} ms, spread {best.latency_ms.spread:.0%}, for "
            f"k = {self.k} of {self.experts} at batch {self.batch}"
            + (f" (others: {'; '.join(listed)})" if listed else "")
        )


@dataclass(frozen=True, slots=True)
class Tuning:
    """Everything that was measured for one export, and on what: as it stands in the manifest.

    `machine` is the CPU or GPU, `inputs` says what the layers were fed.
    """

    machine: str
    provider: str
    runtime: str
    threads: int
    rounds: int
    inputs: str
    measured: tuple[TunedLayers, ...]

    def of(self, layer: str) -> TunedLayers:
        """Returns what was found for a layer."""
        return next(group for group in self.measured if layer in group.layers)

    def as_json(self) -> dict[str, Any]:
        """The record as plain data."""
        return asdict(self)
