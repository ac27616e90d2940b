"""Experts that Algorithm 1 leaves out do not reach the output, even where they overflow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from moexport.graphs.edits import Ablation, Edits
from moexport.graphs.layers.base import algorithm_1
from moexport.graphs.layers.soft_moe import ExpertKind
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.precision.types import ComputeTypes
from moexport.graphs.targets import Precision
from moexport.plugins.token_routed.layers.experts import ExpertsSpec
from moexport.plugins.token_routed.tests import experts_layers
from moexport.plugins.token_routed.tests.experts_layers import (
    CAPACITY,
    PLAIN,
    computed,
    experts,
    routed,
)
from moexport.tests.graphs import mumoe_layers
from moexport.tests.graphs.layers.test_edits import stored
from moexport.tests.graphs.lowerings.test_mumoe import spec_of
from moexport.tests.graphs.mumoe_layers import random_layer
from moexport.tests.graphs.soft_moe_layers import (
    LOWERINGS,
    lowered,
    session,
    soft_moe,
    tiny_layer,
    tokens,
    torch_module,
)
from numpy.typing import NDArray

HUGE, LARGE = 1e25, 1e15
"""Of the weights of one expert and of inputs: together more than a float holds."""

K = 2


def assert_close(y: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    """Each input by its own largest number."""
    largest = np.abs(expected).reshape(len(expected), -1).max(axis=1)
    away = np.abs(y - expected).reshape(len(expected), -1).max(axis=1)
    assert (away <= 1e-5 * largest).all(), (away, largest)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_soft_moe(lowering: str, given: bool, slots: int, renormalize: bool) -> None:
    """Inputs that select the expert are small, and the others so large that it overflows."""
    layer = tiny_layer(slots=slots, slots_from="raw", norm="l2", biases=False)
    x = tokens(6, 3)
    _, sets = soft_moe(layer, x, K)
    counts = [(sets == e).any(axis=1).sum() for e in range(layer.spec.experts)]
    expert = next(e for e, count in enumerate(counts) if 0 < count < len(x))
    layer.w1[expert] *= HUGE
    x[~(sets == expert).any(axis=1)] *= np.float32(LARGE)
    expected, same = soft_moe(layer, x, K, renormalize=renormalize)
    assert np.array_equal(sets, same)
    module = torch_module(layer).eval()
    with torch.no_grad(), algorithm_1(module, {"": K}, renormalize=renormalize):
        assert_close(module(torch.from_numpy(x)).numpy(), expected)
    made = lowered(layer, lowering, None if given else K, renormalize=renormalize)
    feeds = {"input": x} | ({"k": np.array([K])} if given else {})
    assert_close(session(made).run(None, feeds)[0], expected)


def lowerings_for(spec: ExpertsSpec) -> list[str]:
    return [
        name
        for name, record in lowerings_of("experts").items()
        if not (record.problem(spec, "fp32", "ort-cpu") or record.inexact(spec, "fp32", "ort-cpu"))
    ]


SPECS = {
    "gated": replace(PLAIN, activation="relu"),
    "weights on input": replace(PLAIN, weights_on="input", activation="relu"),
}


@pytest.mark.parametrize(
    ("name", "lowering"), [(name, low) for name in SPECS for low in lowerings_for(SPECS[name])]
)
def test_token_routed(name: str, lowering: str) -> None:
    """Tokens that choose the expert are small, and the others so large that it overflows."""
    layer = experts(SPECS[name], biases=True)
    x, index, weights = routed(layer.spec, 12)
    chose = (index == 0).any(axis=1)
    assert 0 < chose.sum() < len(x)
    with torch.no_grad():
        layer.w1[0] *= HUGE
    x[~chose] *= np.float32(LARGE)
    x[chose] *= np.float32(1e-15)
    expected = experts_layers.formula(layer, x, index, weights)
    assert_close(computed(layer, x, index, weights), expected)
    made = experts_layers.lowered(layer, lowering, target="ort-cpu")
    assert_close(experts_layers.run(made, x, index, weights), expected)


@pytest.mark.parametrize(
    ("lowering", "expert"),
    [(low, "mlp") for low in LOWERINGS] + [(low, "linear") for low in LOWERINGS if low != "fused"],
)
def test_ablated_experts(lowering: str, expert: ExpertKind) -> None:
    """One that overflows for every input contributes nothing."""
    layer = tiny_layer(expert=expert, slots=2, biases=False)
    expected = soft_moe(layer, tokens(6, 3), 3, ablated=(1,))[0]
    layer.w1[1] *= 1e38
    if layer.w2 is not None:
        layer.w2[1] *= 1e38
    module = torch_module(layer).eval()
    module.edits = Edits((Ablation("", 1),))
    with torch.no_grad(), algorithm_1(module, {"": 3}):
        assert_close(module(torch.from_numpy(tokens(6, 3))).numpy(), expected)
    made = lowered(layer, lowering, 3, tensors=stored(module))
    assert_close(session(made).run(None, {"input": tokens(6, 3)})[0], expected)


@pytest.mark.parametrize("lowering", lowerings_for(SPECS["gated"]))
def test_ablated_experts_of_tokens(lowering: str) -> None:
    layer = experts(SPECS["gated"], biases=True)
    x, index, weights = routed(layer.spec, 12)
    expected = experts_layers.formula(layer, x, index, np.where(index == 0, 0.0, weights))
    with torch.no_grad():
        layer.w1[0] *= 1e38
        layer.w2[0] *= 1e38  # type: ignore[index]
    layer.edits = Edits((Ablation("", 0),))
    assert_close(computed(layer, x, index, weights), expected)
    made = experts_layers.lowered(layer, lowering, target="ort-cpu")
    assert_close(experts_layers.run(made, x, index, weights), expected)


@pytest.mark.parametrize("lowering", lowerings_for(replace(CAPACITY, activation="relu")))
def test_choices_that_were_dropped(lowering: str) -> None:
    """Which would overflow, and are of experts that other tokens have chosen."""
    spec = replace(CAPACITY, activation="relu")
    layer = experts(spec, biases=True)
    x, index, weights = routed(spec, 27)
    last = spec.experts - 1  # whose last slot is what a choice that was dropped would read
    with torch.no_grad():
        layer.w1[last] *= HUGE
    index[(index == last).any(axis=1)] = np.array([0, 1])
    index[::2, 0] = last
    dropped = np.zeros(index.shape, bool)
    for expert, group in np.ndindex(spec.experts, 3):
        chose = np.argwhere(index == expert)
        chose = chose[chose[:, 0] // 9 == group][spec.capacities[spec.k - 1] :]
        dropped[tuple(chose.T)] = True
    dropped[13] = True
    assert dropped[index == last].any() and not dropped[index == last].all()
    x[(dropped & (index == last)).any(axis=1)] *= np.float32(LARGE)
    weights[dropped] = 0.0
    expected = experts_layers.formula(layer, x, index, weights)
    index = np.where(dropped, index + spec.experts, index)
    assert_close(computed(layer, x, index, weights), expected)
    made = experts_layers.lowered(layer, lowering, target="ort-cpu", width=spec.k)
    y = experts_layers.run(made, x, index, weights)
    assert_close(y[~dropped.all(axis=1)], expected[~dropped.all(axis=1)])
    assert not y[dropped.all(axis=1)].any()


@pytest.mark.parametrize("levels", [(8,), (4, 3)])
@pytest.mark.parametrize("lowering", ["unfactorised", "gathered"])
def test_mumoe(lowering: str, levels: tuple[int, ...]) -> None:
    """Experts that no token keeps overflow."""
    layer = random_layer(spec_of("full", levels, activation="softmax"))
    x = np.random.default_rng(2).standard_normal((1, 3, layer.spec.dim))
    expected = mumoe_layers.formula(layer, x, 1)
    with torch.no_grad():
        kept = layer.coefficients(torch.from_numpy(x.astype(np.float32)), 1)
        idle = [(a.reshape(-1, n) == 0).all(dim=0) for a, n in zip(kept, levels, strict=True)]
        assert all(each.any() for each in idle)
        layer.factors(0)[0][idle[0]] = 3e38
        with algorithm_1(layer, {"": 1}):
            y = layer(torch.from_numpy(x.astype(np.float32))).numpy()
    assert_close(y, expected)
    model = mumoe_layers.graph(layer, 1, lowering)
    assert_close(mumoe_layers.run(model, x), expected)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_in_other_precisions(precision: Precision) -> None:
    """An expert whose FP16 numbers overflow where FP32's would not."""
    layer = experts(SPECS["gated"], biases=True)
    x, index, weights = routed(layer.spec, 12)
    chose = (index == 0).any(axis=1)
    with torch.no_grad():
        assert isinstance(layer.w2, torch.nn.Parameter)
        layer.w2[0] *= 1e5 if precision == "fp16" else 3e38
    x, index, weights = x[~chose], index[~chose], weights[~chose]
    stored = layer if precision == "fp16" else experts_layers.rounded(layer, precision)
    expected = experts_layers.formula(stored, x, index, weights)
    compute: ComputeTypes = experts_layers.computes_in(precision, layer, "ort-cpu")
    made = experts_layers.lowered(layer, "dense", compute=compute, target="ort-cpu")
    y = experts_layers.run(made, x, index, weights)
    assert np.abs(y - expected).max() <= 0.02 * np.abs(expected).max()
