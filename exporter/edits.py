"""The edits of an export as people write them: `--ablate`, `--steer`, and the file of `--rewrite`.

Experts and outputs are counted from 0, as in every array; levels from 1, as `inspect` does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from ..common.documents import read_document
from ..errors import BundleError, UsageError
from ..graphs.rewrites import Rewrite

ABLATE, REWRITE, KEEP, MERGE, STEER = "ablate", "rewrite", "keep", "merge", "steer"
AT_RUN_TIME = "input"
"""The word for strengths that are an input of the graph."""

_STEERED = re.compile(r"(.+?):(?:(\d+)\.)?(\d+)(?::([^:]+))?")
_STEER_WRITTEN = (
    "--steer LAYER:EXPERT or LAYER:EXPERT:STRENGTH, LAYER:LEVEL.EXPERT of a hierarchy; more after "
    "commas; --steer input beside them for strengths that are an input of the graph"
)
_EXPERT = re.compile(r"(?:(\d+)\.)?(\d+)")
_WRITTEN = "--ablate LAYER:EXPERT, or LAYER:LEVEL.EXPERT of a hierarchy; more after commas"
_KEYS = ("layer", "output", "coefficients", "lambda")
_ENTRY = (
    'the file is a list of {"layer": NAME, "output": INDEX, "coefficients": [[…]], "lambda": λ}, '
    "with one list of coefficients per level"
)
_LARGEST = float(np.finfo(np.float32).max)


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
                    rewrites.append(_rewrite(entry, "a re-written output"))
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


def read_edits(
    ablate: str | Sequence[str] = (),
    rewrite: str | Path | Sequence[Mapping[str, Any]] | None = None,
    steer: str | Sequence[str] = (),
) -> Edits:
    """Returns the edits of `--ablate` and `--steer` texts and of a `--rewrite` file or its entries.

    Raises UsageError for what cannot be meant, whatever the model.
    """
    texts = [ablate] if isinstance(ablate, str) else ablate
    ablations = [ablation for text in texts for ablation in _parse_ablate(text)]
    steers = _parse_steers([steer] if isinstance(steer, str) else steer)
    if rewrite is None:
        return Edits(tuple(dict.fromkeys(ablations)), steers=steers)
    where = str(rewrite) if isinstance(rewrite, str | Path) else "rewrite"
    entries = _read_json(Path(rewrite)) if isinstance(rewrite, str | Path) else rewrite
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise UsageError(f"{where}: holds no re-written outputs", hint=_ENTRY)
    return Edits(
        tuple(dict.fromkeys(ablations)),
        tuple(_rewrite(entry, f"{where}: entry {i}") for i, entry in enumerate(entries)),
        steers=steers,
    )


def _parse_steers(texts: Sequence[str]) -> tuple[Steer, ...]:
    """`layer:3`, `layer:3:2.5`, `blocks.1.mlp:2.0:-1`, and `input` for strengths at run time."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    at_run_time = AT_RUN_TIME in parts
    steers: list[Steer] = []
    for part in (entry for entry in parts if entry != AT_RUN_TIME):
        match = _STEERED.fullmatch(part)
        if match is None:
            raise UsageError(f"--steer {part}: names no expert of a layer", hint=_STEER_WRITTEN)
        layer, level, expert, strength = match.groups()
        if at_run_time and strength is not None:
            raise UsageError(
                f"--steer {part}: with --steer input its strength is given at run time",
                hint=f"leave :{strength} out, or leave --steer input out",
            )
        value = None if at_run_time else _strength(part, strength or "1")
        steers.append(Steer(layer, int(expert), None if level is None else int(level), value))
        if [steer.name for steer in steers].count(steers[-1].name) > 1:
            raise UsageError(
                f"--steer {part}: this expert is named twice", hint="give the sum of its strengths"
            )
    if at_run_time and not steers:
        raise UsageError(
            "--steer input: no expert is named that could be steered by", hint=_STEER_WRITTEN
        )
    return tuple(steers)


def _strength(part: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"--steer {part}: {text} is not a strength", hint=_STEER_WRITTEN) from None
    if not abs(value) <= _LARGEST:  # false for NaN, too
        raise UsageError(
            f"--steer {part}: a strength of {value} is not finite",
            hint="about 1 moves tokens by as much as the expert's cluster centre is long",
        )
    return value


def _parse_ablate(text: str) -> list[Ablation]:
    """`blocks.6.mlp:3,5,blocks.7.mlp:2.4`: an expert without a layer is of the one before it."""
    ablations: list[Ablation] = []
    for part in text.split(","):
        layer, colon, number = part.strip().rpartition(":")
        expert = _EXPERT.fullmatch(number)
        if expert is None or (not layer and (colon or not ablations)):
            raise UsageError(
                f"--ablate {text}: '{part.strip()}' names no expert of a layer", hint=_WRITTEN
            )
        level = None if expert[1] is None else int(expert[1])
        ablations.append(Ablation(layer or ablations[-1].layer, int(expert[2]), level))
    return ablations


def _read_json(path: Path) -> Any:
    try:
        return read_document(path, "json", lambda said: UsageError(said, hint=_ENTRY))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}", hint="check --rewrite"
        ) from error


def _rewrite(entry: Any, where: str) -> LayerRewrite:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where} is a {type(entry).__name__}, not an object", hint=_ENTRY)
    for what, keys in (
        ("lacks", [key for key in _KEYS if key not in entry]),
        ("has the unknown key", [str(key) for key in entry if key not in _KEYS]),
    ):
        if keys:
            raise UsageError(f"{where} {what} {', '.join(keys)}", hint=_ENTRY)
    layer, output = entry["layer"], entry["output"]
    if not isinstance(layer, str):
        raise UsageError(f"{where}: layer is {layer!r}, not a name", hint=_ENTRY)
    if not isinstance(output, int) or isinstance(output, bool) or output < 0:
        raise UsageError(
            f"{where}: output is {output!r}, not an index", hint="outputs are counted from 0"
        )
    strength = _number(entry["lambda"], f"{where}: lambda")
    coefficients = entry["coefficients"]
    if not isinstance(coefficients, Sequence) or isinstance(coefficients, str) or not coefficients:
        raise UsageError(f"{where}: coefficients are not lists of numbers", hint=_ENTRY)
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
        raise UsageError(f"{what} are {values!r}, not a list of numbers", hint=_ENTRY)
    return tuple(_number(value, f"{what}, number {i}") for i, value in enumerate(values))


def _number(value: Any, what: str) -> float:
    """A finite float32 number; JSON as Python reads it may hold NaN and Infinity."""
    is_number: bool = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise UsageError(f"{what} is {value!r}, not a number", hint=_ENTRY)
    if not abs(value) <= _LARGEST:  # false for NaN, too
        raise UsageError(
            f"{what} is {value}, not a number that float32 holds",
            hint="a mean over no inputs is not a number",
        )
    return float(value)
