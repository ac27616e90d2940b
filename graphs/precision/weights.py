"""A layer's weights in the numbers that its graph computes in: 16-bit floats, or integers.

Only what multiplies in the experts, or in a muMoE layer's factors, is converted: router and gate
keep FP32. Everything streams: one expert's matrix is converted while it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..layers.base import StoredPart
from ..names import operand_of
from ..targets import QuantFormat
from .types import (
    INT4_BLOCK,
    INT8_LEVELS,
    Bits,
    BlockedWeights,
    ComputeTypes,
    QuantizedProducts,
    Range,
    Scale,
    WeightQuantization,
    block_of,
)

CONVERTED = ("experts.", "tensor.")
"""How the names of those weights begin."""

TINY = float(np.finfo(np.float16).tiny)
"""The scale of a column of zeros: any positive number that every float type holds."""


def converted(parts: Iterable[StoredPart], compute: ComputeTypes) -> Iterator[StoredPart]:
    """Yields a layer's weights as `compute` wants them.

    A weight W that multiplies as integers is followed by `W.scale` [..., out]: the real number that
    one step of it stands for, times one step of what it is multiplied with where the form is not
    `qdq`. Its parts are known once those of W have been read. So is a weight in blocks, whose
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
            if operand_of(part.name) is not None and block_of(form, part.shape[-2:-1]) is None
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
            integers, scale = in_blocks(matrix, blocked.block, inner, blocked.bits)
            scales.append(scale.T if kernel else scale)
            if blocked.bits == 8:
                yield np.ascontiguousarray(integers.T).view(np.uint8) ^ 128
            else:
                yield pack(integers.T + 8 if kernel else integers)

    size = blocked.block * blocked.bits // 8
    shape = (*stacked, out, blocks, size) if kernel else part.shape
    dtype = ir.DataType.UINT8 if kernel else ir.DataType.INT4
    yield replace(part, shape=shape, parts=packed(), dtype=dtype)
    by_column = (out, blocks) if kernel else (blocks, out)
    yield StoredPart(f"{part.name}.scale", (*stacked, *by_column), scales, inner)


SHARES: Mapping[Bits, tuple[float, ...]] = MappingProxyType({4: (1.0, 0.88, 0.76), 8: (1.0,)})
"""How much of a block's largest number its integers reach, of which the best is taken: what lies
beyond is clipped. With four bits that takes a tenth of the squared error away; more shares hardly
take more."""


def in_blocks(
    matrix: np.ndarray,
    block: int,
    scale_type: ir.DataType = ir.DataType.FLOAT,
    bits: Bits = 4,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a matrix [in, out] as integers with a scale for each block of a column.

    Integers of four bits are −8 … 7. The scales [in / block, out] are signed: −8 stands for numbers
    of the sign of the largest in absolute value, which uses all sixteen integers. Each is the one
    of least squares for its integers.
    """
    width, out = matrix.shape
    split = np.asarray(matrix, np.float32).reshape(width // block, block, out)
    integers = np.empty(split.shape, np.int8)
    scales = np.empty((len(split), out), np.float32)
    for place, numbers in enumerate(split):  # few enough to stay in a cache
        integers[place], scales[place] = _block(numbers, scale_type, bits)
    return integers.reshape(width, out), scales


def _block(
    numbers: np.ndarray, scale_type: ir.DataType, bits: Bits
) -> tuple[np.ndarray, np.ndarray]:
    """One block [in, out] as integers, with their scales [out]."""
    levels = 2 ** (bits - 1)
    place = np.abs(numbers).argmax(axis=0, keepdims=True)
    largest = np.take_along_axis(numbers, place, axis=0)[0]
    integers, scales = np.zeros_like(numbers), np.zeros_like(largest)
    least = np.full_like(largest, np.inf)
    for share in SHARES[bits]:
        step = np.where(largest != 0, largest * (share / -levels), np.float32(TINY))
        tried = np.clip(np.rint(numbers / step), -levels, levels - 1)
        squares = np.square(tried).sum(axis=0)
        fitted = (numbers * tried).sum(axis=0) / np.maximum(squares, 1)
        scale = rounded_to(np.where(squares > 0, fitted, step), scale_type)
        scale = np.where(scale != 0, scale, np.float32(TINY))
        error = np.square(numbers - tried * scale).sum(axis=0)
        better = error < least
        integers = np.where(better, tried, integers)
        scales, least = np.where(better, scale, scales), np.where(better, error, least)
    return integers.astype(np.int8), scales


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
