"""Rows in tiles by expert: the arithmetic by itself, its bound, and the choice of the tile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
from moexport.common.onnx_runtime import ort
from moexport.graphs.builder import Builder
from moexport.graphs.cards import GPUS
from moexport.graphs.layers.soft_moe import ExpertKind, SoftMoESpec
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.lowerings.base import SoftMoEPlan
from moexport.graphs.lowerings.block_grouped import (
    TILES,
    best_tile,
    from_tiles,
    into_tiles,
    max_tiles,
)
from moexport.graphs.lowerings.choice import choose
from moexport.tests.graphs.soft_moe_layers import lowered, session, soft_moe, tiny_layer, tokens

LOWERINGS = lowerings_of("soft-moe")

WIDTH = 3


def tiled(n: int, tile: int, p: int) -> ort.InferenceSession:
    """A graph of the arithmetic alone: rows [r, d] and experts of items [r / p] to its tiles."""
    b = Builder("layer")
    rows = ir.Value(
        name="rows", shape=ir.Shape(["r", WIDTH]), type=ir.TensorType(ir.DataType.FLOAT)
    )
    items = ir.Value(name="items", shape=ir.Shape(["i"]), type=ir.TensorType(ir.DataType.INT64))
    tiles = into_tiles(b, rows, items, experts=n, tile=tile, width=WIDTH, rows_per_item=p)
    back = from_tiles(b, tiles, tiles.rows, WIDTH)
    outputs = [tiles.rows, tiles.expert, tiles.offset, back]
    for value, kind in zip(outputs, (1, 7, 7, 1), strict=True):
        value.type = ir.TensorType(ir.DataType(kind))
    graph = ir.Graph(
        [rows, items],
        outputs,
        nodes=b.nodes,
        initializers=b.initializers,
        opset_imports={"": 20},
        name="tiles",
    )
    return ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())


@pytest.mark.parametrize(("tile", "p"), list(itertools.product((1, 4, 8), (1, 3))))
@pytest.mark.parametrize(
    "items",
    [[0], [4, 4, 4, 4, 4, 4, 4, 4, 4], [3, 1, 0, 1, 3, 3], [0, 1, 2, 3, 4, 5], [5, 0] * 20],
    ids=["one", "all-to-one", "some-empty", "one-each", "first-and-last"],
)
def test_rows_lie_in_tiles_of_their_expert_and_come_back(
    items: Sequence[int], tile: int, p: int
) -> None:
    n = 6
    rows = np.random.default_rng(0).standard_normal((len(items) * p, WIDTH)).astype(np.float32)
    found = tiled(n, tile, p).run(None, {"rows": rows, "items": np.array(items, np.int64)})
    tiles, expert, place, back = found
    assert len(tiles) == len(expert) == max_tiles(len(items), p, n, tile)
    assert tiles.shape[1:] == (tile, WIDTH)
    assert len(set(place.tolist())) == len(rows)  # no two rows share a place
    assert np.array_equal(tiles.reshape(-1, WIDTH)[place], rows)
    assert np.array_equal(expert[place // tile], np.repeat(items, p))
    assert np.array_equal(back, rows)
    assert set(expert.tolist()) <= set(range(n))


@pytest.mark.parametrize(("items", "p", "n", "tile"), [(1, 1, 8, 16), (40, 3, 6, 8), (7, 2, 3, 4)])
def test_there_are_as_many_tiles_as_the_worst_inputs_need(
    items: int, p: int, n: int, tile: int
) -> None:
    """Over random choices, and the one that spreads single rows over most experts."""
    rng = np.random.default_rng(1)
    worst = [min(e, items - 1) for e in range(min(items, n))]
    spread = [*range(min(items, n)), *([0] * max(0, items - n))]
    needed = []
    for chosen in (worst, spread, *(rng.integers(0, n, items) for _ in range(300))):
        counts = p * np.bincount(np.asarray(chosen)[:items], minlength=n)
        needed.append(int((-(-counts // tile)).sum()))
    assert max(needed) <= max_tiles(items, p, n, tile)
    if p == 1:
        assert needed[1] == max_tiles(items, p, n, tile)  # the bound is met


@pytest.mark.parametrize("batch", [1, 2, 9, 40])
@pytest.mark.parametrize("expert", ["mlp", "gated"])
def test_a_layer_computes_the_formulas_at_batches_that_fill_several_tiles(
    expert: ExpertKind, batch: int
) -> None:
    layer = tiny_layer(expert=expert, slots=3)
    x = tokens(batch, 6)
    expected, sets = soft_moe(layer, x, 2)
    y, selected = session(lowered(layer, "block-grouped", 2)).run(None, {"input": x})
    assert np.abs(y - expected).max() <= 2e-5 * np.abs(expected).max()
    assert np.array_equal(np.sort(selected, axis=1), sets)


def layer_work(batch: int, *, slots: int = 25, precision: str = "fp16") -> SoftMoEPlan:
    spec = SoftMoESpec("layer", 8, slots, 768, 3072, 768)
    return SoftMoEPlan(spec, 2, batch, 197, precision)  # type: ignore[arg-type]


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    for machines in GPUS.values():
        found = [best_tile(layer_work(batch), machines["fp16"]) for batch in (1, 16, 256, 4096)]
        assert found == sorted(found)
        assert set(found) <= set(TILES)
        assert found[-1] > found[0]


def test_the_prediction_prefers_it_where_rows_outweigh_the_tiles_weights() -> None:
    """At batch 1 copying chosen experts once is all there is to do; many rows pay for the tiles."""
    grouped, machine = LOWERINGS["block-grouped"], GPUS["RTX 4090"]["fp16"]
    rivals = [LOWERINGS[name] for name in ("dense", "gather", "conditional")]
    for batch, wins in ((1, False), (8, False), (512, True)):
        work = layer_work(batch)
        least = min(each.predict_us(work, machine) for each in rivals)
        assert (grouped.predict_us(work, machine) < least) == wins
    assert choose(layer_work(512), "tensorrt").lowering.name == "block-grouped"
    assert choose(layer_work(1), "tensorrt").lowering.name == "gather"


def test_it_is_offered_to_engines_alone() -> None:
    assert LOWERINGS["block-grouped"].targets == {"tensorrt", "tensorrt-rtx"}
