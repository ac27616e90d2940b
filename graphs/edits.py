"""The edits of an export: changes to its MoE layers, and their form in a manifest.

Experts and outputs are counted from 0, levels from 1, as in `inspect`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from ..errors import BundleError, UsageError

ABLATE, REWRITE, KEEP, MERGE, STEER = "ablate", "rewrite", "keep", "merge", "steer"
AT_RUN_TIME = "input"
"""The keyword for a strength that is an input of the graph."""

_KEYS = ("layer", "output", "coefficients", "lambda")
REWRITE_FORMAT = (
    'the file is a list of {"layer": NAME, "output": INDEX, "coefficients": [[…]], "lambda": λ}, '
    "with one list of coefficients per level"
)
"""The format of a file with rewritten outputs, for hints."""

LARGEST = float(np.finfo(np.float32).max)
"""The largest number in an edit."""


def _expert_text(layer: str, level: int | None, expert: int) -> str:
    """Returns an expert as users write it: `LAYER:EXPERT` or `LAYER:LEVEL.EXPERT`."""
    return f"{layer}:{'' if level is None else f'{level}.'}{expert}"


def _without_none(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Ablation:
    """An expert whose contribution is removed; `level` is None in layers with one level."""

    layer: str
    expert: int
    level: int | None = None

    @property
    def option(self) -> str:
        return f"--{self.text}"

    @property
    def text(self) -> str:
        return f"{ABLATE} {_expert_text(self.layer, self.level, self.expert)}"

    def record(self) -> dict[str, Any]:
        content = {"layer": self.layer, "expert": self.expert, "level": self.level}
        return {"edit": ABLATE} | _without_none(content)


@dataclass(frozen=True, slots=True)
class AblatedCombination:
    """One expert of each level of a hierarchy, whose joint contribution is removed."""

    layer: str
    experts: tuple[int, ...]

    @property
    def option(self) -> str:
        return f"--{self.text}"

    @property
    def text(self) -> str:
        return f"{ABLATE} {self.layer}:{'+'.join(map(str, self.experts))}"

    def record(self) -> dict[str, Any]:
        return {"edit": ABLATE, "layer": self.layer, "experts": list(self.experts)}


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewritten output of a muMoE layer: y_o += λ · Π_e(ā_eᵀ·a_e) (Eq. 5).

    `coefficients` are the ā_e [n_e], one vector per level: the mean coefficients over a subgroup of
    inputs. `strength` is λ.
    """

    layer: str
    output: int
    coefficients: tuple[tuple[float, ...], ...]
    strength: float

    @property
    def option(self) -> str:
        return "--rewrite"

    @property
    def text(self) -> str:
        """A description with the output and λ, but not the coefficients."""
        return f"{REWRITE} {self.layer} output {self.output} += {self.strength:g}·āᵀa"

    def record(self) -> dict[str, Any]:
        return {
            "edit": REWRITE,
            "layer": self.layer,
            "output": self.output,
            "lambda": self.strength,
            "coefficients": [list(mean) for mean in self.coefficients],
        }


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """The kept experts of a layer, in ascending order; the others and their weights are removed.

    If `constant`, the slots of dropped experts return the `constants` [dropped, p, o], otherwise
    nothing. `constants` is None in an edit from a manifest or recipe until
    `Edits.with_substitutes` adds them.
    """

    layer: str
    experts: tuple[int, ...]
    constant: bool = False
    constants: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        others = ", the others constant" if self.constant else ""
        return f"{KEEP} {self.layer}:{','.join(map(str, self.experts))}{others}"

    def record(self) -> dict[str, Any]:
        content = {"edit": KEEP, "layer": self.layer, "experts": list(self.experts)}
        return content | ({"constant": True} if self.constant else {})


@dataclass(frozen=True, slots=True)
class MergedExperts:
    """A layer whose experts are merged into one matrix [d + 1, o] per weight tensor.

    `matrices` is None when read from a manifest or recipe; `Edits.with_substitutes` adds them.
    """

    layer: str
    matrices: tuple[np.ndarray, ...] | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        return f"{MERGE} the experts of {self.layer}"

    def record(self) -> dict[str, Any]:
        return {"edit": MERGE, "layer": self.layer}

    def key(self, tensor: int) -> str:
        """Returns the name, in a file, of the matrix for a weight tensor (counted from 0)."""
        return f"{self.layer}:{tensor}"

    def matrices_from(self, substitutes: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...] | None:
        """Returns the layer's matrices from a file; None if it has none."""
        keys = itertools.takewhile(substitutes.__contains__, map(self.key, itertools.count()))
        return tuple(substitutes[key] for key in keys) or None


@dataclass(frozen=True, slots=True)
class Steer:
    """An expert's cluster centre (its column of the gating matrix), added to every token.

    The centre is multiplied by `strength`, or by an input at run time if `strength` is None.
    """

    layer: str
    expert: int
    level: int | None = None
    strength: float | None = 1.0

    @property
    def name(self) -> str:
        """The expert in the form of `--steer`."""
        return _expert_text(self.layer, self.level, self.expert)

    @property
    def option(self) -> str:
        """The option without its strength."""
        return f"--steer {self.name}"

    @property
    def text(self) -> str:
        strength = AT_RUN_TIME if self.strength is None else f"{self.strength:g}"
        return f"{STEER} {self.name}:{strength}"

    def record(self) -> dict[str, Any]:
        content = {"layer": self.layer, "expert": self.expert, "level": self.level}
        strength = AT_RUN_TIME if self.strength is None else self.strength
        return {"edit": STEER} | _without_none(content) | {"strength": strength}


Edit = Ablation | AblatedCombination | Rewrite | KeptExperts | MergedExperts | Steer

ORDER = (Ablation, AblatedCombination, Rewrite, KeptExperts, MergedExperts, Steer)
"""The kinds of edits in the order in which they are listed."""

E = TypeVar("E", Ablation, AblatedCombination, Rewrite, KeptExperts, MergedExperts, Steer)


@dataclass(frozen=True, slots=True)
class Edits:
    """All edits of an export, sorted by kind; falsy if empty.

    `of` selects the edits of one layer.
    """

    listed: tuple[Edit, ...] = ()
    layer: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        in_order = sorted(self.listed, key=lambda edit: ORDER.index(type(edit)))
        object.__setattr__(self, "listed", tuple(in_order))

    def __bool__(self) -> bool:
        return bool(self.listed)

    def of(self, layer: str) -> Edits:
        return replace(self, layer=layer)

    def _of_kind(self, kind: type[E]) -> tuple[E, ...]:
        edits = (edit for edit in self.listed if self.layer in (None, edit.layer))
        return tuple(edit for edit in edits if isinstance(edit, kind))

    @property
    def ablations(self) -> tuple[Ablation, ...]:
        """The experts whose contribution is removed.

        In a hierarchy, this removes every combination that includes such an expert.
        """
        return self._of_kind(Ablation)

    @property
    def combinations(self) -> tuple[AblatedCombination, ...]:
        """The ablated combinations of a hierarchy's experts, one per level."""
        return tuple(dict.fromkeys(self._of_kind(AblatedCombination)))

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        return self._of_kind(Rewrite)

    @property
    def kept(self) -> tuple[KeptExperts, ...]:
        """The layers that lose some of their experts."""
        return self._of_kind(KeptExperts)

    @property
    def merged(self) -> tuple[MergedExperts, ...]:
        return self._of_kind(MergedExperts)

    @property
    def steers(self) -> tuple[Steer, ...]:
        return self._of_kind(Steer)

    @property
    def at_run_time(self) -> tuple[Steer, ...]:
        """The steerings whose strength is set at run time, in the order of the input `steer`.

        Steerings of all layers are included, because the layers share that input.
        """
        steers = (edit for edit in self.listed if isinstance(edit, Steer))
        return tuple(steer for steer in steers if steer.strength is None)

    def ablated_in(self, level: int) -> tuple[int, ...]:
        """Returns the ablated experts of a level, counted from 0, ascending."""
        in_level = (edit for edit in self.ablations if (edit.level or 1) - 1 == level)
        return tuple(sorted({edit.expert for edit in in_level}))

    @property
    def substitutes(self) -> dict[str, np.ndarray]:
        """The arrays that replace experts, by their names in a file.

        A layer's dropped experts have one array, [dropped, p, o]; merged experts have several,
        [d + 1, o].
        """
        kept = ((kept_experts.layer, kept_experts.constants) for kept_experts in self.kept)
        merged = (
            (merge.key(index), matrix)
            for merge in self.merged
            for index, matrix in enumerate(merge.matrices or ())
        )
        return {name: array for name, array in (*kept, *merged) if array is not None}

    def with_substitutes(self, substitutes: Mapping[str, np.ndarray]) -> Edits:
        """Returns the edits with the arrays that replace experts (`substitutes`)."""

        def completed(edit: Edit) -> Edit:
            if isinstance(edit, KeptExperts) and edit.layer in substitutes:
                return replace(edit, constant=True, constants=substitutes[edit.layer])
            if isinstance(edit, MergedExperts):
                return replace(edit, matrices=edit.matrices_from(substitutes))
            return edit

        edits = replace(self, listed=tuple(map(completed, self.listed)))
        for name in substitutes.keys() - edits.substitutes.keys():
            raise UsageError(
                f"{name}: the array replaces experts, but the layer keeps all its experts",
                hint="use the substitutes.safetensors from the recipe's folder or the bundle",
            )
        return edits

    def texts(self) -> list[str]:
        return [edit.text for edit in self.listed]

    def records(self) -> list[dict[str, Any]]:
        """Returns the edits as JSON for a manifest, complete enough to restore them."""
        return [edit.record() for edit in self.listed]

    @staticmethod
    def from_records(records: Sequence[Mapping[str, Any]], where: str) -> Edits:
        """Reads the edits of a manifest; a `BundleError` names `where` and the invalid edit."""
        edits: list[Edit] = []
        for index, record in enumerate(records):
            try:
                edits.append(_read(record))
            except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
                raise BundleError(
                    f"{where}: this version cannot read edit {index} ({error})",
                    hint="use the version of moexport that wrote the bundle, or export again",
                ) from error
        return Edits(tuple(edits))


NO_EDITS = Edits()


def _read(record: Mapping[str, Any]) -> Edit:
    entry = {key: value for key, value in record.items() if key != "edit"}
    match record["edit"]:
        case "rewrite":
            return parse_rewrite(entry, "a rewritten output")
        case "keep":
            return KeptExperts(**entry | {"experts": tuple(map(int, entry["experts"]))})
        case "merge":
            return MergedExperts(**entry)
        case "steer":
            at_run_time = entry["strength"] == AT_RUN_TIME
            strength = None if at_run_time else _number(entry["strength"], "a strength")
            return Steer(**entry | {"strength": strength})
        case _ if "experts" in entry:
            return AblatedCombination(**entry | {"experts": tuple(map(int, entry["experts"]))})
        case _:
            return Ablation(**entry)


def parse_rewrite(entry: Any, where: str) -> Rewrite:
    """Returns a rewritten output from a file or manifest; a `UsageError` names `where`."""
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where} is a {type(entry).__name__}, not an object", hint=REWRITE_FORMAT)
    for what, keys in (
        ("lacks", [key for key in _KEYS if key not in entry]),
        ("has the unknown key", [str(key) for key in entry if key not in _KEYS]),
    ):
        if keys:
            raise UsageError(f"{where} {what} {', '.join(keys)}", hint=REWRITE_FORMAT)
    layer, output = entry["layer"], entry["output"]
    if not isinstance(layer, str):
        raise UsageError(f"{where}: layer is {layer!r}, not a name", hint=REWRITE_FORMAT)
    if not isinstance(output, int) or isinstance(output, bool) or output < 0:
        raise UsageError(
            f"{where}: output is {output!r}, not an index", hint="outputs are counted from 0"
        )
    strength = _number(entry["lambda"], f"{where}: lambda")
    coefficients = entry["coefficients"]
    if not isinstance(coefficients, Sequence) or isinstance(coefficients, str) or not coefficients:
        raise UsageError(f"{where}: coefficients are not lists of numbers", hint=REWRITE_FORMAT)
    nested = any(isinstance(vector, Sequence) for vector in coefficients)
    # A list without outer brackets belongs to the only level.
    vectors = coefficients if nested else [coefficients]
    return Rewrite(
        layer,
        output,
        tuple(
            _vector(vector, f"{where}: coefficients of level {level}")
            for level, vector in enumerate(vectors, start=1)
        ),
        strength,
    )


def _vector(values: Any, what: str) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UsageError(f"{what} are {values!r}, not a list of numbers", hint=REWRITE_FORMAT)
    return tuple(_number(value, f"{what}, number {i}") for i, value in enumerate(values))


def _number(value: Any, what: str) -> float:
    """Returns a finite float32 number; Python's JSON parser also accepts NaN and Infinity."""
    is_number: bool = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise UsageError(f"{what} is {value!r}, not a number", hint=REWRITE_FORMAT)
    if not abs(value) <= LARGEST:  # also false for NaN
        raise UsageError(
            f"{what} is {value}, which float32 cannot represent",
            hint="NaN is the result of a mean over no inputs",
        )
    return float(value)
