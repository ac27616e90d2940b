"""Writes checkpoints as google-research/vmoe does: an index and shards of chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.msgpack import Ext, encode

Slices = tuple[tuple[int, int], ...]
Cut = Callable[[str, tuple[int, ...]], list[Slices]]
"""The chunks of an array, from its path and shape."""


def whole(_: str, shape: tuple[int, ...]) -> list[Slices]:
    """One chunk."""
    return [tuple((0, size) for size in shape)]


def rows(_: str, shape: tuple[int, ...]) -> list[Slices]:
    """Returns a chunk for each row of the first axis, as for experts on separate devices."""
    rest = tuple((0, size) for size in shape[1:])
    return [((i, i + 1), *rest) for i in range(shape[0])] if shape else [()]


def write(
    prefix: Path,
    arrays: Mapping[str, np.ndarray],
    *,
    shards: int = 2,
    cut: Cut = whole,
    version: str | None = "20220622",
    number: Callable[[list[str]], list[str]] = sorted,
    told: Cut | None = None,
) -> Path:
    """Writes arrays by path (`Encoder/encoder_norm/bias`) and returns the index.

    `number` puts the paths in the order in which shards count them; `told` has the chunks in the
    index, if they differ from those in the shards.
    """
    chunks = [dict[str, list[Any]]() for _ in range(shards)]
    tree: dict[str, Any] = {}
    turn = 0
    for place, path in enumerate(number(list(arrays))):
        array = arrays[path]
        boxes, homes = cut(path, array.shape), []
        for box in boxes:
            values = np.ascontiguousarray(array[tuple(slice(*each) for each in box)])
            chunks[turn % shards].setdefault(str(place), []).append([[piece(values)], where(box)])
            homes.append(turn % shards)
            turn += 1
        if told is not None:
            boxes = told(path, array.shape)
            homes = (homes * len(boxes))[: len(boxes)]
        put(tree, path.split("/"), info(array, boxes, homes))
    index = prefix.with_name(prefix.name + ".index")
    top = {"shard_count": shards, "index": tree, **({"version": version} if version else {})}
    index.write_bytes(encode(top))
    for shard, held in enumerate(chunks):
        file = prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")
        file.write_bytes(encode({"__msgpack_array_chunk_a87ca2__": True, **held}))
    return index


def put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def info(array: np.ndarray, boxes: list[Slices], shards: list[int]) -> Ext:
    shaped = encode([list(array.shape), array.dtype.name, False, {}])
    return Ext(8, encode([shaped, [slice_nd(box) for box in boxes], shards]))


def slice_nd(box: Slices) -> bytes:
    return encode([encode([start, stop, None]) for start, stop in box])


def where(box: Slices) -> Ext:
    return Ext(6, slice_nd(box))


def piece(values: np.ndarray) -> Ext:
    shape = [values.size] if values.ndim else [1]
    return Ext(1, encode([shape, values.dtype.name, values.tobytes()]))
