"""Multiplies the eight-bit weights in a folder of `transformers` by their scales.

Tools name the scales of a weight after it: `weight_scale` (ModelOpt, compressed-tensors, FBGEMM) or
`weight_scale_inv` (DeepSeek). There is one scale for the whole tensor, or one for each row or each
block. The configuration states the size of the blocks, or it follows from their number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError

SCALES = ("_scale", "_scale_inv")
"""The suffixes of the names of scales, which begin with the weight's name."""

ACTIVATIONS = re.compile(r"(^|\.)(input|output|act|kv|k|v|q)_scale$")
"""Matches the names of scales of activations and of the cache, which are floats in our graphs."""

DEQUANTISED = "export the original checkpoint in bfloat16 or float32"


def scales_of(key: str, tensors: Mapping[str, Tensor], path: Path) -> str:
    """Returns the key of a weight's scales; raises `CheckpointError` if there are none, or two."""
    found = [key + end for end in SCALES if key + end in tensors]
    if len(found) == 1:
        return found[0]
    dtype = str(tensors[key].dtype).removeprefix("torch.")
    what = "two tensors of scales" if found else "no scales"
    raise CheckpointError(
        f"{path}: {key} is {dtype} and has {what}, but needs either "
        f"{key}{SCALES[0]} or {key}{SCALES[1]}",
        hint=DEQUANTISED,
    )


def blocks_of(config: Any) -> tuple[int, int] | None:
    """Returns the rows and columns of a block from a quantisation configuration."""
    size = config.get("weight_block_size") if isinstance(config, Mapping) else None
    if not isinstance(size, list | tuple) or len(size) != 2:
        return None
    rows, columns = size
    integers = isinstance(rows, int) and isinstance(columns, int)
    return (rows, columns) if integers and rows > 0 and columns > 0 else None


def dequantised(
    key: str, tensors: Mapping[str, Tensor], path: Path, blocks: tuple[int, int] | None
) -> Tensor:
    """Returns an eight-bit weight times its scales, as float32."""
    weight, name = tensors[key], scales_of(key, tensors, path)
    scale = tensors[name]
    factors = _expanded(scale.float(), weight.shape, blocks) if scale.is_floating_point() else None
    if factors is None:
        size = "" if blocks is None else f" of {blocks[0]} × {blocks[1]}"
        raise CheckpointError(
            f"{path}: {name} is {scale.dtype} of shape {list(scale.shape)}, so it is unclear "
            f"which part of {key}, {list(weight.shape)}, each scale belongs to: the whole tensor, "
            f"a row, or a block{size}",
            hint='state the size of a block in config.json, "quantization_config": '
            f'{{"weight_block_size": [rows, columns]}}, or {DEQUANTISED}',
        )
    return weight.float() * factors


def _expanded(scale: Tensor, shape: torch.Size, blocks: tuple[int, int] | None) -> Tensor | None:
    """Returns scales in a shape that multiplies a weight; None if they are ambiguous."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.ndim == 1 and scale.shape[0] == shape[0]:
        return scale.reshape(-1, *(1 for _ in shape[1:]))
    if scale.ndim != len(shape):
        return None
    given = [None] * len(shape) if blocks is None else [*[1] * (len(shape) - 2), *blocks]
    for axis, (size, count) in enumerate(zip(shape, scale.shape, strict=True)):
        block = _block(size, count, given[axis])
        if block is None:
            return None
        if block < size:
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    return scale


def _block(size: int, count: int, given: int | None) -> int | None:
    """Returns the length of each of `count` blocks of an axis; the last block may be shorter.

    If no length is given, it is 1, the whole axis, or the power of two that results in `count`.
    Returns None if a different length also could.
    """
    if count in (1, size):
        return size // count
    if given is not None:
        return given if -(-size // given) == count else None
    block = next((b for j in range(size.bit_length()) if -(-size // (b := 2**j)) == count), None)
    return None if size % count == 0 and block != size // count else block
