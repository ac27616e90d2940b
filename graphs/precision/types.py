"""The numeric types of a layer: its floats, and the integers of its matrix products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from ..targets import QDQ, FloatName, Precision, QuantFormat

UINT8_LEVELS = 255
"""The largest unsigned byte: the number of steps of an affine scale."""

INT8_LEVELS = 127
"""The largest integer of a symmetric scale: its negative is also a signed byte."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The mapping from a real number x to an integer: q = round(x / scale) + zero_point."""

    scale: float
    zero_point: int


@dataclass(frozen=True, slots=True)
class Range:
    """The range of one tensor's values in a calibration run.

    Values from `low` to `high`, which the method chose, are represented; others are clipped.
    `minimum` and `maximum` are the observed extremes, `count` the number of values.
    """

    low: float
    high: float
    minimum: float
    maximum: float
    count: int

    @property
    def peak(self) -> float:
        """The largest observed absolute value, which a 16-bit float must represent."""
        return max(abs(self.minimum), abs(self.maximum))

    def affine(self, levels: int = UINT8_LEVELS) -> Scale:
        """Returns the scale to integers 0 … `levels`, for ONNX Runtime's unsigned activations.

        The range is widened to include zero, which is then represented exactly.
        """
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        scale = _float32((high - low) / levels)
        return Scale(scale, round(-low / scale))

    def symmetric(self, levels: int = INT8_LEVELS) -> Scale:
        """Returns the scale to integers −`levels` … `levels`, as TensorRT requires."""
        return Scale(_float32(max(abs(self.low), abs(self.high)) / levels), 0)


def _float32(value: float) -> float:
    """Returns the float32 value in the graph, never zero."""
    return float(max(np.float32(value), np.finfo(np.float32).tiny))


PRECISIONS: tuple[Precision, ...] = get_args(Precision)

FLOAT_TYPES: Mapping[FloatName, ir.DataType] = MappingProxyType(
    {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
)

HALF_TYPES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """The integers that weights are rounded to: −`levels` … `levels`, stored as x + `zero_point`.

    CPUs without VNNI multiply unsigned by signed bytes with `vpmaddubsw`, which adds two products
    in 16 bits and saturates: 255 · 127 · 2 does not fit, but 255 · 64 · 2 does. For unsigned
    weights these CPUs use a slower instruction, which is exact.
    """

    levels: int
    zero_point: int
    floats: bool = False

    @property
    def dtype(self) -> ir.DataType:
        if self.floats:
            return ir.DataType.FLOAT8E4M3FN
        return ir.DataType.UINT8 if self.zero_point else ir.DataType.INT8


SEVEN_BITS = WeightQuantization(64, 0)
"""Signed, and exact on every CPU."""

EIGHT_BITS_UNSIGNED = WeightQuantization(127, 128)
"""All eight bits, and exact on every CPU; slower on those without VNNI."""

EIGHT_BITS = WeightQuantization(127, 0)
"""As TensorRT requires: symmetric, both operands signed."""

EIGHT_BIT_FLOATS = WeightQuantization(448, 0, floats=True)
"""E4M3, four bits of exponent and three of mantissa, whose largest number is 448."""


@dataclass(frozen=True, slots=True)
class QuantizedProducts:
    """The integer products of a layer; `inputs` has the scale of each weight's operand.

    With `dynamic` each row is divided by its own scale at run time, so the scale here is one step
    of the result: rows do not depend on each other, and nothing is calibrated.
    """

    format: QuantFormat
    weights: WeightQuantization
    inputs: Mapping[str, Scale]
    dynamic: bool = False

    @property
    def in_qdq(self) -> bool:
        """Whether the graph has products of rounded floats, which the runtime recognises."""
        return self.format in QDQ


DYNAMIC_ROW = Scale(1.0, 128)
"""The encoding of a row whose largest absolute value was scaled to `INT8_LEVELS`."""


INT4_BLOCK = 32
"""The length of a block of a column whose numbers share a scale."""

Bits = Literal[4, 8]
"""The number of bits of a blocked weight."""

KERNEL_BLOCKS: Mapping[Bits, tuple[int, ...]] = MappingProxyType(
    {4: (128, 64, INT4_BLOCK), 8: (256, 128, 64, 32)}
)
"""Block sizes of ONNX Runtime's kernels, in order of preference; they must divide the columns."""


MAX_GPU_BLOCK = 128
"""The largest block size that a GPU's kernels support."""


def block_of(
    form: QuantFormat, widths: Iterable[int], bits: Bits = 4, *, on_gpu: bool = False
) -> int | None:
    """Returns the block size for columns of these lengths; None if no size divides all of them."""
    sizes = KERNEL_BLOCKS[bits] if form == "kernel" else (INT4_BLOCK,)
    if on_gpu:
        sizes = tuple(size for size in sizes if size <= MAX_GPU_BLOCK)
    widths = tuple(widths)
    return next((size for size in sizes if not any(width % size for width in widths)), None)


@dataclass(frozen=True, slots=True)
class BlockedWeights:
    """Products with weights of four or eight `bits`, whose operands stay floats.

    In each column of the named `weights`, `block` consecutive numbers share a scale. `format` is
    `kernel` for ONNX Runtime's `MatMulNBits`, else DequantizeLinear and MatMul. `on_gpu`: rows are
    multiplied unchanged; a CPU's kernels round them to eight bits.
    """

    format: QuantFormat
    weights: frozenset[str]
    block: int = INT4_BLOCK
    bits: Bits = 4
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class ComputeTypes:
    """The types in which a layer computes, whatever type its tokens have, and the reason for them.

    `inner` is the float type of the experts' (or factors') products; router and gate are always
    FP32. `quantized` lists the products with integers, or `blocked` those with blocked weights.
    """

    inner: ir.DataType = ir.DataType.FLOAT
    quantized: QuantizedProducts | None = None
    blocked: BlockedWeights | None = None
    reason: str = field(default="", compare=False)

    @property
    def precision(self) -> Precision:
        """The narrowest type of the layer."""
        if self.blocked is not None:
            return "int4" if self.blocked.bits == 4 else "int8"
        if self.quantized is not None:
            return "fp8" if self.quantized.weights.floats else "int8"
        return next(name for name, dtype in FLOAT_TYPES.items() if dtype == self.inner)


FP32 = ComputeTypes()
