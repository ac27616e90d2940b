"""The limits of TensorRT's ONNX importers as data, and the check of a graph against them.

A graph is checked before a build, so that an error names the node, the layer and a remedy; the
importer itself would fail minutes later. The lists are from the importer of TensorRT-RTX 1.7.1
(`OnnxParser.supports_operator`), as a test checks; TensorRT's importer has the same code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from onnx import numpy_helper

from ...errors import EngineError
from ...graphs.targets import TARGETS
from ..bundle.manifest import LayerRecord, graphs_in
from .backends import Backend
from .profiles import MAX_K

_NO_IMPORTER = """
AffineGrid Bernoulli BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CenterCropPad
Col2Im Compress ConcatFromSequence ConvInteger CumProd DFT DeformConv Det DynamicQuantizeLinear
ImageDecoder MatMulInteger MaxRoiPool MaxUnpool MelWeightMatrix Multinomial
NegativeLogLikelihoodLoss Optional OptionalGetElement OptionalHasElement QLinearConv QLinearMatMul
RegexFullMatch SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert
SequenceLength SequenceMap SoftmaxCrossEntropyLoss SplitToSequence StringConcat StringNormalizer
StringSplit SwiGLU TfIdfVectorizer Unique
"""

NO_IMPORTER = frozenset(_NO_IMPORTER.split())
"""Standard ops that neither importer supports."""

REFUSED_BY: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "tensorrt": {},
        "tensorrt-rtx": {"NonZero": "no kernel has an output whose size depends on values"},
    }
)
"""Ops that an importer lists but the backend does not compile, with the reasons."""

QUANTIZED: Mapping[int, str] = {
    onnx.TensorProto.INT8: "INT8",
    onnx.TensorProto.INT4: "INT4",
    onnx.TensorProto.FLOAT8E4M3FN: "FP8",
}
"""Types whose constants may only feed DequantizeLinear."""
STANDARD_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that an importer would refuse, and why."""

    node: str
    op: str
    reason: str


def check_graph(path: Path, backend: Backend, layers: Sequence[LayerRecord]) -> None:
    """Raises `EngineError` for a graph that the backend's importer would refuse.

    The message names the first such node, its layer, and the number of such nodes.
    """
    model = onnx.load(path, load_external_data=False)
    refused = list(refusals(model, backend))
    if not refused:
        return
    first = refused[0]
    layer = next((r for r in layers if first.node.startswith(f"{r.name}/")), None)
    where = f"layer {layer.name}" if layer else "the network around the MoE layers"
    more = f" ({len(refused)} such nodes)" if len(refused) > 1 else ""
    raise EngineError(
        f"{path.name}: {backend.title} does not support node {first.node} ({first.op}) in {where}: "
        f"{first.reason}{more}",
        hint=_remedy(backend, layer),
    )


def _remedy(backend: Backend, layer: LayerRecord | None) -> str:
    from ...graphs.lowerings import lowerings_of

    target = next(record.name for record in TARGETS.own if record.backend == backend.name)
    if layer is None:
        return "change this part of the network, or run this graph in ONNX Runtime (--target onnx)"
    lowerings = lowerings_of(layer.kind).items()
    supported = [name for name, lowering in lowerings if target in lowering.targets]
    return (
        f"export with --target {target}, which writes supported ops; lowerings that it supports: "
        f"{', '.join(supported)}"
    )


def refusals(model: onnx.ModelProto, backend: Backend) -> Iterator[Refusal]:
    """Yields the nodes of a graph that the backend's importer would refuse."""
    constants: dict[str, onnx.TensorProto] = {}
    for graph in graphs_in(model.graph):
        constants |= {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                constants[node.output[0]] = node.attribute[0].t
            reason = _reason(node, constants, backend)
            if reason is not None:
                op = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
                yield Refusal(node=node.name or node.output[0], op=op, reason=reason)


def _reason(
    node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto], backend: Backend
) -> str | None:
    if node.domain not in STANDARD_DOMAINS:
        return f"the domain {node.domain} is not supported"
    unsupported = {node.op_type} & NO_IMPORTER and "the ONNX importer does not support this op"
    if refused := unsupported or REFUSED_BY[backend.name].get(node.op_type):
        return refused
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        return _asymmetry(node, constants)
    if node.op_type == "TopK":
        k = constants.get(node.input[1])
        if k is not None and _values(k).max(initial=0) > MAX_K:
            return f"TopK supports a k of at most {MAX_K}"
    for name in node.input:
        kind = QUANTIZED.get(constants[name].data_type) if name in constants else None
        if kind is not None:
            return f"its input {name} is an {kind} constant, which may only feed DequantizeLinear"
    return None


def _asymmetry(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> str | None:
    """Returns why a quantisation is refused, or None: it must be symmetric."""
    name = node.input[2] if len(node.input) > 2 else ""
    if not name:
        return None
    zero = constants.get(name)
    if zero is None:
        return "its zero point is not a constant"
    if zero.data_type == onnx.TensorProto.UINT8:
        return "it quantises to UINT8, but only symmetric INT8 is supported"
    if _values(zero).any():
        return "its zero point is not 0; quantisation must be symmetric"
    return None


def _values(tensor: onnx.TensorProto) -> np.ndarray:
    if tensor.external_data:  # weights; zero points are small and inside the file
        return np.zeros(0)
    return numpy_helper.to_array(tensor)
