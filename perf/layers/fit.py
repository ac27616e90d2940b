"""Fits the cost model of `auto` to measured layers: `python -m perf fit`.

The constants are fitted to the grid of the speed targets and to layers of many sizes
(`perf.layers.auto`); other layers show how good the resulting choices are. A choice counts as
slower than the best only if the difference exceeds the spread of the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from moexport.bench.results import Results
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.lowerings.base import SoftMoEPlan
from moexport.graphs.lowerings.cost import machine_for
from moexport.graphs.targets import Machine, Precision, Target
from scipy.optimize import least_squares

from . import auto
from .soft_moe import HELD_OUT, SHAPES
from .tables import Cell, cells

LOWERINGS = lowerings_of("soft-moe")

MEASURED = ("sort_us",)
"""Constants that are not fitted: they were measured in graphs of only these nodes."""

RATES = tuple(
    field.name for field in fields(Machine) if field.type == "float" and field.name not in MEASURED
)
"""The constants that are fitted."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
"""The precisions measured on a CPU."""

OUTLIER = 0.2
"""Larger residuals have less weight, because other work disturbed single cells."""

DISTURBED = 1.3
"""Above this ratio of median to least time, other work disturbed a cell, which then counts less."""

PENALTY = 0.1
"""The penalty for changing a constant by a factor e, in residuals: those with little data stay."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A lowering's time for a target's work, in microseconds, and its weight."""

    lowering: str
    plan: SoftMoEPlan
    target: Target
    us: float
    weight: float


def of_grid(results: Results, precision: Precision) -> list[Measured]:
    """Returns the measurements of `SHAPES`."""
    return [
        Measured(
            *(name, _plan(cell), "ort-cpu", 1e3 * median),
            _weight(median, min(cell.lowerings.values())),
        )
        for cell in cells(results, SHAPES, precision)
        for name, median in cell.lowerings.items()
    ]


def of_layers(measured: Iterable[auto.Cell], precision: Precision) -> list[Measured]:
    """Returns the measurements of layers of many sizes."""
    return [
        Measured(
            *(name, cell.plan, cell.target, 1e3 * ms),
            _weight(ms, cell.best) * min(1.0, DISTURBED * ms / cell.medians[name]),
        )
        for cell in measured
        if cell.precision == precision
        for name, ms in cell.ms.items()
    ]


def _weight(time: float, best: float) -> float:
    """Returns a time's weight: a lowering far from the best, which is never chosen, counts less."""
    return float((best / time) ** 0.5)


def fitted(measured: Sequence[Measured], precision: Precision) -> dict[str, float]:
    """Returns the constants that predict the measured lowerings best."""
    now = machine_for("ort-cpu", precision)
    rates = [name for name in RATES if 0 < getattr(now, name) < math.inf]
    start = np.log([getattr(now, name) for name in rates])

    def constants(logarithms: np.ndarray) -> dict[str, float]:
        return dict(zip(rates, np.exp(logarithms).tolist(), strict=True))

    def residuals(logarithms: np.ndarray) -> list[float]:
        tried = {each: machine(each, precision, constants(logarithms)) for each in CPU_TARGETS}
        found = []
        for each in measured:
            predicted = LOWERINGS[each.lowering].predict_us(each.plan, tried[each.target])
            off = float(np.log(predicted / each.us))
            found.append(each.weight * off)
        return [*found, *(PENALTY * (logarithms - start)).tolist()]

    return constants(least_squares(residuals, start, loss="soft_l1", f_scale=OUTLIER).x)


CPU_TARGETS: tuple[Target, ...] = ("ort-cpu", "onnx")


def machine(target: Target, precision: Precision, constants: Mapping[str, float]) -> Machine:
    """Returns the machine of a target with other constants."""
    values: dict[str, Any] = dict(constants)
    return replace(machine_for(target, precision), **values)


def slack(cell: Cell, rates: Machine) -> float:
    """Returns how much slower the predicted best is than the measured best, 0.1 for 10%.

    Returns 0 if the difference is within the spread of the rounds.
    """
    plan = _plan(cell)
    predicted = min(cell.lowerings, key=lambda name: LOWERINGS[name].predict_us(plan, rates))
    return cell.slack_of(predicted)


def _plan(cell: Cell) -> SoftMoEPlan:
    return cell.layer.plan(cell.k, cell.batch, cell.precision)


def report(machines: Sequence[Results], layers: Sequence[auto.Cell] = ()) -> str:
    """Returns the fitted constants, and the worst choices on both grids with old and new constants.

    They are fitted to the grids of all machines and to the `layers` that were measured for it.
    """
    return "\n".join(line for each in PRECISIONS for line in _report(machines, layers, each))


def _report(
    machines: Sequence[Results], layers: Sequence[auto.Cell], precision: Precision
) -> Iterator[str]:
    grids = [each for results in machines for each in of_grid(results, precision)]
    measured = [*grids, *of_layers(layers, precision)]
    if not measured:
        yield f"{precision}: not measured"
        return
    now, constants = machine_for("ort-cpu", precision), fitted(measured, precision)
    new = machine("ort-cpu", precision, constants)
    yield f"{precision}, fitted to {len(measured)} times of single layers:"
    for name, value in constants.items():
        yield f"    {name} = {value:.3g}  (now {getattr(now, name):.3g})"
    for grid_name, shapes in (("the grid", SHAPES), (f"held out, {HELD_OUT.name}", (HELD_OUT,))):
        grid = [cell for each in machines for cell in cells(each, shapes, precision)]
        if not grid:
            yield f"{grid_name}: not measured"
            continue
        for label, rates in (("now", now), ("fitted", new)):
            worst = max(grid, key=lambda cell: slack(cell, rates))
            yield (
                f"{grid_name}, {label}: `auto` at most {slack(worst, rates):.0%} slower than the "
                f"best ({worst.layer.name}, batch {worst.batch}, k = {worst.k}; "
                f"{len(grid)} cells)"
            )
