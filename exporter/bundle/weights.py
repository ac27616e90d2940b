"""The weights file: every tensor of a model once, in a layout that serves all lowerings.

A layer's experts are stored as a stack, [n, d, h], contiguous per expert. A lowering that uses the
stack refers to its start; one that uses expert e's matrix refers to the same bytes at an offset.
Tensors are written one expert at a time, so that a transposed or memory-mapped source is never
loaded as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...common.console import Progress, Silent
from ...common.files import Reading
from ...graphs.layers.base import MoELayer
from ...graphs.precision.types import FP32, ComputeTypes
from ...graphs.precision.weights import convert_weights

WEIGHTS_FILE = "weights.bin"

INLINE_BYTES = 1024
"""Smaller backbone constants stay inside the ONNX file: shapes, scalars, short vectors."""

WEIGHT_TYPES = frozenset(
    {
        ir.DataType.FLOAT,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
        ir.DataType.INT8,
        ir.DataType.UINT8,
        ir.DataType.INT4,
    }
)

_PAGE = 4096
_WORD = 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location and type of a tensor in the weights file."""

    offset: int
    shape: tuple[int, ...]
    dtype: ir.DataType = ir.DataType.FLOAT

    @property
    def bytes(self) -> int:
        return size_of(self.shape, self.dtype)

    def part(self, index: int) -> StoredTensor:
        """Returns the `index`-th part along the first axis, in the same bytes."""
        shape = self.shape[1:]
        return StoredTensor(self.offset + index * size_of(shape, self.dtype), shape, self.dtype)

    def external(self, name: str) -> ir.ExternalTensor:
        """Returns the tensor as external data of an ONNX file next to the weights file."""
        return ir.ExternalTensor(
            location=WEIGHTS_FILE,
            offset=self.offset,
            length=self.bytes,
            dtype=self.dtype,
            shape=ir.Shape(self.shape),
            name=name,
        )


def size_of(shape: tuple[int, ...], dtype: ir.DataType) -> int:
    return dtype.bitwidth * prod(shape) // 8


def layer_bytes(layer: MoELayer, compute: ComputeTypes) -> int:
    """Returns the bytes that `write_layer` writes, without padding; reads no weights."""
    return sum(size_of(part.shape, part.dtype) for part in convert_weights(layer.stored(), compute))


class WeightsWriter:
    """Appends tensors to a weights file; a context manager that closes it.

    `reading` tracks the pass over mapped sources. `progress` receives the number of bytes written.
    """

    def __init__(
        self, directory: Path, progress: Progress | None = None, reading: Reading | None = None
    ) -> None:
        self._progress = progress or Silent()
        self._reading = reading or Reading()
        self._file = (directory / WEIGHTS_FILE).open("wb")

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._reading.end()

    def add(
        self,
        parts: Iterable[np.ndarray],
        shape: tuple[int, ...],
        dtype: ir.DataType = ir.DataType.FLOAT,
    ) -> StoredTensor:
        """Writes the parts one after the other as one tensor of `shape`, converted to `dtype`.

        Four-bit numbers are passed as bytes of two numbers each.
        """
        # A tensor of at least a page begins at a page, so that it can be mapped.
        step = _PAGE if size_of(shape, dtype) >= _PAGE else _WORD
        self._file.write(b"\0" * (-self._file.tell() % step))
        stored = StoredTensor(offset=self._file.tell(), shape=shape, dtype=dtype)
        for part in parts:
            packed = dtype.bitwidth < 8
            array = np.ascontiguousarray(part, dtype=np.uint8 if packed else dtype.numpy())
            # Not ndarray.tofile, whose errors do not distinguish a full disk from other failures.
            # As bytes, since the buffer protocol does not support bfloat16.
            self._file.write(array.reshape(-1).view(np.uint8).data)
            self._progress.advance(array.nbytes)
            self._reading.advance(part.nbytes)
        written = self._file.tell() - stored.offset
        assert written == stored.bytes, f"{written} bytes written for shape {shape}"
        return stored


class StoredLayer:
    """One layer's weights in the weights file (`graphs.layers.stored.LayerTensors`)."""

    def __init__(self, layer: str, tensors: Mapping[str, StoredTensor]) -> None:
        self._layer = layer
        self._tensors = tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def stacked(self, name: str, *, batched: bool = False) -> ir.ExternalTensor:
        stored = self._tensors[name]
        if batched:
            stored = replace(stored, shape=(1, *stored.shape))
        return stored.external(f"{self._layer}/{name}")

    def expert(self, name: str, index: int) -> ir.ExternalTensor:
        return self._tensors[name].part(index).external(f"{self._layer}/{name}/{index}")


def write_layer(
    writer: WeightsWriter, name: str, layer: MoELayer, compute: ComputeTypes = FP32
) -> StoredLayer:
    """Writes a layer's weights in the types of its computation.

    Returns them by the names that lowerings use.
    """
    return StoredLayer(
        name,
        {
            part.name: writer.add(part.parts, part.shape, part.dtype)
            for part in convert_weights(layer.stored(), compute)
        },
    )


def write_backbone(writer: WeightsWriter, traced: ir.Model) -> None:
    """Writes a traced graph's own weights, and points its initializers at them."""
    for name, value in traced.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        if tensor.dtype not in WEIGHT_TYPES or tensor.nbytes < INLINE_BYTES:
            continue
        shape = tuple(tensor.shape.numpy())
        packed = tensor.dtype.bitwidth < 8
        array = np.frombuffer(tensor.tobytes(), np.uint8) if packed else tensor.numpy()
        value.const_value = writer.add([array], shape, tensor.dtype).external(name)
