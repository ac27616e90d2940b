"""The minimum time of a model's work: counted multiply-adds and bytes, at measured rates."""

from __future__ import annotations

from dataclasses import replace

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.measure.roofline import (
    Microbenchmarks,
    Rates,
    RooflineStep,
    layer_parts,
    least_ms,
    limit_ms,
    work_of,
)
from moexport.common.latency import summarise
from moexport.errors import TraceError
from moexport.exporter.model import Model
from moexport.graphs.layers.soft_moe import SoftMoESpec
from moexport.graphs.lowerings.base import LayerPlan
from moexport.tests.recorded import DATA, VIT_CONFIG, read_case
from torch import Tensor, nn

RATES = Rates(stream_gb_s=10.0, matmul_gflop_s=100.0, int8_gop_s=400.0)
SPEC = SoftMoESpec("layer", experts=8, slots=2, dim=16, hidden=32, out=16, norm="l2")


def test_a_part_takes_the_longer_of_moving_and_computing() -> None:
    assert least_ms(RooflineStep("moves", macs=0, bytes=10e9), RATES) == pytest.approx(1000.0)
    assert least_ms(RooflineStep("computes", macs=50e9, bytes=1.0), RATES) == pytest.approx(1000.0)
    assert least_ms(RooflineStep("integers", 50e9, 1.0, "int8"), RATES) == pytest.approx(250.0)


def test_bf16_is_multiplied_at_its_own_rate_but_for_routing() -> None:
    work = LayerPlan(SPEC, k=2, batch=1, tokens=5)
    routing, experts = layer_parts(work, number_bytes=2, arithmetic="bf16")
    assert (routing.arithmetic, experts.arithmetic) == ("fp32", "bf16")
    rates = replace(RATES, stream_gb_s=1e9, bf16_gflop_s=300.0)
    assert least_ms(experts, rates) == pytest.approx(2e-6 * experts.macs / 300)
    with pytest.raises(ValueError, match="bf16 products was not measured"):
        least_ms(experts, RATES)
    machine = Microbenchmarks(threads=1, stream_bytes=1 << 20, square=64, bf16=True)
    for case in machine.calls.values():
        case(0)
    latencies = {name: summarise([[10.0]]) for name in machine.calls}
    assert machine.rates(latencies).bf16_gflop_s == pytest.approx(2 * 64**3 / 1e7)


def test_parts_wait_for_each_other() -> None:
    parts = (RooflineStep("moves", 0, 10e9), RooflineStep("computes", 50e9, 0))
    assert limit_ms(parts, RATES) == pytest.approx(2000.0)


def test_a_layers_parts_hold_all_its_multiply_adds_and_only_the_kept_experts_weights() -> None:
    parts = list(layer_parts(LayerPlan(SPEC, k=2, batch=3, tokens=5)))
    assert sum(part.macs for part in parts) == 3 * sum(SPEC.macs(5, 2).values())
    routing, experts = parts
    assert routing.bytes == 4 * 3 * 5 * (16 + 16)
    assert experts.bytes == 4 * 6 * 2 * 16 * 32  # 3 inputs choose at most 6 of 8 experts
    whole = list(layer_parts(LayerPlan(SPEC, k=2, batch=100, tokens=5)))[1]
    assert whole.bytes == 4 * 8 * 2 * 16 * 32


def test_int8_experts_move_a_quarter_and_compute_integers() -> None:
    work = LayerPlan(SPEC, k=2, batch=1, tokens=5)
    full, quarter = (list(layer_parts(work, int8_experts=int8))[1] for int8 in (False, True))
    assert quarter.bytes * 4 == full.bytes
    assert (quarter.arithmetic, full.arithmetic) == ("int8", "fp32")


def test_a_backbone_multiply_adds_are_counted_without_its_moe_layers() -> None:
    model = moexport.load(DATA / "soft_moe_vit" / "weights.pt", config=VIT_CONFIG)
    _, channels, size, _ = model.input.shape
    assert isinstance(size, int) and isinstance(channels, int)
    work = work_of(model, np.zeros((2, channels, size, size), np.float32))
    dim = next(iter(model.layers.values())).spec.dim
    tokens = next(iter(work.tokens.values()))
    state = {name: p for name, p in model.module.named_parameters() if "mlp.experts" not in name}
    patch = state["patch_embed.proj.weight"]
    expected = (tokens - 1) * patch.numel()
    for name, parameter in state.items():
        linear = name.endswith(("qkv.weight", "attn.proj.weight", "fc1.weight", "fc2.weight"))
        expected += tokens * parameter.numel() if linear else 0
    expected += state["head.weight"].numel()
    blocks = sum(name.endswith("qkv.weight") for name in state)
    expected += blocks * 2 * tokens * tokens * dim  # q·kᵀ and its product with v
    assert work.backbone_macs == expected
    assert set(work.tokens) == set(model.layers)
    assert set(work.tokens.values()) == {tokens}
    # The class token and the positions are one sum, made when the model is built.
    apart = ("cls_token", "pos_embed", *model.layers)
    read = [p.numel() for name, p in state.items() if not name.startswith(apart)]
    assert work.backbone_numbers == sum(read)


class Around(nn.Module):
    """A backbone of one's own: a table that is looked up in, and something before the layer."""

    def __init__(self, moe: nn.Module, before: nn.Module) -> None:
        super().__init__()
        self.table, self.before, self.moe = nn.Embedding(1000, 24), before, moe

    def forward(self, ids: Tensor) -> Tensor:
        y = self.before(self.table(ids))
        tokens: Tensor = self.moe(y[0] if isinstance(y, tuple) else y)
        return tokens


def around(before: nn.Module) -> Model:
    case = read_case("soft_moe_fkodom")
    inner = moexport.load(case.weights, family=case.family, config=case.config)
    (layer,) = inner.layers.values()
    module = Around(layer, before).eval().requires_grad_(False)
    return replace(inner, module=module, order=())


def test_of_a_table_the_rows_are_read_that_are_asked_for() -> None:
    work = work_of(around(nn.Identity()), np.arange(14).reshape(2, 7))
    assert (work.backbone_macs, work.backbone_numbers) == (0, 7 * 24)
    assert work.tokens == {"moe": 7}


def test_attention_that_pytorch_fuses_is_counted_as_its_products() -> None:
    block = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
    work = work_of(around(block), np.arange(14).reshape(2, 7))
    assert work.backbone_macs == 7 * (4 * 24 * 24 + 2 * 24 * 48) + 2 * 7 * 7 * 24


def test_a_backbone_whose_operations_nobody_counts_is_refused_by_their_name() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = torch.fft.fft(x, dim=1).real
            return mixed

    with pytest.raises(TraceError, match="does not count the operations of aten::_fft"):
        work_of(around(Spectrum()), np.arange(14).reshape(2, 7))


def test_probes_beside_others_give_the_rates_of_those_rounds() -> None:
    machine = Microbenchmarks(threads=1, stream_bytes=1 << 20, square=64)
    latencies = {name: summarise([[10.0]]) for name in machine.calls}
    for case in machine.calls.values():
        case(0)
    rates = machine.rates(latencies)
    assert rates.stream_gb_s == pytest.approx((1 << 20) / 1e7)
    assert rates.matmul_gflop_s == rates.int8_gop_s == pytest.approx(2 * 64**3 / 1e7)
    assert rates.cached_gb_s == {}  # of so few the time is mostly that of the call
    larger = Microbenchmarks(threads=1, stream_bytes=1 << 24, square=64)
    latencies = {name: summarise([[10.0]]) for name in larger.calls}
    quarter, sixteenth = str(1 << 22), str(1 << 20)
    assert larger.rates(latencies).cached_gb_s == {
        quarter: pytest.approx((1 << 22) / 1e7),
        sixteenth: pytest.approx((1 << 20) / 1e7),
    }
    floats = Microbenchmarks(threads=1, stream_bytes=1 << 20, square=64, integer=False)
    latencies = {name: summarise([[10.0]]) for name in floats.calls}
    assert floats.rates(latencies).int8_gop_s is None
    with pytest.raises(ValueError, match="int8 products"):
        least_ms(RooflineStep("integers", 1, 1, "int8"), floats.rates(latencies))
