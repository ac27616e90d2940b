"""`fused`: ONNX Runtime's `com.microsoft.MoE`, with each slot as a token of one expert.

On a GPU it is a grouped product that reads each selected expert once, without copies.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..layers.soft_moe import SoftMoESpec
from ..layers.stored import SoftMoELayer
from ..routing import combine_outputs, route, selected_slots
from ..targets import TARGETS, Machine, Precision, Target
from .base import Lowering, SoftMoEPlan
from .cost import PACKED_ROWS, around_experts_us, expert_macs, stacked_us
from .experts import expert_rows
from .moe_op import (
    OP_ACTIVATIONS,
    TANH_PASSES,
    OpExperts,
    excluded_logit,
    grouped_read_us,
    inexact_gelu,
    kernels_after_first,
    moe_node,
    one_hot_logits,
    op_weights,
    unsupported_on_gpu,
    unsupported_parts,
    unsupported_width,
)


def build(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    """Adds the layer around one fused node; router logits are 0 for the slot's own expert."""
    spec = layer.spec
    p, o = spec.slots, spec.out
    routed = route(b, layer, x)
    slots = selected_slots(b, layer, routed)
    rows = expert_rows(b, layer, slots.rows)
    rows = b.op("Reshape", rows, b.ints(-1, spec.dim), name="experts/rows")
    experts = OpExperts(
        spec.activation, spec.expert == "gated", gate_first=spec.gate_first, alpha=spec.alpha
    )
    stored = op_weights(b, layer, experts)
    logits = _router_logits(b, layer, routed.selected, slots.rows)
    logits = b.cast(logits, ir.DataType.FLOAT, layer.compute.inner, "experts/logits_narrow")
    outputs = moe_node(b, layer, experts, rows, logits, stored=stored)
    if isinstance(layer.k, int):
        shape = b.ints(-1, layer.k * p, o)
    else:
        rows_per_input = b.op("Shape", slots.rows, start=1, end=2, name="combine/rows")
        shape = b.op(
            "Concat", b.ints(-1), rows_per_input, b.ints(o), axis=0, name="combine/outputs_shape"
        )
    return combine_outputs(b, layer, slots, b.op("Reshape", outputs, shape, name="combine/outputs"))


def _router_logits(
    b: Builder, layer: SoftMoELayer, selected: ir.Value | None, slots: ir.Value
) -> ir.Value:
    """Adds one-hot logits [b·e·p, n] that send each slot to its own expert."""
    n, p = layer.spec.experts, layer.spec.slots
    if selected is None:
        one_hot = np.full((1, n * p, n), excluded_logit(layer.target), dtype=np.float32)
        one_hot[0, np.arange(n * p), np.arange(n * p) // p] = 0.0
        batch = b.op("Shape", slots, start=0, end=1, name="experts/batch")
        shape = b.op("Concat", batch, b.ints(1, 1), axis=0, name="experts/logits_shape")
        logits = b.op("Expand", b.constant(one_hot), shape, name="experts/logits_by_input")
        return b.op("Reshape", logits, b.ints(-1, n), name="experts/logits")
    index = b.op("Unsqueeze", selected, b.ints(2), name="experts/index")
    if p > 1:
        zeros = b.constant(np.zeros((1, 1, p), dtype=np.int64))
        index = b.op("Add", index, zeros, name="experts/index_per_slot")
    return one_hot_logits(b, layer, index, ir.DataType.FLOAT)


def _unsupported(spec: SoftMoESpec) -> str | None:
    if spec.expert == "gated" and spec.activation != "silu":
        return f"com.microsoft.MoE does not support gated experts with {spec.activation}"
    if spec.expert == "linear":
        return "com.microsoft.MoE does not support linear experts"
    if spec.activation not in OP_ACTIVATIONS:
        return f"com.microsoft.MoE does not support {spec.activation} in its experts"
    if spec.expert == "mlp" and spec.alpha != 1.0:
        return f"com.microsoft.MoE does not support {spec.activation} with alpha = {spec.alpha:g}"
    return unsupported_parts(spec) or unsupported_width(spec)


def _no_kernel(precision: Precision, target: Target) -> str | None:
    record = TARGETS[target]
    if precision in record.moe or (precision in ("int8", "int4") and record.weight_only):
        return None
    return f"com.microsoft.MoE has no {precision.upper()} kernel for this target"


def _unsupported_on_target(spec: SoftMoESpec, precision: Precision, target: Target) -> str | None:
    if spec.expert == "gated" and TARGETS[target].on_cpu:
        return "com.microsoft.MoE with gated experts was not measured on this target"
    return unsupported_on_gpu(spec, precision, target)


def predict_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """Returns the time to read the chosen experts once and compute their rows, in one node.

    On a GPU the node runs several kernels. On a CPU it routes every row by a softmax over all
    experts in one thread, packs weights in every run, and loops over rows and activations.
    """
    rows, active = plan.selections * plan.spec.slots, plan.expected_active
    passes = 1 if plan.spec.activation in ("relu", "identity") else TANH_PASSES
    if machine.reads_once:
        read = grouped_read_us(plan.spec, active, machine)
    else:
        read = stacked_us(plan, active, PACKED_ROWS, machine)
    return (
        read
        + expert_macs(plan, plan.selections) / machine.macs_per_us
        + rows * plan.spec.experts * machine.routing_us
        + rows * (4 * plan.spec.dim + passes * plan.spec.hidden) * machine.scalar_us
        + (10 + (kernels_after_first(rows) if machine.reads_once else 0)) * machine.node_us
        + around_experts_us(plan, machine)
    )


LOWERING = Lowering(
    name="fused",
    summary="ONNX Runtime's com.microsoft.MoE, each slot a token with one-hot router logits",
    needs=lambda target: bool(target.moe),
    build=build,
    predict_us=predict_us,
    unable=_unsupported,
    no_kernel=_no_kernel,
    inexact=inexact_gelu,
    unfit=_unsupported_on_target,
)
