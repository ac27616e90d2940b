"""One weight tensor of a muMoE layer: which form it is in, read from its names and shapes."""

from __future__ import annotations

from torch import Tensor

from ...errors import CheckpointError
from ...graphs.layers.mumoe_spec import FactorisedSpec, Form
from .base import Tensors

WHOLE, CORE, FACTORS = "weight", "core", "factors"
"""The unfactorised tensor; the core of a Tucker form, beside its factors; factors or TR cores."""

Shapes = list[tuple[int, ...]]


def numbered(tensors: Tensors, name: str) -> list[Tensor]:
    """The tensors `name.0`, `name.1`, … as far as they go."""
    found: list[Tensor] = []
    while (tensor := tensors.get(f"{name}.{len(found)}")) is not None:
        found.append(tensor)
    return found


def tensor_names(spec: FactorisedSpec) -> tuple[str, ...]:
    """The local names of a tensor's factors or cores, in the order of `spec.shapes`."""
    if spec.form == "full":
        return (WHOLE,)
    factors = tuple(f"{FACTORS}.{number}" for number in range(len(spec.modes)))
    return (CORE, *factors) if spec.form == "tucker" else factors


def read_tensor(
    where: str, key: str, tensors: Tensors, levels: tuple[int, ...], dim: int
) -> FactorisedSpec:
    """Returns what the tensors under `key` are, for a layer with those levels and that input width.

    Raises CheckpointError where they do not fit each other, the levels or the input.
    """
    factors = [tuple(t.shape) for t in numbered(tensors, FACTORS)]
    if WHOLE in tensors:
        form: Form = "full"
        modes, ranks = _whole(where, key, tuple(tensors[WHOLE].shape), levels)
    else:
        _check_count(where, key, factors, levels)
        if CORE in tensors:
            form = "tucker"
            modes, ranks = _tucker(where, key, tuple(tensors[CORE].shape), factors)
        elif {len(shape) for shape in factors} == {2}:
            form = "cp"
            modes, ranks = _cp(where, key, factors)
        else:
            form = "tr"
            modes, ranks = _tr(where, key, factors)
    what = f"{key}.{WHOLE} is" if form == "full" else f"{key}.{FACTORS} are"
    if modes[:-2] != levels:
        raise CheckpointError(
            f"{where}: {what} for {list(modes[:-2])} experts by level, but projs.* for "
            f"{list(levels)}"
        )
    if modes[-2] not in (dim, dim + 1):
        source = WHOLE if form == "full" else f"{FACTORS}.{len(levels)}"
        raise CheckpointError(
            f"{where}: {key}.{source} takes inputs of width {modes[-2]}, expected {dim}, or "
            f"{dim + 1} with a bias row"
        )
    return FactorisedSpec(form, levels, dim, modes[-1], ranks, bias=modes[-2] == dim + 1)


def _check_count(where: str, key: str, factors: Shapes, levels: tuple[int, ...]) -> None:
    if len(factors) != len(levels) + 2:
        raise CheckpointError(
            f"{where}: {key} has {len(factors)} factors, but {len(levels)} levels of experts "
            f"(projs.*) need {len(levels) + 2}",
            hint="one factor per level, one for the input and one for the output: is the "
            "checkpoint complete?",
        )


Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""The sizes of a tensor's modes, and its ranks."""


def _whole(where: str, key: str, shape: tuple[int, ...], levels: tuple[int, ...]) -> Sizes:
    if len(shape) != len(levels) + 2:
        raise CheckpointError(
            f"{where}: {key}.{WHOLE} has the shape {list(shape)}, but {len(levels)} levels of "
            f"experts (projs.*) need {len(levels) + 2} axes: [n, …, d, o]",
        )
    if 0 in shape:
        raise CheckpointError(f"{where}: {key}.{WHOLE} holds a size of zero: {list(shape)}")
    return shape, ()


def _tucker(where: str, key: str, core: tuple[int, ...], factors: Shapes) -> Sizes:
    if any(len(shape) != 2 for shape in factors):
        raise CheckpointError(
            f"{where}: {key}.{FACTORS} beside a {CORE} are not matrices [n, R]: {_listed(factors)}"
        )
    ranks = tuple(shape[1] for shape in factors)
    if core != ranks:
        raise CheckpointError(
            f"{where}: {key}.{CORE} has the shape {list(core)}, but the ranks of {key}.{FACTORS} "
            f"are {list(ranks)}",
            hint="the core of a Tucker form has one axis per factor, of that factor's rank",
        )
    _check_sizes(where, key, factors)
    return tuple(shape[0] for shape in factors), ranks


def _cp(where: str, key: str, factors: Shapes) -> Sizes:
    _check_sizes(where, key, factors)
    if len({shape[1] for shape in factors}) > 1:
        raise CheckpointError(
            f"{where}: {key}.{FACTORS} do not share one rank R: {_listed(factors)}"
        )
    return tuple(shape[0] for shape in factors), factors[0][1:]


def _tr(where: str, key: str, factors: Shapes) -> Sizes:
    if any(len(shape) != 3 for shape in factors):
        raise CheckpointError(
            f"{where}: {key}.{FACTORS} are neither CP [n, R] nor TR [r, n, r']: {_listed(factors)}"
        )
    _check_sizes(where, key, factors)
    following = [*factors[1:], factors[0]]
    if any(shape[2] != after[0] for shape, after in zip(factors, following, strict=True)):
        raise CheckpointError(
            f"{where}: {key}.{FACTORS} do not chain: each ends with the next one's rank: "
            f"{_listed(factors)}",
            hint="the ring of a TR layer closes: the last core ends with the first one's rank",
        )
    return tuple(shape[1] for shape in factors), tuple(shape[0] for shape in factors)


def _check_sizes(where: str, key: str, factors: Shapes) -> None:
    if any(0 in shape for shape in factors):
        raise CheckpointError(
            f"{where}: {key}.{FACTORS} hold a size or a rank of zero: {_listed(factors)}"
        )


def _listed(shapes: Shapes) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
