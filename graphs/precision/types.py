"""In what numbers a layer computes: its float types, and the integers of its matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import onnx_ir as ir

from .ranges import Scale

Precision = Literal["fp32", "fp16", "bf16", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

FloatName = Literal["fp32", "fp16", "bf16"]

FLOAT_TYPES: Mapping[FloatName, ir.DataType] = MappingProxyType(
    {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
)
HALF_TYPES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

IntegerForm = Literal["kernel", "standard", "qdq"]
"""How a product of integers is written. `kernel`: ONNX Runtime's `MatMulIntegerToFloat`;
`standard`: `MatMulInteger`, whose result is cast and scaled; `qdq`: QuantizeLinear and
DequantizeLinear around a float MatMul, which TensorRT turns into an integer one."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The integers that weights are rounded to: −`levels` … `levels`, stored plus `zero_point`.

    CPUs without VNNI multiply unsigned by signed bytes with `vpmaddubsw`, which adds two products
    in 16 bits and saturates: 255 · 127 · 2 does not fit, 255 · 64 · 2 does. Weights stored as
    unsigned bytes take another, slower instruction there, which is exact.
    """

    levels: int
    zero_point: int

    @property
    def dtype(self) -> ir.DataType:
        """The type that holds them."""
        return ir.DataType.UINT8 if self.zero_point else ir.DataType.INT8


SEVEN_BITS = Grid(64, 0)
"""Signed, and exact on every CPU."""

EIGHT_BITS_UNSIGNED = Grid(127, 128)
"""All eight bits, and exact on every CPU; slower on those without VNNI."""

EIGHT_BITS = Grid(127, 0)
"""TensorRT's: symmetric, both operands signed."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """The integer products of a layer: by weight, the scale of what is multiplied with it."""

    form: IntegerForm
    grid: Grid
    inputs: Mapping[str, Scale]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """In what numbers one layer computes, whatever type its tokens come in.

    `inner` is the float type of the experts' (or factors') products; router and gate are FP32
    always. `quantised` tells which products take integers.
    """

    inner: ir.DataType = ir.DataType.FLOAT
    quantised: Quantised | None = None


FP32 = Arithmetic()
