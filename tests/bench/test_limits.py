"""The limit of a row: what it counts of a precision, and why a row has none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from moexport.bench.engines import Contestant, Graph, GraphSource, Subject
from moexport.bench.limits import Limits
from moexport.bench.results import Work
from moexport.bench.roofline import Rates
from moexport.exporter.model import Model
from moexport.exporter.timing import Measured
from torch import Tensor, nn

RATES = Rates(stream_gb_s=10.0, matmul_gflop_s=100.0, int8_gop_s=400.0)
X = np.zeros((1, 1, 28, 28), np.float32)
ROW = Contestant("digits", "onnxruntime", k=2, experts=4, lowering="grouped")


def unopened() -> Graph:
    raise NotImplementedError


GRAPH = GraphSource(2, "grouped", unopened)


@pytest.fixture
def limits(model: Model) -> Limits:
    return Limits(Subject("digits", model), X, [replace(ROW, precision="int8")])


def test_int8_moves_a_quarter_of_the_experts_and_computes_them_in_integers(
    limits: Limits, model: Model
) -> None:
    ((name, layer),) = model.layers.items()
    weights, macs = layer.spec.bytes_read(2), layer.spec.macs(4, 2)["experts"]
    full = limits.of(ROW, GRAPH, 1, RATES)
    int8 = limits.of(replace(ROW, precision="int8"), GRAPH, 1, RATES)
    assert full.work is not None and int8.work is not None
    assert full.work.bytes - int8.work.bytes == weights * 3 / 4
    assert (full.work.int8_operations, int8.work.int8_operations) == (0, 2 * macs)
    assert full.work.operations - int8.work.operations == 2 * macs
    assert full.limit_ms is not None and int8.limit_ms is not None
    assert int8.limit_ms < full.limit_ms
    floating = replace(GRAPH, floating=frozenset({name}))
    assert limits.of(replace(ROW, precision="int8"), floating, 1, RATES) == full


def test_a_graph_may_keep_another_number_of_experts_in_a_layer(
    limits: Limits, model: Model
) -> None:
    (name,) = model.layers
    one = limits.of(ROW, replace(GRAPH, kept={name: 1}), 1, RATES)
    assert one == limits.of(replace(ROW, k=1), None, 1, RATES)


def test_half_precision_moves_half_the_bytes(limits: Limits) -> None:
    full, half = (limits.of(replace(ROW, precision=p), GRAPH, 1, RATES) for p in ("fp32", "fp16"))
    assert full.work is not None
    assert half.work == Work(full.work.operations, 0, full.work.bytes / 2)


def test_a_row_without_a_limit_says_why(limits: Limits, model: Model) -> None:
    on_gpu = limits.of(replace(ROW, provider="cuda"), GRAPH, 1, RATES)
    assert on_gpu.work is not None and on_gpu.limit_ms is None
    assert on_gpu.reason == "the rates of a GPU are not measured"
    host = limits.of(replace(ROW, precision="int8"), replace(GRAPH, int8_host=True), 1, RATES)
    assert host.work is None and "host's work is INT8" in str(host.reason)
    failed = limits.rates(Measured({}, {"probe: stream": "MemoryError: no room"}))
    assert limits.of(ROW, GRAPH, 1, failed).reason == "probe: stream: MemoryError: no room"

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.host = model.module

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.host(torch.fft.fft(x).real)
            return scores

    own = replace(model, module=Spectrum().eval())
    uncounted = Limits(Subject("own", own), X, [ROW]).of(ROW, None, 1, RATES)
    assert uncounted.work is None and uncounted.limit_ms is None
    assert "does not count the operations of" in str(uncounted.reason)
