"""What PyTorch computed, as a bundle keeps it: the record that graphs are compared with.

It is made once, in PyTorch (`exporter.reference`): the outputs with Algorithm 1, each layer's
chosen experts with the margin by which they were chosen, and the untouched model's outputs. So a
bundle can be verified where its checkpoint and PyTorch are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from ...calibration.feeds import npz_arrays
from ...calibration.shards import Fields
from ...errors import BundleError, FeedError

PARITY_FILE = "parity.npz"


FIRST = ""
"""Stands for the first input, whatever it is called."""


MOST_KEPT = 32
"""Inputs that a bundle keeps to be verified with, where fewer do not reach every expert."""


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
    the graphs makes of it, None where that is not known.
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

    def feeds(self, first: str, count: int | None = None) -> dict[str, np.ndarray]:
        """Returns the inputs by name, up to `count` of each; `first` is that of `x`."""
        return {name: array[:count] for name, array in {first: self.x, **self.inputs}.items()}

    def rows(self, chosen: np.ndarray) -> Reference:
        """Returns the reference of some of the inputs, by their numbers or a mask."""
        arrays = {name: array[chosen] for name, array in self._arrays().items()}
        return Reference._of(arrays, self.kept)

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

    def with_unreached(self, later: Reference, most: int) -> Reference:
        """Returns the reference with those inputs of a later one that choose other experts.

        There are `most` at the most, and none where their shapes are others.
        """
        mine, theirs = self._arrays(), later._arrays()
        shapes = [
            {name: array.shape[1:] for name, array in group.items()} for group in (mine, theirs)
        ]
        if shapes[0] != shapes[1]:
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

    def joined(self, later: Reference) -> Reference:
        """Returns the reference of its own inputs and those of a later one, of the same shapes."""
        added = later._arrays()
        arrays = {n: np.concatenate((array, added[n])) for n, array in self._arrays().items()}
        return Reference._of(arrays, self.kept)

    def save(self, path: Path) -> None:
        """Writes the reference as an `.npz` file."""
        kept = {f"kept/{layer}": np.array(k) for layer, k in self.kept.items()}
        # np.savez takes names as keywords; its own first parameter is positional.
        np.savez(path, **self._arrays(), **kept)  # type: ignore[arg-type]

    def _arrays(self) -> dict[str, np.ndarray]:
        """What there is of each input, by name."""
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
        return arrays

    @staticmethod
    def load(path: Path) -> Reference:
        """Reads a reference; `BundleError` when the file cannot be read."""
        try:
            arrays = dict(npz_arrays(path))
            kept = {layer: int(k) for layer, k in _group(arrays, "kept/").items()}
            record = Reference._of(arrays, kept)
        except (FeedError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise BundleError(f"{path}: not a readable parity record ({error})") from error
        for problem in record._problems():
            raise BundleError(f"{path}: not a readable parity record: {problem}")
        return record

    @staticmethod
    def _of(arrays: Mapping[str, np.ndarray], kept: Mapping[str, int]) -> Reference:
        """The record whose `_arrays` these are."""
        rounded = None
        if "rounded" in arrays:
            rounded = Rounded(arrays["rounded"], _group(arrays, "rounded/"))
        return Reference(
            x=arrays["x"],
            y=arrays["y"],
            dense=arrays["dense"],
            selected=_group(arrays, "selected/"),
            margin=_group(arrays, "margin/"),
            kept=kept,
            inputs=_group(arrays, "x/"),
            outputs=_group(arrays, "y/"),
            rounded=rounded,
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
        for name, sets in rounded.selected.items():
            if name not in self.selected or sets.shape != self.selected[name].shape:
                yield f"'rounded/{name}' is of shape {sets.shape}"
        if self.selected.keys() != self.margin.keys() or not self.kept:
            yield "its choices are not complete"
            return
        for name, sets in self.selected.items():
            if sets.ndim < 2 or self.margin[name].size != math.prod(sets.shape[:-1]):
                yield f"'margin/{name}' is of shape {self.margin[name].shape}"

    def observed(self, values: Mapping[str, str]) -> dict[str, int]:
        """Returns the ONNX element types of the values that hold recorded choices, by name."""
        types = {"f": onnx.TensorProto.FLOAT, "i": onnx.TensorProto.INT64}
        return {
            name: types[self.selected[choice].dtype.kind]
            for choice, name in values.items()
            if choice in self.selected
        }


def holds_coefficients(chosen: np.ndarray) -> bool:
    """Whether a choice holds coefficients [s, m, n], not the indices of a set [s, k]."""
    return chosen.dtype.kind == "f"


def _group(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
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
