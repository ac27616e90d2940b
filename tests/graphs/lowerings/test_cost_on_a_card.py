"""The rates of `ort-cuda` are those that the rows measured on a card give, and choose by them."""

from __future__ import annotations

from pathlib import Path

import moexport
import pytest
from moexport.graphs.lowerings.base import SoftMoEPlan
from moexport.graphs.lowerings.choice import choose
from moexport.graphs.lowerings.cost import rates_of
from moexport.graphs.targets import TARGETS, Precision
from moexport.perf.layers import cuda

FILE = Path(str(moexport.__file__)).parent / "perf" / "results" / "layers-cuda.json"
TIMED, ROWS = cuda.read_rows(FILE)

LAUNCHED = 1
"""At this batch, without a CUDA graph, a network takes what its launches take: the same graph took
from 3.1 to 4.0 ms."""


def test_the_rates_in_use_are_those_that_the_rows_give() -> None:
    found, now = cuda.fitted(TIMED, ROWS), rates_of(TARGETS[cuda.TARGET].machine)
    for name, value in found.rates.items():
        assert getattr(now["fp16"], name) == pytest.approx(value, rel=0.02), name
    for precision, value in found.copied.items():
        assert now[precision].copy_bytes_per_us == pytest.approx(value, rel=0.02), precision


def test_the_rows_of_cuda_graphs_and_of_large_batches_are_predicted() -> None:
    off = cuda.fitted(TIMED, ROWS).off
    told = [
        (row, share)
        for row, share in zip(ROWS, off, strict=True)
        if row.cuda_graph or (row.work.batch == 32 and row.lowering in ("dense", "gather"))
    ]
    assert len(told) == 16
    for row, share in told:
        assert abs(share) < 0.05, row


def test_auto_takes_the_fastest_lowering_that_was_measured() -> None:
    cells = [cell for cell in cuda.cells(ROWS) if cell.work.batch > LAUNCHED]
    assert len(cells) == 4
    for cell in cells:
        assert cell.slack == 0, cell


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("batches", [(1,), (8,), (32,), (1, 8, 32)])
def test_auto_takes_dense_for_the_network_that_was_measured(
    precision: Precision, batches: tuple[int, ...]
) -> None:
    n = TIMED.spec.experts
    for kept in (n // 4, n // 2, n):
        work = SoftMoEPlan(TIMED.spec, kept, batches[0], TIMED.tokens, precision)
        choice = choose(work, cuda.TARGET, batches)
        assert choice.lowering.name == "dense"
        assert "fitted to runs" in choice.reason
