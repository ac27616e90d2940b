"""`gather`: the weights of the selected experts are gathered per input, then batched MatMuls."""

from __future__ import annotations

import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import Layer
from ..routing import combine_outputs, route, selected_slots
from ..targets import TARGETS, Machine, Precision, Target
from . import dense
from .base import Lowering, no_int4
from .cost import (
    Work,
    around_experts_us,
    between_us,
    expert_bytes,
    expert_macs,
    packing_us,
    products_of,
    stream_us,
)
from .experts import batched_experts, expert_rows, stacked_weights


def build(b: Builder, layer: Layer, x: ir.Value) -> ir.Value:
    """Adds the layer with weights gathered to [b, k, d, h]; with k = n nothing is to gather."""
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


def copied_bytes(work: Work) -> float:
    """Every input copies the experts that it keeps."""
    selects = work.k < work.spec.experts
    return expert_bytes(work, work.selections) if selects else 0.0


def predict_us(work: Work, machine: Machine) -> float:
    """The copy, and the arithmetic of the selected experts alone."""
    if work.k == work.spec.experts:
        return dense.predict_us(work, machine)  # nothing is to gather: it is the same graph
    pairs, copied = work.selections, copied_bytes(work)
    read = expert_bytes(work, work.expected_active) if machine.reads_once else copied
    layer = expert_bytes(work, work.spec.experts)
    # A Gather shares its copies out among threads: a single one has one.
    written = copied * max(2, pairs) / pairs
    return (
        stream_us(work, read, layer, machine.bytes_per_us, machine)
        + stream_us(work, written, copied, machine.copy_bytes_per_us, machine)
        + packing_us(work, pairs, work.spec.slots, machine)
        + expert_macs(work, pairs) / machine.macs_per_us
        + products_of(work, pairs) * machine.product_us
        + between_us(work, pairs, machine)
        + 12 * machine.node_us
        + around_experts_us(work, machine)
    )


def no_kernel(precision: Precision, target: Target) -> str | None:
    """What is gathered is no constant."""
    if precision == "int8" and TARGETS[target].constant_integers:
        return f"the runtime of {target} multiplies gathered INT8 weights as floats"
    return no_int4(precision, target)


LOWERING = Lowering(
    name="gather",
    summary="gathers the weights of the selected experts, then batched MatMuls",
    build=build,
    predict_us=predict_us,
    copied_bytes=copied_bytes,
    no_kernel=no_kernel,
)
