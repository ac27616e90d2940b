"""The edits of an export, as a manifest holds them.

Experts and outputs are counted from 0, as in every array; levels from 1, as `inspect` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np

from ..errors import BundleError, UsageError
from ..graphs.rewrites import Rewrite

ABLATE, REWRITE, KEEP, MERGE, STEER = "ablate", "rewrite", "keep", "merge", "steer"
AT_RUN_TIME = "input"
"""The word for strengths that are an input of the graph."""

_KEYS = ("layer", "output", "coefficients", "lambda")
REWRITTEN = (
    'the file is a list of {"layer": NAME, "output": INDEX, "coefficients": [[…]], "lambda": λ}, '
    "with one list of coefficients per level"
)
"""How a file has re-written outputs."""

LARGEST = float(np.finfo(np.float32).max)
"""The largest number that an edit may have."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """One expert that is to contribute nothing; `level` is None where it was not said."""

    layer: str
    expert: int
    level: int | None = None

    @property
    def text(self) -> str:
        """As `--ablate` takes it: `LAYER:EXPERT` or `LAYER:LEVEL.EXPERT`."""
        return f"{self.layer}:{'' if self.level is None else f'{self.level}.'}{self.expert}"


@dataclass(frozen=True, slots=True)
class LayerRewrite:
    """One output of a layer that is to be re-written (Eq. 5)."""

    layer: str
    rewrite: Rewrite

    @property
    def text(self) -> str:
        """In words: the output and λ, not the coefficients."""
        return f"{self.layer} output {self.rewrite.output} += {self.rewrite.strength:g}·āᵀa"


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """The experts of a layer that stay, ascending: the others are dropped, weights and all.

    Where `constant`, the slots of those give the `constants` [dropped, p, o], else nothing. The
    numbers are None in what a manifest or a recipe says, until `Edits.with_substitutes` adds them.
    """

    layer: str
    experts: tuple[int, ...]
    constant: bool = False
    constants: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The edit in words."""
        others = ", the others constant" if self.constant else ""
        return f"{KEEP} {self.layer}:{','.join(map(str, self.experts))}{others}"


@dataclass(frozen=True, slots=True)
class MergedExperts:
    """A layer whose experts become one: a matrix [d + 1, o] for each of its weight tensors.

    The `matrices` are None in what a manifest or a recipe says, until `Edits.with_substitutes` adds
    them.
    """

    layer: str
    matrices: tuple[np.ndarray, ...] | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The edit in words."""
        return f"{MERGE} the experts of {self.layer}"

    def key(self, tensor: int) -> str:
        """The name of the matrix of one of the layer's tensors, from 0, in a file."""
        return f"{self.layer}:{tensor}"

    def of(self, substitutes: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...] | None:
        """Returns the layer's matrices from a file; None where it has none."""
        keys = itertools.takewhile(substitutes.__contains__, map(self.key, itertools.count()))
        return tuple(substitutes[key] for key in keys) or None


@dataclass(frozen=True, slots=True)
class Steer:
    """An expert whose cluster centre is added to every token of its layer, times `strength`.

    `strength` is None where it is given at run time.
    """

    layer: str
    expert: int
    level: int | None = None
    strength: float | None = 1.0

    @property
    def name(self) -> str:
        """The expert as `--steer` takes it: `LAYER:EXPERT` or `LAYER:LEVEL.EXPERT`."""
        return f"{self.layer}:{'' if self.level is None else f'{self.level}.'}{self.expert}"

    @property
    def text(self) -> str:
        """The expert with its strength."""
        return f"{self.name}:{AT_RUN_TIME if self.strength is None else f'{self.strength:g}'}"


@dataclass(frozen=True, slots=True)
class Edits:
    """All edits of an export, as they were asked for; false where there are none."""

    ablations: tuple[Ablation, ...] = ()
    rewrites: tuple[LayerRewrite, ...] = ()
    kept: tuple[KeptExperts, ...] = ()
    merged: tuple[MergedExperts, ...] = ()
    steers: tuple[Steer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ablations or self.rewrites or self.fewer or self.steers)

    @property
    def fewer(self) -> bool:
        """Whether a layer has fewer experts than in the checkpoint."""
        return bool(self.kept or self.merged)

    @property
    def substitutes(self) -> dict[str, np.ndarray]:
        """What takes the places of experts, by its name in a file.

        For a layer's dropped experts an array [dropped, p, o], for its merged ones [d + 1, o] each.
        """
        kept = ((kept_experts.layer, kept_experts.constants) for kept_experts in self.kept)
        merged = (
            (merge.key(index), matrix)
            for merge in self.merged
            for index, matrix in enumerate(merge.matrices or ())
        )
        return {name: array for name, array in (*kept, *merged) if array is not None}

    def with_substitutes(self, substitutes: Mapping[str, np.ndarray]) -> Edits:
        """Returns the edits with what takes the places of experts (`substitutes`)."""
        kept = (
            replace(kept_experts, constant=True, constants=substitutes[kept_experts.layer])
            if kept_experts.layer in substitutes
            else kept_experts
            for kept_experts in self.kept
        )
        merged = (replace(merge, matrices=merge.of(substitutes)) for merge in self.merged)
        edits = replace(self, kept=tuple(kept), merged=tuple(merged))
        for name in substitutes.keys() - edits.substitutes.keys():
            raise UsageError(
                f"{name}: what takes the places of experts is there, but none go in that layer",
                hint="substitutes.safetensors lies beside the recipe, and in the bundle it is of",
            )
        return edits

    @property
    def at_run_time(self) -> tuple[Steer, ...]:
        """The steerings whose strengths are given per run, in the order of the input `steer`."""
        return tuple(steer for steer in self.steers if steer.strength is None)

    def texts(self) -> list[str]:
        """A short line for each edit."""
        return [
            *(f"{ABLATE} {ablation.text}" for ablation in self.ablations),
            *(f"{REWRITE} {rewrite.text}" for rewrite in self.rewrites),
            *(kept_experts.text for kept_experts in self.kept),
            *(merge.text for merge in self.merged),
            *(f"{STEER} {steer.text}" for steer in self.steers),
        ]

    def records(self) -> list[dict[str, Any]]:
        """The edits as a manifest holds them: all that it takes to make them again."""
        return [
            *(
                {"edit": ABLATE, "layer": a.layer, "expert": a.expert}
                | ({} if a.level is None else {"level": a.level})
                for a in self.ablations
            ),
            *(
                {
                    "edit": REWRITE,
                    "layer": r.layer,
                    "output": r.rewrite.output,
                    "lambda": r.rewrite.strength,
                    "coefficients": [list(mean) for mean in r.rewrite.coefficients],
                }
                for r in self.rewrites
            ),
            *(
                {"edit": KEEP, "layer": kept_experts.layer, "experts": list(kept_experts.experts)}
                | ({"constant": True} if kept_experts.constant else {})
                for kept_experts in self.kept
            ),
            *({"edit": MERGE, "layer": merge.layer} for merge in self.merged),
            *(
                {"edit": STEER, "layer": s.layer, "expert": s.expert}
                | ({} if s.level is None else {"level": s.level})
                | {"strength": AT_RUN_TIME if s.strength is None else s.strength}
                for s in self.steers
            ),
        ]

    @staticmethod
    def from_records(records: Sequence[Mapping[str, Any]], where: str) -> Edits:
        """Reads the records of a manifest; a `BundleError` names `where` and the wrong one."""
        ablations, rewrites, kept, merged, steers = [], [], [], [], []
        for index, record in enumerate(records):
            try:
                entry = {key: value for key, value in record.items() if key != "edit"}
                if record["edit"] == REWRITE:
                    rewrites.append(rewrite_of(entry, "a re-written output"))
                elif record["edit"] == KEEP:
                    entry["experts"] = tuple(map(int, entry["experts"]))
                    kept.append(KeptExperts(**entry))
                elif record["edit"] == MERGE:
                    merged.append(MergedExperts(**entry))
                elif record["edit"] == STEER:
                    late = entry["strength"] == AT_RUN_TIME
                    entry["strength"] = None if late else _number(entry["strength"], "a strength")
                    steers.append(Steer(**entry))
                else:
                    ablations.append(Ablation(**entry))
            except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
                raise BundleError(
                    f"{where}: edit {index} is none that this version knows ({error})",
                    hint="use the version of moexport that wrote the bundle, or export again",
                ) from error
        return Edits(
            ablations=tuple(ablations),
            rewrites=tuple(rewrites),
            kept=tuple(kept),
            merged=tuple(merged),
            steers=tuple(steers),
        )


NO_EDITS = Edits()


def rewrite_of(entry: Any, where: str) -> LayerRewrite:
    """Returns a re-written output as a file or a manifest has it; `UsageError` names `where`."""
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where} is a {type(entry).__name__}, not an object", hint=REWRITTEN)
    for what, keys in (
        ("lacks", [key for key in _KEYS if key not in entry]),
        ("has the unknown key", [str(key) for key in entry if key not in _KEYS]),
    ):
        if keys:
            raise UsageError(f"{where} {what} {', '.join(keys)}", hint=REWRITTEN)
    layer, output = entry["layer"], entry["output"]
    if not isinstance(layer, str):
        raise UsageError(f"{where}: layer is {layer!r}, not a name", hint=REWRITTEN)
    if not isinstance(output, int) or isinstance(output, bool) or output < 0:
        raise UsageError(
            f"{where}: output is {output!r}, not an index", hint="outputs are counted from 0"
        )
    strength = _number(entry["lambda"], f"{where}: lambda")
    coefficients = entry["coefficients"]
    if not isinstance(coefficients, Sequence) or isinstance(coefficients, str) or not coefficients:
        raise UsageError(f"{where}: coefficients are not lists of numbers", hint=REWRITTEN)
    nested = any(isinstance(vector, Sequence) for vector in coefficients)
    # Without the outer brackets they are the only level's.
    vectors = coefficients if nested else [coefficients]
    return LayerRewrite(
        layer,
        Rewrite(
            output,
            tuple(
                _vector(vector, f"{where}: coefficients of level {level}")
                for level, vector in enumerate(vectors, start=1)
            ),
            strength,
        ),
    )


def _vector(values: Any, what: str) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UsageError(f"{what} are {values!r}, not a list of numbers", hint=REWRITTEN)
    return tuple(_number(value, f"{what}, number {i}") for i, value in enumerate(values))


def _number(value: Any, what: str) -> float:
    """A finite float32 number; JSON as Python reads it may hold NaN and Infinity."""
    is_number: bool = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise UsageError(f"{what} is {value!r}, not a number", hint=REWRITTEN)
    if not abs(value) <= LARGEST:  # false for NaN, too
        raise UsageError(
            f"{what} is {value}, not a number that float32 holds",
            hint="a mean over no inputs is not a number",
        )
    return float(value)
