"""`dense`: every expert computes every token, and what was not chosen is left out."""

from __future__ import annotations

import onnx_ir as ir

from ....graphs.builder import Builder
from ....graphs.lowerings.base import LoweringOf, no_int4
from ....graphs.targets import TARGETS, Machine
from ..layers.experts import ExpertsSpec
from .arithmetic import (
    ExpertsLayer,
    all_experts,
    by_expert,
    chosen,
    chosen_alone,
    pair_weights,
    token_rows,
    weighted_sum,
)
from .cost import ExpertsWork, all_experts_us, combine_us


def build(b: Builder, layer: ExpertsLayer, x: ir.Value) -> ir.Value:
    """Adds the layer with the experts as the outer axis of batched MatMuls."""
    one_hot, weights = chosen(b, layer), pair_weights(b, layer)
    shares = by_expert(b, one_hot, weights)
    tokens = token_rows(b, layer, x)
    if layer.spec.weights_on == "input":
        tokens = weighted_tokens(b, layer, tokens, shares)
        shares = by_expert(b, one_hot, None)
    elif not TARGETS[layer.target].broadcasts:
        copies = b.ints(layer.spec.experts, 1, 1)
        tokens = b.op("Expand", tokens, copies, name="dispatch/tokens")  # [n, t, d]
    outputs = all_experts(b, layer, tokens)
    by_token = b.op("Transpose", outputs, perm=[1, 0, 2], name="combine/outputs")  # [t, n, o]
    return weighted_sum(b, layer, chosen_alone(b, by_token, one_hot), shares)


def weighted_tokens(
    b: Builder, layer: ExpertsLayer, tokens: ir.Value, shares: ir.Value
) -> ir.Value:
    """Adds each expert's tokens [n, t, d], multiplied by their weights [t, n]."""
    narrow = b.cast(shares, ir.DataType.FLOAT, layer.compute.inner, "dispatch/weights_narrow")
    columns = b.op("Transpose", narrow, perm=[1, 0], name="dispatch/weights")
    columns = b.op("Unsqueeze", columns, b.ints(2), name="dispatch/weight_columns")
    return b.op("Mul", tokens, columns, name="dispatch/weighted")


def predict_us(work: ExpertsWork, machine: Machine) -> float:
    """Every expert is read and computes every token, whatever k is."""
    return (
        all_experts_us(work, work.choosers, machine)
        + combine_us(work, work.choosers * work.spec.experts, machine)
        + 16 * machine.node_us
    )


LOWERING: LoweringOf[ExpertsSpec] = LoweringOf(
    name="dense",
    summary="all experts on all tokens in batched MatMuls; what was not chosen is left out",
    build=build,
    predict_us=predict_us,
    no_kernel=no_int4,
)
