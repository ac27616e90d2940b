"""Fits the cost model of `auto` to measured layers: `python -m benchmarks fit`.

The grid of the speed targets gives the constants; a layer that is not on it says how well they
choose. A choice counts as slower than the best only by what the rounds can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
from moexport.bench.results import Results
from moexport.graphs.cost import CPU, Machine, predict_us
from moexport.graphs.lowerings.base import Work
from moexport.graphs.lowerings.registry import lowering
from scipy.optimize import least_squares

from .layers import HELD_OUT, SHAPES, TOKENS, spec_of
from .tables import Cell, cells

RATES = tuple(field.name for field in fields(Machine) if field.type == "float")
"""The constants that are fitted."""

OUTLIER = 0.2
"""Residuals beyond this share are given less weight: single cells are disturbed by other loads."""


def fitted(results: Results) -> Machine:
    """Returns the constants that predict the measured lowerings of `SHAPES` best."""
    measured = [
        (lowering(name), work, 1e3 * median)
        for cell in cells(results, SHAPES)
        for name, work, median in _lowered(cell)
    ]

    def residuals(logarithms: np.ndarray) -> list[float]:
        machine = _machine(logarithms)
        return [float(np.log(predict_us(how, work, machine) / us)) for how, work, us in measured]

    start = np.log([getattr(CPU, name) for name in RATES])
    found = least_squares(residuals, start, loss="soft_l1", f_scale=OUTLIER)
    return _machine(found.x)


def _machine(logarithms: np.ndarray) -> Machine:
    rates: dict[str, Any] = dict(zip(RATES, np.exp(logarithms).tolist(), strict=True))
    return replace(CPU, **rates)


def slack(cell: Cell, machine: Machine) -> float:
    """Returns how much slower the predicted best is than the measured best, 0.1 for 10%.

    0 where the two are no further apart than the rounds of either.
    """
    predicted = min(
        _lowered(cell), key=lambda found: predict_us(lowering(found[0]), found[1], machine)
    )[0]
    return cell.slack_of(predicted)


def report(results: Results) -> str:
    """Returns the fitted constants, and the worst choices on both grids with old and new ones."""
    new = fitted(results)
    lines = ["fitted to " + ", ".join(shape.name for shape in SHAPES) + ":"]
    lines += [
        f"    {name} = {getattr(new, name):.3g}  (now {getattr(CPU, name):.3g})" for name in RATES
    ]
    for name, shapes in (("the grid", SHAPES), (f"held out, {HELD_OUT.name}", (HELD_OUT,))):
        grid = list(cells(results, shapes))
        if not grid:
            lines.append(f"{name}: not measured")
            continue
        for label, machine in (("now", CPU), ("fitted", new)):
            worst = max(grid, key=lambda cell: slack(cell, machine))
            lines.append(
                f"{name}, {label}: `auto` at most {slack(worst, machine):.0%} slower than the best "
                f"({worst.shape.name}, batch {worst.batch}, k = {worst.k}; {len(grid)} cells)"
            )
    return "\n".join(lines)


def _lowered(cell: Cell) -> Iterator[tuple[str, Work, float]]:
    work = Work(spec_of(cell.shape), cell.k, cell.batch, TOKENS)
    for name in cell.lowerings:
        yield name, work, cell.medians[name]
