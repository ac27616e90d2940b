"""A layer's weights in the numbers that its graph computes in: 16-bit floats, or integers.

Only what multiplies in the experts, or in a muMoE layer's factors, is converted: router and gate
keep FP32. Everything streams: one expert's matrix is converted while it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..layers.base import StoredPart
from ..names import operand_of
from ..targets import QuantFormat
from .types import (
    INT4_BLOCK,
    INT8_LEVELS,
    BlockedWeights,
    ComputeTypes,
    QuantizedProducts,
    Range,
    Scale,
    WeightQuantization,
    int4_block,
)

CONVERTED = ("experts.", "tensor.")
"""How the names of those weights begin."""

TINY = float(np.finfo(np.float16).tiny)
"""The scale of a column of zeros: any positive number that every float type holds."""


def converted(parts: Iterable[StoredPart], compute: ComputeTypes) -> Iterator[StoredPart]:
    """Yields a layer's weights as `compute` wants them.

    A weight W that multiplies as integers is followed by `W.scale` [..., out]: the real number that
    one step of it stands for, times one step of what it is multiplied with where the form is not
    `qdq`. Its parts are known once those of W have been read. So is a weight of four bits, whose
    layout and that of its scales is as `in_blocks` has them.
    """
    for part in parts:
        quantized = compute.quantized
        blocked = compute.blocked
        if blocked is not None and part.name in blocked.weights:
            yield from _in_blocks(part, blocked, compute.inner)
        elif not part.name.startswith(CONVERTED):
            yield part
        elif quantized is not None and part.name in quantized.inputs:
            yield from _integers(part, quantized, compute.inner)
        else:
            yield replace(part, dtype=compute.inner)


def _integers(
    part: StoredPart, quantized: QuantizedProducts, inner: ir.DataType
) -> Iterator[StoredPart]:
    qdq = quantized.in_qdq
    factor = 1.0 if qdq else quantized.inputs[part.name].scale
    scales: list[np.ndarray] = []

    def rounded() -> Iterator[np.ndarray]:
        for matrix in part.parts:
            integers, scale = quantize(matrix, quantized.weights, inner)
            scales.append(scale * np.float32(factor))
            yield integers

    yield replace(part, parts=rounded(), dtype=quantized.weights.dtype)
    yield StoredPart(
        f"{part.name}.scale",
        (*part.shape[:-2], part.shape[-1]),
        scales,
        inner if qdq else ir.DataType.FLOAT,
    )


def quantize(
    matrix: np.ndarray, weights: WeightQuantization, scale_type: ir.DataType = ir.DataType.FLOAT
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a matrix [in, out] as integers, or FP8, with a scale [out] per column, float32.

    The scales are numbers that `scale_type` holds, so that a graph that stores them so loses
    nothing more.
    """
    largest = np.abs(matrix).max(axis=0, initial=0.0)
    scale = rounded_to(largest / weights.levels, scale_type)
    scale = np.where(scale > 0, scale, np.float32(TINY))
    if weights.floats:
        limit = float(weights.levels)
        floats = np.clip(matrix / scale, -limit, limit)
        return floats.astype(ml_dtypes.float8_e4m3fn), scale
    integers = (
        np.clip(np.rint(matrix / scale), -weights.levels, weights.levels) + weights.zero_point
    )
    return integers.astype(np.uint8 if weights.zero_point else np.int8), scale


def not_in_blocks(parts: Iterable[StoredPart], form: QuantFormat) -> str | None:
    """Returns why weights cannot be written in blocks; None where their rows are whole ones."""
    return next(
        (
            f"{part.name} has {part.shape[-2]} rows, which are no whole blocks of {INT4_BLOCK}"
            for part in parts
            if operand_of(part.name) is not None and int4_block(form, part.shape[-2:-1]) is None
        ),
        None,
    )


def _in_blocks(
    part: StoredPart, blocked: BlockedWeights, inner: ir.DataType
) -> Iterator[StoredPart]:
    *stacked, width, out = part.shape
    kernel = blocked.format == "kernel"
    blocks = width // blocked.block
    scales: list[np.ndarray] = []

    def packed() -> Iterator[np.ndarray]:
        for matrix in part.parts:
            integers, scale = in_blocks(matrix, blocked.block, inner)
            scales.append(scale.T if kernel else scale)
            yield pack(integers.T + 8 if kernel else integers)

    shape = (*stacked, out, blocks, blocked.block // 2) if kernel else part.shape
    dtype = ir.DataType.UINT8 if kernel else ir.DataType.INT4
    yield replace(part, shape=shape, parts=packed(), dtype=dtype)
    by_column = (out, blocks) if kernel else (blocks, out)
    yield StoredPart(f"{part.name}.scale", (*stacked, *by_column), scales, inner)


def in_blocks(
    matrix: np.ndarray, block: int, scale_type: ir.DataType = ir.DataType.FLOAT
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a matrix [in, out] as integers −8 … 7 with a scale for each block of a column.

    The scales [in / block, out] are signed: −8 stands for the number of the block that is the
    largest in absolute value, which uses all sixteen integers.
    """
    width, out = matrix.shape
    split = np.asarray(matrix, np.float32).reshape(width // block, block, out)
    place = np.abs(split).argmax(axis=1, keepdims=True)
    largest = np.take_along_axis(split, place, axis=1)
    scale = rounded_to(largest / -8.0, scale_type)
    scale = np.where(scale != 0, scale, np.float32(TINY))
    integers = np.clip(np.rint(split / scale), -8, 7).astype(np.int8)
    return integers.reshape(width, out), scale[:, 0]


def pack(integers: np.ndarray) -> np.ndarray:
    """Returns integers of four bits two in a byte, the first in the lower half."""
    flat = np.ascontiguousarray(integers).reshape(-1).view(np.uint8) & 0xF
    return flat[::2] | (flat[1::2] << 4)


def activation_scale(
    seen: Range, dtype: ir.DataType, *, qdq: bool, levels: int = INT8_LEVELS
) -> Scale:
    """Returns the scale of an activation: signed and symmetric in Q/DQ form, else unsigned.

    In Q/DQ form it is a number that the float type `dtype` holds.
    """
    if not qdq:
        return seen.affine()
    step = float(rounded_to(np.array(seen.symmetric(levels).scale), dtype))
    return Scale(step or TINY, 0)


def rounded_to(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Returns float32 numbers that a float type holds: the nearest ones."""
    kind = {ir.DataType.FLOAT16: np.float16, ir.DataType.BFLOAT16: ml_dtypes.bfloat16}
    exact = np.asarray(array, np.float32)
    return exact if dtype not in kind else exact.astype(kind[dtype]).astype(np.float32)
