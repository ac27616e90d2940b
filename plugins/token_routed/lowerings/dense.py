"""`dense`: every expert computes every token; outputs of experts not chosen are left out."""

from __future__ import annotations

import onnx_ir as ir

from ....graphs.builder import Builder
from ....graphs.lowerings.base import LoweringOf, no_batched_kernel
from ....graphs.targets import TARGETS, Machine
from ..layers.experts import ExpertsSpec
from .arithmetic import (
    ExpertsLayer,
    all_experts,
    by_expert,
    chosen,
    chosen_only,
    pair_weights,
    shares_by_expert,
    token_rows,
    weighted_only,
    weighted_sum,
)
from .cost import ExpertsPlan, all_experts_us, combine_us


def build(b: Builder, layer: ExpertsLayer, x: ir.Value) -> ir.Value:
    """Adds the layer with the experts as the outer axis of batched MatMuls."""
    weights, tokens = pair_weights(b, layer), token_rows(b, layer, x)
    one_hot: ir.Value | None = None
    if layer.spec.weights_on == "input":
        one_hot = chosen(b, layer)
        rows = by_expert(b, one_hot, weights)
        rows = b.cast(rows, ir.DataType.FLOAT, layer.compute.inner, "dispatch/weights_narrow")
        columns = b.op("Transpose", rows, perm=[1, 0], name="dispatch/weights")
        columns = b.op("Unsqueeze", columns, b.ints(2), name="dispatch/weight_columns")
        tokens = b.op("Mul", tokens, columns, name="dispatch/weighted")  # [n, t, d]
        shares = by_expert(b, one_hot, None)
    else:
        shares = shares_by_expert(b, layer, weights)
    if one_hot is None and not TARGETS[layer.target].broadcasts:
        copies = b.ints(layer.spec.experts, 1, 1)
        tokens = b.op("Expand", tokens, copies, name="dispatch/tokens")  # [n, t, d]
    outputs = all_experts(b, layer, tokens)
    by_token = b.op("Transpose", outputs, perm=[1, 0, 2], name="combine/outputs")  # [t, n, o]
    if one_hot is None:
        kept = weighted_only(b, layer, by_token, shares)
    else:
        kept = chosen_only(b, layer, by_token, one_hot)
    return weighted_sum(b, layer, kept, shares)


def predict_us(plan: ExpertsPlan, machine: Machine) -> float:
    """Returns the predicted time: every expert is read and computes every token, for any k."""
    return (
        all_experts_us(plan, plan.choosers, machine)
        + combine_us(plan, plan.choosers * plan.spec.experts, machine)
        + 16 * machine.node_us
    )


LOWERING: LoweringOf[ExpertsSpec] = LoweringOf(
    name="dense",
    summary="all experts on all tokens in batched MatMuls; those not chosen are left out",
    build=build,
    predict_us=predict_us,
    no_kernel=no_batched_kernel,
)
