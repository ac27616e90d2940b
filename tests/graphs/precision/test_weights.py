"""INT8 experts compute what rounding to integers gives, exactly, in every form and lowering."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import onnx_ir as ir
import pytest
from moexport.graphs.layers.soft_moe import ExpertKind
from moexport.graphs.lowerings.grouped import MANY_EXPERTS
from moexport.graphs.precision.types import (
    EIGHT_BITS,
    EIGHT_BITS_UNSIGNED,
    SEVEN_BITS,
    ComputeTypes,
    QuantizedProducts,
    Range,
    Scale,
    WeightQuantization,
)
from moexport.graphs.precision.weights import quantize
from moexport.graphs.targets import QuantFormat
from moexport.tests.graphs.soft_moe_layers import (
    Array,
    TinyLayer,
    lowered,
    session,
    soft_moe,
    tiny_layer,
    tokens,
)

FORMS: list[tuple[QuantFormat, WeightQuantization]] = [
    ("kernel", SEVEN_BITS),
    ("kernel", EIGHT_BITS_UNSIGNED),
    ("standard", SEVEN_BITS),
    ("standard", EIGHT_BITS_UNSIGNED),
    ("qdq", EIGHT_BITS),
]
INPUT = Range(-3.0, 2.5, -3.0, 2.5, 100)
HIDDEN = Range(-0.5, 9.0, -0.5, 9.0, 100)


def int8(layer: TinyLayer, form: QuantFormat, grid: WeightQuantization) -> ComputeTypes:
    """Both products of the experts in integers, over ranges that cover what they see."""

    def scale(seen: Range) -> Scale:
        return seen.symmetric() if form == "qdq" else seen.affine()

    inputs = {"experts.w1": scale(INPUT)}
    if layer.w2 is not None:
        inputs["experts.w2"] = scale(HIDDEN)
    return ComputeTypes(quantized=QuantizedProducts(form, grid, inputs))


def rounded(x: Array, scale: Scale, *, signed: bool) -> Array:
    """What x is after it was an 8-bit integer."""
    low, high = (-128, 127) if signed else (0, 255)
    steps = np.clip(np.rint(x / scale.scale) + scale.zero_point, low, high)
    return np.asarray((steps - scale.zero_point) * scale.scale)


def as_integers(layer: TinyLayer, compute: ComputeTypes) -> TinyLayer:
    """The layer with weights that were integers; its activations still have to be rounded."""
    assert compute.quantized is not None
    grid = compute.quantized.weights

    def through(weights: Array) -> Array:
        found = []
        for matrix in weights:
            integers, scale = quantize(matrix.astype(np.float32), grid)
            found.append((integers.astype(np.float64) - grid.zero_point) * scale)
        return np.stack(found)

    w2 = None if layer.w2 is None else through(layer.w2)
    return replace(layer, w1=through(layer.w1), w2=w2)


def expected(layer: TinyLayer, compute: ComputeTypes, x: Array, k: int) -> Array:
    """The formulas in float64 with weights and activations rounded where the graph rounds them."""
    quantized = compute.quantized
    assert quantized is not None
    signed = quantized.format == "qdq"

    def operand(key: str, rows: Array) -> Array:
        return rounded(rows, quantized.inputs[f"experts.{key}"], signed=signed)

    return soft_moe(as_integers(layer, compute), x, k, operand=operand)[0]


def assert_computes(
    layer: TinyLayer, lowering: str, kept: int | None, compute: ComputeTypes, k: int
) -> None:
    x = tokens(5, 4)
    feeds = {"input": x} if kept is not None else {"input": x, "k": np.array([k])}
    y = session(lowered(layer, lowering, kept, compute=compute)).run(None, feeds)[0]
    wanted = expected(layer, compute, x, k)
    off = np.abs(y - wanted)
    # A number half-way between two integers may go either way in float32: one step, rarely.
    assert np.median(off) <= 2e-6 * np.abs(wanted).max()
    assert off.max() <= 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("form", "grid"), FORMS)
@pytest.mark.parametrize("lowering", ["dense", "gather", "grouped", "conditional"])
def test_every_lowering_rounds_as_written_down(
    lowering: str, form: QuantFormat, grid: WeightQuantization, slots: int
) -> None:
    layer = tiny_layer(slots=slots)
    compute = int8(layer, form, grid)
    assert_computes(layer, lowering, 2, compute, 2)
    assert_computes(layer, lowering, 5, compute, 5)
    assert_computes(layer, lowering, None, compute, 3)


@pytest.mark.parametrize("expert", get_args(ExpertKind))
@pytest.mark.parametrize("form", get_args(QuantFormat))
def test_every_kind_of_expert_with_and_without_biases(
    form: QuantFormat, expert: ExpertKind
) -> None:
    grid = EIGHT_BITS if form == "qdq" else SEVEN_BITS
    for biases in (True, False):
        layer = tiny_layer(expert=expert, biases=biases, activation="gelu")
        for lowering in ("gather", "grouped"):
            assert_computes(layer, lowering, 2, int8(layer, form, grid), 2)


@pytest.mark.parametrize(("form", "grid"), FORMS)
def test_many_grouped_experts_round_their_hidden_rows_together(
    form: QuantFormat, grid: WeightQuantization
) -> None:
    layer = tiny_layer(experts=MANY_EXPERTS, slots=2)
    compute = int8(layer, form, grid)
    assert_computes(layer, "grouped", 3, compute, 3)
    assert_computes(layer, "grouped", MANY_EXPERTS, compute, MANY_EXPERTS)


def extreme(width: int) -> TinyLayer:
    """Experts whose every product is as large as 8 bits allow: all summands have one sign."""
    layer = tiny_layer(experts=3, out=6)
    ones = np.ones((3, width, 5))
    spec = replace(layer.spec, dim=width, hidden=5, norm="none", norm_eps=0.0)
    return replace(
        layer,
        spec=spec,
        phi=np.zeros((width, 3, 1)) + np.array([0.0, 1e-3, 2e-3])[None, :, None],
        w1=ones,
        b1=None,
        w2=np.ones((3, 5, 6)),
        b2=None,
    )


@pytest.mark.parametrize(("form", "grid"), FORMS)
@pytest.mark.parametrize("lowering", ["dense", "gather", "grouped", "conditional"])
def test_the_largest_sums_do_not_saturate(
    lowering: str, form: QuantFormat, grid: WeightQuantization
) -> None:
    # On CPUs without VNNI a product of bytes is added in pairs in 16 bits.
    width = 256
    layer = extreme(width)
    largest = Range(0.0, 1.0, 0.0, 1.0, 1)
    sums = Range(0.0, float(width), 0.0, float(width), 1)
    scales = [r.symmetric() if form == "qdq" else r.affine() for r in (largest, sums)]
    inputs = dict(zip(("experts.w1", "experts.w2"), scales, strict=True))
    compute = ComputeTypes(quantized=QuantizedProducts(form, grid, inputs))
    for batch in (1, 2, 7, 40):
        x = np.ones((batch, 3, width), dtype=np.float32)
        y = session(lowered(layer, lowering, 2, compute=compute)).run(None, {"input": x})[0]
        combined = np.exp([0.0, 1e-3 * width, 2e-3 * width])
        kept = combined[1:].sum() / combined.sum()
        assert np.allclose(y, 5 * width * kept, rtol=1e-5)


def test_scales_are_numbers_that_their_type_holds() -> None:
    random = np.random.default_rng(0)
    matrix = random.standard_normal((64, 9)).astype(np.float32) * 0.01
    matrix[:, 4] = 0.0
    for dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        integers, scale = quantize(matrix, EIGHT_BITS, dtype)
        assert np.array_equal(scale, scale.astype(dtype.numpy()).astype(np.float32))
        assert not integers[:, 4].any()
        assert np.abs(integers * scale - matrix).max() <= 0.51 * scale.max()
