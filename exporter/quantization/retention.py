"""What `--min-retention` measured and decided, for a manifest and for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...graphs.precision.types import FloatName

Measure = Literal["accuracy", "agreement", "cosine"]

HOST = "the linear layers outside the MoE layers"
"""The part of a model that `--quantize all` adds to its MoE layers, all together."""

_MEASURES: dict[Measure, str] = {
    "accuracy": "accuracy over FP32's on {n} labelled inputs",
    "agreement": "share of {n} inputs without labels that get FP32's class",
    "cosine": "mean cosine with FP32's outputs on {n} inputs",
}


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A part that stayed in floats, and the retention that was too low while it was INT8."""

    name: str
    before: float


@dataclass(frozen=True, slots=True)
class Retention:
    """What INT8 keeps of what the FP32 model answers on the inputs of a feed.

    `reached` is `measure` (`trial.ReferenceOutputs`) over `samples` inputs, with the parts `kept`
    in `floats`, in the order in which they were given up. `whole`: nothing is left in INT8.
    """

    asked: float
    reached: float
    measure: Measure
    samples: int
    floats: FloatName
    kept: tuple[KeptPart, ...]
    whole: bool

    def reason(self, layer: str) -> str | None:
        """Why a layer stayed in floats, None where it is INT8."""
        for part in self.kept:
            if part.name == layer:
                return (
                    f"kept in {self.floats} for --min-retention {self.asked:g}: {part.before:.4f} "
                    "with it in INT8"
                )
        return None

    def notes(self) -> tuple[str, ...]:
        """Returns what a user should know: what was reached, by which measure, at what price."""
        names = ", ".join(part.name for part in self.kept) or "nothing"
        notes = [
            f"--min-retention {self.asked:g}: {self.reached:.4f} reached "
            f"({self.how}); kept in {self.floats}: {names}"
        ]
        if self.whole:
            notes.append(f"nothing is left in INT8: --precision {self.floats} writes the same")
        if 0 < 1 - self.asked < 1 / self.samples:
            notes.append(
                f"one of {self.samples} inputs is {1 / self.samples:.2g} of the retention: more "
                "inputs in --data measure it more finely"
            )
        return tuple(notes)

    @property
    def how(self) -> str:
        """The measure in words."""
        return _MEASURES[self.measure].format(n=self.samples)

    def as_json(self) -> dict[str, Any]:
        """The record as it stands in a manifest."""
        return asdict(self)
