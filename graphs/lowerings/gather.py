"""`gather`: the weights of the selected experts are gathered per input, then batched MatMuls."""

from __future__ import annotations

import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import Layer
from ..routing import combine_outputs, route, selected_slots
from . import dense
from .base import STANDARD, Lowering, serves_all
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


LOWERING = Lowering(
    name="gather",
    summary="gathers the weights of the selected experts, then batched MatMuls",
    targets=STANDARD,
    build=build,
    unable=serves_all,
    inexact=serves_all,
)
