"""The arithmetic of the experts, shared by the lowerings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import Layer, LayerOf
from ..names import EXPERT_HIDDEN, EXPERT_INPUT, EXPERT_OUTPUTS, EXPERT_PRODUCTS
from ..precision.products import Linear, operand, product


def expert_rows(b: Builder, layer: Layer, rows: ir.Value) -> ir.Value:
    """Adds the rows as the experts' first product takes them, in any shape: done once for all."""
    converted = b.cast(rows, ir.DataType.FLOAT, layer.compute.inner, "experts/rows_narrow")
    return operand(b, layer.compute, "experts.w1", converted, "experts/rows")


def activate(b: Builder, layer: Layer, hidden: ir.Value, name: str = "experts") -> ir.Value:
    """Adds the nonlinearity: [..., inner] to [..., h]."""
    if layer.spec.expert == "geglu":
        value, gate = b.ops(
            "Split",
            hidden,
            names=(f"{name}/value", f"{name}/gate"),
            axis=-1,
            num_outputs=2,
        )
        gated = b.op("Gelu", gate, name=f"{name}/gelu")
        return b.op("Mul", value, gated, name=f"{name}/hidden")
    match layer.spec.activation:
        case "gelu":
            return b.op("Gelu", hidden, name=f"{name}/hidden")
        case "gelu-tanh":
            return b.op("Gelu", hidden, name=f"{name}/hidden", approximate="tanh")
        case "relu":
            return b.op("Relu", hidden, name=f"{name}/hidden")


def stacked_weights(b: Builder, layer: Layer) -> dict[str, ir.Value]:
    """The experts' weights [n, …] as constants; biases and scales as [n, 1, …], for all rows."""
    weights = {}
    for which in ("1", "2"):
        w, bias = f"w{which}", f"b{which}"
        if layer.tensors.has(f"experts.{w}"):
            weights[w] = _stacked_weight(b, layer, w)
        if layer.tensors.has(f"experts.{w}.scale") and layer.compute.blocked is None:
            weights[f"{w}.scale"] = _stacked_scale(b, layer, w)
        if layer.tensors.has(f"experts.{bias}"):
            stacked = layer.stacked(b, f"experts.{bias}")
            weights[bias] = b.op("Unsqueeze", stacked, b.ints(1), name=f"experts/{bias}_rows")
    return weights


UNIT = 1.0 / 128.0
"""What a step of a stacked weight in Q/DQ form is worth until its column's scale follows: a power
of two, so that every float type holds the weights exactly, as numbers between −1 and 1."""


def _stacked_weight(b: Builder, layer: LayerOf[Any], key: str) -> ir.Value:
    """The weights [n, in, out] of all experts.

    In Q/DQ form they are numbers in steps of `UNIT`: one DequantizeLinear knows one axis, and their
    scales have two. The constant may feed nothing but that node, so a Gather comes after it.
    """
    weight = layer.stacked(b, f"experts.{key}")
    blocked = layer.compute.blocked
    if blocked is not None and f"experts.{key}" in blocked.weights:
        scale = layer.stacked(b, f"experts.{key}.scale")
        name = f"experts/{key}_floats"
        size = blocked.block
        return b.op("DequantizeLinear", weight, scale, axis=1, block_size=size, name=name)
    quantized = layer.compute.quantized
    if quantized is None or quantized.format != "qdq":
        return weight
    unit = b.number(UNIT, layer.compute.inner)
    return b.op("DequantizeLinear", weight, unit, name=f"experts/{key}_units")


def _stacked_scale(b: Builder, layer: LayerOf[Any], key: str) -> ir.Value:
    """The scales of the weights [n, in, out] as [n, 1, out], for what `_stacked_weight` gives."""
    scale = layer.stacked(b, f"experts.{key}.scale")
    rows = b.op("Unsqueeze", scale, b.ints(1), name=f"experts/{key}_scale_rows")
    quantized = layer.compute.quantized
    assert quantized is not None
    if quantized.format != "qdq":
        return rows
    per_unit = b.number(1.0 / UNIT, layer.compute.inner)
    return b.op("Mul", rows, per_unit, name=f"experts/{key}_scale_per_unit")


def stacked_linear(b: Builder, layer: LayerOf[Any], which: str, *, biased: bool = True) -> Linear:
    """The first or second matmul of all experts at once."""
    w, bias = f"w{which}", f"experts.b{which}"
    scale, rows = None, None
    if layer.tensors.has(f"experts.{w}.scale") and layer.compute.blocked is None:
        scale = _stacked_scale(b, layer, w)
    if biased and layer.tensors.has(bias):
        rows = b.op("Unsqueeze", layer.stacked(b, bias), b.ints(1), name=f"experts/b{which}_rows")
    return Linear(f"experts.{w}", _stacked_weight(b, layer, w), scale, rows, "stacked")


def batched_experts(
    b: Builder,
    layer: Layer,
    rows: ir.Value,
    weights: Mapping[str, ir.Value],
) -> ir.Value:
    """Adds batched MatMuls: rows [..., r, d] times w1 [..., d, inner] and so on; [..., r, o].

    `weights` are those of `stacked_weights`, or what was gathered from them.
    """

    def linear(which: str) -> Linear:
        w = f"w{which}"
        scale, bias = weights.get(f"{w}.scale"), weights.get(f"b{which}")
        return Linear(f"experts.{w}", weights[w], scale, bias, "stacked")

    hidden = product(b, layer.compute, rows, linear("1"), "experts/products")
    if "w2" not in weights:
        return hidden
    hidden = operand(b, layer.compute, "experts.w2", activate(b, layer, hidden), "experts/hidden")
    return product(b, layer.compute, hidden, linear("2"), "experts/outputs")


def one_expert(b: Builder, layer: Layer, index: int, rows: ir.Value) -> ir.Value:
    """Adds expert `index` on rows [r, d], with weights that are constants; returns [r, o]."""
    products = first_product(b, layer, index, rows)
    if not layer.tensors.has("experts.w2"):
        return products
    return second_product(b, layer, index, hidden_rows(b, layer, products, f"experts/{index}"))


def first_product(b: Builder, layer: Layer, index: int, rows: ir.Value) -> ir.Value:
    """Adds expert `index`'s first matmul on rows [r, d]; returns [r, inner]."""
    b.tap(EXPERT_INPUT, rows)
    products = product(
        b, layer.compute, rows, _linear(b, layer, index, "1"), f"experts/{index}/products"
    )
    b.tap(EXPERT_PRODUCTS, products)
    return products


def hidden_rows(b: Builder, layer: Layer, products: ir.Value, name: str) -> ir.Value:
    """Adds the nonlinearity on rows [r, inner] of any experts, ready for the second matmul."""
    hidden = activate(b, layer, products, name)
    b.tap(EXPERT_HIDDEN, hidden)
    return operand(b, layer.compute, "experts.w2", hidden, f"{name}/hidden")


def second_product(b: Builder, layer: Layer, index: int, hidden: ir.Value) -> ir.Value:
    """Adds expert `index`'s second matmul on rows of `hidden_rows`; returns [r, o]."""
    outputs = product(
        b, layer.compute, hidden, _linear(b, layer, index, "2"), f"experts/{index}/outputs"
    )
    b.tap(EXPERT_OUTPUTS, outputs)
    return outputs


def _linear(b: Builder, layer: Layer, index: int, which: str) -> Linear:
    """An expert's first or second matmul."""

    def constant(weight: str) -> ir.Value | None:
        name = f"experts.{weight}"
        return layer.expert(b, name, index) if layer.tensors.has(name) else None

    w = f"w{which}"
    weight = layer.expert(b, f"experts.{w}", index)
    return Linear(f"experts.{w}", weight, constant(f"{w}.scale"), constant(f"b{which}"))
