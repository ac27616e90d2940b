"""What a bundle keeps of its comparison with PyTorch: the bounds, the result and the reference.

The bounds (`Tolerance`) and the result (`Parity`) are a section of the manifest; what PyTorch
computed (`Reference`) is `parity.npz`. It is made once, in PyTorch (`exporter.reference`), so that
a bundle can be verified where its checkpoint and PyTorch are not (`exporter.parity`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import onnx

from ...common.documents import from_data
from ...data.feeds import npz_arrays
from ...data.shards import Fields
from ...errors import BundleError, FeedError

if TYPE_CHECKING:
    from ...graphs.targets import Precision

TIE = 1e-5
"""FP32 scores this close, relative to the k-th, are a tie: rounding may order them either way."""


ROUNDED_RTOL = 1e-3
"""What values on the boundary of a rounding to BF16 may change, in FP32 graphs that do so."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds of a parity check.

    Outputs agree where |difference| ≤ `atol` + `rtol` · max|y|, of each input and each output by
    itself: in their own scale, unless an absolute difference is allowed. One input in twenty may be
    `outlier` times as far off, and none may have a cosine below `least_cosine`.

    `routing` is the least share of inputs in which every layer must choose the same experts. A
    choice between scores that are closer than `tie`, relative to the k-th, is a tie: what comes
    before the layer is rounded, and may order them either way. A muMoE layer's coefficients, which
    sum to 1, are the same choice where none differs by more than `coefficient`; below FP32 only
    those count that one of both has dropped, and `routing` is of tokens.

    A graph is also compared with what its own numbers should give (`Rounded`): it may be
    `roundings` times as far from that as that is from PyTorch. Where that is less than once, the
    last bit of its floats is allowed as well.
    """

    atol: float
    rtol: float
    routing: float
    tie: float
    coefficient: float = 1e-3
    roundings: float = 2.0
    outlier: float = 1.0
    least_cosine: float = 0.99

    def asked(self, atol: float | None, rtol: float | None) -> Tolerance:
        """Returns these bounds with those that a user gives; wider ones allow any direction."""
        atol, rtol = (self.atol if atol is None else atol), (self.rtol if rtol is None else rtol)
        asked = replace(self, atol=atol, rtol=rtol)
        return replace(asked, least_cosine=-1.0) if asked.wider_than(self) else asked

    def wider_than(self, other: Tolerance) -> bool:
        """Whether these bounds allow larger differences than others."""
        return self.atol > other.atol or self.rtol > other.rtol

    def no_wider(self, than: Tolerance) -> Tolerance:
        """Returns these bounds, with those of another where they are wider, or not a number."""
        pairs = {name: (getattr(than, name), value) for name, value in asdict(self).items()}
        at_least = ("routing", "least_cosine")
        return Tolerance(**{n: max(p) if n in at_least else min(p) for n, p in pairs.items()})


_IN_INTEGERS = {"outlier": 3.0, "least_cosine": 0.8}

TOLERANCES: Mapping[Precision, Tolerance] = MappingProxyType(
    {
        "fp32": Tolerance(atol=0.0, rtol=1e-4, routing=1.0, tie=1e-5, roundings=16.0),
        "fp16": Tolerance(atol=0.0, rtol=1e-2, routing=0.98, tie=1e-3, coefficient=1e-2),
        "bf16": Tolerance(atol=0.0, rtol=5e-2, routing=0.98, tie=8e-3, coefficient=5e-2),
        "int8": Tolerance(
            atol=0.0,
            rtol=1e-1,
            routing=0.98,
            tie=1e-2,
            coefficient=5e-2,
            roundings=1.5,
            **_IN_INTEGERS,
        ),
        "fp8": Tolerance(
            atol=0.0, rtol=2e-1, routing=0.95, tie=2e-2, coefficient=5e-2, **_IN_INTEGERS
        ),
        "int4": Tolerance(
            atol=0.0, rtol=3e-1, routing=0.9, tie=5e-2, roundings=0.25, **_IN_INTEGERS
        ),
    }
)
"""FP32: rounding in another order. FP16 keeps 11 bits and BF16 8, over a network's depth. INT8 has
about 1% of error in each layer, INT4 10%. The ties are what such an error moves a score by.

`roundings`: where each of two graphs rounds values of its own, as 16-bit floats do, and INT8 on
another CPU once some layers have passed on what differs by the last bit, they are √2 times as far
from each other as from what is exact. INT4 rounds weights, which are the same in both. In FP32
PyTorch's own rounding is the measure, and other orders of summing round more or less than that."""


def tolerance_of(precision: str) -> Tolerance:
    """Returns the bounds of a precision; of one that is not known, those of FP32."""
    known = (bounds for name, bounds in TOLERANCES.items() if name == precision)
    return next(known, TOLERANCES["fp32"])


def recorded(parity: Mapping[str, Any] | None, precision: str = "fp32") -> Tolerance:
    """Returns the bounds that a manifest's `parity` holds; without one, none may differ.

    What an older one does not hold is that of the precision. Raises `BundleError` for what are no
    bounds.
    """
    bounds = asdict(tolerance_of(precision)) | {"atol": 0.0, "rtol": 0.0}
    return from_data(
        Tolerance, bounds | dict(parity or {}), "manifest.json", at="parity", error=BundleError
    )


GPU_RTOL = 1e-3
"""FP32 on a GPU: products are summed in another order than PyTorch sums them on a CPU."""


def on_gpu(bounds: Tolerance, precision: str, *, tf32: bool = False) -> Tolerance:
    """Returns the bounds of a comparison that runs on a GPU: the one statement of them.

    FP32 may be `GPU_RTOL` off. TF32 keeps as many bits of a factor as FP16 does, and has its
    bounds. Other precisions round more than any order of summing: theirs are the same everywhere.
    """
    if precision != "fp32":
        return bounds
    half = TOLERANCES["fp16"]
    if tf32:
        return replace(bounds, rtol=max(bounds.rtol, half.rtol), routing=half.routing, tie=half.tie)
    return replace(bounds, rtol=max(bounds.rtol, GPU_RTOL))


OUTLIERS = 0.05
"""Of the inputs so many, rounded down, may be outliers where a precision allows any."""


@dataclass(frozen=True, slots=True)
class Parity:
    """How far a graph is from its reference.

    `max_abs` is the largest difference of an output where the experts are the same, `max_rel` the
    largest over max|y| of the same input, `cosine` the smallest cosine of a sample's outputs;
    `all_…` are those over all inputs, whatever was chosen. `routing_agreement` is the share of
    samples in which every layer chose the same set, and of a muMoE below FP32 the share of the
    choices that its tokens make: the share `agreeing` of `choices`, `chosen_by` inputs or tokens.
    `ties` counts the samples that differ only where scores were equal up to rounding, `differing`
    all that differ anywhere.
    `first_difference` names the layer where the first wrong set appears. `untouched_cosine`
    compares with the model before Algorithm 1. `jaccard` is the mean overlap of the sets, and
    `flip_margin` the largest margin, relative to the k-th score, of a set that differs (0 where
    none does). Records that are older do not tell what is None here.
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
    """Inputs of which anything was compared."""
    all_max_abs: float | None = None
    all_max_rel: float | None = None
    all_cosine: float | None = None
    differing: int | None = None
    chosen_by: Literal["inputs", "tokens"] = "inputs"
    choices: int | None = None
    agreeing: int | None = None
    tied: int = 0
    """Of `choices`, those that differ by a tie: they agree, and nothing of them was compared."""
    batches: tuple[int, ...] = ()
    """The batch sizes at which the graph was compared."""
    usual_rel: float | None = None
    """What 95% of the inputs are within, as `max_rel` is."""
    loudness: tuple[float, float] | None = None
    """max|y| of the quietest input that is compared and of the loudest."""
    ks: tuple[int, ...] = ()
    """Each k that was compared, where it is an input of the graph."""
    k: int | None = None
    """The one of `ks` whose figures these are: the furthest off."""
    batch: int | None = None
    """The batch size that misses the bounds where another meets them."""
    token_counts: tuple[int, ...] = ()
    """The numbers of tokens at which the graph was compared, besides those of the inputs."""
    tokens: int | None = None
    """The number of tokens that misses the bounds where another meets them."""
    apart: float | None = None
    """How far the graph is from what its numbers should give (`Rounded`), over how far that is from
    PyTorch."""
    computed_in: str | None = None
    """What the runtime says that it computed matrix products in."""
    whole_differing: float | None = None
    """Of outputs of whole numbers (classes, masks), the share of the numbers that differ."""

    @property
    def mostly_ties(self) -> bool:
        """Whether more was left out as a tie than was compared."""
        return self.choices is not None and self.tied > self.choices / 2

    def record(self) -> dict[str, Any]:
        """Returns what a manifest holds, where the bounds stand among the results."""
        found: dict[str, Any] = {}
        for name, value in asdict(self).items():
            found |= {} if name == "bounds" else {name: value}
            found |= {bound: getattr(self.bounds, bound) for bound in _BOUNDS_AFTER.get(name, ())}
        return found

    @staticmethod
    def of(record: Mapping[str, Any]) -> Parity:
        """Returns the result that a manifest of any version holds."""
        bounds = {each.name for each in fields(Tolerance)}
        held = {name: value for name, value in record.items() if name in bounds}
        rest = {name: value for name, value in record.items() if name not in bounds}
        return Parity(**rest, bounds=Tolerance(**{"routing": 1.0, "tie": TIE, **held}))


_BOUNDS_AFTER = {
    "ties": ("atol", "rtol"),
    "flip_margin": ("routing", "tie", "coefficient", "roundings"),
    "batches": ("outlier", "least_cosine"),
}
"""The places of the bounds in a manifest, since its first schema."""


def describe(parity: Parity) -> str:
    """One line about a parity result: the outputs of which inputs, and who chose what."""
    p, inputs = parity, f"{parity.samples} inputs"
    values = differences(p.max_abs, p.max_rel, p.cosine, p.usual_rel)
    if p.differing == 0:
        text = f"{values} over all {inputs}"
    elif p.compared == 0:  # outputs of other experts differ, which says nothing
        text = "no output was compared, because no input selects the same experts"
    elif p.all_max_abs is None or p.all_max_rel is None or p.all_cosine is None:
        text = values
    else:
        whole = differences(p.all_max_abs, p.all_max_rel, p.all_cosine)
        text = f"{values} where the experts are the same; {whole} over all {inputs}"
    if p.choices is None:
        text += f"; same experts in {p.routing_agreement:.0%}"
    elif p.chosen_by == "tokens":
        text += f"; same experts in {p.agreeing:,} of the {p.choices:,} choices of tokens"
    else:
        text += f"; same experts in {p.agreeing:,} of {p.choices:,} inputs"
    text += f" ({p.ties} tied, not compared)" if p.ties else ""
    if p.mostly_ties:
        what = "choices of tokens" if p.chosen_by == "tokens" else "inputs"
        text += (
            f"; MOST WAS NOT COMPARED: {p.tied:,} of {p.choices:,} {what} are ties (scores within "
            f"{p.bounds.tie:g} of the k-th)"
        )
    if p.whole_differing:
        text += f"; {p.whole_differing:.2%} of the whole numbers that it gives differ"
    size = "" if p.batch is None else f"in a batch of {p.batch}: "
    size = size if p.tokens is None else f"with {p.tokens} tokens: "
    text = size + text + _apart(p)
    if p.k is not None:
        text = f"with k = {p.k}, the furthest off of {', '.join(map(str, p.ks))}: {text}"
    if p.first_difference:
        text += f"; first difference in layer {p.first_difference}"
    if p.flip_margin:
        text += f"; flips at margins up to {p.flip_margin:.1g} of the k-th score"
    return text


def _apart(p: Parity) -> str:
    """What is said of a graph that rounds otherwise than another lowering."""
    most = p.bounds.roundings
    if p.apart is None or p.apart <= most:
        return ""
    if p.bounds.routing == 1.0:  # FP32
        return (
            f"; {p.apart:.2g} TIMES as far from float64 as PyTorch's float32 is, where "
            f"{most:g} times is the most"
        )
    return (
        f"; {p.apart:.2g} TIMES as far from what another lowering gives in the same numbers as "
        f"that is from PyTorch, where {most:g} times is the most"
    )


def differences(
    max_abs: float, max_rel: float, cosine: float, usual_rel: float | None = None
) -> str:
    """Returns how far outputs are off, in words."""
    shown = f"{max_rel:.2g} of max|y|"
    if usual_rel is not None and usual_rel < max_rel / 2:
        shown += f", {usual_rel:.2g} in {1 - OUTLIERS:.0%} of the inputs"
    return f"max |difference| {max_abs:.2g} ({shown}), cosine {cosine:.7f}"


Item = TypeVar("Item")

PARITY_FILE = "parity.npz"

_SIZED = re.compile(r"parity-(\d+)-tokens\.npz")


def sized_file(tokens: int) -> str:
    """Returns the name of the record of inputs with so many tokens."""
    return f"parity-{tokens}-tokens.npz"


def sized_files(files: Iterable[str]) -> dict[int, str]:
    """Returns, of some names, those of records of other token counts, by these."""
    found = {int(match[1]): file for file in files if (match := _SIZED.fullmatch(file))}
    return dict(sorted(found.items()))


def by_expert(chosen: np.ndarray) -> np.ndarray:
    """Returns what all experts chose, e or e + n, [..., n] in any order, as [..., n, 1]."""
    order = (chosen % chosen.shape[-1]).argsort(axis=-1)
    ordered: np.ndarray = np.take_along_axis(chosen, order, axis=-1)
    return ordered[..., None]


def places(chosen: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Returns the choices that count, [s, 1] or [s, m]: of experts that choose, what one took."""
    shape = (len(chosen), -1)
    if chosen.ndim < len("smn1"):
        return np.ones(chosen.shape[:-1], dtype=bool).reshape(shape)
    experts = chosen.shape[-2]
    taken: np.ndarray = np.logical_or.reduce([indices < experts for indices in (chosen, *others)])
    return taken.reshape(shape)


FIRST = ""
"""Stands for the first input, whatever it is called."""

MOST_KEPT = 32
"""Inputs that a bundle keeps to be verified with, where fewer do not reach every expert."""

MOST_BYTES_AT_A_K = 16 << 20
"""What a bundle keeps of the outputs with another k, of one input at least: a text model's are
large."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Outputs, and what was chosen: what tells how far rounding alone may take a graph.

    Below FP32 what a graph of another lowering gives in the same numbers, and of FP32 graphs what
    PyTorch gives in float64.
    """

    y: np.ndarray
    selected: Mapping[str, np.ndarray]

    @property
    def exact(self) -> bool:
        """Whether it is of float64: what is far smaller than FP32's bounds is seen then."""
        return bool(self.y.dtype == np.float64)

    @property
    def half(self) -> bool:
        """Whether its numbers are those of FP16, whose last bit may fall either way."""
        with np.errstate(over="ignore"):
            return bool((self.y == self.y.astype(np.float16)).all())


@dataclass(frozen=True, slots=True)
class Reference:
    """What PyTorch computes for some inputs.

    `x` are the inputs, `y` the outputs with Algorithm 1, `dense` those of the untouched model with
    all experts. By choice (`choice_key`), `selected` holds the chosen experts [s, k], ascending,
    those of each token [s, m, k], the kept coefficients [s, m, n], or where each expert chooses for
    itself [s, m, n, 1] (`by_expert`), and `margin` [s], [s, m] or [s, m, n] the gap from the k-th
    score to the next, relative to the k-th. `kept` is each layer's k.
    `inputs` and `outputs` are those beside the first, by name. `rounded` is what the precision of
    the graphs makes of it, None where that is not known. Where k is an input of the graphs,
    `at_other_k` holds what is computed of the same inputs with other k.
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
        """Its k, where that is an input of the graphs."""
        return next(iter(self.kept.values()))

    def feeds(self, first: str, count: int | None = None) -> dict[str, np.ndarray]:
        """Returns the inputs by name, up to `count` of each; `first` is that of `x`."""
        return {name: array[:count] for name, array in {first: self.x, **self.inputs}.items()}

    def rows(self, chosen: np.ndarray) -> Reference:
        """Returns the reference of some of the inputs, by their numbers or a mask."""
        if any(len(other.x) < len(self.x) for other in self.at_other_k.values()):
            return replace(self, at_other_k={}).rows(chosen)  # a bundle holds fewer of them
        arrays = {name: array[chosen] for name, array in self._arrays().items()}
        return Reference._of(arrays, self._kept())

    def reached(self) -> dict[str, frozenset[int]]:
        """Returns, by choice, the experts that some input chose: of the others nothing is known."""
        return {
            name: frozenset(
                np.flatnonzero((sets > 0).any(axis=tuple(range(sets.ndim - 1)))).tolist()
                if holds_coefficients(sets)
                else np.unique(sets).tolist()
            )
            for name, sets in self.selected.items()
        }

    def compared(self, experts: Mapping[str, int]) -> dict[str, frozenset[int]]:
        """Returns, by choice, the experts that some input chose with some k.

        `experts` are the numbers of the layers' experts: where a layer keeps all, all are compared.
        """
        found = self.reached()
        for one in self.at_other_k.values():
            every = {
                layer: frozenset(range(n))
                for layer, n in experts.items()
                if one.kept.get(layer) == n and layer not in one.selected
            }
            for name, chosen in (*one.reached().items(), *every.items()):
                found[name] = found.get(name, frozenset()) | chosen
        return found

    def with_unreached(self, later: Reference, most: int) -> Reference:
        """Returns the reference with those inputs of a later one that choose other experts.

        There are `most` at the most, and none where their shapes are others.
        """
        if self.shapes() != later.shapes():
            return self
        reached = self.reached()
        rows: list[int] = []
        for row in range(len(later.x)):
            chosen = later.rows(np.array([row])).reached()
            fresh = any(chosen[name] - reached[name] for name in reached)
            if fresh and len(self.x) + len(rows) < most:
                rows.append(row)
                reached = {name: reached[name] | chosen[name] for name in reached}
        return self.joined(later.rows(np.array(rows))) if rows else self

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each array for one input: what is alike can be joined."""
        return {name: array.shape[1:] for name, array in self._unrounded()._arrays().items()}

    def _unrounded(self) -> Reference:
        others = {k: other._unrounded() for k, other in self.at_other_k.items()}
        return replace(self, rounded=None, at_other_k=others)

    def joined(self, later: Reference) -> Reference:
        """Returns the reference of its own inputs and those of a later one, of the same shapes.

        What is `rounded` is left out unless both hold it.
        """
        mine, theirs = self._arrays(), later._arrays()
        if mine.keys() != theirs.keys():
            mine, theirs = self._unrounded()._arrays(), later._unrounded()._arrays()
        arrays = {name: np.concatenate((array, theirs[name])) for name, array in mine.items()}
        return Reference._of(arrays, self._kept())

    @property
    def nbytes(self) -> int:
        """The bytes of all its arrays."""
        return sum(array.nbytes for array in self._arrays().values())

    def save(self, path: Path) -> None:
        """Writes the reference as an `.npz` file."""
        kept = {name: np.array(k) for name, k in self._kept().items()}
        arrays = replace(self, at_other_k={})._arrays()
        for k, other in self.at_other_k.items():
            own = other._own_arrays()
            if np.array_equal(other.y, self.dense):  # as with all experts: once is enough
                del own["y"]
            bytes_of_one = sum(array[:1].nbytes for array in own.values())
            count = max(1, MOST_BYTES_AT_A_K // max(1, bytes_of_one))
            arrays |= {f"k={k}/{name}": array[:count] for name, array in own.items()}
        # np.savez takes names as keywords; its own first parameter is positional.
        np.savez(path, **arrays, **kept)  # type: ignore[arg-type]

    def _kept(self) -> dict[str, int]:
        """What does not depend on the inputs, by name: each layer's k."""
        kept = {f"kept/{layer}": k for layer, k in self.kept.items()}
        for k, other in self.at_other_k.items():
            kept |= {f"k={k}/{name}": count for name, count in other._kept().items()}
        return kept

    def _arrays(self) -> dict[str, np.ndarray]:
        """What there is of each input, by name; with other k what is not the same with all."""
        arrays = {"x": self.x, "y": self.y, "dense": self.dense}
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
        """Those that are not the same with every k."""
        return {name: array for name, array in self._arrays().items() if not _shared(name)}

    @staticmethod
    def load(path: Path) -> Reference:
        """Reads a reference; `BundleError` when the file cannot be read."""
        try:
            arrays = dict(npz_arrays(path))
            counts = {name: int(arrays.pop(name)) for name in [*arrays] if _KEPT.match(name)}
            record = Reference._of(arrays, counts)
        except (FeedError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise BundleError(f"{path}: not a readable parity record ({error})") from error
        for problem in record._problems():
            raise BundleError(f"{path}: not a readable parity record: {problem}")
        return record

    @staticmethod
    def _of(arrays: Mapping[str, np.ndarray], kept: Mapping[str, int]) -> Reference:
        """The record whose `_arrays` and `_kept` these are."""
        shared = {name: array for name, array in arrays.items() if _shared(name)}
        at_other_k = {}
        for prefix in dict.fromkeys(found[1] for name in kept if (found := _AT_K.match(name))):
            own = {"y": arrays["dense"], **_group(arrays, prefix)}
            count = min(len(array) for array in own.values())
            own = {name: array[:count] for name, array in {**own, **shared}.items()}
            at_other_k[int(prefix[2:-1])] = Reference._of(own, _group(kept, prefix))
        rounded = None
        if "rounded" in arrays:
            rounded = Rounded(arrays["rounded"], _group(arrays, "rounded/"))
        return Reference(
            x=arrays["x"],
            y=arrays["y"],
            dense=arrays["dense"],
            selected=_group(arrays, "selected/"),
            margin=_group(arrays, "margin/"),
            kept=_group(kept, "kept/"),
            inputs=_group(arrays, "x/"),
            outputs=_group(arrays, "y/"),
            rounded=rounded,
            at_other_k=at_other_k,
        )

    def _problems(self) -> Iterator[str]:
        """In what it is no record of one model's outputs."""
        rounded = Rounded(self.y, {}) if self.rounded is None else self.rounded
        groups = (self.selected, self.margin, self.inputs, self.outputs, rounded.selected)
        arrays = [("x", self.x), ("y", self.y), ("dense", self.dense)]
        arrays += [item for group in groups for item in group.items()]
        if self.x.ndim == 0 or not self.x.size:
            yield "it holds no inputs"
        for name, array in arrays:
            if array.dtype.kind not in "fiub":
                yield f"'{name}' is {array.dtype.name}, not numbers"
            elif array.shape[:1] != self.x.shape[:1] or not (array.size or name in self.inputs):
                yield f"'{name}' is of shape {array.shape}, for inputs {self.x.shape}"
        if any(array.dtype.kind in "ub" for array in self.selected.values()):
            yield "its choices are neither indices nor weights"
        for other in (self.dense, rounded.y):
            if self.y.shape != other.shape:
                yield f"outputs {self.y.shape} and {other.shape} are of different shapes"
        if self.selected.keys() != self.margin.keys() or not self.kept:
            yield "its choices are not complete"
            return
        yield from self._problems_of_choices()
        for k, record in self.at_other_k.items():
            yield from (f"with k = {k}, {problem}" for problem in record._problems())
            if (
                record.kept.keys() != self.kept.keys()
                or record.outputs.keys() != self.outputs.keys()
            ):
                yield f"what it holds with k = {k} is not complete"

    def _problems_of_choices(self) -> Iterator[str]:
        """In what its choices are none."""
        for name, sets in (self.rounded.selected if self.rounded else {}).items():
            if name not in self.selected or sets.shape != self.selected[name].shape:
                yield f"'rounded/{name}' is of shape {sets.shape}"
        for name, sets in self.selected.items():
            if sets.ndim < 2 or self.margin[name].size != math.prod(sets.shape[:-1]):
                yield f"'margin/{name}' is of shape {self.margin[name].shape}"

    def observed(self, values: Mapping[str, str]) -> dict[str, int]:
        """Returns the ONNX element types of the values that hold recorded choices, by name."""
        types = {"f": onnx.TensorProto.FLOAT, "i": onnx.TensorProto.INT64}
        found: dict[str, int] = {}
        for one in (*self.at_other_k.values(), self):
            chosen = {choice: sets.dtype.kind for choice, sets in one.selected.items()}
            found |= {name: types[chosen[c]] for c, name in values.items() if c in chosen}
        return found


def holds_coefficients(chosen: np.ndarray) -> bool:
    """Whether a choice holds coefficients [s, m, n], not the indices of a set [s, k]."""
    return chosen.dtype.kind == "f"


_AT_K = re.compile(r"(k=[1-9]\d*/)")
"""What stands before the names of arrays that are of another k."""

_KEPT = re.compile(r"(k=[1-9]\d*/)?kept/")


def _shared(name: str) -> bool:
    """Whether what is called so is the same with every k."""
    return name in ("x", "dense") or name.startswith("x/")


def _group(arrays: Mapping[str, Item], prefix: str) -> dict[str, Item]:
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}


def chunks(arrays: Fields, size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the inputs in batches of `size`; the last may be smaller."""
    count = len(next(iter(arrays.values())))
    for start in range(0, count, size):
        yield {name: array[start : start + size] for name, array in arrays.items()}


def settled(expected: Reference, tie: float) -> Reference:
    """Returns the reference without the samples in which some choice is a tie.

    For runtimes that do not show what was chosen: in those samples either choice would be right.
    Raises `FeedError` where none is left.
    """
    clear = np.ones(len(expected.x), dtype=bool)
    for margin in expected.margin.values():
        clear &= (margin.reshape(len(clear), -1) > tie).all(axis=1)
    if not clear.any():
        raise FeedError(
            "in every reference input some experts are chosen by less than rounding may change",
            hint="export again with other or more --data",
        )
    return expected.rows(clear)


FEW = 8
"""Experts that are named; of more, how many there are."""


def unreached(
    reached: Mapping[str, frozenset[int]], experts: Mapping[str, int]
) -> dict[str, list[int]]:
    """Returns the experts of each layer that were chosen by no input: they were not compared.

    `experts` are the numbers of the layers' experts; `reached` are those of `Reference.reached`.
    """
    missing = {
        layer: sorted(frozenset(range(experts[layer])) - chosen)
        for layer, chosen in reached.items()
        if layer in experts
    }
    return {layer: indices for layer, indices in missing.items() if indices}


def not_compared(missing: Mapping[str, list[int]], experts: Mapping[str, int]) -> str:
    """Returns in words that some experts were not compared; empty where all were."""
    layers = "; ".join(
        f"{len(indices)} of {experts[layer]} in layer {layer} "
        f"({', '.join(map(str, indices[:FEW]))}{', …' if len(indices) > FEW else ''})"
        for layer, indices in missing.items()
    )
    return f"experts that no input chose were not compared: {layers}" if layers else ""
