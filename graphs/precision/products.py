"""One product with a constant matrix, rows·w + b: in floats, in integers, or in Q/DQ form.

With blocked weights, only the weights are integers (4-bit ones are packed two to a byte); the
product is computed in floats.

With INT8, activations have one scale and weights have one per column: x ≈ (q − z)·s and w[:, j] ≈
v[:, j]·t[j] with integers q and v, so that x·w ≈ (q − z)·v · s·t[j]. The sum is exact, and one
multiplication per result rescales it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..names import MICROSOFT
from .types import INT8_LEVELS, BlockedWeights, ComputeTypes, QuantizedProducts

Rows = Literal["matrix", "tokens", "token", "stacked"]
"""The operands of a product. `matrix`: [r, in]·[in, out]; `tokens`: rows of any rank; `token`: one
row per input, [b, 1, in]; `stacked`: [..., r, in]·[..., in, out], several matrices at once."""


@dataclass(frozen=True, slots=True)
class Linear:
    """The constants of rows·w + b.

    `bias` and `scale` are [..., 1, out] if the weights are stacked, else [out]. `key` is the name
    of the weight in the layer; `scale` is None unless the weights are integers.
    """

    key: str
    weight: ir.Value
    scale: ir.Value | None
    bias: ir.Value | None
    rows: Rows = "matrix"


def operand(b: Builder, compute: ComputeTypes, key: str, rows: ir.Value, name: str) -> ir.Value:
    """Adds the rows in the form that the product with weight `key` needs, in any shape.

    They are integers if the product is of integers; in Q/DQ form they are rounded directly before
    the product, where the runtime expects that.
    """
    quantized = compute.quantized
    if quantized is None or quantized.in_qdq:
        return rows
    return b.op(
        "QuantizeLinear", rows, *_scale(b, compute, quantized, key), name=f"{name}_integers"
    )


ZERO_ROW_SCALE = 1e-30
"""The scale of a row of zeros."""


def scale_rows(b: Builder, rows: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
    """Adds rows [..., w] divided by their own scales, for `QuantizedProducts.dynamic`.

    The second result is the scales [..., 1], by which the rows' results must be multiplied.
    """
    sizes = b.op("Abs", rows, name=f"{name}_sizes")
    peak = b.op("ReduceMax", sizes, b.ints(-1), keepdims=1, name=f"{name}_peak")
    step = b.op("Mul", peak, b.number(1.0 / INT8_LEVELS), name=f"{name}_step")
    scale = b.op("Max", step, b.number(ZERO_ROW_SCALE), name=f"{name}_scale")
    return b.op("Div", rows, scale, name=f"{name}_scaled"), scale


def product(
    b: Builder, compute: ComputeTypes, rows: ir.Value, linear: Linear, name: str
) -> ir.Value:
    """Adds rows·w + b for rows from `operand`: [..., r, in] to [..., r, out]."""
    quantized, blocked = compute.quantized, compute.blocked
    # Stacked operands are already floats.
    if blocked is not None and linear.key in blocked.weights and linear.rows != "stacked":
        return _blocked_product(b, blocked, rows, linear, name)
    if quantized is None:
        return _float_product(b, rows, linear, name)
    if quantized.in_qdq:
        scale, zero = _scale(b, compute, quantized, linear.key)
        integers = b.op("QuantizeLinear", rows, scale, zero, name=f"{name}_integers")
        return _qdq_product(
            b, b.op("DequantizeLinear", integers, scale, zero, name=f"{name}_rounded"), linear, name
        )
    return _integer_product(b, quantized, rows, linear, name)


def one_token(b: Builder, rows: ir.Value, weight: ir.Value, bias: ir.Value, name: str) -> ir.Value:
    """Adds rows·w + b for rows [b, 1, in], as one Gemm between two reshapes.

    ONNX Runtime only fuses an Add with a MatMul of matrices; with one row per input, the Add takes
    3% of a whole layer.
    """
    assert weight.shape is not None
    width, out = weight.shape.numpy()
    flat = b.op("Reshape", rows, b.ints(-1, width), name=f"{name}_rows")
    product = b.op("Gemm", flat, weight, bias, name=f"{name}_flat")
    return b.op("Reshape", product, b.ints(-1, 1, out), name=name)


def _float_product(b: Builder, rows: ir.Value, linear: Linear, name: str) -> ir.Value:
    if linear.bias is None:
        return b.op("MatMul", rows, linear.weight, name=name)
    if linear.rows == "matrix":
        return b.op("Gemm", rows, linear.weight, linear.bias, name=name)
    if linear.rows == "token":
        return one_token(b, rows, linear.weight, linear.bias, name)
    products = b.op("MatMul", rows, linear.weight, name=f"{name}_unbiased")
    return b.op("Add", products, linear.bias, name=name)


INT8_ROWS = 4
"""The `accuracy_level` at which `MatMulNBits` multiplies integers: rows are rounded to eight bits
with a scale per block, which loses far less than rounding the weights."""

FLOAT_ROWS = 0
"""The `accuracy_level` at which rows stay floats."""


def _blocked_product(
    b: Builder, blocked: BlockedWeights, rows: ir.Value, linear: Linear, name: str
) -> ir.Value:
    """Adds a product with one matrix of blocked weights."""
    assert linear.weight.shape is not None and linear.rows != "stacked"
    if blocked.format != "kernel":
        weight = b.op(
            "DequantizeLinear",
            linear.weight,
            linear.scale,
            axis=0,
            block_size=blocked.block,
            name=f"{name}_weight",
        )
        return _float_product(b, rows, replace(linear, weight=weight, scale=None), name)
    out, blocks, _ = linear.weight.shape.numpy()
    return b.op(
        "MatMulNBits",
        rows,
        linear.weight,
        linear.scale,
        None,
        None,
        linear.bias,
        domain=MICROSOFT,
        K=blocks * blocked.block,
        N=out,
        bits=blocked.bits,
        block_size=blocked.block,
        accuracy_level=FLOAT_ROWS if blocked.on_gpu else INT8_ROWS,
        name=name,
    )


def _qdq_product(b: Builder, rows: ir.Value, linear: Linear, name: str) -> ir.Value:
    """Adds products of rounded floats, which a runtime turns into integer products."""
    if linear.rows == "stacked":
        return _rescale(b, b.op("MatMul", rows, linear.weight, name=f"{name}_units"), linear, name)
    weight = b.op("DequantizeLinear", linear.weight, linear.scale, axis=1, name=f"{name}_weight")
    form: Rows = "matrix" if linear.rows == "matrix" else "tokens"
    return _float_product(b, rows, replace(linear, weight=weight, scale=None, rows=form), name)


def _integer_product(
    b: Builder, quantized: QuantizedProducts, rows: ir.Value, linear: Linear, name: str
) -> ir.Value:
    """Adds integer products; `scale` is the product of the rows' and the weight's steps."""
    zero = b.constant(np.array(quantized.inputs[linear.key].zero_point, dtype=np.uint8))
    weight_zero = None
    if quantized.weights.zero_point:
        weight_zero = b.constant(np.array(quantized.weights.zero_point, dtype=np.uint8))
    if quantized.format == "standard":
        sums = b.op(
            "MatMulInteger", rows, linear.weight, zero, weight_zero, name=f"{name}_integers"
        )
        floats = b.op("Cast", sums, to=ir.DataType.FLOAT.value, name=f"{name}_float")
        return _rescale(b, floats, linear, name)
    # The kernel adds one bias; those of stacked weights are added afterwards.
    later_bias = linear.bias if linear.rows == "stacked" else None
    products = b.op(
        "MatMulIntegerToFloat",
        rows,
        linear.weight,
        b.number(1.0),
        linear.scale,
        zero,
        weight_zero,
        linear.bias if later_bias is None else None,
        domain=MICROSOFT,
        name=name if later_bias is None else f"{name}_unbiased",
    )
    return products if later_bias is None else b.op("Add", products, later_bias, name=name)


def _rescale(b: Builder, products: ir.Value, linear: Linear, name: str) -> ir.Value:
    """Adds products·scale + bias."""
    if linear.bias is None:
        return b.op("Mul", products, linear.scale, name=name)
    scaled = b.op("Mul", products, linear.scale, name=f"{name}_scaled")
    return b.op("Add", scaled, linear.bias, name=name)


def _scale(
    b: Builder, compute: ComputeTypes, quantized: QuantizedProducts, key: str
) -> tuple[ir.Value, ir.Value]:
    """Adds the step and the zero point of a weight's operand, as constants."""
    scale = quantized.inputs[key]
    dtype = quantized.weights.dtype.numpy() if quantized.format == "qdq" else np.dtype(np.uint8)
    return (
        b.number(scale.scale, compute.inner),
        b.constant(np.array(scale.zero_point, dtype=dtype)),
    )
