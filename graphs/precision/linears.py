"""The linear layers of a traced host: what `--quantize all` may add to the experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from .ranges import range_key

INPUT = "input"


@dataclass(frozen=True, slots=True)
class HostLinear:
    """A product with a constant matrix: y = x·W, of a `MatMul` or `Gemm` node.

    `weight` is [in, out], or [out, in] where `transposed` (a Gemm's transB).
    """

    node: ir.Node
    input: ir.Value
    weight: ir.Value
    transposed: bool

    @property
    def key(self) -> str:
        """The name of the input in a table of ranges."""
        assert self.node.name is not None
        return range_key(self.node.name, INPUT)


def host_linears(graph: ir.Graph) -> Iterator[HostLinear]:
    """Yields the linear layers of a traced graph in execution order, those of MoE layers not."""
    for node in graph:
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            continue
        x, weight = node.inputs[0], node.inputs[1]
        if x is None or weight is None or x.const_value is not None:
            continue
        tensor = weight.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
            continue
        if node.attributes.get_int("transA", 0):
            continue
        yield HostLinear(node, x, weight, bool(node.attributes.get_int("transB", 0)))
