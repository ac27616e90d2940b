"""The BF16 kernels of ONNX Runtime's CUDA provider, and the nodes of a graph that have none.

The names and opsets are those of `docs/OperatorKernels.md` in microsoft/onnxruntime, version 1.31.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto

BF16 = {
    *("Abs", "Add", "Attention", "Cast", "Concat", "ConstantOfShape", "Div", "Erf", "Exp"),
    *("Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "Identity"),
    *("If", "LayerNormalization", "MatMul", "Max", "Min", "Mul", "Neg", "Pow"),
    *("RMSNormalization", "Relu", "Reshape", "RotaryEmbedding", "ScatterElements", "ScatterND"),
    *("Shape", "Sigmoid", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "Sub", "Tanh", "Tile"),
    *("Transpose", "Trilu", "Unsqueeze", "Where", "BiasGelu", "FastGelu", "FusedMatMul"),
    *("GroupQueryAttention", "MatMulNBits", "MoE", "MultiHeadAttention", "QMoE", "QuickGelu"),
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
}
FROM_OPSET_22 = {"AveragePool", "Conv", "HardSigmoid", "HardSwish"}


def without_bf16_kernel(file: Path) -> set[str]:
    """Returns the ops of a graph that have values in BF16 and no kernel for it."""
    model = onnx.load(file, load_external_data=False)
    opset = next(each.version for each in model.opset_import if not each.domain)
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.data_type for value in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        types[value.name] = value.type.tensor_type.elem_type
    known = BF16 | (FROM_OPSET_22 if opset >= 22 else set())
    found = set()
    for node in graph.node:
        inputs = [types[name] for name in node.input if types.get(name)]
        to = next((each.i for each in node.attribute if each.name == "to"), None)
        for name in node.output:  # ONNX does not know the types after ONNX Runtime's own ops
            types[name] = types.get(name) or to or (inputs[0] if inputs else 0)
        values = {*inputs, *(types[name] for name in node.output)}
        if TensorProto.BFLOAT16 in values and node.op_type not in known:
            found.add(node.op_type)
    return found
