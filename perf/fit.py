"""Fits the cost model of `auto` to measured layers: `python -m perf fit`.

The grid of the speed targets gives the constants; a layer that is not on it says how well they
choose. A choice counts as slower than the best only by what the rounds can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
from moexport.bench.results import Results
from moexport.graphs.choices import Precision
from moexport.graphs.lowerings import lowering
from moexport.graphs.lowerings.cost import Machine, Work, machine_for
from scipy.optimize import least_squares

from .layers import HELD_OUT, SHAPES, TOKENS, spec_of
from .tables import Cell, cells

RATES = tuple(field.name for field in fields(Machine) if field.type == "float")
"""The constants that are fitted."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
"""What is measured on a CPU."""

OUTLIER = 0.2
"""Residuals beyond this share are given less weight: single cells are disturbed by other loads."""


def fitted(results: Results, precision: Precision) -> Machine:
    """Returns the constants that predict the measured lowerings of `SHAPES` best."""
    now = machine_for("ort-cpu", precision)
    measured = [
        (lowering(name), work, 1e3 * median)
        for cell in cells(results, SHAPES, precision)
        for name, work, median in _lowered(cell)
    ]

    def machine(logarithms: np.ndarray) -> Machine:
        rates: dict[str, Any] = dict(zip(RATES, np.exp(logarithms).tolist(), strict=True))
        return replace(now, **rates)

    def residuals(logarithms: np.ndarray) -> list[float]:
        rates = machine(logarithms)
        return [float(np.log(how.predict_us(work, rates) / us)) for how, work, us in measured]

    start = np.log([getattr(now, name) for name in RATES])
    return machine(least_squares(residuals, start, loss="soft_l1", f_scale=OUTLIER).x)


def slack(cell: Cell, machine: Machine) -> float:
    """Returns how much slower the predicted best is than the measured best, 0.1 for 10%.

    0 where the two are no further apart than the rounds of either.
    """
    predicted = min(
        _lowered(cell), key=lambda found: lowering(found[0]).predict_us(found[1], machine)
    )[0]
    return cell.slack_of(predicted)


def report(results: Results) -> str:
    """Returns the fitted constants, and the worst choices on both grids with old and new ones."""
    return "\n".join(line for precision in PRECISIONS for line in _report(results, precision))


def _report(results: Results, precision: Precision) -> Iterator[str]:
    if not list(cells(results, SHAPES, precision)):
        yield f"{precision}: not measured"
        return
    now, new = machine_for("ort-cpu", precision), fitted(results, precision)
    yield f"{precision}, fitted to {', '.join(shape.name for shape in SHAPES)}:"
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
