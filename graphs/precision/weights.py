"""Converts a layer's weights to the types of its graph: 16-bit floats, or integers.

Only the factors of the experts' products, or of a muMoE layer, are converted: router and gate stay
in FP32. Weights are streamed: each expert's matrix is converted while it is written.
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

CONVERTED_PREFIXES = ("experts.", "tensor.")
"""Prefixes of the names of converted weights."""

TINY = float(np.finfo(np.float16).tiny)
"""The scale of a column of zeros: any positive number that every float type represents."""


def convert_weights(parts: Iterable[StoredPart], compute: ComputeTypes) -> Iterator[StoredPart]:
    """Yields a layer's weights in the types of `compute`.

    A weight W of integers is followed by `W.scale` [..., out]: the real value of one step, times
    one step of the operand unless the form is `qdq`. The scales are complete once all parts of W
    have been read. The same is true of blocked weights (`quantize_in_blocks`).
    """
    for part in parts:
        quantized = compute.quantized
        blocked = compute.blocked
        if blocked is not None and part.name in blocked.weights:
            yield from _in_blocks(part, blocked, compute.inner)
        elif not part.name.startswith(CONVERTED_PREFIXES):
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
    """Returns a matrix [in, out] as integers, or FP8, with a float32 scale [out] per column.

    The scales are rounded to `scale_type`, so storing them in that type loses nothing.
    """
    largest = np.abs(matrix).max(axis=0, initial=0.0)
    scale = round_to(largest / weights.levels, scale_type)
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
    """Returns why weights cannot be written in blocks; None if the blocks fit."""
    return next(
        (
            f"{part.name} has {part.shape[-2]} rows, not a multiple of {INT4_BLOCK}"
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
            integers, scale = quantize_in_blocks(matrix, blocked.block, inner, blocked.bits)
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
"""The shares of a block's largest number to try as the largest integer; the best one is used, and
values beyond it are clipped. With four bits this removes a tenth of the squared error; more shares
hardly help."""


def quantize_in_blocks(
    matrix: np.ndarray, block: int, scale_type: ir.DataType = ir.DataType.FLOAT, bits: Bits = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a matrix [in, out] as integers with a scale for each block of a column.

    Four-bit integers are −8 … 7. The scales [in / block, out] are signed: −8 represents the number
    with the largest absolute value, so all sixteen integers are used. Each scale minimises the
    squared error for its integers.
    """
    width, out = matrix.shape
    split = np.asarray(matrix, np.float32).reshape(width // block, block, out)
    integers = np.empty(split.shape, np.int8)
    scales = np.empty((len(split), out), np.float32)
    for index, numbers in enumerate(split):  # small enough to stay in a cache
        integers[index], scales[index] = _block(numbers, scale_type, bits)
    return integers.reshape(width, out), scales


def _block(
    numbers: np.ndarray, scale_type: ir.DataType, bits: Bits
) -> tuple[np.ndarray, np.ndarray]:
    """Returns one block [in, out] as integers, with their scales [out]."""
    levels = 2 ** (bits - 1)
    position = np.abs(numbers).argmax(axis=0, keepdims=True)
    largest = np.take_along_axis(numbers, position, axis=0)[0]
    integers, scales = np.zeros_like(numbers), np.zeros_like(largest)
    least_error = np.full_like(largest, np.inf)
    for share in SHARES[bits]:
        step = np.where(largest != 0, largest * (share / -levels), np.float32(TINY))
        candidate = np.clip(np.rint(numbers / step), -levels, levels - 1)
        squares = np.square(candidate).sum(axis=0)
        fitted = (numbers * candidate).sum(axis=0) / np.maximum(squares, 1)
        scale = round_to(np.where(squares > 0, fitted, step), scale_type)
        scale = np.where(scale != 0, scale, np.float32(TINY))
        error = np.square(numbers - candidate * scale).sum(axis=0)
        better = error < least_error
        integers = np.where(better, candidate, integers)
        scales, least_error = np.where(better, scale, scales), np.where(better, error, least_error)
    return integers.astype(np.int8), scales


def pack(integers: np.ndarray) -> np.ndarray:
    """Returns 4-bit integers packed two to a byte, the first in the lower half."""
    flat = np.ascontiguousarray(integers).reshape(-1).view(np.uint8) & 0xF
    return flat[::2] | (flat[1::2] << 4)


def activation_scale(
    observed: Range, dtype: ir.DataType, *, qdq: bool, levels: int = INT8_LEVELS
) -> Scale:
    """Returns the scale of an activation: signed and symmetric in Q/DQ form, else unsigned.

    In Q/DQ form the float type `dtype` represents the scale exactly.
    """
    if not qdq:
        return observed.affine()
    step = float(round_to(np.array(observed.symmetric(levels).scale), dtype))
    return Scale(step or TINY, 0)


def round_to(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Returns float32 numbers rounded to the nearest ones that a float type represents."""
    types = {ir.DataType.FLOAT16: np.float16, ir.DataType.BFLOAT16: ml_dtypes.bfloat16}
    exact = np.asarray(array, np.float32)
    return exact if dtype not in types else exact.astype(types[dtype]).astype(np.float32)
