"""A network around token-routed experts, exported in each precision: its router keeps FP32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from moexport.common.libraries import ROUTED_WEIGHTS, older
from moexport.errors import MoexportError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.export import write_bundle
from moexport.exporter.job import export_job
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.exporter.options import ExportOptions
from moexport.exporter.session import Session
from moexport.graphs.targets import Precision, Scope, Target
from moexport.plugins.token_routed.layers.experts import Experts, ExpertsSpec
from moexport.plugins.token_routed.tests.experts_layers import experts
from torch import Tensor, nn

D = 64


class Router(nn.Module):
    """A softmax over all experts, and the k largest of it, normalised."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.k = k
        self.scores = nn.Linear(D, n, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = self.scores(x).softmax(dim=-1).topk(self.k, dim=-1)
        return chosen.indices, chosen.values / chosen.values.sum(dim=-1, keepdim=True)


class Block(nn.Module):
    def __init__(self, layer: Experts) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.router = Router(layer.spec.k, layer.spec.experts)
        self.experts = layer

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).reshape(-1, D)
        y: Tensor = self.experts(rows, *self.router(rows))
        return x + y.reshape(x.shape)


class Network(nn.Module):
    """Two blocks between two linear layers: [b, m, 64] to [b, m, 32]."""

    def __init__(self) -> None:
        super().__init__()
        specs = [ExpertsSpec(f"blocks.{i}.experts", 6, 2, D, 128, D) for i in range(2)]
        self.stem = nn.Linear(D, D)
        layers = [experts(spec, seed=i) for i, spec in enumerate(specs)]
        self.blocks = nn.Sequential(*(Block(layer) for layer in layers))
        self.head = nn.Linear(D, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(self.stem(x)))
        return y


def model(folder: Path) -> Model:
    torch.manual_seed(0)
    weights = folder / "network.pt"
    network = Network().eval().requires_grad_(False)
    torch.save(network.state_dict(), weights)
    return Model(
        network,
        "test",
        {},
        Source("network.pt", (weights,)),
        (TensorSpec("x", "float32", ("batch", "tokens", D)),),
        (TensorSpec("y", "float32", ("batch", "tokens", 32)),),
    )


def exported(
    folder: Path,
    precision: Precision = "fp32",
    target: Target = "ort-cpu",
    lowering: str = "grouped",
    *,
    scope: Scope = "experts",
    **more: Any,
) -> Bundle:
    options = ExportOptions(
        target=target,
        k=2,
        lowering=lowering,
        **more,
        precision=precision,
        quantize=scope,
        destination=folder / "out",
    )
    return write_bundle(export_job(model(folder), options))


def nodes_of(bundle: Bundle) -> list[onnx.NodeProto]:
    return list(onnx.load(bundle.path / "model.onnx", load_external_data=False).graph.node)


needs_qmoe = pytest.mark.skipif(
    older("onnxruntime", ROUTED_WEIGHTS), reason="this ONNX Runtime's QMoE takes no weights"
)


@pytest.mark.parametrize(
    ("precision", "target", "lowering"),
    [
        ("fp32", "onnx", "grouped"),
        ("fp32", "onnx", "dense"),
        ("fp32", "ort-cpu", "conditional"),
        ("fp32", "ort-cpu", "fused"),
        ("fp16", "ort-cpu", "grouped"),
        ("int8", "onnx", "grouped"),
        ("int8", "ort-cpu", "grouped"),
        ("int4", "ort-cpu", "grouped"),
        pytest.param("int4", "ort-cpu", "fused", marks=needs_qmoe),
        ("int4", "onnx", "grouped"),
        ("fp32", "ort-cuda", "fused"),
        ("fp16", "ort-cuda", "fused"),
        ("bf16", "ort-cuda", "fused"),
        ("int8", "ort-cuda", "grouped"),
        ("int4", "ort-cuda", "grouped"),
        pytest.param("int8", "ort-cuda", "fused", marks=needs_qmoe),
        pytest.param("int4", "ort-cuda", "fused", marks=needs_qmoe),
    ],
)
def test_an_export_holds_against_pytorch(
    precision: Precision, target: Target, lowering: str, tmp_path: Path
) -> None:
    bundle = exported(tmp_path, precision, target, lowering)
    (graph,) = bundle.manifest.graphs
    assert graph.parity is not None and graph.parity["passed"]
    assert {layer.precision for layer in bundle.manifest.layers} == {precision}
    assert {layer.kind for layer in bundle.manifest.layers} == {"experts"}


@needs_qmoe
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_fused_op_weights_what_a_softmax_chose_and_takes_each_token_once(
    precision: Precision, tmp_path: Path
) -> None:
    bundle = exported(tmp_path, precision, lowering="fused")
    fused = [node for node in nodes_of(bundle) if node.op_type == "QMoE"]
    assert len(fused) == 2 and all(node.input[-1] == node.input[1] for node in fused)
    assert all(att.i == 2 for node in fused for att in node.attribute if att.name == "k")
    (graph,) = bundle.manifest.graphs
    assert graph.parity is not None and graph.parity["passed"]


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_the_linear_layers_around_are_quantised_without_calibration_and_the_router_is_not(
    precision: Precision, target: Target, tmp_path: Path
) -> None:
    bundle = exported(tmp_path, precision, target, scope="all")
    linears = bundle.manifest.numbers["linears"]
    assert linears == {"stem/MatMul": None, "head/MatMul": None}, linears
    products = {"MatMul", "Gemm"}
    routers = [n for n in nodes_of(bundle) if "router" in n.name and n.op_type in products]
    assert len(routers) == 2, [n.name for n in nodes_of(bundle)]


def test_a_router_stays_in_fp32_in_a_graph_of_16_bits(tmp_path: Path) -> None:
    bundle = exported(tmp_path, "fp16")
    usual = bundle.manifest.numbers["usual_fp32_nodes"]
    assert usual["TopK"] == 2 and usual.get("MatMul", 0) + usual.get("Gemm", 0) == 2


def test_int4_makes_the_weights_a_seventh(tmp_path: Path) -> None:
    sizes = {}
    for precision in ("fp32", "int4"):
        folder = tmp_path / precision
        folder.mkdir()
        bundle = exported(folder, precision)
        sizes[precision] = (bundle.path / "weights.bin").stat().st_size
    assert sizes["int4"] < sizes["fp32"] / 4  # the linear layers around keep FP32


def test_auto_looks_at_one_token_and_at_a_prompt(tmp_path: Path) -> None:
    bundle = exported(tmp_path, lowering="auto")
    for layer in bundle.manifest.layers:
        assert "at 1 and 196 and 512 tokens" in layer.reason, layer.reason


def test_tune_gives_the_layers_experts_that_were_chosen(tmp_path: Path) -> None:
    bundle = exported(tmp_path, lowering="tune")
    assert bundle.manifest.tuning is not None
    (group,) = bundle.manifest.tuning.measured
    timed = {each.lowering for each in group.candidates}
    assert timed == {"dense", "grouped", "conditional", "fused"}
    assert not group.left_out and len(group.layers) == 2


def test_int8_of_engines_still_needs_real_inputs(tmp_path: Path) -> None:
    with pytest.raises(MoexportError, match="ranges need real inputs"):
        exported(tmp_path, "int8", "tensorrt", "dense")


def test_int4_as_standard_ops_takes_opset_21_and_no_less(tmp_path: Path) -> None:
    bundle = exported(tmp_path, "int4", "onnx")
    model = onnx.load(bundle.path / "model.onnx", load_external_data=False)
    assert {each.domain: each.version for each in model.opset_import}[""] == 21
    (tmp_path / "less").mkdir()
    with pytest.raises(MoexportError, match="from opset 21 on"):
        exported(tmp_path / "less", "int4", "onnx", opset=20)


def test_one_row_at_a_time_gives_what_all_rows_give(tmp_path: Path) -> None:
    bundle = exported(tmp_path, "int8", scope="all")
    x = np.random.default_rng(0).standard_normal((1, 5, D)).astype(np.float32)
    graph = Session(bundle.path / "model.onnx")
    whole = graph(x)
    assert np.allclose(graph(x[:, :2]), whole[:, :2], atol=1e-5)
