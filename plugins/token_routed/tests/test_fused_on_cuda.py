"""The graphs of `fused` for CUDA compute the formulas, judged by the CPU's kernels of the same ops.

Anything that cannot run in CUDA's kernels is refused by name. With the plugin
`moexport.tests.hard.on_cuda`, CUDA's kernels compute these layers, which are wide enough for them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from moexport.common.libraries import ROUTED_WEIGHTS, older
from moexport.errors import LoweringError
from moexport.graphs.layers.expert import Activation
from moexport.graphs.layers.soft_moe import SoftMoESpec
from moexport.graphs.layers.stored import Layer
from moexport.graphs.lower import Lowered, lower
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.lowerings.base import LayerPlan, SoftMoEPlan
from moexport.graphs.lowerings.choice import check, choose
from moexport.graphs.lowerings.moe_op import EXCLUDED
from moexport.graphs.names import DOMAIN
from moexport.graphs.precision.types import FLOAT_TYPES, FP32, Bits, BlockedWeights, ComputeTypes
from moexport.graphs.precision.weights import quantize_in_blocks
from moexport.graphs.targets import Precision
from moexport.plugins.token_routed.layers.experts import Experts, ExpertsSpec, ExpertsWeights
from moexport.plugins.token_routed.tests import experts_layers
from moexport.plugins.token_routed.tests.experts_layers import (
    PLAIN,
    error,
    experts,
    formula,
    routed,
)
from moexport.tests.graphs import soft_moe_layers
from moexport.tests.graphs.soft_moe_layers import TinyLayer, soft_moe, tiny_layer, tokens

needs_qmoe = pytest.mark.skipif(
    older("onnxruntime", ROUTED_WEIGHTS), reason="this ONNX Runtime's QMoE has no raw weights"
)

RTOL = 2e-5  # of max|y|: float32 against float64
HALF = 3e-3  # the same of float16

FP16 = ComputeTypes(FLOAT_TYPES["fp16"])

EXACT: tuple[Activation, ...] = ("relu", "silu", "identity", "gelu-tanh")


WIDTH = 16
"""The smallest width of an expert that CUDA's kernels support."""


def wide_layer(**options: Any) -> TinyLayer:
    return tiny_layer(dim=WIDTH, out=WIDTH, hidden=24, **options)


def assert_computes(
    layer: TinyLayer, kept: int | None, ks: tuple[int, ...], rtol: float = RTOL, **options: Any
) -> None:
    made = soft_moe_layers.lowered(layer, "fused", kept, target="ort-cuda", **options)
    running = soft_moe_layers.session(made)
    for (batch, count), k in itertools.product([(1, 9), (5, 4)], ks):
        x = tokens(batch, count, dim=WIDTH)
        feeds = {"input": x} if kept is not None else {"input": x, "k": np.array([k])}
        y, *_ = running.run(None, feeds)
        expected, _ = soft_moe(layer, x, k)
        assert np.abs(y - expected).max() <= rtol * np.abs(expected).max()


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("activation", EXACT)
def test_slots_are_rows_that_are_sent_to_their_experts(activation: Activation, slots: int) -> None:
    layer = wide_layer(activation=activation, slots=slots)
    assert_computes(layer, 2, (2,))
    assert_computes(layer, 5, (5,))
    assert_computes(layer, None, (1, 3, 5))


def turned(layer: TinyLayer) -> TinyLayer:
    """The same gated layer, stored with the gate before up."""
    half = layer.spec.hidden
    spec = replace(layer.spec, gate_first=True)
    assert layer.b1 is not None
    return replace(
        layer, spec=spec, w1=np.roll(layer.w1, half, axis=-1), b1=np.roll(layer.b1, half, axis=-1)
    )


@pytest.mark.parametrize("slots", [1, 2])
def test_gated_silu_experts_are_the_swiglu_of_the_op(slots: int) -> None:
    layer = wide_layer(expert="gated", activation="silu", slots=slots)
    assert_computes(layer, 2, (2,))
    assert_computes(layer, None, (1, 5))
    x = tokens(3, 6, dim=WIDTH)
    expected, _ = soft_moe(layer, x, 2)
    made = soft_moe_layers.lowered(turned(layer), "fused", 2, target="ort-cuda")
    y, *_ = soft_moe_layers.session(made).run(None, {"input": x})
    assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


@pytest.mark.parametrize("activation", ["gelu", "gelu-tanh", "silu"])
def test_in_fp16_either_form_of_gelu_is_within_its_rounding(activation: Activation) -> None:
    layer = wide_layer(activation=activation, slots=2)
    assert_computes(layer, 2, (2,), HALF, compute=FP16)


def moe_node(made: Lowered) -> ir.Node:
    (node,) = [node for node in made.model.graph if node.op_type in ("MoE", "QMoE")]
    return node


def test_an_expert_that_a_row_is_not_sent_to_has_no_share_of_the_softmax() -> None:
    made = soft_moe_layers.lowered(wide_layer(), "fused", 2, target="ort-cuda")
    logits = moe_node(made).inputs[1]
    assert logits is not None
    where = logits.producer()
    assert where is not None and where.inputs[2] is not None
    assert where.inputs[2].const_value is not None
    assert where.inputs[2].const_value.numpy() == EXCLUDED
    assert np.exp(np.float32(EXCLUDED)) == 0
    assert moe_node(made).attributes["normalize_routing_weights"].as_int() == 1


WIDE = SoftMoESpec("wide", 8, 1, 768, 3072, 768, activation="relu", norm="l2")


@pytest.mark.parametrize(
    ("changed", "precision", "why"),
    [
        ({"dim": 12, "out": 12}, "fp16", "at least 16 that are multiples of 8 in FP16"),
        ({"hidden": 3076}, "fp16", "multiples of 8 in FP16, but an expert's are 768 and 3076"),
        ({"hidden": 3076}, "bf16", "multiples of 8 in BF16"),
        ({"hidden": 8}, "fp16", "at least 16"),
        ({"hidden": 3074}, "fp32", "multiples of 4 in FP32"),
        ({"activation": "gelu"}, "fp32", "in FP32, com.microsoft.MoE computes the tanh form"),
        ({"activation": "relu2"}, "fp16", "does not support relu2 in its experts"),
        ({"activation": "softmax"}, "fp16", "does not support softmax in its experts"),
        ({"expert": "gated", "activation": "gelu"}, "fp16", "not support gated experts with gelu"),
        ({"expert": "linear", "hidden": 0}, "fp16", "not support linear experts"),
        ({"out": 512}, "fp16", "this layer maps 768 to 512"),
    ],
)
def test_what_its_kernels_cannot_do_is_refused_by_name(
    changed: dict[str, Any], precision: Precision, why: str
) -> None:
    work = SoftMoEPlan(replace(WIDE, **changed), 2, 1, 196, precision)
    with pytest.raises(LoweringError) as caught:
        check("fused", work, "ort-cuda")
    assert why in caught.value.message
    assert caught.value.hint is not None
    assert "auto or one of: dense, gather, grouped" in caught.value.hint
    assert choose(work, "ort-cuda").lowering.name != "fused"


@pytest.mark.parametrize(
    ("activation", "precision"),
    [("gelu-tanh", "fp32"), ("gelu", "fp16"), ("gelu", "bf16"), ("gelu-tanh", "fp16")],
)
def test_gelu_is_taken_where_the_bound_holds_both_of_its_forms(
    activation: Activation, precision: Precision
) -> None:
    work = SoftMoEPlan(replace(WIDE, activation=activation), 1, 1, 196, precision)
    assert "not measured on an H100" in check("fused", work, "ort-cuda").reason
    assert check("fused", replace(work, precision="fp32"), "ort-cpu").predicted_us > 0


def positive(layer: Experts, compute: ComputeTypes = FP32) -> Lowered:
    """The layer in a graph whose weights come from a node without negative results."""
    spec = layer.spec
    k = spec.k

    def value(name: str, size: int, dtype: ir.DataType) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(["t", size]), type=ir.TensorType(dtype))

    x, y = (value(name, spec.dim, ir.DataType.FLOAT) for name in ("x", "y"))
    index = value("index", k, ir.DataType.INT64)
    given, weights = (value(name, k, ir.DataType.FLOAT) for name in ("weights", "router"))
    router = ir.node("Abs", [given], outputs=[weights])
    attributes = {"layer": spec.name}
    node = ir.node(spec.op_type, [x, index, weights], attributes, domain=DOMAIN, outputs=[y])
    graph = ir.Graph(
        [x, index, given], [y], nodes=[router, node], opset_imports={"": 20, DOMAIN: 1}, name="one"
    )
    stored = Layer(
        spec=spec,
        tensors=experts_layers.InMemory(layer, compute),
        k=k,
        build=lowerings_of("experts")["fused"].build,
        compute=compute,
        target="ort-cuda",
    )
    return lower(ir.Model(graph, ir_version=10), {spec.name: stored})


SPECS: dict[str, ExpertsSpec] = {
    "swiglu": PLAIN,
    "interleaved": replace(PLAIN, gate="interleaved"),
    "gpt-oss": replace(PLAIN, gate="interleaved", alpha=1.702, limit=0.7, up_offset=1.0),
    "no gate": replace(PLAIN, gate="none", activation="gelu-tanh"),
    "many experts": replace(PLAIN, experts=70, k=8),
    "k = 1": replace(PLAIN, k=1),
    "k = n": replace(PLAIN, k=6),
}


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("name", list(SPECS))
def test_a_token_is_one_row_whose_logits_are_the_logarithms_of_its_weights(
    name: str, biases: bool
) -> None:
    layer = experts(SPECS[name], biases=biases)
    made = positive(layer)
    node = moe_node(made)
    assert node.op_type == "MoE" and node.attributes["k"].as_int() == layer.spec.k
    assert all(each is None for each in node.inputs[6:])  # CUDA ignores weights beside logits
    running = experts_layers.session(made)
    for count in (1, 9):
        x, index, weights = routed(layer.spec, count)
        for router in (weights, weights / weights.sum(axis=1, keepdims=True), 20 * weights**8):
            y = experts_layers.run(running, x, index, router)
            assert error(y, formula(layer, x, index, router)) < 1e-5


def test_weights_of_zero_and_an_expert_that_is_chosen_twice_count_as_they_are() -> None:
    layer = experts(replace(PLAIN, k=3), biases=True)
    x, index, weights = routed(layer.spec, 6)
    weights[0], weights[1, 0], weights[2, :2] = 0, 0, 0
    index[3] = [2, 2, 4]
    y = experts_layers.run(positive(layer), x, index, weights)
    assert error(y, formula(layer, x, index, weights)) < 1e-5
    assert (y[0] == 0).all()


def test_in_fp16_weights_of_many_sizes_lose_no_more_than_its_rounding() -> None:
    layer = experts(replace(PLAIN, experts=12, k=6), biases=True)
    x, index, _ = routed(layer.spec, 64)
    weights = 10 ** np.random.default_rng(3).uniform(-6, 1, index.shape).astype(np.float32)
    y = experts_layers.run(positive(layer, FP16), x, index, weights)
    expected = formula(layer, x, index, weights)
    off = np.abs(y - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert off.max() < HALF


@pytest.mark.parametrize(
    "changed",
    [{"weights_on": "input"}, {"post_norm": True}],
    ids=["weights on input", "norm after an expert"],
)
def test_where_the_op_cannot_weight_a_pair_is_a_row(changed: dict[str, Any]) -> None:
    layer = experts(replace(PLAIN, **changed))
    made, inputs = positive(layer), routed(layer.spec, 7)
    assert moe_node(made).attributes["k"].as_int() == 1
    assert error(experts_layers.run(made, *inputs), formula(layer, *inputs)) < 1e-5


def test_weights_of_either_sign_follow_the_op() -> None:
    layer, (x, index, weights) = experts(PLAIN), routed(PLAIN, 6)
    weights[:, 0] = [0, -1, 0, 1, -0.5, 2]
    made = experts_layers.lowered(layer, "fused", target="ort-cuda", width=2)
    assert (
        error(experts_layers.run(made, x, index, weights), formula(layer, x, index, weights)) < 1e-5
    )


@pytest.mark.parametrize(
    ("changed", "precision", "why"),
    [
        ({"dim": 20, "out": 20}, "fp16", "multiples of 8 in FP16"),
        ({"gate": "none", "activation": "gelu"}, "fp32", "the tanh form of GELU"),
        ({"activation": "gelu"}, "fp16", "supports gates with silu only, not with gelu"),
    ],
)
def test_token_routed_experts_that_its_kernels_cannot_take_are_refused_by_name(
    changed: dict[str, Any], precision: Precision, why: str
) -> None:
    work = LayerPlan(replace(PLAIN, **changed), 2, 1, 16, precision)
    with pytest.raises(LoweringError) as caught:
        check("fused", work, "ort-cuda")
    assert why in caught.value.message


BLOCK = 64


def in_blocks_of(layer: Experts, bits: Bits) -> Experts:
    """A layer whose weights are the values of integers in blocks."""

    def nearest(matrix: torch.Tensor) -> torch.Tensor:
        integers, scale = quantize_in_blocks(matrix.numpy(), BLOCK, FLOAT_TYPES["fp16"], bits)
        return torch.from_numpy(integers.astype(np.float32) * scale.repeat(BLOCK, axis=0))

    stored = {part.name: [torch.from_numpy(a) for a in part.parts] for part in layer.stored()}
    spec = layer.spec if layer.spec.gate == "none" else replace(layer.spec, gate="concatenated")
    b1, b2 = (torch.stack(stored[b]) if b in stored else None for b in ("experts.b1", "experts.b2"))
    w1, w2 = (tuple(map(nearest, stored[w])) for w in ("experts.w1", "experts.w2"))
    return Experts(spec, ExpertsWeights(w1, w2, b1, b2))


def rounded_rows(row: np.ndarray, bits: Bits) -> np.ndarray:
    """The rows that the CPU's kernel multiplies with eight-bit weights: also eight bits, in blocks.

    CUDA's kernels, and the CPU's for four bits, use the row as it is.
    """
    if bits == 4:
        return row
    blocks = row.reshape(-1, BLOCK)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 127
    return np.asarray((np.rint(blocks / step) * step).reshape(row.shape))


def in_float64(
    layer: Experts, bits: Bits, x: np.ndarray, index: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """The layer token by token, its rows rounded before each product."""
    spec, zero = layer.spec, torch.zeros(layer.spec.experts, 1)
    b1, b2 = (zero if b is None else b for b in (layer.b1, layer.b2))
    assert layer.w2 is not None
    y = np.zeros((len(x), spec.out))
    for (t, j), e in np.ndenumerate(index):
        first = rounded_rows(x[t].astype(np.float64), bits) @ layer.w1[e].double().numpy()
        first = first + b1[e].double().numpy()
        if spec.gate == "none":
            hidden = 0.5 * first * (1 + np.tanh((2 / np.pi) ** 0.5 * (first + 0.044715 * first**3)))
        else:
            gate, up = np.split(first, 2)
            if spec.limit is not None:
                gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
            hidden = gate / (1 + np.exp(-spec.alpha * gate)) * (up + spec.up_offset)
        second = rounded_rows(hidden, bits) @ layer.w2[e].double().numpy()
        y[t] += weights[t, j] * (second + b2[e].double().numpy())
    return y


@needs_qmoe
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("name", ["swiglu", "gpt-oss", "no gate"])
def test_weights_of_integers_are_those_of_qmoe(name: str, biases: bool, bits: Bits) -> None:
    spec = replace(SPECS[name], dim=64, hidden=128, out=64)
    layer, inputs = experts(spec, biases=biases), routed(spec, 9)
    weights = frozenset({"experts.w1", "experts.w2"})
    blocked = BlockedWeights("kernel", weights, BLOCK, bits, on_gpu=True)
    made = positive(layer, ComputeTypes(FLOAT_TYPES["fp16"], blocked=blocked))
    node = moe_node(made)
    assert node.op_type == "QMoE" and node.attributes["weights_prepacked"].as_int() == 0
    assert all(each is None for each in node.inputs[8:])
    y = experts_layers.run(made, *inputs)
    expected = in_float64(in_blocks_of(layer, bits), bits, *inputs)
    # A hidden value between two steps may be rounded to either, due to earlier FP16 errors.
    assert error(y, expected) < (HALF if bits == 4 else 1e-2)
