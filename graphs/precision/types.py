"""In what numbers a layer computes: its float types, and the integers of its matrix products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from ..targets import QDQ, FloatName, Precision, QuantFormat

UINT8_LEVELS = 255
"""The largest number of an unsigned byte: the steps of an affine scale."""

INT8_LEVELS = 127
"""The largest number of a signed byte that has an opposite: the steps of a symmetric scale."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How a real number x is written as an integer: q = round(x / scale) + zero_point."""

    scale: float
    zero_point: int


@dataclass(frozen=True, slots=True)
class Range:
    """The values of one tensor over a calibration run.

    Values from `low` to `high` are represented, those beyond are clipped: a method's choice.
    `minimum` and `maximum` are what was observed, `count` how many numbers were.
    """

    low: float
    high: float
    minimum: float
    maximum: float
    count: int

    @property
    def peak(self) -> float:
        """The largest absolute value observed: what a 16-bit float must hold."""
        return max(abs(self.minimum), abs(self.maximum))

    def affine(self, levels: int = UINT8_LEVELS) -> Scale:
        """Returns the scale to integers 0 … `levels`, for ONNX Runtime's unsigned activations.

        The range is widened to hold zero, which is then represented exactly.
        """
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        scale = _float32((high - low) / levels)
        return Scale(scale, round(-low / scale))

    def symmetric(self, levels: int = INT8_LEVELS) -> Scale:
        """Returns the scale to integers −`levels` … `levels`, as TensorRT requires."""
        return Scale(_float32(max(abs(self.low), abs(self.high)) / levels), 0)


def _float32(value: float) -> float:
    """The float32 that the graph will hold, never zero."""
    return float(max(np.float32(value), np.finfo(np.float32).tiny))


PRECISIONS: tuple[Precision, ...] = get_args(Precision)

FLOAT_TYPES: Mapping[FloatName, ir.DataType] = MappingProxyType(
    {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
)

HALF_TYPES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """The integers that weights are rounded to: −`levels` … `levels`, stored plus `zero_point`.

    CPUs without VNNI multiply unsigned by signed bytes with `vpmaddubsw`, which adds two products
    in 16 bits and saturates: 255 · 127 · 2 does not fit, 255 · 64 · 2 does. Weights stored as
    unsigned bytes take another, slower instruction there, which is exact.
    """

    levels: int
    zero_point: int
    floats: bool = False

    @property
    def dtype(self) -> ir.DataType:
        """The type that holds them."""
        if self.floats:
            return ir.DataType.FLOAT8E4M3FN
        return ir.DataType.UINT8 if self.zero_point else ir.DataType.INT8


SEVEN_BITS = WeightQuantization(64, 0)
"""Signed, and exact on every CPU."""

EIGHT_BITS_UNSIGNED = WeightQuantization(127, 128)
"""All eight bits, and exact on every CPU; slower on those without VNNI."""

EIGHT_BITS = WeightQuantization(127, 0)
"""TensorRT's: symmetric, both operands signed."""

EIGHT_BIT_FLOATS = WeightQuantization(448, 0, floats=True)
"""E4M3, four bits of exponent and three of mantissa, whose largest number is 448."""


@dataclass(frozen=True, slots=True)
class QuantizedProducts:
    """The integer products of a layer: by weight, the scale of what is multiplied with it.

    With `dynamic` that is one step for a row that was divided by a scale of its own, found while
    the graph runs: no row depends on the others, and nothing is calibrated.
    """

    format: QuantFormat
    weights: WeightQuantization
    inputs: Mapping[str, Scale]
    dynamic: bool = False

    @property
    def in_qdq(self) -> bool:
        """Whether it is products of floats that were rounded, which the runtime finds."""
        return self.format in QDQ


DYNAMIC_ROW = Scale(1.0, 128)
"""How a row is written whose largest absolute value was brought to `INT8_LEVELS`."""


INT4_BLOCK = 32
"""How many numbers of a column share a scale."""

Bits = Literal[4, 8]
"""Those of a weight in blocks."""

KERNEL_BLOCKS: Mapping[Bits, tuple[int, ...]] = MappingProxyType(
    {4: (128, 64, INT4_BLOCK), 8: (256, 128, 64, 32)}
)
"""The same for ONNX Runtime's kernels, the best first that divides a column."""


def block_of(form: QuantFormat, widths: Iterable[int], bits: Bits = 4) -> int | None:
    """Returns the size of a block for columns of so many numbers; None where none divides them."""
    sizes = KERNEL_BLOCKS[bits] if form == "kernel" else (INT4_BLOCK,)
    widths = tuple(widths)
    return next((size for size in sizes if not any(width % size for width in widths)), None)


@dataclass(frozen=True, slots=True)
class BlockedWeights:
    """Products with weights of four or eight `bits`; what they multiply stays a float.

    Of each column of the `weights` named, `block` numbers that follow one another share a scale.
    `format` is `kernel` for ONNX Runtime's `MatMulNBits`, else DequantizeLinear and MatMul.
    """

    format: QuantFormat
    weights: frozenset[str]
    block: int = INT4_BLOCK
    bits: Bits = 4


@dataclass(frozen=True, slots=True)
class ComputeTypes:
    """In what numbers one layer computes, whatever type its tokens come in, and the reason.

    `inner` is the float type of the experts' (or factors') products; router and gate are FP32
    always. `quantized` tells which products take integers, `blocked` which take weights in blocks:
    not both.
    """

    inner: ir.DataType = ir.DataType.FLOAT
    quantized: QuantizedProducts | None = None
    blocked: BlockedWeights | None = None
    reason: str = field(default="", compare=False)

    @property
    def precision(self) -> Precision:
        """The precision of the layer, by the narrowest of its numbers."""
        if self.blocked is not None:
            return "int4" if self.blocked.bits == 4 else "int8"
        if self.quantized is not None:
            return "fp8" if self.quantized.weights.floats else "int8"
        return next(name for name, dtype in FLOAT_TYPES.items() if dtype == self.inner)


FP32 = ComputeTypes()
