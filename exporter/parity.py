"""Compares an exported graph with its PyTorch model: the values, and what its layers chose.

The reference is recorded once, in PyTorch: the outputs with Algorithm 1, each layer's chosen
experts with the margin by which they were chosen, and the untouched model's outputs. It is kept in
the bundle, so that a bundle can be verified where its checkpoint is not.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from ..errors import BundleError, FeedError, ParityError
from ..graphs.layers.base import MoELayer, algorithm_1, choice_key, recorded_choices
from ..graphs.lower import LayerValues
from .model import Model
from .options import Tolerance
from .session import Runner, Session, SessionOptions

PARITY_FILE = "parity.npz"

TIE = 1e-5
"""FP32 scores this close, relative to the k-th, are a tie: rounding may order them either way."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What PyTorch computes for some inputs.

    `x` are the inputs, `y` the outputs with Algorithm 1, `dense` those of the untouched model with
    all experts. By choice (`moe.choice_key`), `selected` holds the chosen experts [s, k],
    ascending, or the kept coefficients [s, m, n], and `margin` [s] or [s, m] the gap from the k-th
    score to the next, relative to the k-th. `kept` is each layer's k.
    """

    x: np.ndarray
    y: np.ndarray
    dense: np.ndarray
    selected: Mapping[str, np.ndarray]
    margin: Mapping[str, np.ndarray]
    kept: Mapping[str, int]

    def save(self, path: Path) -> None:
        """Writes the reference as an `.npz` file."""
        arrays = {"x": self.x, "y": self.y, "dense": self.dense}
        for choice in self.selected:
            arrays[f"selected/{choice}"] = self.selected[choice]
            arrays[f"margin/{choice}"] = self.margin[choice]
        for layer, k in self.kept.items():
            arrays[f"kept/{layer}"] = np.array(k)
        # np.savez takes names as keywords; its own first parameter is positional.
        np.savez(path, **arrays)  # type: ignore[arg-type]

    @staticmethod
    def load(path: Path) -> Reference:
        """Reads a reference; `BundleError` when the file cannot be read."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = dict(stored)
            return Reference(
                x=arrays["x"],
                y=arrays["y"],
                dense=arrays["dense"],
                selected=_group(arrays, "selected/"),
                margin=_group(arrays, "margin/"),
                kept={layer: int(k) for layer, k in _group(arrays, "kept/").items()},
            )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise BundleError(f"{path}: not a readable parity record ({error})") from error

    def observed(self, values: Mapping[str, str]) -> dict[str, int]:
        """Returns the ONNX element types of the values that hold recorded choices, by name."""
        types = {"f": onnx.TensorProto.FLOAT, "i": onnx.TensorProto.INT64}
        return {
            name: types[self.selected[choice].dtype.kind]
            for choice, name in values.items()
            if choice in self.selected
        }


def _group(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class Parity:
    """How far a graph is from its reference.

    `max_abs` is the largest difference of an output, `max_rel` the same over max|y|, `cosine` the
    smallest cosine of a sample's outputs. `routing_agreement` is the share of samples in which
    every layer chose the same set, and of a muMoE below FP32 the share of tokens of its layers;
    `ties` counts the samples that differ only where scores were equal up to rounding. Values are
    compared where the sets are the same. `first_difference` names the layer
    where the first wrong set appears. `untouched_cosine` compares with the model before
    Algorithm 1. `jaccard` is the mean overlap of the sets, and `flip_margin` the largest margin,
    relative to the k-th score, of a set that differs (0 where none does). `routing` and `tie` are
    the bounds (`tolerance.Tolerance`).
    """

    max_abs: float
    max_rel: float
    cosine: float
    routing_agreement: float
    samples: int
    ties: int
    atol: float
    rtol: float
    passed: bool
    first_difference: str | None
    untouched_cosine: float
    jaccard: float = 1.0
    flip_margin: float = 0.0
    routing: float = 1.0
    tie: float = TIE
    coefficient: float = 1e-3

    def as_json(self) -> dict[str, Any]:
        """The record as it stands in a manifest."""
        return asdict(self)


@torch.no_grad()
def reference(
    model: Model, x: np.ndarray, kept: Mapping[str, int], *, renormalize: bool, batch: int
) -> Reference:
    """Returns what PyTorch computes for inputs x, in batches of `batch`."""
    original = model.original if model.original is not None else model.module
    dense, y = [], []
    specs = {name: layer.spec for name, layer in model.layers.items()}
    choosing = {
        choice_key(name, choice)
        for name, k in kept.items()
        for choice in specs[name].choices()
        if k < specs[name].experts
    }
    selected: dict[str, list[np.ndarray]] = {}
    margin: dict[str, list[np.ndarray]] = {}
    for part in _batches(x, batch):
        tokens = torch.from_numpy(np.ascontiguousarray(part))
        dense.append(first_output(original(tokens)).numpy())
        with (
            algorithm_1(model.module, dict(kept), renormalize=renormalize),
            recorded_choices(model.module) as records,
        ):
            y.append(first_output(model.module(tokens)).numpy())
        for name, choice in records.items():
            if name in choosing:
                selected.setdefault(name, []).append(choice.chosen.numpy())
                margin.setdefault(name, []).append(choice.margin.numpy())
    return Reference(
        x=x,
        y=np.concatenate(y),
        dense=np.concatenate(dense),
        selected={name: np.concatenate(sets) for name, sets in selected.items()},
        margin={name: np.concatenate(gaps) for name, gaps in margin.items()},
        kept=dict(kept),
    )


def compare(
    session: Runner,
    expected: Reference,
    selected_values: Mapping[str, str],
    *,
    batch: int,
    tolerance: Tolerance,
    k: int | None = None,
) -> Parity:
    """Runs a graph on the reference's inputs and returns how far it is off.

    `selected_values` names the graph's value that holds a layer's chosen experts, for the layers
    that choose. `batch` should differ from the size that was traced.
    """
    outputs: list[np.ndarray] = []
    # With k as an input a layer may choose at run time what it keeps whole at the k compared here.
    compared_values = {n: v for n, v in selected_values.items() if n in expected.selected}
    chosen: dict[str, list[np.ndarray]] = {name: [] for name in compared_values}
    for part in _batches(expected.x, batch):
        values = session.run(part, k)
        outputs.append(values[session.output_names[0]])
        for name, value in compared_values.items():
            chosen[name].append(values[value])
    y = np.concatenate(outputs)
    if y.shape != expected.y.shape:
        raise ParityError(
            f"the graph gives outputs {y.shape}, the reference holds {expected.y.shape}"
        )
    sets = {name: np.concatenate(parts) for name, parts in chosen.items()}
    routing = _routing(expected, sets, tolerance)
    return _parity(expected, y, routing, tolerance)


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
    return Reference(
        x=expected.x[clear],
        y=expected.y[clear],
        dense=expected.dense[clear],
        selected={name: chosen[clear] for name, chosen in expected.selected.items()},
        margin={name: margin[clear] for name, margin in expected.margin.items()},
        kept=expected.kept,
    )


def describe(parity: Parity) -> str:
    """One line about a parity result."""
    text = (
        f"max |difference| {parity.max_abs:.2g} ({parity.max_rel:.2g} of max|y|), "
        f"cosine {parity.cosine:.7f}, same experts in {parity.routing_agreement:.0%} of "
        f"{parity.samples} inputs"
    )
    if parity.ties:
        text += f" ({parity.ties} tied, not compared)"
    if parity.first_difference:
        text += f"; first difference in layer {parity.first_difference}"
    if parity.flip_margin:
        text += f"; flips at margins up to {parity.flip_margin:.1g} of the k-th score"
    return text


@dataclass(frozen=True, slots=True)
class _Routing:
    """How a graph's choices compare: samples that differ by a tie, [s], and the agreement.

    `same` tells what to compare, samples [s] or tokens [s, m]; `first` names the first layer that
    truly differs; `jaccard` is the mean overlap of the sets, and `margin` the largest margin of a
    choice that differs.
    """

    ties: np.ndarray
    agreement: float
    same: np.ndarray
    first: str | None
    jaccard: float
    margin: float


def _routing(expected: Reference, sets: Mapping[str, np.ndarray], tolerance: Tolerance) -> _Routing:
    """Compares what was chosen with the reference.

    After the first difference of a sample its later layers see other inputs, so only the first
    counts as a tie or a miss; all count for the overlap. Of tokens that choose for themselves,
    and may differ here and there, each counts by itself.
    """
    # By layer, each [s, places that choose]; what differs by more than a tie is wrong.
    differs = {name: _different(sets[name], expected.selected[name], tolerance) for name in sets}
    margins = {name: expected.margin[name].reshape(differs[name].shape) for name in sets}
    wrong = {name: differs[name] & (margins[name] > tolerance.tie) for name in sets}
    ties = np.zeros(len(expected.x), dtype=bool)
    misses = np.zeros_like(ties)
    first: str | None = None
    margin = 0.0
    for name in sets:
        fresh = differs[name] & ~(ties | misses)[:, None]
        margin = max(margin, float(margins[name][fresh].max(initial=0.0)))
        missed = (fresh & wrong[name]).any(axis=1)
        if first is None and missed.any():
            first = name
        ties |= fresh.any(axis=1) & ~missed
        misses |= missed
    agreement, same = 1.0 - float(misses.mean()), ~(ties | misses)
    if tolerance.routing < 1.0 and any(_is_mumoe(chosen) for chosen in sets.values()):
        total = sum(each.size for each in wrong.values())
        agreement = sum(int((~each).sum()) for each in wrong.values()) / total
        same = _same_tokens(list(differs.values()), expected.y.shape)
    overlaps = [_jaccard(sets[name], expected.selected[name]) for name in sets]
    overlap = float(np.mean(overlaps)) if overlaps else 1.0
    return _Routing(ties, agreement, same, first, overlap, margin)


def _same_tokens(differs: Sequence[np.ndarray], output: tuple[int, ...]) -> np.ndarray:
    """What is to be compared where tokens choose for themselves and some may differ.

    Those are the tokens [s, m] that chose alike in every layer, where outputs of this shape have
    these tokens; else the samples [s] all of whose tokens did, or all samples where there is none.
    """
    tokens = all(each.shape == output[:2] and len(output) > each.ndim for each in differs)
    each_alike = [~each if tokens else ~each.any(axis=1) for each in differs]
    same: np.ndarray = np.logical_and.reduce(each_alike)
    return same if tokens or same.any() else np.ones_like(same)


def _is_mumoe(chosen: np.ndarray) -> bool:
    """Whether a choice holds coefficients [s, m, n], not the indices of a set [s, k]."""
    return chosen.dtype.kind == "f"


def _jaccard(actual: np.ndarray, expected: np.ndarray) -> float:
    """The mean overlap of two choices: of sets of experts [s, k], or of non-zero coefficients."""
    if _is_mumoe(expected):
        one, other = actual > 0, expected > 0
        shares = (one & other).sum(axis=-1) / np.maximum(1, (one | other).sum(axis=-1))
        return float(shares.mean())
    k = expected.shape[1]
    common = (actual[:, :, None] == expected[:, None, :]).any(axis=2).sum(axis=1)
    return float((common / (2 * k - common)).mean())


def _different(actual: np.ndarray, expected: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    """Where two choices differ: [s, 1] for sets of experts [s, k], [s, m] for coefficients.

    Below FP32 the rounding before a layer moves its coefficients, so that experts count which only
    one of both has kept.
    """
    if _is_mumoe(expected):
        off = np.abs(actual - expected)
        if tolerance.routing < 1.0:
            off = np.where((actual > 0) == (expected > 0), 0.0, off)
        different: np.ndarray = (off > tolerance.coefficient).any(axis=-1)
        return different
    other: np.ndarray = (np.sort(actual, axis=1) != expected).any(axis=1, keepdims=True)
    return other


def _parity(expected: Reference, y: np.ndarray, routing: _Routing, tolerance: Tolerance) -> Parity:
    same = routing.same.reshape(*routing.same.shape, *(1,) * (y.ndim - routing.same.ndim))
    actual = np.where(same, y, 0.0).astype(np.float64)
    wanted = np.where(same, expected.y, 0.0).astype(np.float64)
    largest = float(np.abs(wanted).max(initial=0.0))
    max_abs = float(np.abs(actual - wanted).max(initial=0.0))
    finite = bool(np.isfinite(actual).all())
    close = finite and max_abs <= tolerance.atol + tolerance.rtol * largest
    return Parity(
        max_abs=max_abs,
        max_rel=max_abs / largest if largest else 0.0,
        cosine=float(cosines(actual, wanted).min(initial=1.0)),
        routing_agreement=routing.agreement,
        samples=len(y),
        ties=int(routing.ties.sum()),
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        passed=bool(close and routing.agreement >= tolerance.routing and same.any()),
        first_difference=routing.first,
        untouched_cosine=float(cosines(y, expected.dense).min(initial=1.0)),
        jaccard=routing.jaccard,
        flip_margin=routing.margin,
        routing=tolerance.routing,
        tie=tolerance.tie,
        coefficient=tolerance.coefficient,
    )


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the cosine of each sample's outputs, [s, …], [s, …] → [s], in float64.

    1 where both are zero, 0 where one is, or where a number is not finite.
    """
    a, b = (part.reshape(len(part), -1).astype(np.float64) for part in (a, b))
    zero = ~a.any(axis=1) & ~b.any(axis=1)
    with np.errstate(invalid="ignore"):
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        found = np.where(zero, 1.0, (a * b).sum(axis=1) / np.where(norms == 0, 1.0, norms))
    return np.where(np.isfinite(found), found, 0.0)


def _batches(x: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(x), size):
        yield x[start : start + size]


def first_output(output: Any) -> torch.Tensor:
    """Returns a backbone's output tensor; published layers give a tuple with auxiliary values."""
    value = output[0] if isinstance(output, tuple) else output
    assert isinstance(value, torch.Tensor)
    return value


@torch.no_grad()
def first_different_layer(
    model: Model,
    path: Path,
    values: Mapping[str, LayerValues],
    expected: Reference,
    *,
    renormalize: bool,
    rtol: float,
    batch: int,
) -> str:
    """Returns where the first difference appears, in words: a layer, or the network around it.

    The inputs and outputs of every MoE layer are compared in order, on the first `batch` inputs.
    """
    x = expected.x[:batch]
    names = {name for layer in values.values() for name in (layer.input, layer.output)}
    observe = dict.fromkeys(sorted(names), onnx.TensorProto.FLOAT)
    session = Session(path, SessionOptions(plan_memory=False, observe=observe, rounded=True))
    actual = session.run(x, next(iter(expected.kept.values())) if session.takes_k else None)
    seen = _layer_values(model, x, expected.kept, renormalize=renormalize)
    before = "the network before it"
    for name, layer in values.items():
        wanted_input, wanted_output = seen[name]
        if _differs(actual[layer.input], wanted_input, rtol):
            return f"{before}, at the input of layer {name}"
        if _differs(actual[layer.output], wanted_output, rtol):
            return f"layer {name}"
        before = f"the network after layer {name}"
    return f"{before.replace('before it', 'before the layers')}, at the output"


def _layer_values(
    model: Model, x: np.ndarray, kept: Mapping[str, int], *, renormalize: bool
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each MoE layer's input and output in PyTorch, with Algorithm 1."""
    seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any, name: str) -> None:
        assert isinstance(module, MoELayer)
        seen[name] = (module.tokens(args[0]).numpy(), output.numpy())

    with ExitStack() as hooks, algorithm_1(model.module, dict(kept), renormalize=renormalize):
        for name, layer in model.layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(record, name=name)))
        model.module(torch.from_numpy(np.ascontiguousarray(x)))
    return seen


def _differs(actual: np.ndarray, wanted: np.ndarray, rtol: float) -> bool:
    largest = float(np.abs(wanted).max(initial=0.0))
    return not bool(np.abs(actual - wanted).max(initial=0.0) <= rtol * largest)
