"""`dense`: every expert is computed, and unselected outputs are excluded."""

from __future__ import annotations

import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import SoftMoELayer
from ..routing import combine_outputs, masked_slots, route
from ..targets import Machine
from .base import Lowering, SoftMoEPlan, no_batched_kernel
from .cost import around_experts_us, between_us, expert_macs, products_of, stacked_us, unselected_us
from .experts import batched_experts, expert_rows, stacked_weights


def build(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    """Adds the layer with the experts as the outer axis of batched MatMuls."""
    n, p, d = layer.spec.experts, layer.spec.slots, layer.spec.dim
    slots, _ = masked_slots(b, layer, route(b, layer, x))
    rows = expert_rows(b, layer, slots.rows)
    # [b, n·p, d] to [n, b·p, d]: one matmul per expert, over the rows of the whole batch.
    if p == 1:
        rows = b.op("Transpose", rows, perm=[1, 0, 2], name="dispatch/by_expert")
    else:
        rows = b.op("Reshape", rows, b.ints(0, n, p, d), name="dispatch/slots_by_expert")
        rows = b.op("Transpose", rows, perm=[1, 0, 2, 3], name="dispatch/by_expert")
        rows = b.op("Reshape", rows, b.ints(n, -1, d), name="dispatch/rows")
    outputs = batched_experts(b, layer, rows, stacked_weights(b, layer))
    if p == 1:
        outputs = b.op("Transpose", outputs, perm=[1, 0, 2], name="combine/by_input")
    else:
        o = layer.spec.out
        outputs = b.op("Reshape", outputs, b.ints(n, -1, p, o), name="combine/slots_by_expert")
        outputs = b.op("Transpose", outputs, perm=[1, 0, 2, 3], name="combine/by_input")
        outputs = b.op("Reshape", outputs, b.ints(0, n * p, o), name="combine/outputs")
    return combine_outputs(b, layer, slots, outputs)


def predict_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """Returns the time to read and compute every expert for every input, at any k."""
    n = plan.spec.experts
    pairs = plan.batch * n
    return (
        stacked_us(plan, n, plan.batch * plan.spec.slots, machine)
        + expert_macs(plan, pairs) / machine.macs_per_us
        + products_of(plan, n) * machine.product_us
        + between_us(plan, pairs, machine)
        + unselected_us(plan, machine)
        + 8 * machine.node_us
        + around_experts_us(plan, machine)
    )


LOWERING = Lowering(
    name="dense",
    summary="all experts in batched MatMuls; the outputs of unselected experts are left out",
    build=build,
    predict_us=predict_us,
    no_kernel=no_batched_kernel,
)
