"""One product with a constant matrix, rows·w + b: in floats, in integers, or in Q/DQ form.

In INT8 activations have one scale and weights one per column: x ≈ (q − z)·s and
w[:, j] ≈ v[:, j]·t[j] with integers q, v, so that x·w ≈ (q − z)·v · s·t[j]. The sum is exact, and
one multiplication per result brings it back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import Layer, LayerOf
from ..precision.types import Quantised

UNIT = 1.0 / 128.0
"""What a step of a stacked weight in Q/DQ form is worth until its column's scale follows: a power
of two, so that every float type holds the weights exactly, as numbers between −1 and 1."""


@dataclass(frozen=True, slots=True)
class Linear:
    """The constants of rows·w + b, of one expert or of several.

    Of several, `weight` is [..., in, out] and `bias` and `scale` are [..., 1, out]; of one they are
    [in, out] and [out], and the rows are [r, in], or where they are not `flat` of any rank. `key`
    names the weight among the layer's; `scale` belongs to one of integers.
    """

    key: str
    weight: ir.Value
    scale: ir.Value | None
    bias: ir.Value | None
    stacked: bool
    flat: bool = True


def operand(b: Builder, layer: LayerOf[Any], key: str, rows: ir.Value, name: str) -> ir.Value:
    """Adds the rows as the product with weight `key` takes them, in any shape.

    Integers where it multiplies integers; in Q/DQ form they are rounded beside the product, where
    the runtime looks for it.
    """
    quantised = layer.arithmetic.quantised
    if quantised is None or quantised.form == "qdq":
        return rows
    scale, zero = _scale(b, layer, quantised, key)
    return b.op("QuantizeLinear", rows, scale, zero, name=f"{name}_integers")


def product(b: Builder, layer: LayerOf[Any], rows: ir.Value, linear: Linear, name: str) -> ir.Value:
    """Adds rows·w + b for rows that `operand` prepared: [..., r, in] to [..., r, out]."""
    quantised = layer.arithmetic.quantised
    if quantised is None:
        if layer.tokens == 1 and linear.bias is not None and not linear.flat:
            return one_token(b, rows, linear.weight, linear.bias, name)
        return _floats(b, rows, linear, name)
    if quantised.form == "qdq":
        return _rounded(b, layer, quantised, rows, linear, name)
    return _integers(b, quantised, rows, linear, name)


def one_token(b: Builder, rows: ir.Value, weight: ir.Value, bias: ir.Value, name: str) -> ir.Value:
    """Adds rows·w + b for rows [b, 1, in], as one Gemm between two changes of shape.

    ONNX Runtime fuses an Add with a MatMul of matrices only; with a row per input the Add is worth
    3% of a whole layer.
    """
    assert weight.shape is not None
    width, out = weight.shape.numpy()
    flat = b.op("Reshape", rows, b.ints(-1, width), name=f"{name}_rows")
    product = b.op("Gemm", flat, weight, bias, name=f"{name}_flat")
    return b.op("Reshape", product, b.ints(-1, 1, out), name=name)


def stacked_weight(b: Builder, layer: Layer, key: str) -> ir.Value:
    """The weights [n, in, out] of all experts.

    In Q/DQ form they are numbers in steps of `UNIT`: one DequantizeLinear knows one axis, and their
    scales have two. The constant may feed nothing but that node, so a Gather comes after it.
    """
    weight = layer.stacked(b, f"experts.{key}")
    quantised = layer.arithmetic.quantised
    if quantised is None or quantised.form != "qdq":
        return weight
    unit = b.number(UNIT, layer.arithmetic.inner)
    return b.op("DequantizeLinear", weight, unit, name=f"experts/{key}_units")


def stacked_scale(b: Builder, layer: Layer, key: str) -> ir.Value:
    """The scales of the weights [n, in, out] as [n, 1, out], for what `stacked_weight` gives."""
    scale = layer.stacked(b, f"experts.{key}.scale")
    rows = b.op("Unsqueeze", scale, b.ints(1), name=f"experts/{key}_scale_rows")
    quantised = layer.arithmetic.quantised
    assert quantised is not None
    if quantised.form != "qdq":
        return rows
    per_unit = b.number(1.0 / UNIT, layer.arithmetic.inner)
    return b.op("Mul", rows, per_unit, name=f"experts/{key}_scale_per_unit")


def _floats(b: Builder, rows: ir.Value, linear: Linear, name: str) -> ir.Value:
    if linear.bias is None:
        return b.op("MatMul", rows, linear.weight, name=name)
    if linear.flat and not linear.stacked:
        return b.op("Gemm", rows, linear.weight, linear.bias, name=name)
    products = b.op("MatMul", rows, linear.weight, name=f"{name}_unbiased")
    return b.op("Add", products, linear.bias, name=name)


def _rounded(
    b: Builder, layer: LayerOf[Any], quantised: Quantised, rows: ir.Value, linear: Linear, name: str
) -> ir.Value:
    scale, zero = _scale(b, layer, quantised, linear.key)
    integers = b.op("QuantizeLinear", rows, scale, zero, name=f"{name}_integers")
    rows = b.op("DequantizeLinear", integers, scale, zero, name=f"{name}_rounded")
    if linear.stacked:
        return _scaled(b, b.op("MatMul", rows, linear.weight, name=f"{name}_units"), linear, name)
    weight = b.op("DequantizeLinear", linear.weight, linear.scale, axis=1, name=f"{name}_weight")
    return _floats(b, rows, replace(linear, weight=weight, scale=None), name)


def _integers(
    b: Builder, quantised: Quantised, rows: ir.Value, linear: Linear, name: str
) -> ir.Value:
    """Integer products; their `scale` holds both steps, that of the rows and that of the weight."""
    zero = b.constant(np.array(quantised.inputs[linear.key].zero_point, dtype=np.uint8))
    weight_zero = None
    if quantised.grid.zero_point:
        weight_zero = b.constant(np.array(quantised.grid.zero_point, dtype=np.uint8))
    if quantised.form == "standard":
        sums = b.op(
            "MatMulInteger", rows, linear.weight, zero, weight_zero, name=f"{name}_integers"
        )
        floats = b.op("Cast", sums, to=ir.DataType.FLOAT.value, name=f"{name}_float")
        return _scaled(b, floats, linear, name)
    # The kernel adds a bias of one row: that of stacked weights comes after it.
    apart = linear.bias if linear.stacked else None
    products = b.op(
        "MatMulIntegerToFloat",
        rows,
        linear.weight,
        b.number(1.0),
        linear.scale,
        zero,
        weight_zero,
        None if linear.stacked else linear.bias,
        domain="com.microsoft",
        name=name if apart is None else f"{name}_unbiased",
    )
    return products if apart is None else b.op("Add", products, apart, name=name)


def _scaled(b: Builder, products: ir.Value, linear: Linear, name: str) -> ir.Value:
    """Adds products·scale + bias."""
    if linear.bias is None:
        return b.op("Mul", products, linear.scale, name=name)
    scaled = b.op("Mul", products, linear.scale, name=f"{name}_scaled")
    return b.op("Add", scaled, linear.bias, name=name)


def _scale(
    b: Builder, layer: LayerOf[Any], quantised: Quantised, key: str
) -> tuple[ir.Value, ir.Value]:
    """The step and the zero point of what meets a weight, as constants."""
    scale = quantised.inputs[key]
    kind = np.int8 if quantised.form == "qdq" else np.uint8
    return (
        b.number(scale.scale, layer.arithmetic.inner),
        b.constant(np.array(scale.zero_point, dtype=kind)),
    )
