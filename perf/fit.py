"""Fits the cost model of `auto` to measured layers: `python -m perf fit`.

The grid of the speed targets and layers of many sizes (`perf.auto`) give the constants; layers that
are not among them say how well they choose. A choice counts as slower than the best only by what
the rounds can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from moexport.bench.results import Results
from moexport.graphs.choices import Precision
from moexport.graphs.lowerings import lowering
from moexport.graphs.lowerings.cost import Machine, Work, machine_for
from scipy.optimize import least_squares

from . import auto
from .layers import HELD_OUT, SHAPES, TOKENS, spec_of
from .tables import Cell, cells

RATES = tuple(field.name for field in fields(Machine) if field.type == "float")
"""The constants that are fitted."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
"""What is measured on a CPU."""

OUTLIER = 0.2
"""Residuals beyond this share are given less weight: single cells are disturbed by other loads."""


Measured = tuple[str, Work, float, float]
"""A lowering, its work, the microseconds that it took, and how much it counts."""


def of_grid(results: Results, precision: Precision) -> list[Measured]:
    """Returns what was measured of `SHAPES`."""
    return [
        (name, work, 1e3 * median, _weight(median, min(cell.medians[n] for n in cell.lowerings)))
        for cell in cells(results, SHAPES, precision)
        for name, work, median in _lowered(cell)
    ]


def of_layers(measured: Iterable[auto.Cell], precision: Precision) -> list[Measured]:
    """Returns what was measured of layers of many sizes."""
    return [
        (name, cell.work, 1e3 * ms, _weight(ms, cell.best))
        for cell in measured
        if cell.precision == precision
        for name, ms in cell.ms.items()
    ]


def _weight(time: float, best: float) -> float:
    """What is far from the best is never chosen: how far matters less."""
    return float((best / time) ** 0.5)


def fitted(measured: Sequence[Measured], precision: Precision) -> Machine:
    """Returns the constants that predict the measured lowerings best."""
    now = machine_for("ort-cpu", precision)
    rates = [name for name in RATES if getattr(now, name) > 0]

    def machine(logarithms: np.ndarray) -> Machine:
        values: dict[str, Any] = dict(zip(rates, np.exp(logarithms).tolist(), strict=True))
        return replace(now, **values)

    def residuals(logarithms: np.ndarray) -> list[float]:
        tried = machine(logarithms)
        return [
            weight * float(np.log(lowering(name).predict_us(work, tried) / us))
            for name, work, us, weight in measured
        ]

    start = np.log([getattr(now, name) for name in rates])
    return machine(least_squares(residuals, start, loss="soft_l1", f_scale=OUTLIER).x)


def slack(cell: Cell, machine: Machine) -> float:
    """Returns how much slower the predicted best is than the measured best, 0.1 for 10%.

    0 where the two are no further apart than the rounds of either.
    """
    predicted = min(
        _lowered(cell), key=lambda found: lowering(found[0]).predict_us(found[1], machine)
    )[0]
    return cell.slack_of(predicted)


def report(results: Results, layers: Sequence[auto.Cell] = ()) -> str:
    """Returns the fitted constants, and the worst choices on both grids with old and new ones.

    They are fitted to the `layers` that were measured for it, too.
    """
    return "\n".join(
        line for precision in PRECISIONS for line in _report(results, layers, precision)
    )


def _report(results: Results, layers: Sequence[auto.Cell], precision: Precision) -> Iterator[str]:
    measured = [*of_grid(results, precision), *of_layers(layers, precision)]
    if not measured:
        yield f"{precision}: not measured"
        return
    now, new = machine_for("ort-cpu", precision), fitted(measured, precision)
    yield f"{precision}, fitted to {len(measured)} times of single layers:"
    for name in RATES:
        yield f"    {name} = {getattr(new, name):.3g}  (now {getattr(now, name):.3g})"
    for grid_name, shapes in (("the grid", SHAPES), (f"held out, {HELD_OUT.name}", (HELD_OUT,))):
        grid = list(cells(results, shapes, precision))
        if not grid:
            yield f"{grid_name}: not measured"
            continue
        for label, machine in (("now", now), ("fitted", new)):
            worst = max(grid, key=lambda cell: slack(cell, machine))
            yield (
                f"{grid_name}, {label}: `auto` at most {slack(worst, machine):.0%} slower than the "
                f"best ({worst.shape.name}, batch {worst.batch}, k = {worst.k}; "
                f"{len(grid)} cells)"
            )


def _lowered(cell: Cell) -> Iterator[tuple[str, Work, float]]:
    work = Work(spec_of(cell.shape), cell.k, cell.batch, TOKENS)
    for name in cell.lowerings:
        yield name, work, cell.medians[name]
