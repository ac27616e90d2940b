"""`auto` is held against what was measured: with VNNI, without it, and beside other work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import moexport
import numpy as np
import pytest
from moexport.bench.results import read
from moexport.graphs.targets import Precision
from moexport.perf.layers import auto
from moexport.perf.layers.soft_moe import BATCHES, HELD_OUT, SHAPES, Layer
from moexport.perf.layers.tables import AUTO_SLACK, Cell, cells

FOLDER = Path(str(moexport.__file__)).parent / "perf" / "results"
FILES = ("layers-cpu", "layers-vnni-cpu", "layers-loaded-cpu")
MACHINES = {name: read(FOLDER / f"{name}.json") for name in FILES}
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
HELD_OUT_SLACK = 0.10
MEDIAN, HIGH, LEAST_CELLS = 1.02, 1.3, 60


def name_of(cell: Cell) -> str:
    """What a cell is called."""
    return f"{cell.precision}-n{cell.layer.experts}-batch{cell.batch}-k{cell.k}"


def too_slow(machine: str, layers: Sequence[Layer], slack: float) -> list[str]:
    """The cells of a machine's table in which the choice of `auto` is further from the best."""
    found = [
        cell for precision in PRECISIONS for cell in cells(MACHINES[machine], layers, precision)
    ]
    assert found
    return [f"{name_of(cell)}: {cell.auto_slack:.0%}" for cell in found if cell.auto_slack > slack]


@pytest.mark.parametrize("machine", list(MACHINES))
def test_auto_is_within_15_percent_of_the_best_lowering_measured(machine: str) -> None:
    assert too_slow(machine, SHAPES, AUTO_SLACK) == []


@pytest.mark.parametrize("machine", list(MACHINES))
def test_auto_is_within_10_percent_on_a_layer_it_was_not_fitted_to(machine: str) -> None:
    assert too_slow(machine, (HELD_OUT,), HELD_OUT_SLACK) == []


@pytest.mark.parametrize("machine", list(MACHINES))
def test_the_measured_grid_is_whole(machine: str) -> None:
    for precision in PRECISIONS:
        found = {(c.layer, c.batch, c.k) for c in cells(MACHINES[machine], SHAPES, precision)}
        assert found == {
            (layer, batch, k)
            for layer in SHAPES
            for batch in BATCHES
            for k in (layer.ks if precision == "fp32" else layer.integer_ks)
        }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("choice", [auto.chosen, auto.chosen_by_batch])
def test_on_small_layers_that_no_constant_has_seen_auto_is_near_the_best(
    precision: Precision, choice: auto.Choice
) -> None:
    """Where neither time was disturbed: single cells may be, in all of their rounds."""
    cells = auto.read_cells(FOLDER / "auto-cpu.json", auto.HELD_OUT)
    chosen = [(cell, choice(cell)) for cell in cells if cell.precision == precision]
    found = [cell.ratio(name) for cell, name in chosen if cell.undisturbed(name)]
    assert len(found) >= LEAST_CELLS
    assert np.median(found) <= MEDIAN
    assert np.quantile(found, 0.95) <= HIGH
