"""`gather`: the selected experts' weights are gathered per input, for batched MatMuls."""

from __future__ import annotations

import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import SoftMoELayer
from ..routing import combine_outputs, route, selected_slots
from ..targets import TARGETS, Machine, Precision, Target
from . import dense
from .base import Lowering, SoftMoEPlan, no_batched_kernel
from .cost import (
    around_experts_us,
    between_us,
    expert_bytes,
    expert_macs,
    packing_us,
    products_of,
    stream_us,
)
from .experts import batched_experts, expert_rows, stacked_weights


def build(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    """Adds the layer with weights gathered to [b, k, d, h]; at k = n nothing needs gathering."""
    if not layer.selects:
        return dense.build(b, layer, x)
    routed = route(b, layer, x)
    assert routed.selected is not None
    slots = selected_slots(b, layer, routed)
    p, d, o = layer.spec.slots, layer.spec.dim, layer.spec.out
    rows = expert_rows(b, layer, slots.rows)
    if p == 1:
        rows = b.op("Unsqueeze", rows, b.ints(2), name="dispatch/rows")  # [b, k, 1, d]
    else:
        rows = b.op("Reshape", rows, b.ints(0, -1, p, d), name="dispatch/rows")
    weights = {
        name: b.op("Gather", stacked, routed.selected, axis=0, name=f"experts/{name}_selected")
        for name, stacked in stacked_weights(b, layer).items()
    }
    outputs = batched_experts(b, layer, rows, weights)
    if p == 1:
        outputs = b.op("Squeeze", outputs, b.ints(2), name="combine/outputs")
    else:
        outputs = b.op("Reshape", outputs, b.ints(0, -1, o), name="combine/outputs")
    return combine_outputs(b, layer, slots, outputs)


def copied_bytes(plan: SoftMoEPlan) -> float:
    """Returns the bytes of the kept experts that every input copies."""
    selects = plan.typical_k < plan.spec.experts
    return expert_bytes(plan, plan.selections) if selects else 0.0


def predict_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """Returns the time of the copy and of the selected experts' arithmetic."""
    if plan.typical_k == plan.spec.experts:
        return dense.predict_us(plan, machine)  # nothing needs gathering: it is the same graph
    pairs, copied = plan.selections, copied_bytes(plan)
    read = expert_bytes(plan, plan.expected_active) if machine.reads_once else copied
    layer = expert_bytes(plan, plan.spec.experts)
    # A Gather distributes its copies over threads: a single copy uses one.
    written = copied * max(2, pairs) / pairs
    return (
        stream_us(plan, read, layer, machine.bytes_per_us, machine)
        + stream_us(plan, written, copied, machine.copy_bytes_per_us, machine)
        + packing_us(plan, pairs, plan.spec.slots, machine)
        + expert_macs(plan, pairs) / machine.macs_per_us
        + products_of(plan, pairs) * machine.product_us
        + between_us(plan, pairs, machine)
        + 12 * machine.node_us
        + around_experts_us(plan, machine)
    )


def no_kernel(precision: Precision, target: Target) -> str | None:
    """Returns why integer products, which need constant weights, cannot be gathered."""
    if precision == "int8" and TARGETS[target].constant_integers:
        return f"the runtime of {target} multiplies gathered INT8 weights as floats"
    return no_batched_kernel(precision, target)


LOWERING = Lowering(
    name="gather",
    summary="gathers the weights of the selected experts, then batched MatMuls",
    build=build,
    predict_us=predict_us,
    copied_bytes=copied_bytes,
    no_kernel=no_kernel,
)
