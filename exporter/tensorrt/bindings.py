"""Experts' weights as inputs of an engine, and what its layers choose as outputs.

A weight that is gathered, as `gather` and `block-grouped` do, need not lie in the plan: as an input
of the engine it is bound from the bundle's weights file, once for all engines of the bundle. INT8
then dequantises what was gathered and no other expert: as a constant it may feed DequantizeLinear
alone (TensorRT-RTX 1.7.1 refuses a Gather of it), as an input it may be gathered first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import EngineError
from ...graphs.names import part_of

if TYPE_CHECKING:
    import onnx

BEFORE_GATHER = ("DequantizeLinear", "Unsqueeze", "Mul")
"""What may lie between a weight, a bias or a scale and the Gather that picks the chosen experts."""


@dataclass(frozen=True, slots=True)
class BoundWeight:
    """A weight that an engine takes as an input: its name, and where its bytes are in a file."""

    name: str
    file: str
    offset: int
    nbytes: int
    shape: list[int]

    def as_json(self) -> dict[str, Any]:
        """The weight as it stands in an engine's record."""
        return asdict(self)


def rewritten(
    path: Path, layers: Sequence[str], *, bind: bool, outputs: Sequence[str] = ()
) -> tuple[onnx.ModelProto, list[BoundWeight]]:
    """Returns the graph with weights as inputs and further outputs, and what is to be bound.

    Nothing of a weights file is read. Raises `EngineError` where no weight is gathered.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    for name in outputs:
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None)
        )
    if not bind:
        return model, []
    found = list(_gathered(model.graph, layers))
    if not found:
        raise EngineError(
            f"{path.name}: no expert's weights are gathered, so none can be bound",
            hint="export with --lowering gather or block-grouped, and a k below n",
        )
    _dequantize_last(model.graph, {tensor.name for tensor in found})
    for tensor in found:
        model.graph.initializer.remove(tensor)
        model.graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    return model, [_bound(tensor) for tensor in found]


def _gathered(graph: onnx.GraphProto, layers: Sequence[str]) -> Iterator[onnx.TensorProto]:
    """The experts' weights in the weights file that a Gather alone reads, in the end."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for tensor in list(graph.initializer):
        experts = any(part_of(tensor.name, layer) == "experts" for layer in layers)
        if not experts or not tensor.external_data:
            continue
        nodes = readers.get(tensor.name, [])
        while len(nodes) == 1 and nodes[0].op_type in BEFORE_GATHER:
            nodes = readers.get(nodes[0].output[0], [])
        if nodes and all(node.op_type == "Gather" for node in nodes):
            yield tensor


def _dequantize_last(graph: onnx.GraphProto, names: set[str]) -> None:
    """Exchanges DequantizeLinear, which has one scale for all, and the Gather after it.

    The numbers stay the same, and only those that were gathered are made floats.
    """
    order = list(graph.node)
    by_input = {node.input[0]: node for node in order if node.op_type == "Gather"}
    for node in order:
        if node.op_type != "DequantizeLinear" or node.input[0] not in names:
            continue
        gather = by_input[node.output[0]]
        weight, floats, result = node.input[0], node.output[0], gather.output[0]
        gather.input[0], gather.output[0] = weight, floats
        node.input[0], node.output[0] = floats, result
        graph.node.remove(node)
        graph.node.insert(list(graph.node).index(gather) + 1, node)


def _place(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    told = {entry.key: entry.value for entry in tensor.external_data}
    return told["location"], int(told.get("offset", 0)), int(told.get("length", 0))


def _bound(tensor: onnx.TensorProto) -> BoundWeight:
    file, offset, nbytes = _place(tensor)
    return BoundWeight(tensor.name, file, offset, nbytes, list(tensor.dims))


def bound_of(records: Sequence[Mapping[str, Any]]) -> list[BoundWeight]:
    """Reads what `as_json` wrote."""
    return [BoundWeight(**each) for each in records]
