"""The arithmetic of the experts, shared by the lowerings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from ..builder import Builder
from ..layers.expert import NORM_WEIGHTS, Activation, ExpertMapsSpec, ExpertNorm
from ..layers.stored import Layer, SoftMoELayer
from ..names import EXPERT_HIDDEN, EXPERT_INPUT, EXPERT_OUTPUTS, EXPERT_PRODUCTS, MICROSOFT
from ..precision.products import Linear, operand, product
from ..targets import TARGETS


def expert_rows(b: Builder, layer: SoftMoELayer, rows: ir.Value) -> ir.Value:
    """Adds the rows in the form that the experts' first product needs, in any shape."""
    converted = b.cast(rows, ir.DataType.FLOAT, layer.compute.inner, "experts/rows_narrow")
    return operand(b, layer.compute, "experts.w1", converted, "experts/rows")


def activation(
    b: Builder, layer: Layer[Any], z: ir.Value, kind: Activation, name: str, alpha: float = 1.0
) -> ir.Value:
    """Adds an activation of z in the experts' float type; `alpha` applies to `silu`."""
    match kind:
        case "silu" if not TARGETS[layer.target].standard_ops:
            return b.op("QuickGelu", z, domain=MICROSOFT, alpha=alpha, name=name)
        case "silu":
            scaled = z
            if alpha != 1.0:
                factor = b.number(alpha, layer.compute.inner)
                scaled = b.op("Mul", z, factor, name=f"{name}_scaled")
            return b.op("Mul", z, b.op("Sigmoid", scaled, name=f"{name}_sigmoid"), name=name)
        case "gelu" | "gelu-tanh":
            form = {"approximate": "tanh"} if kind == "gelu-tanh" else {}
            return b.op("Gelu", z, name=name, **form)
        case "relu" | "relu2":
            squared = kind == "relu2"
            positive = b.op("Relu", z, name=f"{name}_positive" if squared else name)
            return b.op("Mul", positive, positive, name=name) if squared else positive
        case "softmax":
            return b.op("Softmax", z, axis=-1, name=name)
        case "identity":
            return z


Affine = Callable[[str], ir.Value | None]
"""Returns an expert's weight by name (`g1`), for rows of one or several experts, or None."""


def add_norm_after_map(
    b: Builder, layer: Layer[Any], z: ir.Value, affine: Affine, name: str, *, last: bool
) -> ir.Value:
    """Adds the normalisation after an expert's map, and after the last map its activation."""
    spec: ExpertMapsSpec = layer.spec
    norm, which = (spec.out_norm, "2") if last else (spec.hidden_norm, "1")
    if norm is not None:
        z = _normalise(b, layer, z, norm, name)
        for op, key in (("Mul", f"g{which}"), ("Add", f"s{which}")):
            weight = affine(key)
            if weight is not None:
                z = b.op(op, z, weight, name=f"{name}_{'gained' if op == 'Mul' else 'shifted'}")
    if not last:
        return z
    return activation(b, layer, z, spec.out_activation, f"{name}_activated", spec.alpha)


def _normalise(b: Builder, layer: Layer[Any], z: ir.Value, norm: ExpertNorm, name: str) -> ir.Value:
    """Adds z [..., width] divided by its standard deviation or root mean square, in FP32."""
    inner, fp32 = layer.compute.inner, ir.DataType.FLOAT
    z = b.cast(z, inner, fp32, f"{name}_wide")
    if norm.kind == "layernorm":
        mean = b.op("ReduceMean", z, b.ints(-1), keepdims=1, name=f"{name}_mean")
        z = b.op("Sub", z, mean, name=f"{name}_centred")
    return b.cast(rms_normalise(b, z, norm.eps, f"{name}_"), fp32, inner, f"{name}_narrow")


def rms_normalise(b: Builder, z: ir.Value, eps: float, prefix: str) -> ir.Value:
    """Adds z [..., width] divided by its root mean square, with names that begin with `prefix`."""
    square = b.op("Mul", z, z, name=f"{prefix}squares")
    mean = b.op("ReduceMean", square, b.ints(-1), keepdims=1, name=f"{prefix}mean_square")
    shifted = b.op("Add", mean, b.number(eps), name=f"{prefix}mean_square_eps")
    root = b.op("Sqrt", shifted, name=f"{prefix}root_mean_square")
    return b.op("Div", z, root, name=f"{prefix}normalised")


def activate(b: Builder, layer: SoftMoELayer, hidden: ir.Value, name: str = "experts") -> ir.Value:
    """Adds the nonlinearity: [..., inner] to [..., h]."""
    spec = layer.spec
    if spec.expert != "gated":
        return activation(b, layer, hidden, spec.activation, f"{name}/hidden", spec.alpha)
    names = [f"{name}/value", f"{name}/gate"]
    order = -1 if spec.gate_first else 1
    value, gate = b.ops("Split", hidden, names=names[::order], axis=-1, num_outputs=2)[::order]
    gated = activation(b, layer, gate, spec.activation, f"{name}/gate_activated", spec.alpha)
    return b.op("Mul", value, gated, name=f"{name}/hidden")


def stacked_weights(b: Builder, layer: SoftMoELayer) -> dict[str, ir.Value]:
    """Adds the experts' weights [n, …] as constants; biases and scales as [n, 1, …]."""
    weights = {}
    for which in ("1", "2"):
        w, bias = f"w{which}", f"b{which}"
        if layer.tensors.has(f"experts.{w}"):
            weights[w] = _stacked_weight(b, layer, w)
        if layer.tensors.has(f"experts.{w}.scale") and layer.compute.blocked is None:
            weights[f"{w}.scale"] = _stacked_scale(b, layer, w)
        if layer.tensors.has(f"experts.{bias}"):
            weights[bias] = stacked_rows(b, layer, bias)
    for name in NORM_WEIGHTS:
        if layer.tensors.has(f"experts.{name}"):
            weights[name] = stacked_rows(b, layer, name)
    return weights


def stacked_rows(b: Builder, layer: Layer[Any], key: str) -> ir.Value:
    """Adds a vector per expert as [n, 1, ·], for all its rows."""
    if TARGETS[layer.target].launches:
        return layer.rows(b, f"experts.{key}", f"experts/{key}_rows")
    stacked = layer.stacked(b, f"experts.{key}")
    return b.op("Unsqueeze", stacked, b.ints(1), name=f"experts/{key}_rows")


UNIT = 1.0 / 128.0
"""The value of one step of a stacked weight in Q/DQ form before its column's scale: a power of two,
so that every float type represents the weights exactly, as numbers between −1 and 1."""


def _stacked_weight(b: Builder, layer: Layer[Any], key: str) -> ir.Value:
    """Adds the weights [n, in, out] of all experts.

    In Q/DQ form they are multiples of `UNIT`: DequantizeLinear supports one axis, but their scales
    have two. The constant may only feed that node, so a Gather comes after it.
    """
    weight = layer.stacked(b, f"experts.{key}")
    blocked = layer.compute.blocked
    if blocked is not None and f"experts.{key}" in blocked.weights:
        scale = layer.stacked(b, f"experts.{key}.scale")
        name = f"experts/{key}_floats"
        size = blocked.block
        return b.op("DequantizeLinear", weight, scale, axis=1, block_size=size, name=name)
    quantized = layer.compute.quantized
    if quantized is None or not quantized.in_qdq:
        return weight
    unit = b.number(UNIT, layer.compute.inner)
    return b.op("DequantizeLinear", weight, unit, name=f"experts/{key}_units")


def _stacked_scale(b: Builder, layer: Layer[Any], key: str) -> ir.Value:
    """Adds the scales of `_stacked_weight` [n, in, out], as [n, 1, out]."""
    scale = layer.stacked(b, f"experts.{key}.scale")
    rows = b.op("Unsqueeze", scale, b.ints(1), name=f"experts/{key}_scale_rows")
    quantized = layer.compute.quantized
    assert quantized is not None
    if not quantized.in_qdq:
        return rows
    per_unit = b.number(1.0 / UNIT, layer.compute.inner)
    return b.op("Mul", rows, per_unit, name=f"experts/{key}_scale_per_unit")


def stacked_linear(b: Builder, layer: Layer[Any], which: str, *, biased: bool = True) -> Linear:
    """Adds the constants of the first or second matmul of all experts."""
    w, bias = f"w{which}", f"experts.b{which}"
    scale, rows = None, None
    if layer.tensors.has(f"experts.{w}.scale") and layer.compute.blocked is None:
        scale = _stacked_scale(b, layer, w)
    if biased and layer.tensors.has(bias):
        rows = stacked_rows(b, layer, f"b{which}")
    return Linear(
        key=f"experts.{w}",
        weight=_stacked_weight(b, layer, w),
        scale=scale,
        bias=rows,
        rows="stacked",
    )


def batched_experts(
    b: Builder, layer: SoftMoELayer, rows: ir.Value, weights: Mapping[str, ir.Value]
) -> ir.Value:
    """Adds batched MatMuls: rows [..., r, d] times w1 [..., d, inner] and so on; [..., r, o].

    `weights` are those of `stacked_weights`, or gathered from them.
    """

    def linear(which: str) -> Linear:
        w = f"w{which}"
        scale, bias = weights.get(f"{w}.scale"), weights.get(f"b{which}")
        return Linear(key=f"experts.{w}", weight=weights[w], scale=scale, bias=bias, rows="stacked")

    hidden = product(b, layer.compute, rows, linear("1"), "experts/products")
    if "w2" in weights:
        hidden = add_norm_after_map(b, layer, hidden, weights.get, "experts/products", last=False)
        hidden = activate(b, layer, hidden)
        hidden = operand(b, layer.compute, "experts.w2", hidden, "experts/hidden")
        hidden = product(b, layer.compute, hidden, linear("2"), "experts/outputs")
    return add_norm_after_map(b, layer, hidden, weights.get, "experts/outputs", last=True)


def one_expert(b: Builder, layer: SoftMoELayer, index: int, rows: ir.Value) -> ir.Value:
    """Adds expert `index` on rows [r, d], with constant weights; returns [r, o]."""
    products = first_product(b, layer, index, rows)
    if not layer.tensors.has("experts.w2"):
        return products
    return second_product(b, layer, index, hidden_rows(b, layer, products, f"experts/{index}"))


def first_product(b: Builder, layer: SoftMoELayer, index: int, rows: ir.Value) -> ir.Value:
    """Adds expert `index`'s first matmul on rows [r, d]; returns [r, inner]."""
    b.tap(EXPERT_INPUT, rows)
    name = f"experts/{index}/products"
    products = product(b, layer.compute, rows, _linear(b, layer, index, "1"), name)
    b.tap(EXPERT_PRODUCTS, products)
    last = not layer.tensors.has("experts.w2")
    return add_norm_after_map(b, layer, products, constants_of(b, layer, index), name, last=last)


def hidden_rows(b: Builder, layer: SoftMoELayer, products: ir.Value, name: str) -> ir.Value:
    """Adds the nonlinearity on rows [r, inner] of any experts, ready for the second matmul."""
    hidden = activate(b, layer, products, name)
    b.tap(EXPERT_HIDDEN, hidden)
    return operand(b, layer.compute, "experts.w2", hidden, f"{name}/hidden")


def second_product(b: Builder, layer: SoftMoELayer, index: int, hidden: ir.Value) -> ir.Value:
    """Adds expert `index`'s second matmul on rows of `hidden_rows`; returns [r, o]."""
    name = f"experts/{index}/outputs"
    outputs = product(b, layer.compute, hidden, _linear(b, layer, index, "2"), name)
    b.tap(EXPERT_OUTPUTS, outputs)
    return add_norm_after_map(b, layer, outputs, constants_of(b, layer, index), name, last=True)


def constants_of(b: Builder, layer: Layer[Any], index: int) -> Affine:
    """Returns the weights of one expert by name."""

    def constant(weight: str) -> ir.Value | None:
        name = f"experts.{weight}"
        return layer.expert(b, name, index) if layer.tensors.has(name) else None

    return constant


def _linear(b: Builder, layer: SoftMoELayer, index: int, which: str) -> Linear:
    constant = constants_of(b, layer, index)
    w = f"w{which}"
    weight = layer.expert(b, f"experts.{w}", index)
    return Linear(f"experts.{w}", weight, constant(f"{w}.scale"), constant(f"b{which}"))
