"""Which engines a benchmark can measure on this machine, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..engines import KINDS, PYTORCH_EAGER, PYTORCH_EAGER_CUDA, EngineKind, Serves
from ..results import Absent

NOT_SERVED: dict[Serves, str] = {
    "one-input": "it runs models with one input, and these have several",
    "transformers": "it runs models of transformers",
}


@dataclass(frozen=True, slots=True)
class Selection:
    """The engines to measure, and those that were asked for or known and are not there."""

    present: tuple[EngineKind, ...]
    absent: tuple[Absent, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The engines to measure, as `--engine` names them."""
        return tuple(kind.name for kind in self.present)


def select(
    names: Iterable[str], models: Sequence[Serves] = ("one-input", "transformers")
) -> Selection:
    """Returns which of the named engines can run here, and why each other known one is left out.

    `models` are what the models are that will be measured; an engine for others that was not named
    is not mentioned. The untouched model takes part wherever another engine runs: always on the
    CPU, on the GPU with the first engine there.
    """
    asked = set(names) | {PYTORCH_EAGER}
    if any(KINDS[name].provider != "cpu" and KINDS[name].missing() is None for name in asked):
        asked.add(PYTORCH_EAGER_CUDA)
    everything = asked >= KINDS.keys()
    present, absent = [], []
    for kind in KINDS.values():
        if kind.serves != "all" and kind.serves not in models:
            if kind.name in asked and not everything:
                absent.append(Absent(kind.name, NOT_SERVED[kind.serves]))
            continue
        reason = kind.missing()
        if reason is None and kind.name not in asked:
            reason = f"not asked for: --engine {kind.name}"
        if reason is None:
            present.append(kind)
        else:
            absent.append(Absent(kind.name, reason))
    return Selection(tuple(present), tuple(absent))
