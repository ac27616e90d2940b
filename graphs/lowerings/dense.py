"""`dense`: every expert is computed, and what was not selected is left out of the outputs."""

from __future__ import annotations

import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import Layer
from ..routing import combine_outputs, masked_slots, route
from ..targets import Machine
from .base import Lowering, no_int4
from .cost import (
    Work,
    around_experts_us,
    between_us,
    expert_macs,
    products_of,
    stacked_us,
    unselected_us,
)
from .experts import batched_experts, expert_rows, stacked_weights


def build(b: Builder, layer: Layer, x: ir.Value) -> ir.Value:
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


def predict_us(work: Work, machine: Machine) -> float:
    """Every expert is read and computed, for every input, whatever k is."""
    n = work.spec.experts
    pairs = work.batch * n
    return (
        stacked_us(work, n, work.batch * work.spec.slots, machine)
        + expert_macs(work, pairs) / machine.macs_per_us
        + products_of(work, n) * machine.product_us
        + between_us(work, pairs, machine)
        + unselected_us(work, machine)
        + 8 * machine.node_us
        + around_experts_us(work, machine)
    )


LOWERING = Lowering(
    name="dense",
    summary="all experts in batched MatMuls; the outputs of unselected ones are left out",
    build=build,
    predict_us=predict_us,
    no_kernel=no_int4,
)
