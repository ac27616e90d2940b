"""Compares a graph with PyTorch's results: names, shapes, values, and choices of its layers.

`Tolerance` has the bounds; `Reference` has PyTorch's results, stored as `parity.npz`; a
`Comparison` runs a graph on its inputs, at several sizes; `Parity` is the result, a section of the
manifest. None of this needs PyTorch (`exporter.reference` makes the references), so `verify`
repeats the comparison of the export.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx

from ...common.documents import from_data
from ...data.batches import rebatched
from ...errors import BundleError, EngineError, FeedError, ParityError
from ..inputs import repeated_indices

if TYPE_CHECKING:
    from ...graphs.targets import Precision
    from ..session import GraphSession
    from .given_choices import GivenSession

PARITY_FILE = "parity.npz"
MAX_STORED = 32  # inputs in this file, unless fewer reach every expert
MAX_BYTES_PER_K = 16 << 20  # of outputs in it for each other k; one input is always stored
MAX_LISTED = 8  # experts or layers that a message names

# Relative to the k-th score, or to max|y|.
TIE = 1e-5  # FP32 scores this close may be in either order
ROUNDED_RTOL = 1e-3  # for FP32 graphs that round intermediate values to BF16
GPU_RTOL = 1e-3  # for FP32 on a GPU, which sums products in another order
MIN_SCALE = 1e-3  # the smallest scale of an input's outputs, relative to quiet inputs

# Shares of the inputs, or of the choices.
OUTLIERS = 0.05  # that may be outliers, rounded down, if a precision allows any
MAX_TIED = 0.75  # that may be ties, which are not compared
CHOICES_BY_CHANCE = 0.005  # that may differ, at least one, between graphs that round alike
FEW_NUMBERS = 8  # fewer outputs may all be near zero by chance, and have no clear direction

# For a few inputs, at another batch size or number of tokens.
Axis = Literal["batch", "tokens"]
# Rounding does not change the order of scores that are this many ties apart. With other numbers of
# tokens, at which other tokens are compared, correct graphs reach 6.
_FAR_APART: Mapping[Axis, float] = {"batch": 4.0, "tokens": 12.0}
FLIPS_AT_TOKENS = 3.0  # times the share of choices that may differ; correct graphs reach 1.3
OUTLIER_IN_A_BATCH = 1.5  # times as far off as the same outlier in the usual batch
OUTLIER_AT_TOKENS = 1.5  # times as far off as most inputs may be
FURTHER_AT_TOKENS = 2.0  # times as far off as the worst input at the usual number

_SIZED = re.compile(r"parity-(\d+)-tokens\.npz")
_AT_K = re.compile(r"(k=[1-9]\d*/)")  # before the names of arrays of another k


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Bounds of a parity check.

    Outputs agree if |difference| ≤ `atol` + `rtol` · max|y|, separately for each input and output:
    in their own scale, unless an absolute difference is allowed. One input in twenty may be
    `outlier` times as far off, and none may have a cosine below `least_cosine`.

    `routing` is the least share of inputs for which every layer must choose the same experts. A
    choice between scores that are closer than `tie`, relative to the k-th, is a tie: rounding
    before the layer may order them either way. A muMoE layer's coefficients, which sum to 1, are
    the same choice if none differs by more than `coefficient`; below FP32, only coefficients that
    just one of the two dropped count, and `routing` is a share of tokens.

    A graph is also compared with the exact result for its own weights (`Rounded`): its distance
    from that result may be `roundings` times as large as PyTorch's. If `roundings` is below 1, a
    difference in the last bit of its floats is also allowed.
    """

    atol: float = 0.0
    rtol: float
    routing: float
    tie: float
    coefficient: float = 1e-3
    roundings: float = 2.0
    outlier: float = 1.0
    least_cosine: float = 0.99

    def with_user_bounds(self, atol: float | None, rtol: float | None) -> Tolerance:
        """Returns these bounds with a user's; if those are wider, any cosine is allowed."""
        atol = self.atol if atol is None else atol
        bounds = replace(self, atol=atol, rtol=self.rtol if rtol is None else rtol)
        return replace(bounds, least_cosine=-1.0) if bounds.wider_than(self) else bounds

    def wider_than(self, other: Tolerance) -> bool:
        return self.atol > other.atol or self.rtol > other.rtol

    def narrower(self, other: Tolerance) -> Tolerance:
        """Returns the narrower of these and other bounds, one by one; for NaN, the other."""
        pairs = {name: (getattr(other, name), value) for name, value in asdict(self).items()}
        at_least = ("routing", "least_cosine")
        return Tolerance(**{n: max(p) if n in at_least else min(p) for n, p in pairs.items()})


_INTEGER_BOUNDS = {"outlier": 3.0, "least_cosine": 0.8}

TOLERANCES: Mapping[Precision, Tolerance] = MappingProxyType(
    {
        "fp32": Tolerance(rtol=1e-4, routing=1.0, tie=1e-5, roundings=16.0),
        "fp16": Tolerance(rtol=1e-2, routing=0.98, tie=1e-3, coefficient=1e-2),
        "bf16": Tolerance(rtol=5e-2, routing=0.98, tie=8e-3, coefficient=5e-2),
        "int8": Tolerance(
            rtol=1e-1, routing=0.98, tie=1e-2, coefficient=5e-2, roundings=1.5, **_INTEGER_BOUNDS
        ),
        "fp8": Tolerance(rtol=2e-1, routing=0.95, tie=2e-2, coefficient=5e-2, **_INTEGER_BOUNDS),
        "int4": Tolerance(rtol=3e-1, routing=0.9, tie=5e-2, roundings=0.25, **_INTEGER_BOUNDS),
    }
)
"""FP32 allows for sums in another order. FP16 keeps 11 bits and BF16 8, over a network's depth.
INT8 has about 1% of error in each layer, INT4 10%. Ties are as wide as such errors in a score.

`roundings`: if each of two graphs rounds its own values, as in 16-bit floats, or in INT8 on another
CPU after layers that amplify a difference in the last bit, they are √2 times as far from each other
as from the exact result. INT4 rounds weights, which are the same in both. In FP32 the measure is
PyTorch's own rounding, and sums in another order round more or less than that."""


def tolerance_of(precision: str) -> Tolerance:
    """Returns the bounds of a precision; those of FP32 if it is unknown."""
    known = (bounds for name, bounds in TOLERANCES.items() if name == precision)
    return next(known, TOLERANCES["fp32"])


def stored_bounds(parity: Mapping[str, Any] | None, precision: str = "fp32") -> Tolerance:
    """Returns the bounds in a manifest's `parity`; without one, no difference is allowed.

    Bounds that an older manifest lacks are those of the precision. Raises `BundleError` for invalid
    ones.
    """
    bounds = asdict(tolerance_of(precision)) | {"atol": 0.0, "rtol": 0.0}
    return from_data(
        Tolerance, bounds | dict(parity or {}), "manifest.json", at="parity", error=BundleError
    )


def gpu_bounds(bounds: Tolerance, precision: str, *, tf32: bool = False) -> Tolerance:
    """Returns the bounds of every comparison that runs on a GPU.

    FP32 may be `GPU_RTOL` off. TF32 keeps as many bits of a factor as FP16, and has its bounds. In
    other precisions rounding exceeds the effect of the order of sums, so bounds are the same.
    """
    if precision != "fp32":
        return bounds
    half = TOLERANCES["fp16"]
    if tf32:
        return replace(bounds, rtol=max(bounds.rtol, half.rtol), routing=half.routing, tie=half.tie)
    return replace(bounds, rtol=max(bounds.rtol, GPU_RTOL))


@dataclass(frozen=True, slots=True)
class Parity:
    """How far a graph is from its reference.

    `max_abs` is the largest difference of an output with the same experts, `max_rel` the largest
    over max|y| of the same input, `cosine` the smallest cosine of a sample's outputs; `all_…` are
    those over all inputs, whatever was chosen. `routing_agreement` is the share of samples for
    which every layer chose the same set, or for a muMoE below FP32 the share of its tokens'
    choices: `agreeing` of `choices`, `chosen_by` inputs or tokens. `ties` counts the samples that
    differ only in scores that are equal up to rounding, `differing` all that differ anywhere.
    `first_difference` names the layer where the first wrong set appears. `untouched_cosine`
    compares with the model before Algorithm 1. `jaccard` is the mean overlap of the sets, and
    `flip_margin` the largest margin, relative to the k-th score, of a set that differs (0 if
    none does). Older records lack the fields that are None here.
    """

    max_abs: float
    max_rel: float
    cosine: float
    routing_agreement: float
    samples: int
    ties: int
    bounds: Tolerance
    passed: bool
    first_difference: str | None
    untouched_cosine: float
    jaccard: float = 1.0
    flip_margin: float = 0.0
    compared: int | None = None
    """The number of inputs of which some output was compared."""
    all_max_abs: float | None = None
    all_max_rel: float | None = None
    all_cosine: float | None = None
    differing: int | None = None
    chosen_by: Literal["inputs", "tokens"] = "inputs"
    choices: int | None = None
    agreeing: int | None = None
    tied: int = 0
    """Of `choices`, those that differ by a tie: they agree, but their outputs are not compared."""
    batches: tuple[int, ...] = ()
    """The batch sizes at which the graph was compared."""
    usual_rel: float | None = None
    """The 95th percentile over the inputs, in the unit of `max_rel`."""
    loudness: tuple[float, float] | None = None
    """max|y| of the quietest and of the loudest compared input."""
    ks: tuple[int, ...] = ()
    """Each k that was compared, if it is an input of the graph."""
    k: int | None = None
    """The worst of `ks`, whose figures these are."""
    batch: int | None = None
    """The batch size that misses the bounds, if the usual one meets them."""
    token_counts: tuple[int, ...] = ()
    """The numbers of tokens at which the graph was compared, besides those of the inputs."""
    tokens: int | None = None
    """The number of tokens that misses the bounds, if the usual one meets them."""
    apart: float | None = None
    """The graph's distance from the exact result for its weights (`Rounded`), divided by
    PyTorch's."""
    computed_in: str | None = None
    """The type in which the runtime reports that it computed matrix products."""
    whole_differing: float | None = None
    """The share of numbers that differ in outputs of whole numbers (classes, masks)."""
    given_choices: bool = False
    """Whether the graph got PyTorch's choices as inputs, so that a tie changes no other output."""

    @property
    def mostly_ties(self) -> bool:
        """Whether more choices were left out as ties than were compared."""
        if self.choices is None or self.given_choices:
            return False
        return self.tied > self.choices / 2

    @property
    def what_chooses(self) -> str:
        """The meaning of `choices`, in words."""
        by_input = "choices" if self.given_choices else "inputs"
        return "choices of tokens" if self.chosen_by == "tokens" else by_input

    def record(self) -> dict[str, Any]:
        """Returns the manifest's entry, with the bounds among the results."""
        entry: dict[str, Any] = {}
        for name, value in asdict(self).items():
            is_unset = name == "bounds" or (name == "given_choices" and not value)
            entry |= {} if is_unset else {name: value}
            entry |= {bound: getattr(self.bounds, bound) for bound in _BOUNDS_AFTER.get(name, ())}
        return entry

    @staticmethod
    def of(record: Mapping[str, Any]) -> Parity:
        """Returns the result from a manifest of any version."""
        rest = dict(record)
        names = [bound.name for bound in fields(Tolerance)]
        known = {name: rest.pop(name) for name in names if name in rest}
        return Parity(**rest, bounds=Tolerance(**{"routing": 1.0, "tie": TIE, **known}))


_BOUNDS_AFTER = {
    "ties": ("atol", "rtol"),
    "flip_margin": ("routing", "tie", "coefficient", "roundings"),
    "batches": ("outlier", "least_cosine"),
}
"""The places of the bounds in a manifest, since its first schema."""


def describe(parity: Parity) -> str:
    """Returns one line about a parity result: the outputs compared, and the choices."""
    p, inputs = parity, f"{parity.samples} inputs"
    values = differences(p.max_abs, p.max_rel, p.cosine, p.usual_rel)
    if p.differing == 0:
        text = f"{values} over all {inputs}"
    elif p.compared == 0:  # outputs of other experts differ anyway
        text = "no output was compared, because no input selects the same experts"
    elif p.all_max_abs is None or p.all_max_rel is None or p.all_cosine is None:
        text = values
    else:
        over_all = differences(p.all_max_abs, p.all_max_rel, p.all_cosine)
        same = "with PyTorch's choices" if p.given_choices else "where the experts are the same"
        text = f"{values} {same}; {over_all} over all {inputs}"
        text += " with the graph's own" * p.given_choices
    if p.choices is None:
        text += f"; same experts in {p.routing_agreement:.0%}"
    else:
        article = "the " if p.chosen_by == "tokens" else ""
        text += f"; same experts in {p.agreeing:,} of {article}{p.choices:,} {p.what_chooses}"
        text += " after PyTorch's earlier choices" * p.given_choices
    text += f" ({p.ties} tied{', not compared' * (not p.given_choices)})" if p.ties else ""
    if p.mostly_ties:
        text += (
            f"; MOST RESULTS WERE NOT COMPARED: {p.tied:,} of {p.choices:,} {p.what_chooses} are "
            f"ties (scores within {p.bounds.tie:g} of the k-th)"
        )
    if p.whole_differing:
        text += f"; {p.whole_differing:.2%} of its whole numbers differ"
    size = "" if p.batch is None else f"in a batch of {p.batch}: "
    size = size if p.tokens is None else f"with {p.tokens} tokens: "
    text = size + text
    if p.apart is not None and p.apart > p.bounds.roundings:
        other = (
            "float64 as PyTorch's float32 is"
            if p.bounds.routing == 1.0  # FP32
            else "another lowering in the same precision as that is from PyTorch"
        )
        text += (
            f"; {p.apart:.2g} TIMES as far from {other}, but at most {p.bounds.roundings:g} times "
            "is allowed"
        )
    if p.k is not None:
        text = f"with k = {p.k}, the worst of {', '.join(map(str, p.ks))}: {text}"
    if p.first_difference:
        text += f"; first difference in layer {p.first_difference}"
    if p.flip_margin:
        text += f"; flips at margins up to {p.flip_margin:.1g} of the k-th score"
    return text


def differences(
    max_abs: float, max_rel: float, cosine: float, usual_rel: float | None = None
) -> str:
    """Returns how far outputs are off, in words."""
    shown = f"{max_rel:.2g} of max|y|"
    if usual_rel is not None and usual_rel < max_rel / 2:
        shown += f", {usual_rel:.2g} in {1 - OUTLIERS:.0%} of the inputs"
    return f"max |difference| {max_abs:.2g} ({shown}), cosine {cosine:.7f}"


def sized_file(tokens: int) -> str:
    """Returns the name of the record of inputs with this number of tokens."""
    return f"parity-{tokens}-tokens.npz"


def sized_files(files: Iterable[str]) -> dict[int, str]:
    """Returns the files among some names that are records of other token counts, by count."""
    found = {int(match[1]): file for file in files if (match := _SIZED.fullmatch(file))}
    return dict(sorted(found.items()))


def by_expert(chosen: np.ndarray) -> np.ndarray:
    """Returns the choices of all experts (e or e + n), [..., n] in any order, as [..., n, 1]."""
    order = (chosen % chosen.shape[-1]).argsort(axis=-1)
    ordered: np.ndarray = np.take_along_axis(chosen, order, axis=-1)
    return ordered[..., None]


def counted_choices(chosen: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Returns a mask [s, 1] or [s, m] of choices that count; what an expert leaves out does not."""
    shape = (len(chosen), -1)
    if chosen.ndim < len("smn1"):
        return np.ones(chosen.shape[:-1], dtype=bool).reshape(shape)
    experts = chosen.shape[-2]
    mask: np.ndarray = np.logical_or.reduce([indices < experts for indices in (chosen, *others)])
    return mask.reshape(shape)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Outputs and choices that show how far rounding alone may move a graph.

    Below FP32 they are the results of another lowering in the same precision; for FP32 graphs,
    those of PyTorch in float64.
    """

    y: np.ndarray
    selected: Mapping[str, np.ndarray]

    @property
    def exact(self) -> bool:
        """Whether they are float64 results, which show differences far below FP32's bounds."""
        return bool(self.y.dtype == np.float64)

    @property
    def half(self) -> bool:
        """Whether all outputs are FP16 numbers, whose last bit may be rounded either way."""
        with np.errstate(over="ignore"):
            return bool((self.y == self.y.astype(np.float16)).all())


@dataclass(frozen=True, slots=True)
class Reference:
    """PyTorch's results for some inputs.

    `x` are the inputs, `y` the outputs with Algorithm 1, `dense` those of the untouched model with
    all experts. By choice (`choice_key`), `selected` has the chosen experts [s, k] in ascending
    order, those of each token [s, m, k], the kept coefficients [s, m, n] or, if experts choose for
    themselves, [s, m, n, 1] (`by_expert`); `margin` ([s], [s, m] or [s, m, n]) is the gap from the
    k-th score to the next, relative to the k-th. `kept` is each layer's k.
    `inputs` and `outputs` are those after the first, by name. `rounded` has the results in the
    graphs' precision, None if they are unknown. If k is an input of the graphs, `at_other_k` has
    the results for the same inputs with other k.
    """

    x: np.ndarray
    y: np.ndarray
    dense: np.ndarray
    selected: Mapping[str, np.ndarray]
    margin: Mapping[str, np.ndarray]
    kept: Mapping[str, int]
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    rounded: Rounded | None = None
    at_other_k: Mapping[int, Reference] = field(default_factory=dict)

    @property
    def main_k(self) -> int:
        """Its k, if that is an input of the graphs."""
        return next(iter(self.kept.values()))

    def feeds(self, first: str, count: int | None = None) -> dict[str, np.ndarray]:
        """Returns the inputs by name, up to `count` of each; `first` is the name of `x`."""
        return {name: array[:count] for name, array in {first: self.x, **self.inputs}.items()}

    def rows(self, chosen: np.ndarray) -> Reference:
        """Returns the reference of some of the inputs, by index or mask."""
        if any(len(other.x) < len(self.x) for other in self.at_other_k.values()):
            return replace(self, at_other_k={}).rows(chosen)  # a bundle may store fewer of them
        arrays = self._arrays()
        return Reference._of({name: a[chosen] if a.ndim else a for name, a in arrays.items()})

    def reached(self) -> dict[str, frozenset[int]]:
        """Returns, by choice, the experts that some input chose; the others were not compared."""
        return {
            name: frozenset(
                np.flatnonzero((sets > 0).any(axis=tuple(range(sets.ndim - 1)))).tolist()
                if has_coefficients(sets)
                else np.unique(sets).tolist()
            )
            for name, sets in self.selected.items()
        }

    def compared(self, experts: Mapping[str, int]) -> dict[str, frozenset[int]]:
        """Returns, by choice, the experts that some input chose with some k.

        `experts` are the numbers of the layers' experts: if a layer keeps all, all are compared.
        """
        found = self.reached()
        for other in self.at_other_k.values():
            all_kept = {
                layer: frozenset(range(n))
                for layer, n in experts.items()
                if other.kept.get(layer) == n and layer not in other.selected
            }
            for name, chosen in (*other.reached().items(), *all_kept.items()):
                found[name] = found.get(name, frozenset()) | chosen
        return found

    def with_unreached(self, later: Reference, limit: int) -> Reference:
        """Returns the reference with those inputs of a later one that choose other experts.

        It has at most `limit` inputs; none are added if shapes differ.
        """
        if self.shapes() != later.shapes():
            return self
        reached = self.reached()
        rows: list[int] = []
        for row in range(len(later.x)):
            chosen = later.rows(np.array([row])).reached()
            is_new = any(chosen[name] - reached[name] for name in reached)
            if is_new and len(self.x) + len(rows) < limit:
                rows.append(row)
                reached = {name: reached[name] | chosen[name] for name in reached}
        return self.joined(later.rows(np.array(rows))) if rows else self

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns each array's shape for one input: references of equal shapes can be joined."""
        return {name: array.shape[1:] for name, array in self._unrounded()._arrays().items()}

    def _unrounded(self) -> Reference:
        others = {k: other._unrounded() for k, other in self.at_other_k.items()}
        return replace(self, rounded=None, at_other_k=others)

    def joined(self, later: Reference) -> Reference:
        """Returns the reference with the inputs of a later one, of the same shapes, added.

        `rounded` is left out unless both have it.
        """
        mine, theirs = self._arrays(), later._arrays()
        if mine.keys() != theirs.keys():
            mine, theirs = self._unrounded()._arrays(), later._unrounded()._arrays()
        return Reference._of(
            {n: np.concatenate((a, theirs[n])) if a.ndim else a for n, a in mine.items()}
        )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays().values())

    def save(self, path: Path) -> None:
        arrays = replace(self, at_other_k={})._arrays()
        for k, other in self.at_other_k.items():
            arrays_of_k = other._own_arrays()
            if np.array_equal(other.y, self.dense):  # the outputs with all experts
                del arrays_of_k["y"]
            bytes_of_one = sum(array[:1].nbytes for array in arrays_of_k.values() if array.ndim)
            count = max(1, MAX_BYTES_PER_K // max(1, bytes_of_one))
            arrays |= {f"k={k}/{name}": array for name, array in _first(arrays_of_k, count).items()}
        # np.savez takes names as keywords; its own first parameter is positional.
        np.savez(path, **arrays)  # type: ignore[arg-type]

    def _arrays(self) -> dict[str, np.ndarray]:
        """Returns the file's arrays by name, with a row per input; for other k, those that differ.

        An array without axes has one value for all inputs.
        """
        arrays = {"x": self.x, "y": self.y, "dense": self.dense}
        arrays |= {f"kept/{layer}": np.array(k) for layer, k in self.kept.items()}
        for choice in self.selected:
            arrays[f"selected/{choice}"] = self.selected[choice]
            arrays[f"margin/{choice}"] = self.margin[choice]
        arrays |= {f"x/{name}": array for name, array in self.inputs.items()}
        arrays |= {f"y/{name}": array for name, array in self.outputs.items()}
        if self.rounded is not None:
            arrays["rounded"] = self.rounded.y
            for choice, sets in self.rounded.selected.items():
                arrays[f"rounded/{choice}"] = sets
        for k, other in self.at_other_k.items():
            arrays |= {f"k={k}/{name}": array for name, array in other._own_arrays().items()}
        return arrays

    def _own_arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays that depend on k."""
        return {name: array for name, array in self._arrays().items() if not _shared(name)}

    @staticmethod
    def load(path: Path) -> Reference:
        """Reads a reference; raises `BundleError` if the file cannot be read."""
        from ...data.arrays import npz_arrays  # not needed to write one

        try:
            record = Reference._of(dict(npz_arrays(path)))
        except (FeedError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise BundleError(f"{path}: not a readable parity record ({error})") from error
        for problem in record._problems():
            raise BundleError(f"{path}: not a readable parity record: {problem}")
        return record

    @staticmethod
    def _of(arrays: Mapping[str, np.ndarray]) -> Reference:
        """Returns the record whose `_arrays` these are."""
        shared = {name: array for name, array in arrays.items() if _shared(name)}
        at_other_k = {}
        for prefix in dict.fromkeys(match[1] for name in arrays if (match := _AT_K.match(name))):
            arrays_of_k = {"y": arrays["dense"], **_group(arrays, prefix)}
            if any(map(_AT_K.match, arrays_of_k)):
                raise ValueError(f"results with another k within {prefix}")
            count = min(len(array) for array in arrays_of_k.values() if array.ndim)
            at_other_k[int(prefix[2:-1])] = Reference._of(_first({**arrays_of_k, **shared}, count))
        rounded = None
        if "rounded" in arrays:
            rounded = Rounded(arrays["rounded"], _group(arrays, "rounded/"))
        return Reference(
            x=arrays["x"],
            y=arrays["y"],
            dense=arrays["dense"],
            selected=_group(arrays, "selected/"),
            margin=_group(arrays, "margin/"),
            kept={layer: int(k) for layer, k in _group(arrays, "kept/").items()},
            inputs=_group(arrays, "x/"),
            outputs=_group(arrays, "y/"),
            rounded=rounded,
            at_other_k=at_other_k,
        )

    def _problems(self) -> Iterator[str]:
        """Yields why it is not a valid record of one model's outputs."""
        rounded = Rounded(self.y, {}) if self.rounded is None else self.rounded
        groups = (self.selected, self.margin, self.inputs, self.outputs, rounded.selected)
        arrays = [("x", self.x), ("y", self.y), ("dense", self.dense)]
        arrays += [item for group in groups for item in group.items()]
        if self.x.ndim == 0 or not self.x.size:
            yield "it has no inputs"
        for name, array in arrays:
            if array.dtype.kind not in "fiub":
                yield f"'{name}' is {array.dtype.name}, not numbers"
            elif array.shape[:1] != self.x.shape[:1] or not (array.size or name in self.inputs):
                yield f"'{name}' has the shape {array.shape}, for inputs {self.x.shape}"
        if any(array.dtype.kind in "ub" for array in self.selected.values()):
            yield "its choices are neither indices nor weights"
        for other in (self.dense, rounded.y):
            if self.y.shape != other.shape:
                yield f"outputs {self.y.shape} and {other.shape} have different shapes"
        if self.selected.keys() != self.margin.keys() or not self.kept:
            yield "its choices are not complete"
            return
        yield from self._problems_of_choices(rounded.selected)
        for k, record in self.at_other_k.items():
            yield from (f"with k = {k}, {problem}" for problem in record._problems())
            if (
                record.kept.keys() != self.kept.keys()
                or record.outputs.keys() != self.outputs.keys()
            ):
                yield f"the results with k = {k} are not complete"

    def _problems_of_choices(self, rounded: Mapping[str, np.ndarray]) -> Iterator[str]:
        """Yields why its choices are invalid."""
        for name, sets in rounded.items():
            if name not in self.selected or sets.shape != self.selected[name].shape:
                yield f"'rounded/{name}' has the shape {sets.shape}"
        for name, sets in self.selected.items():
            if sets.ndim < 2 or self.margin[name].size != math.prod(sets.shape[:-1]):
                yield f"'margin/{name}' has the shape {self.margin[name].shape}"

    def observed(self, values: Mapping[str, str]) -> dict[str, int]:
        """Returns the ONNX element types of the values with recorded choices, by name."""
        types = {"f": onnx.TensorProto.FLOAT, "i": onnx.TensorProto.INT64}
        chosen = {
            choice: types[sets.dtype.kind]
            for reference in (*self.at_other_k.values(), self)
            for choice, sets in reference.selected.items()
        }
        return {name: chosen[choice] for choice, name in values.items() if choice in chosen}


def has_coefficients(chosen: np.ndarray) -> bool:
    """Whether a choice has coefficients [s, m, n], not the indices of a set [s, k]."""
    return chosen.dtype.kind == "f"


def _shared(name: str) -> bool:
    """Whether the value of this name is the same with every k."""
    return name in ("x", "dense") or name.startswith("x/")


def _first(arrays: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Returns the values of the first inputs."""
    return {name: array[:count] if array.ndim else array for name, array in arrays.items()}


def _group(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}


def not_compared(reached: Mapping[str, frozenset[int]], experts: Mapping[str, int]) -> str:
    """Returns, in words, which experts of each layer no input chose; empty if there are none.

    `reached` is the result of `Reference.reached`.
    """
    missing = {
        layer: sorted(frozenset(range(experts[layer])) - chosen)
        for layer, chosen in reached.items()
        if layer in experts
    }
    layers = "; ".join(
        f"{len(indices)} of {experts[layer]} in layer {layer} "
        f"({', '.join(map(str, indices[:MAX_LISTED]))}{', …' if len(indices) > MAX_LISTED else ''})"
        for layer, indices in missing.items()
        if indices
    )
    return f"experts that no input chose were not compared: {layers}" if layers else ""


def compare(
    session: GraphSession,
    expected: Reference,
    selected_values: Mapping[str, str],
    *,
    batch: int,
    tolerance: Tolerance,
    k: int | None = None,
) -> Parity:
    """Runs a graph on the reference's inputs and returns how far it is off (`Comparison`).

    The session may be of any runtime whose rounding stays within the bounds. Outputs with another
    k are not compared.
    """
    expected = replace(expected, rounded=None, at_other_k={})
    comparison = Comparison(session, selected_values, batch=batch, tolerance=tolerance, k=k)
    comparison.add(expected)
    return comparison.parity()


def worst_parity(parities: Mapping[int, Parity]) -> Parity:
    """Returns the parity of the worst k of a graph that was compared with each k."""
    k = max(parities, key=lambda k: (not parities[k].passed, parities[k].max_rel))
    return replace(parities[k], k=k, ks=tuple(sorted(parities)))


@dataclass(slots=True, eq=False)
class Comparison:
    """A graph that is compared with its reference, some inputs at a time.

    `selected_values` names the graph's value with a layer's chosen experts, for the layers that
    choose. `batch` should differ from the size that was traced. The first inputs are also compared
    in batches of each size in `probed`: a graph with a size that was frozen in the trace, or
    another dependence on the batch, is correct for at most one of them. Groups of
    `group_size` inputs, which are computed together, are not split.
    """

    session: GraphSession
    selected_values: Mapping[str, str]
    _: KW_ONLY
    batch: int
    tolerance: Tolerance
    k: int | None = None
    probed: Sequence[int] = ()
    group_size: int = 1
    _given: list[GivenSession | None] = field(default_factory=list)
    """The graph with choices as inputs, once it was needed; None if it has no such inputs."""
    _results: list[_PartResult] = field(default_factory=list, init=False)
    _at_sizes: dict[tuple[Axis, int], _PartResult] = field(default_factory=dict, init=False)
    """Results in batches of other sizes, for the first inputs, and with other token counts."""
    _at_other_k: dict[int, Comparison] = field(default_factory=dict, init=False)
    _first: Reference = field(init=False, repr=False)
    _worst: Reference = field(init=False, repr=False)
    _furthest: float = field(default=0.0, init=False)

    def add(self, expected: Reference) -> None:
        """Runs the graph on the reference's inputs, with each k for which it has outputs."""
        result = self._compare(expected, self.batch)
        furthest, is_first = result.everything.max_rel, not self._results
        if is_first or furthest > self._furthest:
            self._worst, self._furthest = expected, furthest
        self._results.append(result)
        if is_first:
            self._first = expected
            for size in self.probed:
                if size != self.batch:
                    self._at_sizes["batch", size] = self._compare(self._first_inputs(size), size)
        for k, other in expected.at_other_k.items():
            if k not in self._at_other_k:
                self._at_other_k[k] = replace(self, k=k, probed=())
            self._at_other_k[k].add(other)

    def add_sized(self, expected: Reference, tokens: int) -> bool:
        """Runs the graph on inputs with another token count; returns whether the outputs match."""
        result = self._at_sizes["tokens", tokens] = self._compare(expected, len(expected.x))
        return not self._missed("tokens", tokens, result)

    def with_rounded(self, expected: Reference) -> Reference:
        """Returns a reference with the graph's outputs and choices, for each k of this one.

        It is the reference for other graphs in the same precision.
        """
        values, sets = self._run(expected, self.batch)
        others = {
            k: replace(self, k=k, probed=()).with_rounded(other)
            for k, other in expected.at_other_k.items()
        }
        rounded = Rounded(next(iter(values.values())), sets)
        return replace(expected, rounded=rounded, at_other_k=others)

    def parity_on(self, expected: Reference) -> Parity:
        """Returns how far the graph is off on only these inputs, and at other token counts."""
        other = replace(self)
        other._at_sizes = {at: part for at, part in self._at_sizes.items() if at[0] == "tokens"}
        other.add(expected)
        return other.parity()

    @property
    def worst(self) -> Reference:
        """The inputs with the largest difference; one batch of them if the batch size matters."""
        parity = self.parity()
        if parity.k in self._at_other_k:
            return self._at_other_k[parity.k].worst
        return self._worst if parity.batch is None else self._first_inputs(parity.batch)

    def parity(self) -> Parity:
        """Returns how far the graph is off, over all inputs that were added.

        If only one batch size misses the bounds, this is the result for it; of several k, this is
        the result for the worst.
        """
        main = self._parity_at_one_k()
        if not self._at_other_k:
            return main
        assert self.k is not None, "a reference with several k needs a graph with k as an input"
        parities = {self.k: main, **{k: other.parity() for k, other in self._at_other_k.items()}}
        return worst_parity(parities)

    def _compare(
        self, expected: Reference, batch: int, given: GivenSession | None = None
    ) -> _PartResult:
        """Compares names and shapes, then values and choices, with PyTorch's choices if `given`."""
        values, sets = self._run(expected, batch, given)
        references = {self.session.output_names[0]: expected.y, **expected.outputs}
        outputs = [(array, values[name]) for name, array in references.items()]
        for array, actual in outputs:
            if actual.shape != array.shape:
                raise ParityError(
                    f"the graph's outputs have the shape {actual.shape}, PyTorch's {array.shape}"
                )
        result = _part_result(expected, outputs, sets, self.tolerance, given=given is not None)
        return self._explained(expected, batch, result) if given is None else result

    def _explained(self, expected: Reference, batch: int, free: _PartResult) -> _PartResult:
        """Returns a result, or that with PyTorch's choices if choices may explain its failure."""
        parity, finite = _parity([free], self.tolerance), np.isfinite(free.everything.off).all()
        if not free.differing or not finite or (parity.passed and not parity.mostly_ties):
            return free
        # With k as an input a layer may choose at run time, even if it keeps all at this k.
        compared = {n: v for n, v in self.selected_values.items() if n in expected.selected}
        try:
            if not self._given:
                open_given = getattr(self.session, "with_given_choices", lambda _: None)
                self._given.append(open_given(compared.values()))
            if (session := self._given[0]) is None:
                return free
            inputs = session.inputs_for({v: expected.selected[n] for n, v in compared.items()})
            with_choices = replace(expected, inputs={**expected.inputs, **inputs})
            given = self._compare(with_choices, batch, session)
        except (BundleError, EngineError, FeedError):  # of the changed graph only
            return free
        given = replace(
            free,
            **{name: getattr(given, name) for name in _WITH_GIVEN_CHOICES},
            margin=max(given.margin, session.largest_gap()),
            given_choices=True,
        )
        # If free choices leave out most inputs, here or earlier, a wrong result is not hidden.
        left_out = free.tied > MAX_TIED * free.choices
        left_out |= any(part.given_choices for part in self._results)
        return given if left_out or _parity([given], self.tolerance).passed else free

    def _run(
        self, expected: Reference, batch: int, session: GraphSession | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns the outputs of the graph, or of another session, and its layers' choices."""
        session = session or self.session
        compared = {n: v for n, v in self.selected_values.items() if n in expected.selected}
        names = dict.fromkeys((self.session.output_names[0], *expected.outputs))
        outputs: dict[str, list[np.ndarray]] = {name: [] for name in names}
        chosen: dict[str, list[np.ndarray | None]] = {name: [] for name in compared}
        first = self.session.input_name
        for part in rebatched([expected.feeds(first)], batch):
            x = part[first]
            values = session.run(part if len(part) > 1 else x, self.k)
            for name in names:
                outputs[name].append(values[name])
            for name, value in compared.items():
                shape = (len(x), *expected.selected[name].shape[1:])
                chosen[name].append(_as_recorded(name, values[value], shape))
        recorded = {
            name: [part for part in parts if part is not None] for name, parts in chosen.items()
        }
        return (
            {name: np.concatenate(parts) for name, parts in outputs.items()},
            {n: np.concatenate(p) for n, p in recorded.items() if len(p) == len(chosen[n])},
        )

    def _first_inputs(self, size: int) -> Reference:
        """Returns the first inputs, repeated if there are fewer than `size`."""
        return self._first.rows(repeated_indices(len(self._first.x), size, self.group_size))

    def _parity_at_one_k(self) -> Parity:
        """Returns how far the graph is off with the k of this comparison.

        If the usual size meets the bounds but another misses them, the other one decides.
        """
        facts: dict[str, Any] = {
            "computed_in": getattr(self.session, "computed_in", None),  # PyTorch does not report it
            "batches": tuple(sorted({self.batch, *self._sizes("batch")})),
            "token_counts": tuple(sorted(self._sizes("tokens"))),
        }
        overall = replace(_parity(self._results, self.tolerance), **facts)
        if not overall.passed:
            return overall
        for (axis, size), probe in self._at_sizes.items():
            if self._missed(axis, size, probe):
                facts |= {axis: size, "passed": False}
                return replace(_parity([probe], self.tolerance), **facts)
        return overall

    def _sizes(self, axis: Axis) -> list[int]:
        return [size for name, size in self._at_sizes if name == axis]

    def _missed(self, axis: Axis, size: int, probe: _PartResult) -> bool:
        """Whether a few inputs of another size miss the bounds that all others meet.

        That is so if they are too far off, choose differently too often, or choose differently
        between scores so far apart that rounding is not the reason, unlike any input at the usual
        size. Tokens that choose differently with another number of tokens are not compared, so only
        a few may do so at each number.
        """
        bounds, usual = self.tolerance, _by_output(self._results)
        far = max(*(part.margin for part in self._results), bounds.tie * _FAR_APART[axis])
        wrong = int(probe.wrong.sum())
        if axis == "batch":
            rows = repeated_indices(len(self._first.x), size, self.group_size)
            near = [a.matches(b, rows, bounds) for a, b in zip(probe.same, usual, strict=True)]
            # A choice that is also wrong at the usual size counts only there.
            flips = wrong - int(self._results[0].wrong[rows].sum())
            often = self._missed_routing(probe, max(0, flips))
        else:
            near = [a.near(b, bounds) for a, b in zip(probe.same, usual, strict=True)]
            share = FLIPS_AT_TOKENS * (1 - bounds.routing)
            often = self._missed_routing(probe) or wrong > max(1.0, share * probe.choices)
        return not all(near) or often or probe.margin > far

    def _missed_routing(self, probe: _PartResult, flips: int | None = None) -> bool:
        """Whether too many choices are wrong.

        One of a few inputs may choose differently by chance, so the share is that of all inputs. In
        another batch, only the `flips` count: choices that are correct in the usual one.
        """
        parts = [*self._results, *self._at_sizes.values()]
        pooled, least = _parity(parts, self.tolerance), self.tolerance.routing
        agreement = pooled.routing_agreement
        if flips is not None:
            agreement = _parity(self._results, self.tolerance).routing_agreement
            agreement -= flips / sum(part.choices for part in parts)
        differing = probe.integers[0] > 0 and (pooled.whole_differing or 0.0) > 1 - least
        return differing or (agreement < least and probe.first is not None)


def _as_recorded(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns a layer's choices in the graph, in the shape of the reference.

    None if a layer gets single tokens, but not those of PyTorch: then only values are compared.
    """
    is_by_token = len(shape) > array.ndim
    if len(shape) == len("smn1") and array.shape[-1:] == shape[-2:-1]:
        array = by_expert(array)
    # A single token, for which the layer in PyTorch has no axis.
    if array.shape == (shape[0], 1, *shape[1:]):
        array = array[:, 0]
    same_k = array.ndim > 0 and array.shape[-1] == shape[-1]
    if not same_k or not (is_by_token or array.shape == shape):
        raise ParityError(f"layer {name}: its choices are {array.shape}, PyTorch's are {shape}")
    if array.size != math.prod(shape):
        return None
    array = array.reshape(shape)
    return array if has_coefficients(array) else np.sort(array, axis=-1)


def _parity(parts: Sequence[_PartResult], bounds: Tolerance) -> Parity:
    """Returns the result over all parts."""
    samples = sum(part.samples for part in parts)
    tokens = any(part.by_token for part in parts)
    choices = sum(part.choices for part in parts)
    agreeing = choices - sum(int(part.wrong.sum()) for part in parts)
    tied = sum(part.tied for part in parts)
    everything = Distance.of([part.everything for part in parts])
    outputs = _by_output(parts)
    if tokens and not outputs[0].inputs:  # every input has a token that chose differently
        outputs = (everything,)
    same = max(outputs, key=lambda output: (not output.within(bounds), output.max_rel))
    numbers = sum(part.integers[1] for part in parts)
    wrong = sum(part.integers[0] for part in parts) / numbers if numbers else None
    given = any(part.given_choices for part in parts)
    free = [part for part in parts if not part.given_choices]
    left_out, free_choices = sum(p.tied for p in free), sum(p.choices for p in free)
    # With given choices, rounding swaps no experts whose scores are far apart.
    gap = max((part.margin for part in parts if part.given_choices), default=0.0)
    apart = _Rounding.times([part.rounding for part in parts if part.rounding is not None])
    return Parity(
        max_abs=same.max_abs,
        max_rel=same.max_rel,
        cosine=same.least_cosine,
        usual_rel=same.usual_rel,
        loudness=same.loudness,
        routing_agreement=agreeing / choices,
        samples=samples,
        ties=sum(part.ties for part in parts),
        passed=bool(
            all(output.within(bounds) for output in outputs)
            and agreeing / choices >= bounds.routing
            and same.inputs
            and left_out <= MAX_TIED * free_choices
            and gap <= _FAR_APART["batch"] * bounds.tie
            and (wrong is None or wrong <= 1 - bounds.routing)
            and (apart is None or apart <= bounds.roundings)
        ),
        first_difference=next((part.first for part in parts if part.first), None),
        untouched_cosine=min(part.untouched_cosine for part in parts),
        jaccard=sum(part.samples * part.jaccard for part in parts) / samples,
        flip_margin=max(part.margin for part in parts),
        bounds=bounds,
        compared=same.inputs,
        all_max_abs=everything.max_abs,
        all_max_rel=everything.max_rel,
        all_cosine=everything.least_cosine,
        differing=sum(part.differing for part in parts),
        chosen_by="tokens" if tokens else "inputs",
        choices=choices,
        agreeing=agreeing,
        tied=tied,
        apart=apart,
        whole_differing=wrong,
        given_choices=given,
    )


def _by_output(parts: Sequence[_PartResult]) -> tuple[Distance, ...]:
    """Returns how far each output is off, over the inputs of all parts."""
    by_output = zip(*(part.same for part in parts), strict=True)
    return tuple(Distance.of(list(distances)) for distances in by_output)


@dataclass(frozen=True, slots=True)
class _PartResult:
    """The results for one part of the inputs.

    `ties` samples differ only by a tie, `differing` ones anywhere. Of the `choices`, made by each
    input or `by_token`, `wrong` has the number of wrong ones of each input, and `tied` differ by a
    tie. `first` is the first layer with a wrong choice, `jaccard` the mean overlap of the sets,
    `margin` the largest of a choice that differs. `same` has each output's distance with the same
    experts, `everything` the first output's, whatever was chosen.
    """

    samples: int
    ties: int
    differing: int
    choices: int
    wrong: np.ndarray
    tied: int
    by_token: bool
    first: str | None
    jaccard: float
    margin: float
    same: tuple[Distance, ...]
    everything: Distance
    untouched_cosine: float
    rounding: _Rounding | None
    integers: tuple[int, int]
    """The count of numbers that differ in outputs of whole numbers, and the count of all."""
    given_choices: bool = False
    """Whether `_WITH_GIVEN_CHOICES` are the results with the reference's choices as inputs."""


_WITH_GIVEN_CHOICES = ("ties", "choices", "wrong", "tied", "first", "same", "integers")


def _part_result(
    expected: Reference,
    outputs: Sequence[tuple[np.ndarray, np.ndarray]],
    sets: Mapping[str, np.ndarray],
    tolerance: Tolerance,
    *,
    given: bool = False,
) -> _PartResult:
    """Compares values, each output with its expected values, and choices.

    After the first difference of a sample its later layers get other inputs, so only the first
    counts as a tie or a miss; all count for the overlap. If tokens choose for themselves, each
    token counts separately. If choices were `given`, all outputs are compared.
    """
    y = outputs[0][1]
    # By layer, each [s, choices]; a difference by more than a tie is wrong.
    differs = {name: _different(sets[name], expected.selected[name], tolerance) for name in sets}
    margins = {name: expected.margin[name].reshape(differs[name].shape) for name in sets}
    wrong = {name: differs[name] & (margins[name] > tolerance.tie) for name in sets}
    ties, misses, different = (np.zeros(len(expected.x), dtype=bool) for _ in range(3))
    first: str | None = None
    margin = 0.0
    for name in sets:
        new = differs[name] if given else differs[name] & ~(ties | misses)[:, None]
        margin = max(margin, float(margins[name][new].max(initial=0.0)))
        missed = (new & wrong[name]).any(axis=1)
        if first is None and missed.any():
            first = name
        ties |= new.any(axis=1) & ~missed
        misses |= missed
        different |= differs[name].any(axis=1)
    choices, wrong_by_input = misses.size, misses.astype(int)
    same, tied = ~(ties | misses), int(ties.sum())
    by_token = tolerance.routing < 1.0 and any(chosen.ndim > 2 for chosen in sets.values())
    if by_token or given:
        counted = {name: counted_choices(expected.selected[name], sets[name]) for name in sets}
        choices = sum(int(mask.sum()) for mask in counted.values())
        wrong_by_input = sum((counted[name] & wrong[name]).sum(axis=1) for name in sets)
        same = _same_tokens([*differs.values()], expected.y.shape)
        tied = sum(int((differs[name] & ~wrong[name]).sum()) for name in differs)
    if given:
        same = np.ones(len(y), dtype=bool)
    # Classes and masks are never nearly correct, so those that differ are counted.
    samples = np.logical_and.reduce(same.reshape(len(y), -1), axis=1)
    integers = [(a[samples], b[samples]) for a, b in outputs if a.dtype.kind != "f"]
    overlaps = [_jaccard(sets[name], expected.selected[name]) for name in sets]
    return _PartResult(
        samples=len(y),
        ties=int(ties.sum()),
        differing=int(different.sum()),
        choices=choices,
        wrong=wrong_by_input,
        tied=tied,
        by_token=by_token,
        first=first,
        jaccard=float(np.mean(overlaps)) if overlaps else 1.0,
        margin=margin,
        same=(
            distance(expected.y, y, same),
            # Other outputs may not have the same tokens, so whole samples are compared.
            *(distance(wanted, actual, samples) for wanted, actual in outputs[1:]),
        ),
        everything=distance(expected.y, y, np.ones(len(y), dtype=bool)),
        untouched_cosine=float(cosines(y, expected.dense).min(initial=1.0)),
        rounding=_Rounding.of(expected, y, sets, tolerance),
        integers=(sum(int((a != b).sum()) for a, b in integers), sum(a.size for a, b in integers)),
    )


def _same_tokens(differs: Sequence[np.ndarray], output: tuple[int, ...]) -> np.ndarray:
    """Returns the tokens to compare if each token chooses for itself and some may differ.

    They are the tokens [s, m] with the same choice in every layer, if outputs of this shape have
    these tokens; otherwise the samples [s] in which all tokens do.
    """
    tokens = all(mask.shape == output[:2] and len(output) > mask.ndim for mask in differs)
    masks = [~mask if tokens else ~mask.any(axis=1) for mask in differs]
    same: np.ndarray = np.logical_and.reduce(masks)
    return same


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one output is off for each input [s]: the largest difference, and the cosine.

    `peak` is the largest expected absolute value of each input, and `numbers` the count of values.
    `counted` marks inputs of which any value was compared.
    """

    off: np.ndarray
    peak: np.ndarray
    cosine: np.ndarray
    counted: np.ndarray
    numbers: int

    def scale(self) -> np.ndarray:
        """Returns the scale of each input's difference: its own largest absolute value.

        An output of few numbers has at least the median scale, and one of zeros the scale of quiet
        inputs: the largest value of all inputs would hide their differences.
        """
        peaks = self.peak[self.counted & (self.peak > 0)]
        if not peaks.size:
            return np.ones_like(self.peak)
        quiet = float(np.quantile(peaks, 0.1))
        least = float(np.median(peaks)) if self.numbers < FEW_NUMBERS else MIN_SCALE * quiet
        return np.maximum(np.where(self.peak > 0, self.peak, quiet), least)

    @property
    def inputs(self) -> int:
        return int(self.counted.sum())

    @property
    def max_abs(self) -> float:
        return float(self.off.max(initial=0.0))

    @property
    def max_rel(self) -> float:
        """The largest difference in the scale of its input."""
        return float(self._beyond().max(initial=0.0))

    @property
    def usual_rel(self) -> float:
        """The largest difference of all inputs but the outliers, in their scales."""
        return _largest_usual(self._beyond())

    @property
    def loudness(self) -> tuple[float, float]:
        """The largest number of the quietest input and of the loudest."""
        peaks = self.peak[self.counted]
        return (float(peaks.min()), float(peaks.max())) if peaks.size else (0.0, 0.0)

    @property
    def least_cosine(self) -> float:
        return float(self.cosine[self.counted].min(initial=1.0))

    def within(self, bounds: Tolerance) -> bool:
        """Whether the inputs are within the bounds, each in its own scale."""
        usual = _largest_usual(self._beyond(bounds.atol)) <= bounds.rtol
        return usual and self.within_outliers(bounds)

    def within_outliers(self, bounds: Tolerance) -> bool:
        """Whether each input is within the bounds of an outlier."""
        largest = float(self._beyond(bounds.atol).max(initial=0.0))
        loud = self.counted & (self.peak >= self.scale())
        # A few numbers have no clear direction.
        rotated = self.numbers >= FEW_NUMBERS and (self.cosine[loud] < bounds.least_cosine).any()
        return largest <= bounds.outlier * bounds.rtol and not rotated

    def near(self, usual: Distance, bounds: Tolerance) -> bool:
        """Whether a few inputs with another number of tokens are not too far off.

        They may be further off if the worst ones at the usual number are as well.
        """
        largest = float(self._beyond(bounds.atol).max(initial=0.0))
        limit = max(OUTLIER_AT_TOKENS * bounds.rtol, FURTHER_AT_TOKENS * usual.max_rel)
        return largest <= limit and self.within_outliers(bounds)

    def _beyond(self, atol: float = 0.0) -> np.ndarray:
        """Returns the difference of each counted input beyond `atol`, in its scale."""
        excess: np.ndarray = (np.maximum(0.0, self.off - atol) / self.scale())[self.counted]
        return excess

    def matches(self, other: Distance, rows: np.ndarray, bounds: Tolerance) -> bool:
        """Whether inputs in another batch are within the bounds, or as far off as in the usual one.

        They are these `rows` of `other`, whose scales are used: a few rows have no reliable scales.
        """
        allowed, off = bounds.atol + bounds.rtol * other.scale()[rows], other.off[rows]
        return bool((self.off <= np.where(off > allowed, OUTLIER_IN_A_BATCH * off, allowed)).all())

    @staticmethod
    def of(parts: Sequence[Distance]) -> Distance:
        """Returns the distance over the inputs of all parts."""
        joined = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("off", "peak", "cosine", "counted")
        }
        return Distance(**joined, numbers=min(part.numbers for part in parts))


def _largest_usual(relative: np.ndarray) -> float:
    """Returns the largest value without the outliers."""
    if not relative.size:
        return 0.0
    return float(np.sort(relative)[len(relative) - 1 - int(OUTLIERS * len(relative))])


def distance(expected: np.ndarray, y: np.ndarray, same: np.ndarray) -> Distance:
    """Returns how far outputs are off in the samples [s] or tokens [s, m] that are `same`.

    Whole numbers have no distance: callers count those that differ.
    """
    if expected.dtype.kind != "f":
        expected = y = np.zeros(expected.shape)
    mask = same.reshape(*same.shape, *(1,) * (y.ndim - same.ndim))
    actual = np.where(mask, y, 0.0).astype(np.float64).reshape(len(y), -1)
    reference = np.where(mask, expected, 0.0).astype(np.float64).reshape(len(y), -1)
    off = np.abs(actual - reference).max(axis=1, initial=0.0)
    return Distance(
        off=np.where(np.isfinite(off), off, np.inf),
        peak=np.abs(reference).max(axis=1, initial=0.0),
        cosine=cosines(actual, reference),
        counted=np.asarray(same.reshape(len(y), -1).any(axis=1)),
        numbers=actual.shape[1],
    )


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the cosine of each sample's outputs, [s, …], [s, …] → [s], in float64.

    It is 1 if both are zero, and 0 if only one is or if a number is not finite.
    """
    a, b = (part.reshape(len(part), -1).astype(np.float64) for part in (a, b))
    zero = ~a.any(axis=1) & ~b.any(axis=1)
    with np.errstate(invalid="ignore"):
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosine = np.where(zero, 1.0, (a * b).sum(axis=1) / np.where(norms == 0, 1.0, norms))
    return np.where(np.isfinite(cosine), cosine, 0.0)


def _jaccard(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean overlap of two choices: sets of experts [s, k] or non-zero coefficients."""
    if has_coefficients(expected):
        a, b = actual > 0, expected > 0
        shares = (a & b).sum(axis=-1) / np.maximum(1, (a | b).sum(axis=-1))
        return float(shares.mean())
    k = expected.shape[-1]
    return float(jaccard(actual.reshape(-1, k), expected.reshape(-1, k)).mean())


def jaccard(chosen: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Returns |A∩B| / |A∪B| of the sets in each row: [b, k], [b, k] to [b]; order is ignored."""
    common = (chosen[:, :, None] == reference[:, None, :]).any(axis=2).sum(axis=1)
    shares: np.ndarray = common / (chosen.shape[1] + reference.shape[1] - common)
    return shares


def _different(actual: np.ndarray, expected: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    """Returns where choices differ: [s, 1] for sets of experts [s, k], [s, m] for those of tokens.

    Below FP32 rounding before a layer moves its coefficients, so only experts that one of the two
    has dropped count.
    """
    if has_coefficients(expected):
        off = np.abs(actual - expected)
        if tolerance.routing < 1.0:
            off = np.where((actual > 0) == (expected > 0), 0.0, off)
        different: np.ndarray = (off > tolerance.coefficient).any(axis=-1)
        return different
    unequal: np.ndarray = (actual != expected).any(axis=-1)
    return unequal.reshape(len(unequal), -1)


@dataclass(frozen=True, slots=True)
class _Rounding:
    """How far a graph is from the results of the same rounding, and how far those are from PyTorch.

    `off` and `own` have the largest difference of an output, the sum of squares, and the number of
    choices that differ; `scale` has those of the outputs themselves, and the number of choices.
    """

    off: tuple[float, float, float]
    own: tuple[float, float, float]
    scale: tuple[float, float, float]
    exact: bool
    half: bool

    @staticmethod
    def times(parts: Sequence[_Rounding]) -> float | None:
        """Returns the largest of the three quotients over all parts; None without parts.

        The tolerance of FP32 and the share of choices due to chance are subtracted. Against float64
        the tolerance is the last bit, and choices are not counted: FP32 graphs choose like PyTorch.
        If only weights are rounded (`half`), a largest difference of FP16's last bit is ignored:
        sums in another order are rounded to either neighbour.
        """
        if not parts:
            return None
        exact, half = all(part.exact for part in parts), all(part.half for part in parts)
        factor = 0.0
        epsilon = float(np.finfo(np.float32).eps) if exact else TOLERANCES["fp32"].rtol
        measures: tuple[Callable[[list[float]], float], ...] = (
            max,
            lambda squares: math.sqrt(math.fsum(squares)),
            math.fsum,
        )
        measures = measures[:2] if exact else measures
        for index, combine in enumerate(measures):
            off, own, scale = (
                combine([row[index] for row in column])
                for column in zip(*((p.off, p.own, p.scale) for p in parts), strict=True)
            )
            chosen = combine is math.fsum
            slack = max(1.0, CHOICES_BY_CHANCE * scale) if chosen else epsilon * scale
            if not np.isfinite(off):
                return float("inf")
            if half and combine is max and off <= float(np.finfo(np.float16).eps) * scale:
                continue
            factor = max(factor, max(0.0, off - slack) / max(own, slack, 1e-30))
        return factor

    @staticmethod
    def of(
        expected: Reference, y: np.ndarray, sets: Mapping[str, np.ndarray], tolerance: Tolerance
    ) -> _Rounding | None:
        """Compares all choices, and the outputs of inputs whose choices are all the same.

        None without `rounded` results.
        """
        rounded = expected.rounded
        if rounded is None:
            return None

        def differing(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> np.ndarray:
            """Returns the number of choices that differ, for each input."""
            count = np.zeros(len(y))
            for name in a.keys() & b.keys():
                count += _different(a[name], b[name], tolerance).sum(axis=1)
            return count

        flips, own_flips = (
            differing(sets, rounded.selected),
            differing(rounded.selected, expected.selected),
        )
        same, exact = flips == 0, own_flips == 0
        if not exact.any():  # each input has a token whose choice rounding changes
            exact = ~exact
        common = sets.keys() & rounded.selected.keys()
        masks = (counted_choices(rounded.selected[name], sets[name]) for name in common)
        return _Rounding(
            off=(*_magnitude(y[same], rounded.y[same]), float(flips.sum())),
            own=(*_magnitude(rounded.y[exact], expected.y[exact]), float(own_flips.sum())),
            scale=(*_magnitude(rounded.y), float(sum(int(mask.sum()) for mask in masks))),
            exact=rounded.exact,
            half=tolerance.roundings < 1.0 and rounded.half,
        )


def _magnitude(y: np.ndarray, subtracted: np.ndarray | float = 0.0) -> tuple[float, float]:
    """Returns the largest absolute value of a difference, and its mean sum of squares."""
    off = y.astype(np.float64) - subtracted
    return float(np.abs(off).max(initial=0.0)), float((off**2).sum()) / max(1, len(y))
