"""Weights of eight bits in a folder of `transformers`, multiplied by the scales beside them.

Tools name the scales of a weight after it: `weight_scale` (ModelOpt, compressed-tensors, FBGEMM) or
`weight_scale_inv` (DeepSeek). Each is what a weight is multiplied by, for the whole tensor, for
each row, or for each block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..checkpoints.state_dict import FLOAT8

SCALES = ("_scale", "_scale_inv")
"""What follows the name of a weight in the name of its scales."""

ACTIVATIONS = re.compile(r"(^|\.)(input|output|act|kv|k|v|q)_scale$")
"""Scales of activations and of the cache, which are computed in floats here."""

DEQUANTISED = "export the checkpoint in bfloat16 or float32 that it was made from"


def scales_of(key: str, tensors: Mapping[str, Tensor], place: Path) -> str:
    """Returns the key of the scales of a weight; `CheckpointError` where there are none, or two."""
    found = [key + end for end in SCALES if key + end in tensors]
    if len(found) == 1:
        return found[0]
    kind = str(tensors[key].dtype).removeprefix("torch.")
    what = "two scales" if found else "no scales"
    raise CheckpointError(
        f"{place}: {key} is {kind} and has {what}: one is expected, "
        f"{key}{SCALES[0]} or {key}{SCALES[1]}",
        hint=DEQUANTISED,
    )


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is of a type of eight bits that only scales give a meaning."""
    return tensor.dtype in FLOAT8


def dequantised(key: str, tensors: Mapping[str, Tensor], place: Path) -> Tensor:
    """Returns a weight of eight bits times its scales, as float32."""
    weight, name = tensors[key], scales_of(key, tensors, place)
    scale = tensors[name]
    spread = _spread(scale.float(), weight.shape) if scale.is_floating_point() else None
    if spread is None:
        raise CheckpointError(
            f"{place}: {name} is {scale.dtype} of shape {list(scale.shape)}, which is no scale for "
            f"the whole, the rows or the blocks of {key}, {list(weight.shape)}",
            hint=DEQUANTISED,
        )
    return weight.float() * spread


def _spread(scale: Tensor, shape: torch.Size) -> Tensor | None:
    """Scales in a shape that multiplies a weight; None where it cannot be told what each is of."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.ndim == 1 and scale.shape[0] == shape[0]:
        return scale.reshape(-1, *(1 for _ in shape[1:]))
    if scale.ndim != len(shape):
        return None
    for axis, (size, count) in enumerate(zip(shape, scale.shape, strict=True)):
        block = _block(size, count)
        if block is None:
            return None
        if block < size:
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    return scale


def _block(size: int, count: int) -> int | None:
    """How long each of so many blocks of an axis is; the last may be shorter.

    Blocks are powers of two, so that their number tells their length.
    """
    if count == 1:
        return size
    return next((b for j in range(size.bit_length()) if -(-size // (b := 2**j)) == count), None)
