"""Every lowering computes the formulas, in every variant that published layers have."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import numpy as np
import pytest
import torch
from moexport.graphs.layers.expert import Activation
from moexport.graphs.layers.soft_moe import ExpertKind, NormKind, SlotSource
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.lowerings.grouped import MANY_EXPERTS
from moexport.graphs.targets import Target
from moexport.tests.graphs.soft_moe_layers import (
    TinyLayer,
    lowered,
    session,
    soft_moe,
    tiny_layer,
    tokens,
    torch_module,
)

LOWERINGS = lowerings_of("soft-moe")

RTOL = 2e-5  # of max|y|: float32 against float64
SIZES = [(1, 9), (5, 4), (2, 1)]  # batch and tokens; no graph here was made for any size

NORMS: tuple[NormKind, ...] = get_args(NormKind)
EXPERTS: tuple[ExpertKind, ...] = get_args(ExpertKind)
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def assert_computes(
    layer: TinyLayer, lowering: str, kept: int | None, ks: tuple[int, ...], **options: Any
) -> None:
    """The graph gives y and the chosen sets of the formulas at every size and every k."""
    made = lowered(layer, lowering, kept, **options)
    running = session(made)
    for (batch, count), k in itertools.product(SIZES, ks):
        x = tokens(batch, count)
        feeds = {"input": x} if kept is not None else {"input": x, "k": np.array([k])}
        y, *selected = running.run(None, feeds)
        expected, sets = soft_moe(layer, x, k, **options)
        assert y.shape == expected.shape
        assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()
        assert len(selected) == (kept is None or k < layer.spec.experts)
        for chosen in selected:
            assert np.array_equal(np.sort(chosen, axis=1), sets)


def exact_lowerings(layer: TinyLayer) -> list[str]:
    """The lowerings that compute this layer exactly."""
    records = LOWERINGS.values()
    return [
        r.name
        for r in records
        if not r.unable(layer.spec) and not r.inexact(layer.spec, "fp32", "ort-cpu")
    ]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("expert", EXPERTS)
@pytest.mark.parametrize("norm", NORMS)
def test_every_layer_in_every_lowering(norm: NormKind, expert: ExpertKind, slots: int) -> None:
    layer = tiny_layer(norm=norm, expert=expert, slots=slots)
    names = exact_lowerings(layer)
    assert ("fused" in names) == (expert == "mlp")
    assert {"dense", "gather", "grouped", "conditional"} <= set(names)
    for name in names:
        assert_computes(layer, name, 2, (2,))
        assert_computes(layer, name, 5, (5,))
        assert_computes(layer, name, None, (1, 3, 5))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("lowering", list(LOWERINGS))
def test_renormalised_weights_sum_to_one(lowering: str, slots: int) -> None:
    layer = tiny_layer(slots=slots)
    assert_computes(layer, lowering, 2, (2,), renormalize=True)
    assert_computes(layer, lowering, 5, (5,), renormalize=True)
    assert_computes(layer, lowering, None, (1, 4), renormalize=True)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("lowering", list(LOWERINGS))
def test_a_token_that_all_but_ignores_the_kept_experts_is_renormalised(
    lowering: str, slots: int
) -> None:
    layer, x = tiny_layer(slots=slots, norm="none", seed=3), 12 * tokens(4, 6)
    expected, sets = soft_moe(layer, x, 1, renormalize=True)
    module = torch_module(layer)
    module.keep = 1
    kept = module.route(torch.from_numpy(x)).combine.sum(dim=3)
    assert (kept.gather(2, torch.from_numpy(sets)[:, None].expand(-1, 6, -1)) == 0).any()
    module.renormalize = True
    running = session(lowered(layer, lowering, 1, renormalize=True))
    for y in (module(torch.from_numpy(x)).numpy(), running.run(None, {"input": x})[0]):
        assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


def test_scores_of_zero_are_a_tie() -> None:
    layer, x = tiny_layer(norm="none", seed=3), 100 * tokens(1, 1)
    module = torch_module(layer)
    module.keep = 4
    assert module.choices(torch.from_numpy(x))[""].margin.tolist() == [0.0]


@pytest.mark.parametrize("expert", ["gated", "linear"])
@pytest.mark.parametrize("slots", [1, 3])
def test_the_output_may_be_wider_or_narrower(expert: ExpertKind, slots: int) -> None:
    for out in (4, 9):
        layer = tiny_layer(expert=expert, slots=slots, out=out)
        for name in exact_lowerings(layer):
            assert_computes(layer, name, 2, (2,))
            assert_computes(layer, name, 5, (5,))


@pytest.mark.parametrize("expert", EXPERTS)
def test_experts_may_lack_biases(expert: ExpertKind) -> None:
    layer = tiny_layer(expert=expert, biases=False, slots=2)
    for name in exact_lowerings(layer):
        assert_computes(layer, name, 2, (2,))
        assert_computes(layer, name, 5, (5,))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: Activation) -> None:
    layer = tiny_layer(activation=activation)
    names = exact_lowerings(layer)
    assert ("fused" in names) == (activation not in ("gelu", "relu2", "softmax"))
    for name in names:
        assert_computes(layer, name, 2, (2,))


@pytest.mark.parametrize("norm", ["l2", "l2-plus", "l2-rsqrt"])
@pytest.mark.parametrize("gain", [False, True])
def test_slots_may_average_raw_tokens_and_norms_may_have_a_gain(norm: NormKind, gain: bool) -> None:
    for source in get_args(SlotSource):
        layer = tiny_layer(norm=norm, gain=gain, slots_from=source)
        for name in exact_lowerings(layer):
            assert_computes(layer, name, 2, (2,))


@pytest.mark.parametrize("lowering", list(LOWERINGS))
def test_a_layer_of_one_expert_and_one_of_many(lowering: str) -> None:
    assert_computes(tiny_layer(experts=1), lowering, 1, (1,))
    assert_computes(tiny_layer(experts=1), lowering, None, (1,))
    assert_computes(tiny_layer(experts=40, slots=2), lowering, 3, (3,))
    assert_computes(tiny_layer(experts=40), lowering, None, (1, 39, 40))


@pytest.mark.parametrize("expert", EXPERTS)
@pytest.mark.parametrize("slots", [1, 2])
def test_many_grouped_experts_share_one_nonlinearity(expert: ExpertKind, slots: int) -> None:
    many = tiny_layer(expert=expert, activation="gelu", experts=MANY_EXPERTS, slots=slots)
    assert_computes(many, "grouped", 3, (3,))
    assert_computes(many, "grouped", None, (1, MANY_EXPERTS - 1, MANY_EXPERTS))
    assert_computes(many, "grouped", MANY_EXPERTS, (MANY_EXPERTS,))
    nodes = [node.op_type for node in lowered(many, "grouped", 3).model.graph]
    assert nodes.count("Gelu") == (0 if expert == "linear" else 1)
    few = tiny_layer(expert=expert, activation="gelu", experts=MANY_EXPERTS - 1, slots=slots)
    nodes = [node.op_type for node in lowered(few, "grouped", 3).model.graph]
    assert nodes.count("Gelu") == (0 if expert == "linear" else MANY_EXPERTS - 1)


@pytest.mark.parametrize("lowering", list(LOWERINGS))
def test_tokens_of_all_zeros_give_no_nan(lowering: str) -> None:
    for norm in NORMS:
        layer = tiny_layer(norm=norm)
        x = tokens(2, 4)
        x[:, 1] = 0.0
        y, _ = session(lowered(layer, lowering, 2)).run(None, {"input": x})
        expected, _ = soft_moe(layer, x, 2)
        assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


def test_the_tanh_form_of_the_fused_gelu_is_as_far_off_as_it_says() -> None:
    layer = tiny_layer(activation="gelu")
    caveat = LOWERINGS["fused"].inexact(layer.spec, "fp32", "ort-cpu")
    assert caveat is not None
    assert "tanh form" in caveat
    x = tokens(4, 6)
    y, _ = session(lowered(layer, "fused", 2)).run(None, {"input": x})
    expected, _ = soft_moe(layer, x, 2)
    off = np.abs(y - expected).max() / np.abs(expected).max()
    assert RTOL < off < 1e-3


@pytest.mark.parametrize("lowering", ["gather", "grouped"])
@pytest.mark.parametrize(("kept", "slots"), [(2, 1), (4, 1), (1, 3)])
def test_a_few_slots_are_averaged_row_by_row_where_a_cpu_gains_from_it(
    lowering: str, kept: int, slots: int
) -> None:
    layer = tiny_layer(slots=slots)
    products = [
        {node.name for node in lowered(layer, lowering, kept, target=target).model.graph}
        for target in ("onnx", "ort-cpu")
    ]
    assert products[0].isdisjoint({"layer/dispatch/slots_apart"})
    assert "layer/dispatch/slots_apart" in products[1]
    running = session(lowered(layer, lowering, kept, target="ort-cpu"))
    for batch, count in SIZES:
        x = tokens(batch, count)
        expected, _ = soft_moe(layer, x, kept)
        y = running.run(None, {"input": x})[0]
        assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


@pytest.mark.parametrize(
    ("slots", "target", "axes"),
    [(1, "ort-cpu", 3), (12, "ort-cpu", 3), (13, "ort-cpu", 2), (1, "onnx", 2)],
)
def test_phi_of_few_slots_is_kept_from_being_packed_on_a_cpu(
    slots: int, target: Target, axes: int
) -> None:
    layer = tiny_layer(slots=slots)
    made = lowered(layer, "grouped", 2, target=target)
    phi = made.model.graph.initializers["layer/phi"].shape
    assert phi is not None
    assert len(phi) == axes
    x = tokens(3, 5)
    expected, _ = soft_moe(layer, x, 2)
    y = session(made).run(None, {"input": x})[0]
    assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


@pytest.mark.parametrize("norm", ["l2", "l2-plus", "l2-rsqrt"])
@pytest.mark.parametrize(("dim", "width"), [(64, 32), (100, 25), (23, None), (768, 32)])
def test_a_token_is_measured_in_short_sums_where_a_cpu_gains_from_it(
    norm: NormKind, dim: int, width: int | None
) -> None:
    layer = tiny_layer(norm=norm, dim=dim)
    made = lowered(layer, "grouped", 2, target="ort-cpu")
    parts = [node.inputs[1] for node in made.model.graph if node.name == "layer/router/parts"]
    shapes = [value.const_value.numpy().tolist() for value in parts if value and value.const_value]
    assert shapes == ([[0, 0, dim // width, width]] if width else [])
    x = tokens(3, 5, dim=dim)
    x[:, 2] = 0.0
    expected, chosen = soft_moe(layer, x, 2)
    y, selected = session(made).run(None, {"input": x})
    assert np.array_equal(np.sort(selected), chosen)
    assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()
