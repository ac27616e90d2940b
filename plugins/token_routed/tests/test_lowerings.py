"""Every lowering of token-routed experts, in ONNX Runtime, against a formula in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.lowerings.base import LayerPlan
from moexport.graphs.lowerings.choice import choose, exact_lowerings
from moexport.graphs.lowerings.cost import machine_for
from moexport.graphs.precision.types import (
    EIGHT_BITS,
    EIGHT_BITS_UNSIGNED,
    SEVEN_BITS,
    ComputeTypes,
    QuantizedProducts,
    Scale,
    WeightQuantization,
)
from moexport.graphs.targets import Precision, Target
from moexport.plugins.token_routed.layers.experts import ExpertsSpec
from moexport.plugins.token_routed.tests.experts_layers import (
    CAPACITY,
    PLAIN,
    SPECS,
    computed,
    computes_in,
    error,
    experts,
    formula,
    lowered,
    rounded,
    routed,
    run,
    session,
)

TARGETS_HERE: tuple[Target, ...] = ("onnx", "ort-cpu", "tensorrt")
"""TensorRT's graphs contain standard ops, which ONNX Runtime also runs."""

CASES = [
    (name, target)
    for name, record in lowerings_of("experts").items()
    for target in TARGETS_HERE
    if record.problem(PLAIN, "fp32", target) is None
]


def serving(spec: ExpertsSpec) -> list[tuple[str, Target]]:
    return [
        (name, target)
        for name, record in lowerings_of("experts").items()
        for target in TARGETS_HERE
        if record.problem(spec, "fp32", target) is None
        and record.inexact(spec, "fp32", target) is None
    ]


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("name", list(SPECS))
def test_every_option_in_every_lowering(name: str, biases: bool) -> None:
    layer = experts(SPECS[name], biases=biases)
    inputs = routed(layer.spec, 9)
    expected = formula(layer, *inputs)
    for lowering, target in serving(layer.spec):
        y = run(lowered(layer, lowering, target=target), *inputs)
        assert error(y, expected) < 1e-5, (lowering, target)


@pytest.mark.parametrize(("lowering", "target"), CASES)
def test_one_graph_serves_any_number_of_tokens_and_any_choice(
    lowering: str, target: Target
) -> None:
    layer = experts(PLAIN, biases=True)
    graph = session(lowered(layer, lowering, target=target, width=2))
    for tokens in (1, 2, 17):
        inputs = routed(PLAIN, tokens)
        assert error(run(graph, *inputs), formula(layer, *inputs)) < 1e-5
    x, _, weights = routed(PLAIN, 5)
    to_two = np.tile(np.array([4, 1]), (5, 1))  # four experts get no tokens
    assert error(run(graph, x, to_two, weights), formula(layer, x, to_two, weights)) < 1e-5
    if target != "tensorrt":  # an engine has at least one
        assert run(graph, *routed(PLAIN, 0)).shape == (0, PLAIN.out)


@pytest.mark.parametrize(("lowering", "target"), CASES)
def test_all_tokens_to_one_expert(lowering: str, target: Target) -> None:
    spec = replace(PLAIN, k=1)
    layer, (x, index, weights) = experts(spec), routed(spec, 6)
    index = np.full_like(index, 3)
    y = run(lowered(layer, lowering, target=target, width=1), x, index, weights)
    assert error(y, formula(layer, x, index, weights)) < 1e-5


@pytest.mark.parametrize(("lowering", "target"), CASES)
def test_weights_may_be_zero_or_negative(lowering: str, target: Target) -> None:
    layer, (x, index, weights) = experts(PLAIN), routed(PLAIN, 6)
    weights[:, 0] = [0, -1, 0, 1, -0.5, 2]
    y = run(lowered(layer, lowering, target=target, width=2), x, index, weights)
    assert error(y, formula(layer, x, index, weights)) < 1e-5


@pytest.mark.parametrize(("lowering", "target"), CASES)
def test_k_may_be_known_when_the_graph_runs(lowering: str, target: Target) -> None:
    layer = experts(PLAIN)
    graph = session(lowered(layer, lowering, target=target))
    for k in (1, 2, 3, 6):
        inputs = routed(PLAIN, 4, k=k)
        assert error(run(graph, *inputs), formula(layer, *inputs)) < 1e-5


SIZES = replace(PLAIN, dim=64, hidden=96, out=64)
"""Rows of whole blocks."""

OPTIONS = {
    "plain": SIZES,
    "clamped": replace(SIZES, gate="interleaved", alpha=1.702, limit=0.7, up_offset=1.0),
    "ungated": replace(SIZES, gate="none", activation="relu2"),
    "post-norm": replace(SIZES, post_norm=True),
    "weights on input": replace(SIZES, weights_on="input"),
}

PRECISE: dict[Precision, float] = {"fp16": 3e-3, "int8": 2e-2, "int4": 2e-2}
"""The largest error beyond that of rounded weights, as a share of the largest output: integer
kernels also round the rows."""


@pytest.mark.parametrize("precision", list(PRECISE))
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_every_precision(option: str, biases: bool, precision: Precision) -> None:
    layer = experts(OPTIONS[option], biases=biases)
    inputs = routed(layer.spec, 7)
    exact = layer if precision == "fp16" else rounded(layer, precision)
    expected = formula(exact, *inputs)
    for lowering, target in serving(layer.spec):
        record = lowerings_of("experts")[lowering]
        if record.problem(layer.spec, precision, target) is not None or (
            target == "tensorrt" and precision == "int8"
        ):
            continue  # engines need ranges for INT8
        compute = computes_in(precision, layer, target)
        graph = lowered(
            layer, lowering, target=target, compute=compute, width=layer.spec.k, opset=21
        )
        floats = precision == "int4" and target != "ort-cpu"
        limit = 1e-5 if floats else PRECISE[precision]
        assert error(run(graph, *inputs), expected) < limit, (lowering, target)


@pytest.mark.parametrize("weights", [SEVEN_BITS, EIGHT_BITS_UNSIGNED], ids=["signed", "unsigned"])
def test_the_fused_op_takes_int8_weights_that_are_no_whole_blocks(
    weights: WeightQuantization,
) -> None:
    layer = experts(replace(SIZES, hidden=90), biases=True)
    inputs = routed(layer.spec, 7)
    compute = computes_in("int8", layer, "ort-cpu")
    assert compute.quantized is not None
    compute = replace(compute, quantized=replace(compute.quantized, weights=weights))
    y = run(lowered(layer, "fused", target="ort-cpu", compute=compute, width=2), *inputs)
    assert error(y, formula(layer, *inputs)) < 4e-2


@pytest.mark.parametrize(("precision", "most"), [("int8", 4e-2), ("int4", 2e-1)])
def test_what_integers_lose_of_random_weights(precision: Precision, most: float) -> None:
    layer, inputs = experts(SIZES), routed(SIZES, 9)
    assert error(formula(rounded(layer, precision), *inputs), formula(layer, *inputs)) < most


@pytest.mark.parametrize("lowering", ["dense", "conditional", "block-grouped"])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_int8_of_engines_has_scales_that_a_calibration_found(option: str, lowering: str) -> None:
    layer = experts(OPTIONS[option], biases=True)
    inputs = routed(layer.spec, 7)
    peak = 14.0 if option == "ungated" else 5.0  # of relu²'s outputs
    steps = {"experts.w1": Scale(3.5 / 127, 0), "experts.w2": Scale(peak / 127, 0)}
    compute = ComputeTypes(quantized=QuantizedProducts("qdq", EIGHT_BITS, steps))
    made = lowered(layer, lowering, target="tensorrt", compute=compute, width=2, opset=21)
    assert error(run(made, *inputs), formula(layer, *inputs)) < 6e-2


def test_a_row_of_int8_does_not_depend_on_the_others() -> None:
    layer, (x, index, weights) = experts(SIZES, biases=True), routed(SIZES, 5)
    compute = computes_in("int8", layer, "ort-cpu")
    graph = session(lowered(layer, "grouped", target="ort-cpu", compute=compute, width=2))
    together = run(graph, x, index, weights)
    x[1:] *= 100.0
    assert np.array_equal(run(graph, x, index, weights)[0], together[0])
    assert error(run(graph, x[:1], index[:1], weights[:1]), together[:1]) < 1e-6


def test_a_row_of_zeros_stays_finite_in_int8() -> None:
    layer, (x, index, weights) = experts(SIZES), routed(SIZES, 3)
    compute = computes_in("int8", layer, "ort-cpu")
    graph = lowered(layer, "grouped", target="ort-cpu", compute=compute, width=2)
    y = run(graph, np.zeros_like(x), index, weights)
    assert not y.any()


def test_tokens_and_outputs_may_be_16_bit_floats() -> None:
    layer, (x, index, weights) = experts(SIZES), routed(SIZES, 5)
    made = lowered(
        layer,
        "grouped",
        compute=computes_in("fp16", layer, "onnx"),
        stream=ir.DataType.FLOAT16,
        width=2,
    )
    y = run(made, x.astype(np.float16), index, weights)
    assert y.dtype == np.float16
    assert error(y.astype(np.float32), formula(layer, x, index, weights)) < 3e-3


def test_the_standard_target_takes_standard_ops_alone() -> None:
    for precision in ("fp32", "fp16", "int8", "int4"):
        layer = experts(SIZES)
        made = lowered(layer, "grouped", compute=computes_in(precision, layer, "onnx"), opset=21)
        assert {node.domain for node in made.model.graph} == {""}


def test_what_was_chosen_is_the_value_of_the_graph_around() -> None:
    made = lowered(experts(PLAIN), "grouped", width=2)
    assert made.values[PLAIN.name].selected == "index"
    assert made.values[PLAIN.name].input == "x"


@pytest.mark.parametrize("precision", ["fp32", "int8", "fp16"])
def test_choices_that_were_dropped_add_nothing(precision: Precision) -> None:
    layer = experts(CAPACITY, biases=True)
    x, index, weights = routed(CAPACITY, 27)
    taken = np.zeros((3, CAPACITY.experts), int)
    for token, choice in np.ndindex(*index.shape):
        place = token // CAPACITY.group, index[token, choice]
        taken[place] += 1
        if taken[place] > CAPACITY.capacities[CAPACITY.k - 1]:
            index[token, choice] += CAPACITY.experts
            weights[token, choice] = 0.0
    dropped = index >= CAPACITY.experts
    assert dropped.any(axis=1).sum() > dropped.all(axis=1).sum() > 0
    expected = formula(layer, x, index % CAPACITY.experts, weights)
    assert error(computed(layer, x, index, weights), expected) < 1e-5
    bound = {"fp32": 1e-5, "int8": 0.02, "fp16": 2e-3}[precision]
    served = [(name, target) for name, target in serving(CAPACITY) if name != "fused"]
    assert {name for name, _ in served} >= {"slots", "grouped", "dense", "block-grouped"}
    for name, target in served:
        if precision != "fp32" and target == "tensorrt":
            continue
        compute = computes_in(precision, layer, target)
        made = lowered(layer, name, compute=compute, target=target, width=CAPACITY.k)
        y = run(made, x, index, weights)
        assert not y[dropped.all(axis=1)].any()
        assert error(y, expected) < bound, (name, target)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_what_decodes_is_chosen_by_one_token_and_says_what_a_prompt_takes(
    precision: Precision,
) -> None:
    spec = ExpertsSpec("experts", experts=32, k=8, dim=1024, hidden=512, out=1024)
    work = LayerPlan(spec, 8, 1, 196, precision)
    decoding = choose(work, "ort-cpu", (1, 64), decodes=True)
    machine = machine_for("ort-cpu", precision)
    token = replace(work, tokens=1)
    times = {each: each.predict_us(token, machine) for each in exact_lowerings(token, "ort-cpu")}
    assert decoding.lowering == min(times, key=lambda each: times[each])
    assert "at 1 and 196 and 512 tokens, fastest at one token (others: " in decoding.reason
    floats = replace(work, precision="fp32")
    assert choose(floats, "ort-cpu", (1, 64), decodes=True) == choose(floats, "ort-cpu", (1, 64))
