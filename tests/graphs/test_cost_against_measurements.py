"""`auto` is held against what was measured: benchmarks/results/layers-cpu.json."""

from __future__ import annotations

from pathlib import Path

import moexport
import pytest
from moexport.bench.results import read
from moexport.benchmarks.tables import AUTO_SLACK, Cell, cells

RESULTS = Path(str(moexport.__file__)).parent / "benchmarks" / "results" / "layers-cpu.json"
CELLS = list(cells(read(RESULTS)))


@pytest.mark.parametrize(
    "cell", CELLS, ids=[f"{c.shape.name}-batch{c.batch}-k{c.k}".replace(" ", "") for c in CELLS]
)
def test_auto_is_within_15_percent_of_the_best_lowering_measured(cell: Cell) -> None:
    assert cell.auto_slack <= AUTO_SLACK


def test_the_measured_grid_is_whole() -> None:
    assert {(c.shape.experts, c.batch) for c in CELLS} == {
        (n, b) for n in (8, 128) for b in (1, 16, 100)
    }
    assert len(CELLS) == 3 * (4 + 6)
