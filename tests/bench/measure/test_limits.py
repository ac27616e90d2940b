"""The limit of a row: what it counts of a precision, and why a row has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.measure.gpu_rates import GpuProbes
from moexport.bench.measure.roofline import (
    NO_GPU_INTEGERS,
    NO_GPU_RATES,
    Limits,
    Products,
    Rates,
    integer_linears,
    products_of,
    why_below_limit,
    work_of,
)
from moexport.bench.plan import Candidate, Case, GraphSource, IntegerLinear
from moexport.bench.results import Row, Workload
from moexport.bench.runners.base import Runner
from moexport.common.latency import summarise
from moexport.common.timing import Measured, Protocol, measure
from moexport.exporter.model import Model
from moexport.tests.bench.loaders import Made
from moexport.tests.recorded import read_case
from torch import Tensor, nn

ON_GPU = Rates(stream_gb_s=1e3, matmul_gflop_s=100.0, fp16_gflop_s=1000.0, gpu=True)
RATES = Rates(stream_gb_s=10.0, matmul_gflop_s=100.0, int8_gop_s=400.0)
X = np.zeros((1, 1, 28, 28), np.float32)
ROW = Case("digits", "onnxruntime", k=2, experts=4, lowering="grouped")


def unopened() -> Runner:
    raise NotImplementedError


GRAPH = GraphSource(2, "grouped", Made(unopened))


@pytest.fixture
def limits(model: Model) -> Limits:
    return Limits(Candidate("digits", model), X, [replace(ROW, precision="int8")])


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
    floating = replace(GRAPH, float_layers=frozenset({name}))
    assert limits.of(replace(ROW, precision="int8"), floating, 1, RATES) == full


def test_a_graph_may_keep_another_number_of_experts_in_a_layer(
    limits: Limits, model: Model
) -> None:
    (name,) = model.layers
    one = limits.of(ROW, replace(GRAPH, k_by_layer={name: 1}), 1, RATES)
    assert one == limits.of(replace(ROW, k=1), None, 1, RATES)


def test_half_precision_moves_half_the_bytes(limits: Limits) -> None:
    full, half = (limits.of(replace(ROW, precision=p), GRAPH, 1, RATES) for p in ("fp32", "fp16"))
    assert full.work is not None
    assert half.work == Workload(full.work.operations, 0, full.work.bytes / 2)


def test_bf16_has_its_own_rate_in_openvino_alone(model: Model) -> None:
    openvino = replace(ROW, engine="openvino", precision="bf16")
    rates = replace(RATES, stream_gb_s=1e9, matmul_gflop_s=1.0, bf16_gflop_s=2.0)
    of = Limits(Candidate("digits", model), X, [openvino])
    assert "probe: bf16" in of.benchmarks
    fast, slow = (
        of.of(case, GRAPH, 100, rates) for case in (openvino, replace(ROW, precision="bf16"))
    )
    assert fast.work == slow.work
    assert fast.limit_ms is not None and slow.limit_ms is not None
    assert 0.5 < fast.limit_ms / slow.limit_ms < 0.9  # routing stays in FP32
    assert "probe: bf16" not in Limits(Candidate("digits", model), X, [ROW]).benchmarks


def test_a_row_without_a_limit_says_why(limits: Limits, model: Model) -> None:
    none = limits.gpu_rates(Measured({}, {}))  # the rows of these limits run on the CPU
    on_gpu = limits.of(replace(ROW, provider="cuda"), GRAPH, 1, none)
    assert on_gpu.work is not None and on_gpu.limit_ms is None
    assert on_gpu.reason == NO_GPU_RATES
    integers = limits.of(replace(ROW, provider="cuda", precision="int8"), GRAPH, 1, ON_GPU)
    assert integers.limit_ms is None and integers.reason == NO_GPU_INTEGERS
    untold = replace(GRAPH, integer_linears=(IntegerLinear("head/Gemm", None, (8, 10)),))
    backbone = limits.of(replace(ROW, precision="int8"), untold, 1, RATES)
    assert backbone.work is None and "how many rows head/Gemm multiplies" in str(backbone.reason)
    failed = limits.rates(Measured({}, {"probe: stream": "MemoryError: no room"}))
    assert limits.of(ROW, GRAPH, 1, failed).reason == "probe: stream: MemoryError: no room"

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = model.module

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.backbone(torch.fft.fft(x).real)
            return scores

    own = replace(model, module=Spectrum().eval())
    uncounted = Limits(Candidate("own", own), X, [ROW]).of(ROW, None, 1, RATES)
    assert uncounted.work is None and uncounted.limit_ms is None
    assert "does not count the operations of" in str(uncounted.reason)


def test_a_row_on_a_gpu_has_the_limit_of_that_gpu(limits: Limits) -> None:
    """Its FP16 products at their own rate, half of the bytes; routing in FP32."""
    case = replace(ROW, provider="cuda")
    wide = limits.of(case, GRAPH, 1, ON_GPU)
    assert wide.limit_ms == limits.of(ROW, GRAPH, 1, replace(RATES, stream_gb_s=1e3)).limit_ms
    short = limits.of(replace(case, precision="fp16"), GRAPH, 1, ON_GPU)
    assert wide.work is not None and short.work is not None
    assert short.work.bytes == wide.work.bytes / 2
    computing = replace(ON_GPU, stream_gb_s=1e9)
    slow = limits.of(case, GRAPH, 1, computing)
    fast = limits.of(replace(case, precision="fp16"), GRAPH, 1, computing)
    assert slow.limit_ms is not None and fast.limit_ms is not None
    assert 0.1 <= fast.limit_ms / slow.limit_ms < 1.0


def test_the_probes_of_a_gpu_tell_what_they_moved_and_multiplied() -> None:
    """Run on the CPU, where their clock is the wall's."""
    probes = GpuProbes("cpu", stream_bytes=1 << 16, squares={"fp32": 8, "fp16": 16})
    found = measure(probes.calls, Protocol(round_s=0.0, warmup=1))
    assert found.failures == {}
    assert found.device.keys() == probes.calls.keys()
    ms = dict.fromkeys(probes.calls, 0.5)
    rates = probes.rates(ms)
    assert rates == {
        "stream_gb_s": 2 * (1 << 16) / 0.5 / 1e6,  # a copy reads and writes
        "matmul_gflop_s": 2 * 8**3 / 0.5 / 1e6,
        "fp16_gflop_s": 2 * 16**3 / 0.5 / 1e6,
    }


def test_a_row_on_a_gpu_is_as_far_from_its_limit_as_the_gpu_says(row: Callable[..., Row]) -> None:
    on_gpu = row(4, 2.0, 1.0, provider="cuda", device_ms=summarise([[0.5]] * 5), limit_ms=0.25)
    assert on_gpu.over_limit == pytest.approx(2.0)
    assert replace(on_gpu, device_ms=None).over_limit == pytest.approx(8.0)


def test_what_stays_in_a_cache_has_the_rate_of_as_many_bytes(limits: Limits) -> None:
    plain = limits.of(ROW, GRAPH, 1, RATES)
    assert plain.work is not None and plain.limit_ms is not None
    moved = plain.work.bytes
    cached = replace(RATES, cached_gb_s={str(int(moved / 2)): 40.0, str(int(2 * moved)): 20.0})
    faster = limits.of(ROW, GRAPH, 1, cached)
    assert faster.limit_ms is not None
    assert plain.limit_ms / 2 <= faster.limit_ms < plain.limit_ms
    # More bytes than any of the probes have the rate of all weights.
    assert limits.of(ROW, GRAPH, 1, replace(RATES, cached_gb_s={"10": 40.0})) == plain


def test_a_row_that_beats_its_limit_says_that_it_does_not_hold_and_why(limits: Limits) -> None:
    limit = limits.of(ROW, GRAPH, 1, RATES)
    assert limit.limit_ms is not None
    assert why_below_limit(limit, 1.1 * limit.limit_ms, RATES) is None
    by_memory = why_below_limit(limit, 0.9 * limit.limit_ms, RATES)
    assert by_memory is not None
    assert by_memory.startswith("limit does not apply: the ")
    assert (
        "stay in a cache between calls and are read faster than the measured 10 GB/s" in by_memory
    )
    slow = replace(RATES, matmul_gflop_s=0.01)
    limit = limits.of(ROW, GRAPH, 1, slow)
    assert "its products are faster" in str(why_below_limit(limit, 1e-6, slow))


def test_an_int8_backbones_linear_layers_move_bytes_and_compute_integers(
    limits: Limits, model: Model
) -> None:
    backbone = IntegerLinear("fc", ("batch", 3), (8, 10))
    int8 = replace(ROW, precision="int8")
    plain = limits.of(int8, GRAPH, 2, RATES).work
    whole = limits.of(int8, replace(GRAPH, integer_linears=(backbone,)), 2, RATES).work
    assert plain is not None and whole is not None
    assert plain.operations - whole.operations == 2 * 2 * 3 * 8 * 10
    assert whole.int8_operations - plain.int8_operations == 2 * 2 * 3 * 8 * 10
    assert plain.bytes - whole.bytes == 3 * 8 * 10


@pytest.mark.slow
def test_the_linear_layers_of_an_exported_int8_backbone_are_those_that_pytorch_multiplies(
    tmp_path: Path,
) -> None:
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    x = case.x.astype(np.float32)
    bundle = moexport.export(
        model, tmp_path / "out", k=2, precision="int8", quantize="all", data=x, method="minmax"
    )
    reasons = bundle.manifest.numbers["linears"]
    integers = [node for node, reason in reasons.items() if reason is None]
    linears = integer_linears(bundle.path / "model.onnx", reasons)
    assert [linear.node for linear in linears] == integers
    found = products_of(linears, {"batch": 1})
    counted = work_of(model, x)
    (tokens,) = set(counted.tokens.values())
    wide = ("qkv.weight", "attn.proj.weight", "fc1.weight", "fc2.weight")
    weights = sum(
        p.numel()
        for name, p in model.module.named_parameters()
        if name.endswith(wide) and not name.startswith(tuple(model.layers))
    )
    assert found == Products(tokens * weights, weights)
