"""Rows sorted by expert and padded to tiles of T, in shapes that follow from the inputs' alone.

No sort, no NonZero and no If, which TensorRT lacks or has to wait for: a row's place is counted. An
item is what chose an expert (an input, a token), with so many rows of its own. Experts lie one
after the other, each from the beginning of a tile, so that one matrix serves a tile. There are at
most a + ⌊(r − a)/T⌋ tiles for r rows, of which a = min(items, n) experts can get any: each of those
fills all tiles but its last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..builder import Builder


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows in tiles: `rows` [t, T, d], the expert of each tile [t], and where each row lies, [r].

    Places that no row took hold a copy of the first row, and tiles that no expert needed are the
    last expert's: what comes of them is never read.
    """

    rows: ir.Value
    expert: ir.Value
    place: ir.Value


def tiles_at_most(items: int, rows_per_item: int, experts: int, tile: int) -> int:
    """Returns how many tiles there are for so many items."""
    active = min(items, experts)
    return active + (items * rows_per_item - active) // tile


def into_tiles(
    b: Builder,
    rows: ir.Value,
    expert_of_item: ir.Value,
    *,
    experts: int,
    tile: int,
    rows_per_item: int = 1,
) -> Tiles:
    """Adds the tiles of rows [r, d], `rows_per_item` for each item of `expert_of_item` [r / p]."""
    n, p = experts, rows_per_item
    column = b.op("Unsqueeze", expert_of_item, b.ints(1), name="tiles/expert_of_item")
    numbers = b.constant(np.arange(n, dtype=np.int64)[None, :])
    same = b.op("Equal", column, numbers, name="tiles/one_hot")
    one_hot = b.op("Cast", same, to=ir.DataType.INT64.value, name="tiles/one_hot_int")  # [r/p, n]
    counts = b.op("ReduceSum", one_hot, b.ints(0), keepdims=1, name="tiles/items")  # [1, n]
    running = b.op("CumSum", one_hot, b.integer(0), name="tiles/items_up_to")
    # How many items of an expert came before: its running count without itself.
    before = b.op("Sub", running, one_hot, name="tiles/items_before")
    if p > 1:
        counts = b.op("Mul", counts, b.integer(p), name="tiles/rows")
        before = b.op("Mul", before, b.integer(p), name="tiles/rows_before")
    padded = b.op("Add", counts, b.integer(tile - 1), name="tiles/rows_padded")
    needed = b.op("Div", padded, b.integer(tile), name="tiles/needed")
    ends = b.op("CumSum", needed, b.integer(1), name="tiles/ends")  # [1, n]
    first = b.op("Sub", ends, needed, name="tiles/first")
    first = b.op("Mul", first, b.integer(tile), name="tiles/first_row")
    places = b.op("Add", before, first, name="tiles/places")
    places = b.op("Mul", places, one_hot, name="tiles/own_places")
    place = b.op("ReduceSum", places, b.ints(1), keepdims=int(p > 1), name="tiles/place_of_item")
    if p > 1:
        steps = b.constant(np.arange(p, dtype=np.int64)[None, :])
        place = b.op("Add", place, steps, name="tiles/places_of_item")
        place = b.op("Reshape", place, b.ints(-1), name="tiles/place")
    count = _count(b, expert_of_item, rows, n, tile)
    return Tiles(_gathered(b, rows, place, count, tile), _expert_of_tile(b, ends, count, n), place)


def from_tiles(b: Builder, tiles: Tiles, outputs: ir.Value, width: int) -> ir.Value:
    """Adds the rows [r, o] in their own order, for outputs [t, T, o] of their tiles."""
    flat = b.op("Reshape", outputs, b.ints(-1, width), name="tiles/outputs")
    return b.op("Gather", flat, tiles.place, axis=0, name="tiles/outputs_of_rows")


def _count(b: Builder, items: ir.Value, rows: ir.Value, n: int, tile: int) -> ir.Value:
    """How many tiles there are, [1]: from shapes alone."""
    length = b.op("Shape", items, start=0, end=1, name="tiles/item_count")
    active = b.op("Min", length, b.ints(n), name="tiles/active_at_most")
    total = b.op("Shape", rows, start=0, end=1, name="tiles/row_count")
    further = b.op("Sub", total, active, name="tiles/further_rows")
    further = b.op("Div", further, b.ints(tile), name="tiles/further_tiles")
    return b.op("Add", active, further, name="tiles/count")


def _gathered(b: Builder, rows: ir.Value, place: ir.Value, count: ir.Value, tile: int) -> ir.Value:
    """The rows at their places, [t, T, d]."""
    size = b.op("Mul", count, b.ints(tile), name="tiles/size")
    nobody = b.op("Expand", b.ints(0), size, name="tiles/nobody")
    shape = b.op("Shape", place, name="tiles/place_count")
    order = _counted(b, shape, "tiles/order")
    source = b.op("ScatterElements", nobody, place, order, axis=0, name="tiles/source")
    gathered = b.op("Gather", rows, source, axis=0, name="tiles/sorted")
    assert rows.shape is not None
    return b.op("Reshape", gathered, b.ints(-1, tile, rows.shape[-1]), name="tiles/tiles")


def _expert_of_tile(b: Builder, ends: ir.Value, count: ir.Value, n: int) -> ir.Value:
    """The expert of each tile, [t]: as many experts end at or before it as come before its own."""
    index = _counted(b, count, "tiles/index")
    column = b.op("Unsqueeze", index, b.ints(1), name="tiles/index_column")
    ended = b.op("GreaterOrEqual", column, ends, name="tiles/ended")
    counted = b.op("Cast", ended, to=ir.DataType.INT64.value, name="tiles/ended_int")
    expert = b.op("ReduceSum", counted, b.ints(1), keepdims=0, name="tiles/expert_or_none")
    return b.op("Min", expert, b.integer(n - 1), name="tiles/expert")


def _counted(b: Builder, length: ir.Value, name: str) -> ir.Value:
    """0, 1, 2 … for a length [1]."""
    scalar = b.op("Squeeze", length, b.ints(0), name=f"{name}_length")
    return b.op("Range", b.integer(0), scalar, b.integer(1), name=name)
