"""`grouped`: sorts the (token, expert) pairs by expert; each expert computes only its own pairs.

An expert's weights are constants of 2-D products, which runtimes pack once. An expert that no token
chose has zero rows, which costs next to nothing. The operation between the two products runs once
for the rows of all experts, so each expert costs two nodes.
"""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from ....graphs.builder import Builder
from ....graphs.lowerings.base import LoweringOf
from ....graphs.lowerings.cost import waiting_us
from ....graphs.lowerings.grouped import invert, sort_by_expert
from ....graphs.targets import Machine
from ..layers.experts import ExpertsSpec
from .arithmetic import (
    ExpertsLayer,
    ScaledRows,
    both_products,
    by_token,
    first_rows,
    products,
    routed,
    token_rows,
)
from .cost import ExpertsPlan, combine_us, one_by_one_us


def build(b: Builder, layer: ExpertsLayer, x: ir.Value) -> ir.Value:
    """Adds the layer with two small products per expert."""
    index, weights = routed(b, layer)
    flat = b.op("Reshape", layer.routed[0], b.ints(-1), name="group/expert_of_pair")
    # The r pairs that were not dropped, of t·k, and the token and the expert of each, [r].
    pairs = sort_by_expert(b, flat, layer.spec.experts, "group/rows_per_expert")
    k = _k(b, layer.routed[0])
    token = b.op("Div", pairs.order, k, name="group/token_of_row")
    expert = b.op("Gather", pairs.coordinates, b.integer(0), axis=0, name="group/expert_of_row")
    if layer.spec.weights_on == "input":
        rows = _weighted_rows(b, layer, x, token, pairs.order, weights)
    else:
        rows = _token_rows(b, layer, x, token)
    multiply = partial(_products_by_expert, b, layer, pairs.counts)
    outputs = both_products(b, layer, rows, multiply, expert)  # sorted by expert, like the rows
    if layer.spec.capacities:
        outputs = _with_dropped(b, layer, outputs, pairs.order, index)
    else:
        outputs = b.op("Gather", outputs, invert(b, pairs.order), axis=0, name="group/unsorted")
    return by_token(b, layer, outputs, index, weights, zeroed=True)


def _with_dropped(
    b: Builder, layer: ExpertsLayer, outputs: ir.Value, order: ir.Value, index: ir.Value
) -> ir.Value:
    """Adds the outputs [r, o] in the order of all pairs, [t·k, o], with zeros for dropped ones."""
    pairs = b.op("Size", index, name="group/all_pairs")
    count = b.op("Unsqueeze", pairs, b.ints(0), name="group/all_pair_count")
    shape = b.op("Concat", count, b.ints(layer.spec.out), axis=0, name="group/all_pairs_shape")
    zero = b.number(0.0, layer.compute.inner)
    zeros = b.op("Expand", zero, shape, name="group/nothing")
    places = b.op("Unsqueeze", order, b.ints(1), name="group/places")
    return b.op("ScatterND", zeros, places, outputs, name="group/unsorted")


def _token_rows(b: Builder, layer: ExpertsLayer, x: ir.Value, token: ir.Value) -> ScaledRows:
    """Adds the tokens of the pairs; if they are quantised, then before they are copied."""
    rows = first_rows(b, layer, token_rows(b, layer, x))
    values = b.op("Gather", rows.values, token, axis=0, name="dispatch/rows")
    if rows.scale is None:
        return ScaledRows(values=values)
    scale = b.op("Gather", rows.scale, token, axis=0, name="dispatch/scales")
    return ScaledRows(values=values, scale=scale)


def _weighted_rows(
    b: Builder,
    layer: ExpertsLayer,
    x: ir.Value,
    token: ir.Value,
    order: ir.Value,
    weights: ir.Value,
) -> ScaledRows:
    """Adds the tokens of the pairs, multiplied by their weights."""
    tokens = b.op("Gather", token_rows(b, layer, x), token, axis=0, name="dispatch/pairs")
    flat = b.op("Reshape", weights, b.ints(-1, 1), name="dispatch/weights")
    weight = b.op("Gather", flat, order, axis=0, name="dispatch/weight_of_row")
    weight = b.cast(weight, ir.DataType.FLOAT, layer.compute.inner, "dispatch/weight_narrow")
    return first_rows(b, layer, b.op("Mul", tokens, weight, name="dispatch/weighted"))


def _products_by_expert(
    b: Builder, layer: ExpertsLayer, counts: ir.Value, which: str, rows: ir.Value, name: str
) -> ir.Value:
    n, (first, last) = layer.spec.experts, name.split("/")
    names = [f"group/{last}_{e}" for e in range(n)]
    parts = b.ops("Split", rows, counts, axis=0, names=names)
    outputs = [
        products(b, layer, e, which, part, f"{first}/{e}/{last}") for e, part in enumerate(parts)
    ]
    return b.op("Concat", *outputs, axis=0, name=name)


def _k(b: Builder, index: ir.Value) -> ir.Value:
    """Adds the graph's k, which is a constant if the index has a fixed width."""
    k = None if index.shape is None else index.shape[1]
    if isinstance(k, int):
        return b.integer(k)
    width = b.op("Shape", index, start=1, end=2, name="group/k")
    return b.op("Squeeze", width, name="group/k_scalar")


NODES = 20
"""The number of nodes that sort, gather and combine."""


def predict_us(plan: ExpertsPlan, machine: Machine) -> float:
    """Returns the predicted time: chosen experts are read once and compute their rows.

    The nodes of all n experts run, even without rows.
    """
    spec, pairs = plan.spec, plan.selections
    # Rows are gathered, concatenated twice and scattered back.
    moved = pairs * (spec.dim + spec.inner + 2 * spec.out)
    return (
        one_by_one_us(plan, plan.expected_active, pairs, machine)
        + combine_us(plan, pairs, machine)
        + pairs * spec.experts * machine.sort_us
        + moved * machine.number_us
        + waiting_us(2 * spec.experts + NODES, machine)
    )


LOWERING: LoweringOf[ExpertsSpec] = LoweringOf(
    name="grouped",
    summary="sorts the tokens' choices by expert; each expert computes its rows",
    needs=lambda target: target.data_sizes,
    build=build,
    predict_us=predict_us,
    observable=True,
)
