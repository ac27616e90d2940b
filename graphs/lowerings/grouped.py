"""`grouped`: rows are sorted by expert, and each expert computes its own rows.

Each expert's weights are constants of a 2-D Gemm, which runtimes pre-pack once. An expert without
rows runs a Gemm with zero rows, which takes 2 µs, but an `If` around it would take 40 µs. There is
therefore no control flow, and the number of nodes is the only cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import SoftMoELayer
from ..routing import combine_outputs, route, selected_slots
from ..targets import Machine
from .base import Lowering, SoftMoEPlan
from .cost import ROUTER_NODES, around_experts_us, expert_nodes, separate_experts_us, waiting_us
from .experts import expert_rows, first_product, hidden_rows, one_expert, second_product


def build(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    """Adds the layer with a short chain of matmuls per expert."""
    routed = route(b, layer, x)
    slots = selected_slots(b, layer, routed)
    rows = expert_rows(b, layer, slots.rows)
    if routed.selected is None:
        outputs = _every_expert(b, layer, rows)
    else:
        outputs = _chosen_rows(b, layer, rows, routed.selected)
    return combine_outputs(b, layer, slots, outputs)


def _every_expert(b: Builder, layer: SoftMoELayer, slots: ir.Value) -> ir.Value:
    """Adds all experts on all inputs: slots [b, n·p, d] to outputs [b, n·p, o]."""
    n, p, d, o = layer.spec.experts, layer.spec.slots, layer.spec.dim, layer.spec.out
    by_input = b.op("Reshape", slots, b.ints(0, n, p, d), name="dispatch/slots_by_expert")
    by_expert = b.op("Transpose", by_input, perm=[1, 0, 2, 3], name="dispatch/by_expert")
    rows = b.op("Reshape", by_expert, b.ints(-1, d), name="dispatch/rows")  # [n·b·p, d]
    outputs = _compute_sorted(b, layer, rows, None)
    outputs = b.op("Reshape", outputs, b.ints(n, -1, p, o), name="combine/slots_by_expert")
    outputs = b.op("Transpose", outputs, perm=[1, 0, 2, 3], name="combine/by_input")
    return b.op("Reshape", outputs, b.ints(-1, n * p, o), name="combine/outputs")


def _chosen_rows(b: Builder, layer: SoftMoELayer, slots: ir.Value, selected: ir.Value) -> ir.Value:
    """Adds the experts on the rows that chose them: slots [b, k·p, d] to outputs [b, k·p, o].

    A row here is one (input, expert) pair with its p slots: b·k rows of p·d numbers.
    """
    n, p, d, o = layer.spec.experts, layer.spec.slots, layer.spec.dim, layer.spec.out
    expert_of_pair = b.op("Reshape", selected, b.ints(1, -1), name="group/expert_of_pair")
    pairs = sort_by_expert(b, expert_of_pair, n, "group/pairs_per_expert")
    counts = pairs.counts
    if p > 1:
        counts = b.op("Mul", counts, b.integer(p), name="group/rows_per_expert")

    flat = b.op("Reshape", slots, b.ints(-1, p * d), name="group/pairs")
    rows = b.op("Gather", flat, pairs.order, axis=0, name="group/sorted")
    if p > 1:
        rows = b.op("Reshape", rows, b.ints(-1, d), name="group/rows")
    outputs = _compute_sorted(b, layer, rows, counts)
    if p > 1:
        outputs = b.op("Reshape", outputs, b.ints(-1, p * o), name="group/outputs_by_pair")

    # Reshape the indices, not the outputs: runtimes cannot infer the width after a reshape by k.
    position = b.op(
        "Reshape", invert(b, pairs.order), _pairs_shape(b, layer), name="group/place_by_input"
    )
    if p == 1:
        return b.op("Gather", outputs, position, axis=0, name="combine/outputs")
    outputs = b.op("Gather", outputs, position, axis=0, name="group/unsorted")  # [b, k, p·o]
    return b.op("Reshape", outputs, b.ints(0, -1, o), name="combine/outputs")


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs of a row and an expert, sorted by expert.

    `order` [r] is the permutation of the pairs, `coordinates` [2, r] are the expert and the pair,
    and `counts` [n] is the number of pairs of each expert.
    """

    order: ir.Value
    coordinates: ir.Value
    counts: ir.Value


def sort_by_expert(b: Builder, expert_of_pair: ir.Value, n: int, counts: str) -> SortedPairs:
    """Adds the order by expert of pairs [r] or [1, r]; `counts` is the name of that output."""
    experts = b.constant(np.arange(n, dtype=np.int64)[:, None])
    one_hot = b.op("Equal", expert_of_pair, experts, name="group/one_hot")  # [n, r]
    # NonZero reads row by row, so its pairs are sorted by expert: a counting sort in one op.
    coordinates = b.op("NonZero", one_hot, name="group/coordinates")
    order = b.op("Gather", coordinates, b.integer(1), axis=0, name="group/order")
    counted = b.op("Cast", one_hot, to=ir.DataType.INT64.value, name="group/one_hot_int")
    return SortedPairs(
        order=order,
        coordinates=coordinates,
        counts=b.op("ReduceSum", counted, b.ints(1), keepdims=0, name=counts),
    )


def invert(b: Builder, order: ir.Value) -> ir.Value:
    """Adds the inverse of a permutation [r]."""
    shape = b.op("Shape", order, name="group/pair_count")
    count = b.op("Squeeze", shape, name="group/pair_count_scalar")
    positions = b.op("Range", b.integer(0), count, b.integer(1), name="group/positions")
    return b.op("ScatterElements", order, order, positions, axis=0, name="group/place")


def _pairs_shape(b: Builder, layer: SoftMoELayer) -> ir.Value:
    """Adds the shape [b, k] for a Reshape of [b·k]."""
    if isinstance(layer.k, int):
        return b.ints(-1, layer.k)
    return b.op("Concat", b.ints(-1), layer.k_value(b), axis=0, name="group/place_shape")


MANY_EXPERTS = 64
"""From this number of experts on, one nonlinearity for all of them saves more than splitting and
joining the hidden rows costs."""


def _compute_sorted(
    b: Builder, layer: SoftMoELayer, rows: ir.Value, counts: ir.Value | None
) -> ir.Value:
    """Adds each expert on its rows: [r, d] sorted by expert to [r, o].

    `counts` [n] are the experts' numbers of rows, or None if all are equal.
    """
    n = layer.spec.experts
    parts = _split(b, rows, counts, n, "group/expert")
    if n < MANY_EXPERTS or not layer.tensors.has("experts.w2"):
        outputs = [one_expert(b, layer, e, part) for e, part in enumerate(parts)]
    else:
        products = [first_product(b, layer, e, part) for e, part in enumerate(parts)]
        joined = b.op("Concat", *products, axis=0, name="group/products")
        hidden = hidden_rows(b, layer, joined, "experts")
        parts = _split(b, hidden, counts, n, "group/hidden")
        outputs = [second_product(b, layer, e, part) for e, part in enumerate(parts)]
    return b.op("Concat", *outputs, axis=0, name="group/outputs")


def _split(b: Builder, rows: ir.Value, sizes: ir.Value | None, n: int, name: str) -> list[ir.Value]:
    names = [f"{name}_{e}" for e in range(n)]
    if sizes is None:
        return b.ops("Split", rows, axis=0, num_outputs=n, names=names)
    return b.ops("Split", rows, sizes, axis=0, names=names)


def predict_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """Returns the time to read chosen experts once and compute their rows, in n chains of nodes."""
    n = plan.spec.experts
    selects = plan.typical_k < n
    nodes = (expert_nodes(plan) + machine.integer_nodes) * n + (12 if selects else 3)
    if n >= MANY_EXPERTS and plan.spec.expert != "linear":
        # The operators between the matmuls exist once for all experts.
        nodes -= n if machine.integer_nodes == 0 else 2 * n
    compared = n * plan.selections if selects else 0
    return (
        separate_experts_us(plan, plan.expected_active, plan.selections, machine)
        + compared * machine.sort_us
        + waiting_us(nodes, machine)
        + around_experts_us(plan, machine)
        + ROUTER_NODES * machine.launch_us
    )


LOWERING = Lowering(
    name="grouped",
    summary="sorts rows by expert; each expert computes only the rows that chose it",
    needs=lambda target: target.data_sizes,
    build=build,
    predict_us=predict_us,
    observable=True,
)
