"""`auto` is held against what was measured: benchmarks/results/layers-cpu.json."""

from __future__ import annotations

from pathlib import Path

import moexport
import pytest
from moexport.bench.results import read
from moexport.benchmarks.layers import BATCHES, HELD_OUT, SHAPES
from moexport.benchmarks.tables import AUTO_SLACK, Cell, cells

RESULTS = read(Path(str(moexport.__file__)).parent / "benchmarks" / "results" / "layers-cpu.json")
FLOATS, INTEGERS = (list(cells(RESULTS, SHAPES, name)) for name in ("fp32", "int8"))
HELD_OUT_CELLS = [c for name in ("fp32", "int8") for c in cells(RESULTS, [HELD_OUT], name)]
HELD_OUT_SLACK = 0.10


def name_of(cell: Cell) -> str:
    """What pytest calls a cell."""
    return f"{cell.precision}-n{cell.shape.experts}-batch{cell.batch}-k{cell.k}"


@pytest.mark.parametrize("cell", [*FLOATS, *INTEGERS], ids=name_of)
def test_auto_is_within_15_percent_of_the_best_lowering_measured(cell: Cell) -> None:
    assert cell.auto_slack <= AUTO_SLACK


@pytest.mark.parametrize("cell", HELD_OUT_CELLS, ids=name_of)
def test_auto_is_within_10_percent_on_a_layer_it_was_not_fitted_to(cell: Cell) -> None:
    assert cell.auto_slack <= HELD_OUT_SLACK


def test_the_measured_grid_is_whole() -> None:
    for grid, ks in (
        (FLOATS, {shape: shape.ks for shape in SHAPES}),
        (INTEGERS, {shape: shape.integer_ks for shape in SHAPES}),
    ):
        assert {(c.shape, c.batch, c.k) for c in grid} == {
            (shape, batch, k) for shape in SHAPES for batch in BATCHES for k in ks[shape]
        }
