"""The linear layers of an exported graph's host that compute in INT8: `--quantize all`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx

from ...exporter.model import Dimension

QUANTIZE = "QuantizeLinear"


@dataclass(frozen=True, slots=True)
class IntegerLinear:
    """An integer product y = x·W of the host: x [*rows, in], W [in, out].

    The first of `rows` is the batch; None where the graph does not tell them.
    """

    node: str
    rows: tuple[Dimension, ...] | None
    weights: tuple[int, int]

    def macs(self, sizes: Mapping[str, int]) -> int | None:
        """Multiply-adds for the named axes' `sizes`, or None where these do not tell."""
        if self.rows is None:
            return None
        try:
            rows = prod(sizes[size] if isinstance(size, str) else size for size in self.rows)
        except KeyError:
            return None
        return rows * prod(self.weights)


def integer_linears(graph: Path, nodes: Iterable[str]) -> tuple[IntegerLinear, ...]:
    """Returns those of the host's `nodes` that the graph file computes in integers."""
    wanted = list(nodes)
    if not wanted:
        return ()
    content = onnx.load(graph, load_external_data=False).graph
    shapes = {
        value.name: tuple(
            dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim
        )
        for value in (*content.input, *content.value_info)
        if value.type.tensor_type.HasField("shape")
    }
    weights = {tensor.name: tuple(tensor.dims) for tensor in content.initializer}
    rounded = {node.name: node.input[0] for node in content.node if node.op_type == QUANTIZE}
    found = []
    for name in wanted:
        shape = shapes.get(rounded[f"{name}/integers"])
        inputs, outputs = weights[f"{name}/weight"]
        rows = None if shape is None else shape[:-1]
        found.append(IntegerLinear(name, rows, (inputs, outputs)))
    return tuple(found)
