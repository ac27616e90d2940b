"""`slots`: experts with a capacity compute only their slots, in batched products of fixed sizes.

Each group of tokens has C slots for each expert, whatever the tokens choose. The experts compute
n·C rows per group, which is k times the capacity factor per token, not n. Only the number of groups
varies, as engines require.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....graphs.builder import Builder
from ....graphs.lowerings.base import LoweringOf, no_batched_kernel
from ....graphs.targets import Machine
from ..layers.experts import ExpertsSpec
from .arithmetic import ExpertsLayer, all_experts, kept_only, pair_weights, token_rows, weighted_sum
from .cost import ExpertsPlan, all_experts_us, combine_us


def build(b: Builder, layer: ExpertsLayer, x: ir.Value) -> ir.Value:
    """Adds the layer with a batched MatMul over the slots of each expert."""
    spec, k, group, capacity = layer.spec, *_sizes(layer.spec, layer.k)
    n, slots = spec.experts, spec.experts * capacity
    weights = pair_weights(b, layer)
    chosen = b.op(
        "Reshape", layer.routed[0], b.ints(-1, group * k), name="slots/experts"
    )  # [G, S·k]
    slot = _slot_of_pair(b, chosen, n, capacity)
    token = _token_of_slot(b, slot, group, k, slots)
    by_group = b.op(
        "Reshape", token_rows(b, layer, x), b.ints(-1, group, spec.dim), name="slots/groups"
    )
    slot_tokens = b.op(
        "GatherND", by_group, token, batch_dims=1, name="slots/tokens"
    )  # [G, n·C, d]
    outputs = all_experts(b, layer, _by_expert(b, slot_tokens, n, capacity, spec.dim, "dispatch"))
    by_slot = b.op("Reshape", outputs, b.ints(n, -1, capacity, spec.out), name="slots/outputs")
    by_slot = b.op("Transpose", by_slot, perm=[1, 0, 2, 3], name="slots/outputs_by_group")
    by_slot = b.op("Reshape", by_slot, b.ints(-1, slots, spec.out), name="slots/outputs_of_group")
    # A dropped choice reads an arbitrary slot, and the result is left out.
    valid_slot = b.op("Min", slot, b.integer(slots - 1), name="slots/some_slot")
    indices = b.op("Unsqueeze", valid_slot, b.ints(2), name="slots/place")
    gathered = b.op("GatherND", by_slot, indices, batch_dims=1, name="slots/outputs_of_pair")
    shaped = b.op("Reshape", gathered, b.ints(-1, k, spec.out), name="combine/outputs")
    return weighted_sum(b, layer, kept_only(b, layer, shaped), weights)


def _sizes(spec: ExpertsSpec, k: object) -> tuple[int, int, int]:
    assert isinstance(k, int) and spec.group is not None, "k must be fixed, with tokens in groups"
    return k, spec.group, spec.capacities[k - 1]


def _slot_of_pair(b: Builder, chosen: ir.Value, n: int, capacity: int) -> ir.Value:
    """Adds the slot of each (token, expert) pair, [G, S·k]; n·C for a dropped one.

    The order of an expert's slots makes no difference; here it is that of the pairs.
    """
    column = b.op("Unsqueeze", chosen, b.ints(2), name="slots/expert_column")
    experts = b.constant(np.arange(n, dtype=np.int64))
    is_expert = b.op("Equal", column, experts, name="slots/one_hot")  # [G, S·k, n]
    is_expert = b.op("Cast", is_expert, to=ir.DataType.INT64.value, name="slots/one_hot_int")
    counted = b.op("CumSum", is_expert, b.integer(1), exclusive=1, name="slots/counted")
    before = b.op("Mul", counted, is_expert, name="slots/own_counted")
    position = b.op("ReduceSum", before, b.ints(2), keepdims=0, name="slots/place_of_pair")
    first = b.op("Mul", chosen, b.integer(capacity), name="slots/first_slot")
    slot = b.op("Add", first, position, name="slots/slot_of_kept")
    kept = b.op("Less", chosen, b.integer(n), name="slots/kept")
    return b.op("Where", kept, slot, b.integer(n * capacity), name="slots/slot_of_pair")


def _token_of_slot(b: Builder, slot: ir.Value, group: int, k: int, slots: int) -> ir.Value:
    """Adds the number of the token in each slot, [G, n·C, 1], in its group; 0 for an empty slot."""
    groups = b.op("Shape", slot, start=0, end=1, name="slots/group_count")
    shape = b.op("Concat", groups, b.ints(slots + 1), axis=0, name="slots/table_shape")
    table = b.op("Expand", b.integer(0), shape, name="slots/empty")
    tokens = b.constant(np.arange(group * k, dtype=np.int64)[None] // k)
    pair_tokens = b.op(
        "Expand", tokens, b.op("Shape", slot, name="slots/shape"), name="slots/token_of_pair"
    )
    filled = b.op("ScatterElements", table, slot, pair_tokens, axis=1, name="slots/filled")
    token_of_slot = b.op(
        "Slice", filled, b.ints(0), b.ints(slots), b.ints(1), name="slots/token_of_slot"
    )
    return b.op("Unsqueeze", token_of_slot, b.ints(2), name="slots/token_column")


def _by_expert(
    b: Builder, rows: ir.Value, n: int, capacity: int, width: int, name: str
) -> ir.Value:
    """Adds rows [G, n·C, ·] as [n, G·C, ·]."""
    in_slots = b.op("Reshape", rows, b.ints(-1, n, capacity, width), name=f"{name}/slots")
    by_expert = b.op("Transpose", in_slots, perm=[1, 0, 2, 3], name=f"{name}/slots_by_expert")
    return b.op("Reshape", by_expert, b.ints(n, -1, width), name=f"{name}/rows")


def predict_us(plan: ExpertsPlan, machine: Machine) -> float:
    """Returns the predicted time: every expert is read and computes all of its slots."""
    spec, n = plan.spec, plan.spec.experts
    _, group, capacity = _sizes(spec, plan.typical_k)
    rows = max(1, plan.choosers // group) * capacity
    return (
        all_experts_us(plan, rows, machine)
        + combine_us(plan, plan.selections, machine)
        + plan.selections * n * machine.sort_us
        + n * rows * (spec.dim + spec.out) * machine.number_us
        + 32 * machine.node_us
    )


def _unsupported(spec: ExpertsSpec) -> str | None:
    return (
        None
        if spec.capacities
        else "its experts have no capacity, so each computes every token that chose it"
    )


LOWERING: LoweringOf[ExpertsSpec] = LoweringOf(
    name="slots",
    summary="experts with a capacity compute all their slots, full or not, in batched MatMuls",
    build=build,
    predict_us=predict_us,
    unable=_unsupported,
    no_kernel=no_batched_kernel,
)
