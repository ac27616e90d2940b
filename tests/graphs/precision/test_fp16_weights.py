"""FP16 for CPUs: what weights are stored in, while every op computes in FP32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from moexport.graphs.lower import simplify
from moexport.graphs.precision.fp16_weights import MOVES, compute_in_fp32
from moexport.graphs.precision.types import ComputeTypes
from moexport.tests.command import run
from moexport.tests.graphs.soft_moe_layers import lowered, soft_moe, tiny_layer, tokens
from moexport.tests.graphs.test_clean import (
    assert_casts_change_types,
    assert_clean,
    every_graph,
    every_node,
)
from moexport.tests.recorded import DATA, VIT_SETS

HALF = onnx.TensorProto.FLOAT16
FP16 = ComputeTypes(ir.DataType.FLOAT16)


def assert_computes_in_fp32(model: onnx.ModelProto) -> None:
    """No op but those that move values and casts has an FP16 input or output."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False)
    half = {
        value.name
        for graph in every_graph(inferred.graph)
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.elem_type == HALF
    }
    half |= {t.name for g in every_graph(model.graph) for t in g.initializer if t.data_type == HALF}
    for node in every_node(model.graph):
        if node.op_type not in (*MOVES, "Cast"):
            assert half.isdisjoint((*node.input, *node.output)), node.name


@pytest.mark.parametrize("lowering", ["dense", "gather", "grouped", "conditional"])
@pytest.mark.parametrize("expert", ["mlp", "gated", "linear"])
def test_only_weights_are_rounded(lowering: str, expert: str, tmp_path: Path) -> None:
    layer = tiny_layer(expert=expert, slots=2)  # type: ignore[arg-type]
    x = tokens(3, 4)
    made = lowered(layer, lowering, 2, compute=FP16).model
    compute_in_fp32(made)
    simplify(made)
    model = ir.serde.serialize_model(made)
    onnx.checker.check_model(model, full_check=True)
    assert_computes_in_fp32(model)
    assert_clean(model.graph)
    assert_casts_change_types(model.graph, model)
    stored = {
        name: getattr(layer, name).astype(np.float16).astype(np.float32)
        for name in ("w1", "b1", "w2", "b2")
        if getattr(layer, name) is not None
    }
    expected, _ = soft_moe(replace(layer, **stored), x, 2)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    (y,) = ort.InferenceSession(model.SerializeToString(), options).run(None, {"input": x})
    assert np.abs(y - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("target", ["onnx", "ort-cpu", "ort-web", "ort-cuda"])
@pytest.mark.parametrize("io", ["fp32", "fp16"])
def test_an_export_for_cpus_computes_in_fp32(target: str, io: str, tmp_path: Path) -> None:
    weights = DATA / "soft_moe_vit" / "weights.pt"
    done = run(
        *("export", weights, *VIT_SETS, "-o", tmp_path / "out", "--k", "2", "--target", target),
        *("--precision", "fp16", "--io-precision", io, "--lowering", "gather"),
    )
    assert done.code == 0, done.err
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    ports = (*model.graph.input, *model.graph.output)
    wanted = HALF if io == "fp16" else onnx.TensorProto.FLOAT
    assert {port.type.tensor_type.elem_type for port in ports} == {wanted}
    stored = {tensor.name for tensor in model.graph.initializer if tensor.data_type == HALF}
    assert {"blocks.2.mlp/experts.w1", "blocks.2.mlp/experts.w2"} <= stored
    if target == "ort-cuda":  # a GPU's graph multiplies FP16
        with pytest.raises(AssertionError):
            assert_computes_in_fp32(model)
    else:
        assert_computes_in_fp32(model)
        assert_clean(model.graph)


def test_a_rounding_of_a_network_s_own_is_kept() -> None:
    """To BF16, as V-MoE's dispatch has it; and one to FP16 of what is no FP16 graph."""
    x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
    short = ir.node("Cast", [x], {"to": ir.DataType.BFLOAT16.value}, name="short")
    back = ir.node("Cast", short.outputs, {"to": ir.DataType.FLOAT16.value}, name="back")
    wide = ir.node("Cast", back.outputs, {"to": ir.DataType.FLOAT.value}, name="wide")
    y = wide.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), x.shape
    graph = ir.Graph([x], [y], nodes=[short, back, wide], opset_imports={"": 20}, name="g")
    model = ir.Model(graph, ir_version=10)
    compute_in_fp32(model)
    casts = [node.attributes.get_int("to") for node in graph]
    assert casts == [ir.DataType.BFLOAT16.value, ir.DataType.FLOAT.value]
    assert [value.name for value in graph.outputs] == ["y"]
