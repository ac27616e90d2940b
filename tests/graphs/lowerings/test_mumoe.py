"""muMoE graphs compute the factorised formulas, at the counted cost."""

from __future__ import annotations

from typing import get_args

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from moexport.graphs.builder import Builder
from moexport.graphs.gating import _entmax15, _sparsemax
from moexport.graphs.layers.mumoe import (
    FactorisedSpec,
    Form,
    GateActivation,
    GateNorm,
    MuMoESpec,
    entmax15,
    sparsemax,
)
from moexport.graphs.lowerings.base import LayerPlan
from moexport.graphs.lowerings.choice import choose
from moexport.tests.graphs.mumoe_layers import (
    FORMS,
    formula,
    graph,
    name_of,
    random_layer,
    run,
    simplex,
    tensor,
)

NEWTON_ERROR = 1e-5  # of a coefficient, for logits up to 100 in size: float32 rounds those to 4e-6


def spec_of(
    form: Form,
    levels: tuple[int, ...],
    *,
    norm: GateNorm = "bn",
    activation: GateActivation = "entmax15",
    block: bool = False,
    bias: bool = True,
    input_norm: bool = False,
) -> MuMoESpec:
    tensors: tuple[FactorisedSpec, ...] = (tensor(form, levels, 10, 12, bias=bias),)
    if block:
        tensors += (tensor(form, levels, 12, 10, bias=bias),)
    return MuMoESpec("layer", tensors, norm, activation, input_norm)


SPECS = [
    *(spec_of(form, levels) for form in FORMS for levels in ((8,), (8, 4), (4, 3, 2))),
    *(spec_of(form, (3, 2, 2, 2)) for form in ("tr", "tucker", "full")),
    *(spec_of("cp", (8,), activation=name, norm="bn") for name in get_args(GateActivation)),
    *(spec_of("cp", (8,), activation=name, norm="ln") for name in get_args(GateActivation)),
    spec_of("cp", (8,), block=True, norm="ln", input_norm=True),
    *(spec_of(form, (8, 4), block=True, bias=False) for form in ("tr", "tucker", "full")),
    *(spec_of(form, (8,), block=True, norm="ln", input_norm=True) for form in ("tucker", "full")),
    spec_of("matrix", ()),
    spec_of("matrix", (), block=True, norm="ln", input_norm=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
@pytest.mark.parametrize("keep", [None, 2])
def test_graph_and_module_compute_the_formula_of_the_whole_tensor(
    spec: MuMoESpec, keep: int | None
) -> None:
    layer = random_layer(spec)
    layer.keep = keep
    x = np.random.default_rng(1).standard_normal((3, 5, spec.dim))
    expected = formula(layer, x, keep)
    for y in (layer(torch.from_numpy(x).float()).numpy(), run(graph(layer, keep), x)):
        assert y.shape == expected.shape
        assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_of_one_token_the_gates_and_the_factors_biases_cost_no_node(spec: MuMoESpec) -> None:
    layer = random_layer(spec)
    x = np.random.default_rng(1).standard_normal((4, 1, spec.dim))
    expected = formula(layer, x)
    model = graph(layer, tokens=1)
    assert np.abs(run(model, x) - expected).max() <= 1e-5 * np.abs(expected).max()
    gemms = [node.name for node in model.graph if node.op_type == "Gemm"]
    gates = len(spec.levels) if spec.norm == "bn" else 0
    factors = [tensor for tensor in spec.tensors if tensor.bias and spec.form != "full"]
    assert len(gemms) == gates + len(factors)


WHOLE = [spec for spec in SPECS if spec.form == "full"]


@pytest.mark.parametrize("spec", WHOLE, ids=name_of)
@pytest.mark.parametrize("keep", [1, 3, 8])
def test_gathering_the_kept_experts_is_the_same_layer(spec: MuMoESpec, keep: int) -> None:
    layer = random_layer(spec)
    x = np.random.default_rng(2).standard_normal((2, 4, spec.dim))
    expected = formula(layer, x, keep)
    model = graph(layer, min(keep, spec.experts), "gathered")
    assert np.abs(run(model, x) - expected).max() <= 1e-5 * np.abs(expected).max()
    gathers = {node.op_type for node in model.graph} & {"Gather"}
    assert bool(gathers) == (keep < spec.experts)


def logits(n: int) -> np.ndarray:
    """Rows [r, n] of many kinds: flat, peaked, heavy-tailed, and clusters that each cost a step."""
    random = np.random.default_rng(n)
    few, many = (40, 200) if n <= 256 else (8, 40)
    rows = [random.standard_normal((few, n)) * s for s in (0.01, 0.1, 0.3, 1, 2, 3, 5, 10, 30)]
    rows += [-(np.abs(random.standard_normal((few, n))) ** p) for p in (1.2, 2, 4, 8)]
    rows.append(np.zeros((1, n)))
    for _ in range(many):
        row, start, size, distance = np.full(n, -100.0), 0, 1.0, 0.0
        growth, nearer = random.uniform(1.2, 6), random.uniform(0.05, 0.9)
        while start < n:
            end = start + max(1, int(size))
            row[start:end] = -distance
            start, size, distance = end, size * growth, 2 - (2 - distance) * nearer
        rows.append(row[None])
    return np.concatenate(rows).astype(np.float32)


def activated(name: str, rows: np.ndarray) -> np.ndarray:
    n = rows.shape[-1]
    x = ir.Value(name="x", shape=ir.Shape(["r", n]), type=ir.TensorType(ir.DataType.FLOAT))
    b = Builder("gate")
    y = {"entmax15": _entmax15, "sparsemax": _sparsemax}[name](b, x, n, "a")
    y.type = ir.TensorType(ir.DataType.FLOAT)
    inner = ir.Graph(
        [x], [y], nodes=b.nodes, initializers=b.initializers, opset_imports={"": 20}, name="gate"
    )
    return run(ir.Model(inner, ir_version=10), rows)


@pytest.mark.parametrize("n", [2, 8, 64, 65, 256, 1000, 2048])
def test_newtons_method_finds_the_thresholds_of_any_logits(n: int) -> None:
    rows = logits(n)
    exact = rows.astype(np.float64)
    expected = {"entmax15": simplex(exact / 2, 2), "sparsemax": simplex(exact, 1)}
    sorted_forms = {"entmax15": entmax15, "sparsemax": sparsemax}
    halves = {"entmax15": rows / 2, "sparsemax": rows}
    for name, wanted in expected.items():
        assert np.abs(activated(name, halves[name]) - wanted).max() <= NEWTON_ERROR
        by_sorting = sorted_forms[name](torch.from_numpy(exact)).numpy()
        assert np.abs(by_sorting - wanted).max() <= 1e-9


def mumoe_block(form: Form, d: int, h: int, n: int, ranks: tuple[int, ...]) -> MuMoESpec:
    return MuMoESpec(
        "block",
        (
            FactorisedSpec(form, (n,), d, h, ranks, bias=True),
            FactorisedSpec(form, (n,), h, d, ranks, bias=True),
        ),
    )


def test_parameters_are_those_of_table_4() -> None:
    gpt2 = (
        mumoe_block("cp", 768, 3072, 256, (int(768 * 0.725),)),
        mumoe_block("tr", 768, 3072, 256, (4, 4, int(768 * 0.195))),
    )
    assert [12 * block.parameters for block in gpt2] == [57_029_664, 57_399_264]
    mixer_cp = (
        mumoe_block("cp", 196, 256, 64, (int(196 * 0.75),)),
        mumoe_block("cp", 512, 2048, 64, (int(512 * 0.75),)),
    )
    mixer_tr = (
        mumoe_block("tr", 196, 256, 64, (4, 4, int(196 * 0.19))),
        mumoe_block("tr", 512, 2048, 64, (4, 4, int(512 * 0.19))),
    )
    assert 8 * sum(block.parameters for block in mixer_cp) == 17_706_480
    assert 8 * sum(block.parameters for block in mixer_tr) == 17_366_656


def counted_macs(model: ir.Model, tokens: int) -> int:
    """Multiply-adds of a graph's MatMuls for one input; an added bias is one more input's row."""
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True)
    sizes = proto.graph.input[0].type.tensor_type.shape.dim
    sizes[0].dim_value, sizes[1].dim_value = 1, tokens
    del proto.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True, strict_mode=True).graph
    shapes = {v.name: tuple(v.dims) for v in inferred.initializer} | {
        v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim)
        for v in (*inferred.input, *inferred.value_info, *inferred.output)
    }
    counted = 0
    for node in inferred.node:
        if node.op_type == "MatMul":
            left, right = (shapes[name] for name in node.input)
            counted += int(np.prod(left)) * right[-1]
        elif node.output[0].endswith(("/input", "/outputs_biased")):
            counted += int(np.prod(shapes[node.output[0]]))  # the row that a 1 would meet
    return counted


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_multiply_adds_of_the_graph_are_those_of_the_formula(spec: MuMoESpec) -> None:
    counted = counted_macs(graph(random_layer(spec)), 5)
    assert counted == sum(spec.macs(5, spec.experts).values())


@pytest.mark.parametrize("spec", WHOLE, ids=name_of)
def test_gathering_costs_what_the_kept_experts_cost(spec: MuMoESpec) -> None:
    for k in (1, 2):
        counted = counted_macs(graph(random_layer(spec), k, "gathered"), 5)
        assert counted == sum(spec.macs(5, k).values()) < sum(spec.macs(5, 3).values())


def test_few_tokens_are_gathered_for_and_many_meet_the_whole_tensor() -> None:
    spec = MuMoESpec("layer", (FactorisedSpec("full", (64,), 768, 1000, (), bias=True),))
    chosen = {
        (tokens, k): choose(LayerPlan(spec, k, 1, tokens), "onnx").lowering.name
        for tokens in (1, 196)
        for k in (4, 64)
    }
    assert chosen[1, 4] == "gathered"
    assert chosen[196, 4] == chosen[196, 64] == chosen[1, 64] == "unfactorised"


def test_nodes_of_a_layer_are_few_and_none_sorts() -> None:
    ops = [node.op_type for node in ir.to_proto(graph(random_layer(SPECS[0]))).graph.node]
    # Gate 2, start of the threshold 4, five steps of 7, square 1; two factors, a bias, ⊙ and Bᵀ 5.
    assert len(ops) == 47
    for spec in SPECS:
        ops = [node.op_type for node in ir.to_proto(graph(random_layer(spec))).graph.node]
        assert not {"TopK", "CumSum", "Einsum", "Concat", "Expand", "Shape"} & set(ops)
