"""`block-grouped`: rows sorted by expert and padded to tiles; one weight is gathered per tile.

All shapes follow from the input shapes, and positions are counted without sort, NonZero or If,
which TensorRT does not support or for which it synchronises. An item is one expert chosen by one
input or token, and has one or more rows. The rows of an expert start at the beginning of a tile, so
that one matrix serves a tile of T rows. At most a = min(items, n) experts have rows, and each of
them fills all its tiles but the last, so r rows need at most a + ⌊(r − a)/T⌋ tiles. For one input,
that is one tile per chosen expert, as in `gather`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import SoftMoELayer
from ..precision.types import FLOAT_TYPES, ComputeTypes
from ..routing import combine_outputs, route, selected_slots
from ..targets import SERVER_GPU, Machine, Precision
from . import dense
from .base import AnyPlan, Lowering, SoftMoEPlan, no_batched_kernel
from .cost import around_experts_us, between_us, expert_bytes, machine_for, rates_of, stream_us
from .experts import batched_experts, expert_rows, stacked_weights

TILES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Rows per tile: the size that a matrix unit multiplies at once, and multiples of it."""


def build(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    """Adds the layer with weights gathered to [t, d, h]; at k = n nothing needs gathering."""
    if not layer.selects:
        return dense.build(b, layer, x)
    routed = route(b, layer, x)
    assert routed.selected is not None
    slots = selected_slots(b, layer, routed)
    spec = layer.spec
    p, d, o = spec.slots, spec.dim, spec.out
    rows = expert_rows(b, layer, slots.rows)
    tiles = into_tiles(
        b,
        b.op("Reshape", rows, b.ints(-1, d), name="tiles/rows_in_order"),
        b.op("Reshape", routed.selected, b.ints(-1), name="tiles/expert_of_pair"),
        experts=spec.experts,
        tile=_tile_for(layer),
        width=d,
        rows_per_item=p,
    )
    weights = {
        name: b.op("Gather", stacked, tiles.expert, axis=0, name=f"experts/{name}_of_tile")
        for name, stacked in stacked_weights(b, layer).items()
    }
    outputs = from_tiles(b, tiles, batched_experts(b, layer, tiles.rows, weights), o)
    shape = b.op("Shape", slots.rows, start=0, end=2, name="combine/rows")
    shape = b.op("Concat", shape, b.ints(o), axis=0, name="combine/outputs_shape")
    outputs = b.op("Reshape", outputs, shape, name="combine/outputs")
    return combine_outputs(b, layer, slots, outputs)


def _tile_for(layer: SoftMoELayer) -> int:
    """Returns the tile with the lowest predicted time at the layer's usual batch."""
    spec, precision = layer.spec, costed_precision(layer.compute)
    k = layer.k if isinstance(layer.k, int) else max(1, spec.experts // 4)
    plan = SoftMoEPlan(spec, k, layer.batch, layer.tokens or 1, precision)
    return best_tile(plan, machine_for(layer.target, precision))


def costed_precision(compute: ComputeTypes) -> Precision:
    """Returns the precision whose costs determine the tile: FP8 counts as INT8."""
    if compute.quantized is not None:
        return "int8"
    names: dict[ir.DataType, Precision] = {dtype: name for name, dtype in FLOAT_TYPES.items()}
    return names[compute.inner]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows in tiles: `rows` [t, T, d], each tile's `expert` [t], and each row's `offset` [r].

    Empty positions have a copy of the first row, and empty tiles use the last expert; their results
    are never read.
    """

    rows: ir.Value
    expert: ir.Value
    offset: ir.Value


def max_tiles(items: int, rows_per_item: int, experts: int, tile: int) -> int:
    """Returns the largest number of tiles for a number of items."""
    active = min(items, experts)
    return active + (items * rows_per_item - active) // tile


def planned_tiles(plan: AnyPlan, tile: int) -> int:
    """Returns `max_tiles` for the sizes of a plan."""
    return max_tiles(plan.selections, plan.spec.slots, plan.spec.experts, tile)


def into_tiles(
    b: Builder,
    rows: ir.Value,
    expert_of_item: ir.Value,
    *,
    experts: int,
    tile: int,
    width: int,
    rows_per_item: int = 1,
) -> Tiles:
    """Adds the tiles of rows [r, d], `rows_per_item` for each item of `expert_of_item` [r / p].

    `width` is d.
    """
    n, p = experts, rows_per_item
    column = b.op("Unsqueeze", expert_of_item, b.ints(1), name="tiles/expert_of_item")
    indices = b.constant(np.arange(n, dtype=np.int64)[None, :])
    same = b.op("Equal", column, indices, name="tiles/one_hot")
    one_hot = b.op("Cast", same, to=ir.DataType.INT64.value, name="tiles/one_hot_int")  # [r/p, n]
    counts = b.op("ReduceSum", one_hot, b.ints(0), keepdims=1, name="tiles/items")  # [1, n]
    running = b.op("CumSum", one_hot, b.integer(0), name="tiles/items_up_to")
    # The number of earlier items with the same expert: its running count without itself.
    before = b.op("Sub", running, one_hot, name="tiles/items_before")
    if p > 1:
        counts = b.op("Mul", counts, b.integer(p), name="tiles/rows")
        before = b.op("Mul", before, b.integer(p), name="tiles/rows_before")
    padded = b.op("Add", counts, b.integer(tile - 1), name="tiles/rows_padded")
    needed = b.op("Div", padded, b.integer(tile), name="tiles/needed")
    ends = b.op("CumSum", needed, b.integer(1), name="tiles/ends")  # [1, n]
    first = b.op("Sub", ends, needed, name="tiles/first")
    first = b.op("Mul", first, b.integer(tile), name="tiles/first_row")
    offsets = b.op("Add", before, first, name="tiles/places")
    offsets = b.op("Mul", offsets, one_hot, name="tiles/own_places")
    offset = b.op("ReduceSum", offsets, b.ints(1), keepdims=int(p > 1), name="tiles/place_of_item")
    if p > 1:
        steps = b.constant(np.arange(p, dtype=np.int64)[None, :])
        offset = b.op("Add", offset, steps, name="tiles/places_of_item")
        offset = b.op("Reshape", offset, b.ints(-1), name="tiles/place")
    count = _tile_count(b, expert_of_item, rows, n, tile)
    gathered = _gather(b, rows, offset, count, tile)
    shaped = b.op("Reshape", gathered, b.ints(-1, tile, width), name="tiles/tiles")
    return Tiles(shaped, _expert_of_tile(b, ends, count, n), offset)


def from_tiles(b: Builder, tiles: Tiles, outputs: ir.Value, width: int) -> ir.Value:
    """Adds the rows [r, o] in their original order, from outputs [t, T, o] of the tiles."""
    flat = b.op("Reshape", outputs, b.ints(-1, width), name="tiles/outputs")
    return b.op("Gather", flat, tiles.offset, axis=0, name="tiles/outputs_of_rows")


def _tile_count(b: Builder, items: ir.Value, rows: ir.Value, n: int, tile: int) -> ir.Value:
    """Adds the number of tiles, [1], from shapes only."""
    length = b.op("Shape", items, start=0, end=1, name="tiles/item_count")
    active = b.op("Min", length, b.ints(n), name="tiles/active_at_most")
    total = b.op("Shape", rows, start=0, end=1, name="tiles/row_count")
    extra = b.op("Sub", total, active, name="tiles/further_rows")
    extra = b.op("Div", extra, b.ints(tile), name="tiles/further_tiles")
    return b.op("Add", active, extra, name="tiles/count")


def _gather(b: Builder, rows: ir.Value, offset: ir.Value, count: ir.Value, tile: int) -> ir.Value:
    """Adds the rows at their positions, [t·T, d]."""
    size = b.op("Mul", count, b.ints(tile), name="tiles/size")
    zeros = b.op("Expand", b.ints(0), size, name="tiles/nobody")
    shape = b.op("Shape", offset, name="tiles/place_count")
    order = _indices(b, shape, "tiles/order")
    source = b.op("ScatterElements", zeros, offset, order, axis=0, name="tiles/source")
    return b.op("Gather", rows, source, axis=0, name="tiles/sorted")


def _expert_of_tile(b: Builder, ends: ir.Value, count: ir.Value, n: int) -> ir.Value:
    """Adds the expert of each tile, [t]: the number of experts that end at or before the tile."""
    index = _indices(b, count, "tiles/index")
    column = b.op("Unsqueeze", index, b.ints(1), name="tiles/index_column")
    ended = b.op("GreaterOrEqual", column, ends, name="tiles/ended")
    counted = b.op("Cast", ended, to=ir.DataType.INT64.value, name="tiles/ended_int")
    expert = b.op("ReduceSum", counted, b.ints(1), keepdims=0, name="tiles/expert_or_none")
    return b.op("Min", expert, b.integer(n - 1), name="tiles/expert")


def _indices(b: Builder, length: ir.Value, name: str) -> ir.Value:
    """Adds the indices 0, 1, 2 … below a length [1]."""
    scalar = b.op("Squeeze", length, b.ints(0), name=f"{name}_length")
    return b.op("Range", b.integer(0), scalar, b.integer(1), name=name)


SORTING_NODES = 28
"""The number of small operators that count the positions; an engine builder may fuse them."""


Between = Callable[[Any, float, Machine], float]
"""The time between and after the products of pairs of an item and an expert: `between_us`."""


def best_tile(plan: AnyPlan, machine: Machine, between: Between = between_us) -> int:
    """Returns the tile with the lowest predicted time, the smallest if several are equally fast.

    A larger tile gathers fewer matrices, but pads more rows.
    """
    return min(TILES, key=lambda tile: (tiles_us(plan, machine, tile, between), tile))


def tiles_us(plan: AnyPlan, machine: Machine, tile: int, between: Between = between_us) -> float:
    """Returns the time to copy a matrix per tile, read it again, and compute the tiles' rows."""
    tiles = planned_tiles(plan, tile)
    copied, layer = expert_bytes(plan, tiles), expert_bytes(plan, plan.spec.experts)
    read = expert_bytes(plan, min(tiles, plan.expected_active)) if machine.reads_once else copied
    return (
        stream_us(plan, read, layer, machine.bytes_per_us, machine)
        + stream_us(plan, copied, copied, machine.copy_bytes_per_us, machine)
        + tiles * tile * float(plan.spec.parameters_per_expert) / machine.macs_per_us
        + between(plan, tiles * tile / plan.spec.slots, machine)
    )


def copied_bytes(plan: SoftMoEPlan) -> float:
    """Returns the bytes of the experts that the tiles copy."""
    if plan.typical_k == plan.spec.experts:
        return 0.0
    return expert_bytes(plan, planned_tiles(plan, best_tile(plan, rates_of(SERVER_GPU)["fp32"])))


def predict_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """Returns the time to copy and compute the tiles, and to count the positions."""
    if plan.typical_k == plan.spec.experts:
        return dense.predict_us(plan, machine)  # nothing needs gathering: it is the same graph
    counted = plan.selections * plan.spec.experts
    return (
        tiles_us(plan, machine, best_tile(plan, machine))
        + counted * machine.sort_us
        + SORTING_NODES * machine.node_us
        + around_experts_us(plan, machine)
    )


LOWERING = Lowering(
    name="block-grouped",
    summary="sorts rows by expert into padded tiles; gathers one expert's weights per tile, then "
    "runs batched MatMuls",
    needs=lambda target: target.compiled,
    build=build,
    predict_us=predict_us,
    copied_bytes=copied_bytes,
    no_kernel=no_batched_kernel,
)
