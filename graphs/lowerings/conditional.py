"""`conditional`: each expert runs on the whole batch, but only if any input has chosen it."""

from __future__ import annotations

import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import SoftMoELayer
from ..routing import combine_outputs, masked_slots, route
from ..targets import Machine
from .base import Lowering, SoftMoEPlan
from .cost import (
    ROUTER_NODES,
    around_experts_us,
    expert_nodes,
    packing_us,
    separate_experts_us,
    unselected_us,
    waiting_us,
)
from .experts import expert_rows, one_expert


def build(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    """Adds the layer with an `If` per expert; at k = n every expert runs and no `If` is needed."""
    n, p, d, o = layer.spec.experts, layer.spec.slots, layer.spec.dim, layer.spec.out
    slots, mask = masked_slots(b, layer, route(b, layer, x))
    rows = expert_rows(b, layer, slots.rows)
    by_input = b.op("Reshape", rows, b.ints(0, n, p, d), name="dispatch/slots_by_expert")
    parts = split(b, by_input, n, 1, "dispatch/expert")
    needed = None if mask is None else chosen_by_any(b, mask, n)
    outputs = []
    for e, part in enumerate(parts):
        rows = b.op("Reshape", part, b.ints(-1, d), name=f"experts/{e}/rows")  # [b·p, d]
        if needed is None:
            outputs.append(one_expert(b, layer, e, rows))
            continue
        run = b.nested(f"experts/{e}/run")
        y = one_expert(run, layer, e, rows)
        outputs.append(if_chosen(b, e, needed[e], run, y, rows, o, layer.compute.inner))
    shaped = [
        b.op("Reshape", y, b.ints(-1, p, o), name=f"combine/expert_{e}")
        for e, y in enumerate(outputs)
    ]
    return combine_outputs(b, layer, slots, b.op("Concat", *shaped, axis=1, name="combine/outputs"))


def chosen_by_any(b: Builder, mask: ir.Value, n: int) -> list[ir.Value]:
    """Adds one boolean per expert: whether any row of the mask [r, n] has chosen it."""
    chosen = b.op("ReduceMax", mask, b.ints(0), keepdims=0, name="group/chosen")
    needed = b.op("Cast", chosen, to=ir.DataType.BOOL.value, name="group/wanted")
    parts = split(b, needed, n, 0, "group/wanted")
    return [b.op("Squeeze", part, b.ints(0), name=f"group/if_{e}") for e, part in enumerate(parts)]


def split(b: Builder, value: ir.Value, n: int, axis: int, name: str) -> list[ir.Value]:
    """Adds n equal parts of a value."""
    if n == 1:
        return [value]
    names = [f"{name}_{e}" for e in range(n)]
    return b.ops("Split", value, axis=axis, num_outputs=n, names=names)


def if_chosen(
    b: Builder,
    e: int,
    chosen: ir.Value,
    run: Builder,
    y: ir.Value,
    rows: ir.Value,
    width: int,
    dtype: ir.DataType,
) -> ir.Value:
    """Adds an `If` for expert e: the result y of the nodes in `run`, or zeros [r, width].

    The rows of the expert are [r, d].
    """
    skip = b.nested(f"experts/{e}/skip")
    count = skip.op("Shape", rows, start=0, end=1, name="row_count")
    shape = skip.op("Concat", count, skip.ints(width), axis=0, name="shape")
    zeros = skip.op("Expand", skip.number(0.0, dtype), shape, name="zeros")
    return b.op(
        "If",
        chosen,
        then_branch=b.branch(run, y, f"experts/{e}/run"),
        else_branch=b.branch(skip, zeros, f"experts/{e}/skip"),
        name=f"experts/{e}/outputs",
    )


def predict_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """Returns the time to read the chosen experts once for the whole batch, plus n branches."""
    n, active = plan.spec.experts, plan.expected_active
    branches = 0.0
    if plan.typical_k < n:
        # Weights in a branch are packed in every run.
        rows = plan.batch * plan.spec.slots
        branches = n * machine.branch_us + packing_us(plan, active, rows, machine)
    return (
        separate_experts_us(plan, active, plan.batch * active, machine)
        + branches
        + unselected_us(plan, machine)
        + waiting_us((expert_nodes(plan) + machine.integer_nodes + 3) * n, machine)
        + around_experts_us(plan, machine)
        + ROUTER_NODES * machine.launch_us
    )


LOWERING = Lowering(
    name="conditional",
    summary="an If per expert, which runs on the whole batch if any input chose the expert",
    needs=lambda target: target.branches,
    branches=True,
    build=build,
    predict_us=predict_us,
)
