"""The arithmetic of token-routed experts, shared by their lowerings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from ....graphs.builder import Builder
from ....graphs.layers.stored import Layer
from ....graphs.lowerings.experts import (
    activation,
    add_norm_after_map,
    constants_of,
    rms_normalise,
    stacked_linear,
    stacked_rows,
)
from ....graphs.names import EXPERT_HIDDEN, EXPERT_INPUT, EXPERT_OUTPUTS, EXPERT_PRODUCTS, OUTPUT
from ....graphs.precision.products import Linear, operand, product, scale_rows
from ....graphs.routing import is_expert, one_hot_experts
from ....graphs.targets import TARGETS
from ..layers.experts import ExpertsSpec

ExpertsLayer = Layer[ExpertsSpec]


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """The rows of a product; their true values are `scale` [r, 1] times these, if it isn't None."""

    values: ir.Value
    scale: ir.Value | None = None


def routed(b: Builder, layer: ExpertsLayer) -> tuple[ir.Value, ir.Value]:
    """Adds the chosen experts [t, k], int64, and their weights [t, k] as FP32.

    A dropped choice keeps its expert's number but has weight 0.
    """
    index = layer.routed[0]
    if layer.spec.capacities:
        n = b.integer(layer.spec.experts)
        kept = b.op("Less", index, n, name="router/kept")
        index = b.op(
            "Where",
            kept,
            index,
            b.op("Sub", index, n, name="router/dropped"),
            name="router/experts",
        )
    return index, pair_weights(b, layer)


def pair_weights(b: Builder, layer: ExpertsLayer) -> ir.Value:
    """Adds the weights [t, k] of the choices as FP32."""
    weights, single = layer.routed[1], ir.DataType.FLOAT
    return b.cast(weights, weights.dtype or single, single, "combine/weights_wide")


def chosen(b: Builder, layer: ExpertsLayer) -> ir.Value:
    """Adds a mask [t, k, n] that is 1 for a chosen expert; the row of a dropped choice is 0."""
    return one_hot_experts(b, layer.routed[0], layer.spec.experts)


def outputs_type(layer: ExpertsLayer) -> ir.DataType:
    """Returns the float type of the experts' outputs and of their weighted sum.

    It is FP32, except for a runtime in which 16-bit products accumulate in FP32 and a cast launches
    a separate kernel.
    """
    wide = layer.spec.post_norm or layer.spec.rounded or not TARGETS[layer.target].launches
    return ir.DataType.FLOAT if wide else layer.compute.inner


def token_rows(b: Builder, layer: ExpertsLayer, x: ir.Value) -> ir.Value:
    """Adds the tokens in the float type that the experts compute in."""
    tokens = b.cast(x, layer.x_type, layer.compute.inner, "dispatch/tokens")
    if layer.spec.rounded:
        tokens = b.rounded(tokens, layer.compute.inner, "dispatch/tokens")
    return tokens


def first_rows(b: Builder, layer: ExpertsLayer, rows: ir.Value) -> ScaledRows:
    """Adds the input of the first product, for rows [..., d]."""
    b.tap(EXPERT_INPUT, rows)
    return _product_input(b, layer, "experts.w1", rows, "experts/rows")


def _product_input(
    b: Builder, layer: ExpertsLayer, key: str, rows: ir.Value, name: str
) -> ScaledRows:
    quantized = layer.compute.quantized
    if quantized is None or not quantized.dynamic:
        return ScaledRows(values=operand(b, layer.compute, key, rows, name))
    scaled, scale = scale_rows(b, rows, name)
    return ScaledRows(values=operand(b, layer.compute, key, scaled, name), scale=scale)


def products(
    b: Builder, layer: ExpertsLayer, expert: int, which: str, rows: ir.Value, name: str
) -> ir.Value:
    """Adds one expert's product with `w1` or `w2`, and the bias unless `_complete_map` adds it."""
    constant, w = constants_of(b, layer, expert), f"w{which}"
    bias = None if _bias_after_scales(layer) else constant(f"b{which}")
    linear = Linear(
        f"experts.{w}", layer.expert(b, f"experts.{w}", expert), constant(f"{w}.scale"), bias
    )
    return product(b, layer.compute, rows, linear, name)


def stacked_products(
    b: Builder, layer: ExpertsLayer, which: str, rows: ir.Value, name: str
) -> ir.Value:
    """Adds all experts' products with `w1` or `w2`: rows [t, d] or [n, t, ·] to [n, t, ·]."""
    linear = stacked_linear(b, layer, which, biased=not _bias_after_scales(layer))
    return product(b, layer.compute, rows, linear, name)


def _complete_map(
    b: Builder,
    layer: ExpertsLayer,
    which: str,
    raw: ir.Value,
    scale: ir.Value | None,
    experts: int | ir.Value | None,
    name: str,
) -> ir.Value:
    """Adds the rest of a map: the scales of its rows, the bias, and what follows the map.

    `experts` is the rows' expert, or the expert of each row [r]; if it is None, the biases of all
    experts [n, 1, ·] are added.
    """

    def parameter(weight: str) -> ir.Value | None:
        key = f"experts.{weight}"
        if not layer.tensors.has(key):
            return None
        if isinstance(experts, int):
            return layer.expert(b, key, experts)
        if experts is None:
            return stacked_rows(b, layer, weight)
        return b.op("Gather", layer.stacked(b, key), experts, axis=0, name=f"{name}_{weight}")

    y = raw if scale is None else b.op("Mul", raw, scale, name=f"{name}_unscaled")
    bias = parameter(f"b{which}") if _bias_after_scales(layer) else None
    if bias is not None:
        y = b.op("Add", y, bias, name=f"{name}_biased")
    b.tap(EXPERT_PRODUCTS if which == "1" else EXPERT_OUTPUTS, y)
    return add_norm_after_map(b, layer, y, parameter, name, last=which == "2" or layer.spec.linear)


def _bias_after_scales(layer: ExpertsLayer) -> bool:
    """Returns whether a bias can be added only after the rows were multiplied by their scales."""
    quantized = layer.compute.quantized
    return quantized is not None and quantized.dynamic


Multiply = Callable[[str, ir.Value, str], ir.Value]
"""Adds the first or second product ("1" or "2") of rows, under a name."""


def both_products(
    b: Builder,
    layer: ExpertsLayer,
    rows: ScaledRows,
    multiply: Multiply,
    experts: int | ir.Value | None,
) -> ir.Value:
    """Adds the outputs [..., o] for rows of `first_rows`; `experts` is as in `_complete_map`."""
    raw = multiply("1", rows.values, "experts/products")
    first = _complete_map(b, layer, "1", raw, rows.scale, experts, "experts/products")
    if layer.spec.linear:
        return first
    hidden = _activate(b, layer, first)
    b.tap(EXPERT_HIDDEN, hidden)
    between = _product_input(b, layer, "experts.w2", hidden, "experts/hidden")
    raw = multiply("2", between.values, "experts/outputs")
    return _complete_map(b, layer, "2", raw, between.scale, experts, "experts/outputs")


def _activate(b: Builder, layer: ExpertsLayer, hidden: ir.Value) -> ir.Value:
    """Adds the operation between an expert's matrices: [..., inner] to [..., h]."""
    spec, inner = layer.spec, layer.compute.inner
    if spec.gate == "none":
        return activation(b, layer, hidden, spec.activation, "experts/hidden", spec.alpha)
    gate, up = b.ops("Split", hidden, names=("experts/gate", "experts/up"), axis=-1, num_outputs=2)
    if spec.limit is not None:
        limit, lower = b.number(spec.limit, inner), b.number(-spec.limit, inner)
        gate = b.op("Min", gate, limit, name="experts/gate_limited")
        if inner == ir.DataType.BFLOAT16:  # CUDA has no Clip of BF16
            below = b.op("Min", up, limit, name="experts/up_below")
            up = b.op("Max", below, lower, name="experts/up_limited")
        else:
            up = b.op("Clip", up, lower, limit, name="experts/up_limited")
    if spec.up_offset:
        up = b.op("Add", up, b.number(spec.up_offset, inner), name="experts/up_offset")
    activated = activation(b, layer, gate, spec.activation, "experts/gate_activated", spec.alpha)
    return b.op("Mul", activated, up, name="experts/hidden")


def all_experts(b: Builder, layer: ExpertsLayer, tokens: ir.Value) -> ir.Value:
    """Adds all experts' outputs [n, t, o], for tokens [t, d] or each expert's rows [n, t, d]."""
    rows, multiply = first_rows(b, layer, tokens), partial(stacked_products, b, layer)
    return normalised(b, layer, both_products(b, layer, rows, multiply, None))


def normalised(b: Builder, layer: ExpertsLayer, outputs: ir.Value) -> ir.Value:
    """Adds the post-norm, if the layer has one; the outputs [..., o] have `outputs_type`."""
    wide = b.cast(outputs, layer.compute.inner, outputs_type(layer), "experts/outputs_wide")
    if layer.spec.rounded:
        wide = b.rounded(wide, ir.DataType.FLOAT, "experts/outputs")
    if not layer.spec.post_norm:
        return wide
    return rms_normalise(b, wide, layer.spec.post_norm_eps, "experts/")


def pair_rows(
    b: Builder, layer: ExpertsLayer, x: ir.Value, index: ir.Value, weights: ir.Value
) -> ir.Value:
    """Adds each token once per expert it chose, [t·k, d], weighted if weights are on inputs."""
    spec = layer.spec
    tokens = b.op("Unsqueeze", token_rows(b, layer, x), b.ints(1), name="dispatch/token")
    if spec.weights_on == "input":
        narrow = b.cast(weights, ir.DataType.FLOAT, layer.compute.inner, "dispatch/weights_narrow")
        columns = b.op("Unsqueeze", narrow, b.ints(2), name="dispatch/weights")
        pairs = b.op("Mul", tokens, columns, name="dispatch/weighted")
    else:
        sizes = b.op("Shape", index, name="combine/sizes")
        shape = b.op("Concat", sizes, b.ints(spec.dim), axis=0, name="dispatch/shape")
        pairs = b.op("Expand", tokens, shape, name="dispatch/pairs")  # [t, k, d]
    return b.op("Reshape", pairs, b.ints(-1, spec.dim), name="dispatch/rows")


def by_token(
    b: Builder,
    layer: ExpertsLayer,
    outputs: ir.Value,
    index: ir.Value,
    weights: ir.Value,
    *,
    zeroed: bool = False,
) -> ir.Value:
    """Adds y [t, o] for the experts' outputs [t·k, o], which are in the order of the pairs.

    `zeroed`: the outputs of dropped choices are already zeros.
    """
    outputs = normalised(b, layer, outputs)
    sizes = b.op("Shape", index, name="combine/sizes")
    shape = b.op("Concat", sizes, b.ints(layer.spec.out), axis=0, name="combine/shape")
    shaped = b.op("Reshape", outputs, shape, name="combine/outputs")
    if not zeroed:
        shaped = kept_only(b, layer, shaped)
    if layer.spec.weights_on == "output":
        return weighted_sum(b, layer, shaped, weights)
    summed = b.op("ReduceSum", shaped, b.ints(1), keepdims=0, name="combine/sums")
    return output(b, layer, summed)


def weighted_sum(b: Builder, layer: ExpertsLayer, outputs: ir.Value, weights: ir.Value) -> ir.Value:
    """Adds y [t, o] for outputs [t, j, o] and FP32 weights [t, j]."""
    narrow = b.cast(weights, ir.DataType.FLOAT, outputs_type(layer), "combine/weights_narrow")
    rows = b.op("Unsqueeze", narrow, b.ints(1), name="combine/weights")
    summed = b.op("MatMul", rows, outputs, name="combine/sums")
    return output(b, layer, b.op("Squeeze", summed, b.ints(1), name="combine/tokens"))


def output(b: Builder, layer: ExpertsLayer, y: ir.Value) -> ir.Value:
    """Adds the layer's result in the type that the surrounding graph expects."""
    return b.cast(y, outputs_type(layer), layer.y_type, OUTPUT)


def by_expert(b: Builder, one_hot: ir.Value, values: ir.Value | None) -> ir.Value:
    """Adds each token's weight for each expert [t, n]; if `values` is None, its count."""
    by_expert_weights = one_hot
    if values is not None:
        weights = b.op("Unsqueeze", values, b.ints(2), name="router/weights")
        by_expert_weights = b.op("Mul", by_expert_weights, weights, name="router/one_hot_weights")
    return b.op("ReduceSum", by_expert_weights, b.ints(1), keepdims=0, name="router/by_expert")


def shares_by_expert(b: Builder, layer: ExpertsLayer, weights: ir.Value) -> ir.Value:
    """Adds the weight [t, n] of each expert for each token, 0 if it was not chosen."""
    is_chosen = is_expert(b, layer.routed[0], layer.spec.experts)
    column = b.op("Unsqueeze", weights, b.ints(2), name="router/weights")
    by_expert_weights = b.op(
        "Where", is_chosen, column, b.number(0.0), name="router/one_hot_weights"
    )
    return b.op("ReduceSum", by_expert_weights, b.ints(1), keepdims=0, name="router/by_expert")


def weighted_only(b: Builder, layer: ExpertsLayer, outputs: ir.Value, shares: ir.Value) -> ir.Value:
    """Adds the outputs [t, n, o] of all experts, with zeros where a token has no weight.

    Outputs are selected instead of multiplied by zero, because unused ones may be infinite.
    """
    none = b.op("Equal", shares, b.number(0.0), name="router/unweighted")
    column = b.op("Unsqueeze", none, b.ints(2), name="combine/left_out")
    zero = b.number(0.0, outputs_type(layer))
    return b.op("Where", column, zero, outputs, name="combine/kept_outputs")


def chosen_only(b: Builder, layer: ExpertsLayer, outputs: ir.Value, one_hot: ir.Value) -> ir.Value:
    """Adds the outputs [t, n, o] of all experts, with zeros if a token did not choose the expert.

    Outputs are selected instead of multiplied by zero, because unused ones may be infinite.
    """
    counts = b.op("ReduceSum", one_hot, b.ints(1), keepdims=0, name="router/choices_by_expert")
    kept = b.op("Cast", counts, to=ir.DataType.BOOL.value, name="router/chosen")
    return _zeroed_unless(b, layer, outputs, kept)


def kept_only(b: Builder, layer: ExpertsLayer, outputs: ir.Value) -> ir.Value:
    """Adds the outputs [t, k, o] of the choices, with zeros for dropped ones."""
    if not layer.spec.capacities:
        return outputs
    kept = b.op("Less", layer.routed[0], b.integer(layer.spec.experts), name="router/kept_choices")
    return _zeroed_unless(b, layer, outputs, kept)


def _zeroed_unless(b: Builder, layer: ExpertsLayer, outputs: ir.Value, kept: ir.Value) -> ir.Value:
    """Adds outputs [t, j, o] where `kept` [t, j] is true, and zeros elsewhere."""
    column = b.op("Unsqueeze", kept, b.ints(2), name="combine/kept")
    zero = b.number(0.0, outputs_type(layer))
    return b.op("Where", column, outputs, zero, name="combine/kept_outputs")
