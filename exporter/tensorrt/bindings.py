"""Makes experts' weights inputs of an engine, and its layers' choices outputs.

A gathered weight (`gather`, `block-grouped`) need not be part of the plan: as an input of the
engine, it is bound from the bundle's weights file, once for all engines of the bundle. In INT8,
then only the gathered experts are dequantised: a constant may only feed DequantizeLinear
(TensorRT-RTX 1.7.1 refuses to gather it), but an input may be gathered first.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.files import known_sha256
from ...errors import EngineError
from ...graphs.names import SELECTED, part_of
from ..bundle.manifest import Manifest
from . import cuda

if TYPE_CHECKING:
    import onnx

BEFORE_GATHER = ("DequantizeLinear", "Unsqueeze", "Mul")
"""Ops allowed between a weight, bias or scale and the Gather of the chosen experts."""


@dataclass(frozen=True, slots=True)
class BoundWeight:
    """A weight that is an input of an engine: its name, and its position in a file."""

    name: str
    file: str
    offset: int
    nbytes: int
    shape: list[int]


def rewrite_graph(
    path: Path, layers: Sequence[str], *, bind: bool, outputs: Sequence[str] = ()
) -> tuple[onnx.ModelProto, list[BoundWeight]]:
    """Returns the graph with experts' weights as inputs and with `outputs`, and these weights.

    The weights file is not read. Raises `EngineError` for weights that cannot be gathered.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    existing = {output.name for output in model.graph.output}
    for name in (output for output in outputs if output not in existing):
        is_set = name.endswith(f"/{SELECTED}")
        kind = onnx.TensorProto.INT64 if is_set else onnx.TensorProto.FLOAT  # muMoE: coefficients
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    if not bind:
        return model, []
    weights = list(_gathered_weights(model.graph, layers))
    if not weights:
        raise EngineError(
            f"{path.name}: no expert's weights are gathered, so none can be bound",
            hint="export with --lowering gather or block-grouped, and a k below n",
        )
    packed: dict[int, str] = {onnx.TensorProto.FLOAT8E4M3FN: "FP8", onnx.TensorProto.INT4: "INT4"}
    for tensor in weights:
        if tensor.data_type in packed:
            raise EngineError(
                f"{path.name}: {tensor.name} is {packed[tensor.data_type]}, which TensorRT gathers "
                "neither as a constant nor as an input",
                hint="leave --bind-weights out, or export with --precision int8 or fp16",
            )
    _dequantize_last(model.graph, {tensor.name for tensor in weights})
    for tensor in weights:
        model.graph.initializer.remove(tensor)
        model.graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    return model, [_bound_weight(tensor) for tensor in weights]


def _gathered_weights(graph: onnx.GraphProto, layers: Sequence[str]) -> Iterator[onnx.TensorProto]:
    """Yields the experts' weights in the weights file that are used only through a Gather."""
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
    """Swaps DequantizeLinear (with one scale for all experts) and the Gather that follows it.

    The results are the same, but only gathered numbers are converted to floats.
    """
    nodes = list(graph.node)
    by_input = {node.input[0]: node for node in nodes if node.op_type == "Gather"}
    for node in nodes:
        if node.op_type != "DequantizeLinear" or node.input[0] not in names:
            continue
        gather = by_input[node.output[0]]
        weight, floats, result = node.input[0], node.output[0], gather.output[0]
        gather.input[0], gather.output[0] = weight, floats
        node.input[0], node.output[0] = floats, result
        graph.node.remove(node)
        graph.node.insert(list(graph.node).index(gather) + 1, node)


def _bound_weight(tensor: onnx.TensorProto) -> BoundWeight:
    location = {entry.key: entry.value for entry in tensor.external_data}
    return BoundWeight(
        name=tensor.name,
        file=location["location"],
        offset=int(location.get("offset", 0)),
        nbytes=int(location.get("length", 0)),
        shape=list(tensor.dims),
    )


class PlacedWeight:
    """A weight in the memory from which an engine reads it; freed with the last reference.

    It is in the GPU's memory or, with `host`, in pinned memory that the GPU reads via its bus, for
    models larger than the GPU's memory.
    """

    def __init__(self, content: np.ndarray, *, host: bool) -> None:
        if host:
            flags = cuda.runtime().cudaHostAllocMapped
            pinned = int(cuda.call("cudaHostAlloc", content.nbytes, flags))
            ctypes.memmove(pinned, content.ctypes.data, content.nbytes)
            self.address = int(cuda.call("cudaHostGetDevicePointer", pinned, 0))
            weakref.finalize(self, cuda.call, "cudaFreeHost", pinned).atexit = False
            return
        kind = cuda.runtime().cudaMemcpyKind.cudaMemcpyDefault
        self.address = int(cuda.call("cudaMalloc", content.nbytes))
        weakref.finalize(self, cuda.call, "cudaFree", self.address).atexit = False
        cuda.call("cudaMemcpy", self.address, content.ctypes.data, content.nbytes, kind)


_PLACED: weakref.WeakValueDictionary[Any, PlacedWeight] = weakref.WeakValueDictionary()
"""The placed weights, which all engines of a bundle in this process share."""


def place_weight(folder: Path, bound: BoundWeight, *, host: bool) -> PlacedWeight:
    """Returns a weight in memory, reading the bundle's file unless another engine has placed it."""
    status = (folder / bound.file).stat()
    device = int(cuda.call("cudaGetDevice"))
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    key = (identity, bound.offset, bound.nbytes, host, device)
    weight = _PLACED.get(key)
    if weight is None:
        weight = _PLACED[key] = PlacedWeight(map_weight(folder, bound), host=host)
    return weight


def map_weight(folder: Path, bound: BoundWeight) -> np.ndarray:
    return np.memmap(folder / bound.file, np.uint8, "r", bound.offset, (bound.nbytes,))


def check_weights(folder: Path, bound: Sequence[BoundWeight]) -> None:
    """Raises `EngineError` for a weights file that differs from the bundle's manifest."""
    files = Manifest.read(folder).files
    for name in {weight.file for weight in bound}:
        path, record = folder / name, files.get(name)
        if not path.is_file() or record is None or known_sha256(path) != record.sha256:
            raise EngineError(
                f"{path}: the engine's experts are in this file, which is missing or has changed",
                hint="keep the bundle together; export it again if the file is damaged",
            )


def experts_of(folder: Path, graph: str, wanted: Sequence[BoundWeight]) -> list[BoundWeight]:
    """Returns the weights of another bundle that replace the engine's own.

    Raises `EngineError` if that bundle has no such graph, or experts of other sizes or types.
    """
    if not (folder / graph).is_file():
        raise EngineError(f"{folder} has no {graph}", hint="export it like the engine's bundle")
    layers = [layer.name for layer in Manifest.read(folder).layers]
    weights = {w.name: w for w in rewrite_graph(folder / graph, layers, bind=True)[1]}
    for weight in wanted:
        other = weights.get(weight.name)
        if other is None or (other.shape, other.nbytes) != (weight.shape, weight.nbytes):
            raise EngineError(
                f"{folder}: the size or type of {weight.name} differs from the engine's",
                hint="export it with the same options, from a checkpoint with the same shapes",
            )
    return [weights[weight.name] for weight in wanted]
