"""What the importers are said to take is what they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from moexport.exporter.tensorrt.backends import BACKENDS, TENSORRT_RTX
from moexport.exporter.tensorrt.onnx_support import NO_IMPORTER, REFUSED_BY, refusals
from moexport.tests.exporter.tensorrt.engines import needs_rtx
from onnx import TensorProto, helper, numpy_helper

INT8 = np.ones((4, 4), np.int8)


def model(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], str | None]] = {
    "products": (
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"w": np.ones((4, 4), "f")},
        None,
    ),
    "quantised weights through DequantizeLinear": (
        [
            helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=1),
            helper.make_node("MatMul", ["x", "f"], ["y"]),
        ],
        {"w": INT8, "s": np.ones(4, "f")},
        None,
    ),
    "quantised weights gathered first": (
        [
            helper.make_node("Gather", ["w", "i"], ["g"]),
            helper.make_node("DequantizeLinear", ["g", "s"], ["f"], axis=1),
            helper.make_node("MatMul", ["x", "f"], ["y"]),
        ],
        {"w": INT8, "i": np.arange(4), "s": np.ones(4, "f")},
        "INT8 constant, which may only feed DequantizeLinear",
    ),
    "asymmetric quantisation": (
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ],
        {"s": np.array(1, "f"), "z": np.array(3, np.int8)},
        "its zero point is not 0",
    ),
    "integer products": (
        [
            helper.make_node("Cast", ["x"], ["q"], to=TensorProto.INT8),
            helper.make_node("MatMulInteger", ["q", "w"], ["i"]),
            helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
        ],
        {"w": INT8},
        "the ONNX importer does not support this op",
    ),
    "an op of a runtime's own": (
        [helper.make_node("MoE", ["x"], ["y"], domain="com.microsoft")],
        {},
        "the domain com.microsoft is not supported",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))
def test_a_graph_is_refused_for_the_right_reason(case: str, backend: Any) -> None:
    nodes, constants, reason = CASES[case]
    found = list(refusals(model(nodes, constants), backend))
    if reason is None:
        assert found == []
    else:
        assert reason in found[0].reason


def test_nodes_of_branches_are_looked_at() -> None:
    inner = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["z"], name="layer/inner")],
        "b",
        [],
        [helper.make_tensor_value_info("z", TensorProto.INT64, None)],
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    (first, _) = refusals(model([node], {"c": np.array(True)}), TENSORRT_RTX)
    assert (first.node, first.op) == ("layer/inner", "NonZero")


def parser() -> tuple[Any, Any, list[Any]]:
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    return trt, trt.OnnxParser(network, logger), [logger, builder, network]


@needs_rtx
def test_the_list_of_ops_is_the_importer_s_own() -> None:
    _, onnx_parser, _alive = parser()
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    taken = {name for name in known if onnx_parser.supports_operator(name)}
    assert known - taken == NO_IMPORTER & known
    assert set(REFUSED_BY["tensorrt-rtx"]) <= taken


@needs_rtx
@pytest.mark.parametrize("case", CASES)
def test_what_is_refused_would_indeed_not_compile(case: str) -> None:
    nodes, constants, reason = CASES[case]
    trt, onnx_parser, (_, builder, network) = parser()
    compiled = onnx_parser.parse(model(nodes, constants).SerializeToString())
    if compiled:
        config = builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        compiled = builder.build_serialized_network(network, config) is not None
    assert compiled == (reason is None)
