"""What ships holds nothing that serves nothing: look at the graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.targets import TARGETS
from moexport.tests.graphs.soft_moe_layers import TinyLayer, lowered, tiny_layer

LOWERINGS = lowerings_of("soft-moe")

KEPT = [2, 5, None]


def every_node(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from every_node(attribute.g)


def every_graph(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from every_graph(attribute.g)


def graph_of(layer: TinyLayer, lowering: str, kept: int | None) -> onnx.GraphProto:
    model: onnx.ModelProto = ir.serde.serialize_model(lowered(layer, lowering, kept).model)
    onnx.checker.check_model(model)
    return model.graph


def assert_clean(graph: onnx.GraphProto) -> None:
    nodes = list(every_node(graph))
    used = {name for node in nodes for name in node.input}
    used |= {value.name for each in every_graph(graph) for value in each.output}
    assert [n.name for n in nodes if n.op_type == "Identity"] == []
    assert [n.name for n in nodes if used.isdisjoint(n.output)] == []
    assert [t.name for t in graph.initializer if t.name not in used] == []
    names = [name for node in nodes for name in node.output if name]
    assert len(names) == len(set(names))
    assert len({node.name for node in nodes}) == len(nodes)
    assert all(not node.doc_string and not node.metadata_props for node in nodes)
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    assert all(not value.doc_string and not value.metadata_props for value in values)
    # Two transposes in a row are one, or none.
    made_by = {name: node for node in nodes for name in node.output}
    for node in nodes:
        if node.op_type == "Transpose" and node.input[0] in made_by:
            assert made_by[node.input[0]].op_type != "Transpose"


def assert_casts_change_types(graph: onnx.GraphProto, model: onnx.ModelProto) -> None:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Cast":
            assert types[node.input[0]] != node.attribute[0].i


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("lowering", list(LOWERINGS))
@pytest.mark.parametrize("slots", [1, 3])
def test_every_node_and_weight_serves(lowering: str, kept: int | None, slots: int) -> None:
    layer = tiny_layer(slots=slots)
    model = ir.serde.serialize_model(lowered(layer, lowering, kept).model)
    assert_clean(model.graph)
    assert_casts_change_types(model.graph, model)


@pytest.mark.parametrize("name", ["model.onnx", "model-grouped.onnx"])
def test_a_whole_exported_model_is_clean(exported: Path, name: str) -> None:
    model = onnx.load(exported / name, load_external_data=False)
    assert_clean(model.graph)
    assert_casts_change_types(model.graph, model)
    assert {entry.domain for entry in model.opset_import} == {""}


@pytest.mark.parametrize("lowering", ["dense", "gather"])
@pytest.mark.parametrize("kept", [2, 5])
@pytest.mark.parametrize("slots", [1, 3])
def test_no_shapes_are_computed_where_k_is_known(lowering: str, kept: int, slots: int) -> None:
    graph = graph_of(tiny_layer(slots=slots), lowering, kept)
    shaping = {"Shape", "Range", "Size", "ConstantOfShape", "Concat", "Expand"}
    assert shaping.isdisjoint(node.op_type for node in graph.node)


def test_the_standard_lowerings_use_standard_ops_alone() -> None:
    for name, record in LOWERINGS.items():
        domains = {node.domain for node in every_node(graph_of(tiny_layer(), name, 2))}
        own = not any(TARGETS[target].standard_ops for target in record.targets)
        assert domains == ({"", "com.microsoft"} if own else {""})


ROUTER = {"ReduceL2": 1, "Clip": 1, "Reciprocal": 1, "MatMul": 1, "Mul": 1, "Softmax": 1}
CHOICE = {"ReduceSum": 1, "TopK": 1}
DISPATCH = {"Transpose": 2, "Softmax": 1, "Mul": 1, "MatMul": 1}  # of L and of 1/|x|
COMBINE = {"MatMul": 1}
MASK = {"Unsqueeze": 2, "Equal": 1, "Cast": 2, "ReduceMax": 1, "Where": 1}
SELECTION = {"Unsqueeze": 1, "GatherND": 2, "Transpose": 2}  # of C there and back
BATCHED = {"Unsqueeze": 2, "MatMul": 2, "Add": 2, "Relu": 1}

HISTOGRAMS: dict[tuple[str, int], list[dict[str, int]]] = {
    ("dense", 3): [ROUTER, DISPATCH, COMBINE, BATCHED, {"Transpose": 2}],
    ("dense", 1): [ROUTER, CHOICE, DISPATCH, COMBINE, MASK, BATCHED, {"Transpose": 2}],
    ("gather", 3): [ROUTER, DISPATCH, COMBINE, BATCHED, {"Transpose": 2}],
    ("gather", 1): [
        *(ROUTER, CHOICE, DISPATCH, COMBINE, SELECTION, BATCHED),
        {"Gather": 4, "Unsqueeze": 1, "Squeeze": 1},
    ],
    ("grouped", 3): [
        *(ROUTER, DISPATCH, COMBINE),
        {"Reshape": 4, "Transpose": 2, "Split": 1, "Gemm": 6, "Relu": 3, "Concat": 1},
    ],
    ("grouped", 1): [
        *(ROUTER, CHOICE, DISPATCH, COMBINE, SELECTION),
        {"Reshape": 3, "Equal": 1, "NonZero": 1, "Gather": 3, "Cast": 1, "ReduceSum": 1},
        {"Split": 1, "Gemm": 6, "Relu": 3, "Concat": 1},
        {"Shape": 1, "Squeeze": 1, "Range": 1, "ScatterElements": 1},
    ],
    ("conditional", 3): [
        *(ROUTER, DISPATCH, COMBINE),
        {"Reshape": 7, "Split": 1, "Gemm": 6, "Relu": 3, "Concat": 1},
    ],
    ("conditional", 1): [
        *(ROUTER, CHOICE, DISPATCH, COMBINE, MASK),
        {"Reshape": 7, "Split": 2, "Concat": 1},
        {"ReduceMax": 1, "Cast": 1, "Squeeze": 3, "If": 3},
        {"Gemm": 6, "Relu": 3, "Shape": 3, "Concat": 3, "Expand": 3},  # in the branches
    ],
    ("fused", 3): [
        *(ROUTER, DISPATCH, COMBINE),
        {"Reshape": 3, "Transpose": 2, "MoE": 1, "Shape": 1, "Concat": 1, "Expand": 1},
    ],
    ("fused", 1): [
        *(ROUTER, CHOICE, DISPATCH, COMBINE, SELECTION),
        {"Reshape": 3, "Transpose": 2, "MoE": 1, "Equal": 1, "Where": 1},
    ],
}


@pytest.mark.parametrize(("lowering", "kept"), list(HISTOGRAMS))
def test_the_ops_of_a_small_layer_are_these_and_no_more(lowering: str, kept: int) -> None:
    expected: Counter[str] = Counter()
    for part in HISTOGRAMS[lowering, kept]:
        expected.update(part)
    graph = graph_of(tiny_layer(experts=3), lowering, kept)
    assert Counter(node.op_type for node in every_node(graph)) == expected


def external(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and length of each weight that lies outside a graph's file."""
    found = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            found[tensor.name] = (int(entries["offset"]), int(entries["length"]))
    return found


def test_one_weights_file_serves_all_lowerings(exported: Path) -> None:
    stacked, singles = external(exported / "model.onnx"), external(exported / "model-grouped.onnx")
    shared = stacked.keys() & singles.keys()
    assert "blocks.2.mlp/phi" in shared
    assert {name: stacked[name] for name in shared} == {name: singles[name] for name in shared}
    for layer in ("blocks.2.mlp", "blocks.3.mlp"):
        for weight in ("w1", "b1", "w2", "b2"):
            offset, length = stacked[f"{layer}/experts.{weight}"]
            parts = [singles[f"{layer}/experts.{e}.{weight}"] for e in range(8)]
            assert parts == [(offset + e * length // 8, length // 8) for e in range(8)]


def test_the_weights_file_holds_each_weight_once(exported: Path) -> None:
    spans = sorted(external(exported / "model.onnx").values())
    end = 0
    for offset, length in spans:
        assert 0 <= offset - end < 4096  # padding to the next page, never an overlap
        assert offset % (4096 if length >= 4096 else 64) == 0
        end = offset + length
    assert (exported / "weights.bin").stat().st_size == end
