"""`--precision int4`: Soft MoE experts with weights in blocks, and what it does not serve."""

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
from moexport.graphs.layers.soft_moe import ExpertKind, SoftMoE, SoftMoESpec, SoftMoEWeights
from moexport.graphs.precision.types import Bits
from moexport.graphs.precision.weights import pack, quantize_in_blocks
from moexport.graphs.targets import Precision, Target
from moexport.tests.command import run
from moexport.tests.recorded import read_case
from torch import Tensor, nn

D, H, N = 64, 96, 6


class Residual(nn.Module):
    def __init__(self, layer: SoftMoE) -> None:
        super().__init__()
        self.moe = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(x)
        return y


def soft_moe(expert: ExpertKind, hidden: int = H) -> SoftMoE:
    hidden = 0 if expert == "linear" else hidden
    spec = SoftMoESpec("moe", N, 1, D, hidden, D, expert=expert, norm="l2", norm_eps=1e-6)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    second = None if expert == "linear" else normal(N, hidden, D) / hidden**0.5
    weights = SoftMoEWeights(
        phi=3 * normal(D, N, 1),
        w1=normal(N, D, spec.inner) / D**0.5,
        b1=normal(N, spec.inner) / 4,
        w2=second,
        b2=None if second is None else normal(N, D) / 4,
    )
    return SoftMoE(spec, weights)


def exported(
    folder: Path,
    target: Target,
    lowering: str,
    expert: ExpertKind = "mlp",
    *,
    hidden: int = H,
    opset: int = 21,
    precision: Precision = "int4",
    largest: float | None = None,
    **more: Any,
) -> Bundle:
    network = Residual(soft_moe(expert, hidden)).eval()
    if largest is not None:
        for name, weight in network.named_parameters():
            if name.endswith("w1"):
                weight.data.view(-1)[0] = largest
    torch.save(network.state_dict(), folder / "w.pt")
    axes = ("batch", "tokens", D)
    model = Model(
        network,
        "test",
        {},
        Source("w.pt", (folder / "w.pt",)),
        (TensorSpec("x", "float32", axes),),
        (TensorSpec("y", "float32", axes),),
    )
    options = ExportOptions(
        target=target,
        k=3,
        lowering=lowering,
        opset=opset,
        precision=precision,
        **more,
        destination=folder / "out",
    )
    return write_bundle(export_job(model, options))


@pytest.mark.parametrize("expert", ["mlp", "gated", "linear"])
@pytest.mark.parametrize("lowering", ["grouped", "conditional"])
@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_soft_moe_experts_hold_against_pytorch(
    target: Target, lowering: str, expert: ExpertKind, tmp_path: Path
) -> None:
    bundle = exported(tmp_path, target, lowering, expert)
    (graph,) = bundle.manifest.graphs
    assert graph.parity is not None and graph.parity["passed"]
    (layer,) = bundle.manifest.layers
    assert layer.precision == "int4"
    model = onnx.load(bundle.path / graph.file, load_external_data=False)
    ops = {node.op_type for node in every_node(model.graph)}
    assert ("MatMulNBits" in ops) == (target == "ort-cpu")


def every_node(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    inner = [
        node
        for each in graph.node
        for attribute in each.attribute
        if attribute.HasField("g")
        for node in every_node(attribute.g)
    ]
    return [*graph.node, *inner]


@pytest.mark.parametrize("lowering", ["dense", "gather", "fused"])
def test_a_lowering_that_needs_all_matrices_at_once_is_refused(
    lowering: str, tmp_path: Path
) -> None:
    with pytest.raises(MoexportError, match="cannot be used"):
        exported(tmp_path, "ort-cpu", lowering)


def test_a_model_of_which_no_layer_can_have_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MoexportError, match=r"no layer supports it: .* experts.w2 has 40 rows"
    ) as told:
        exported(tmp_path, "ort-cpu", "grouped", hidden=40)
    assert "--precision int8" in str(told.value.hint)
    assert not (tmp_path / "out").exists()


def test_mumoe_layers_are_refused_with_the_reason(tmp_path: Path) -> None:
    case = read_case("mumoe_gpt2_cp")
    options = ("--precision", "int4", "--target", "ort-cpu", "--set", "rest=default")
    outcome = run("export", case.weights, "-o", tmp_path / "out", *options)
    assert outcome.code != 0 and "--precision int4 does not support this layer" in outcome.error
    assert not (tmp_path / "out").exists()


def test_for_cuda_a_layer_whose_weights_fp16_cannot_hold_keeps_fp32(tmp_path: Path) -> None:
    bundle = exported(tmp_path, "ort-cuda", "grouped", largest=1e5, verify=False)
    (record,) = bundle.manifest.layers
    assert record.precision == "fp32" and "kept in FP32" in record.precision_reason


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize(("lowering", "op"), [("grouped", "MatMulNBits"), ("fused", "QMoE")])
def test_for_cuda_weights_alone_are_integers_in_what_its_kernels_take(
    precision: Precision, lowering: str, op: str, tmp_path: Path
) -> None:
    if op == "QMoE" and older("onnxruntime", ROUTED_WEIGHTS):
        pytest.skip("this ONNX Runtime's QMoE has no raw weights")
    bundle = exported(tmp_path, "ort-cuda", lowering, hidden=128, precision=precision)
    (graph,) = bundle.manifest.graphs
    assert graph.parity is not None and graph.parity["passed"]
    (layer,) = bundle.manifest.layers
    assert layer.precision == precision
    model = onnx.load(bundle.path / graph.file, load_external_data=False)
    for node in (node for node in every_node(model.graph) if node.op_type == op):
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        assert attributes["block_size"] == 64
        if op == "QMoE":
            assert attributes["weights_prepacked"] == 0 and attributes["k"] == 1
            assert attributes["expert_weight_bits"] == (8 if precision == "int8" else 4)
        else:
            assert attributes["accuracy_level"] == 0
    assert op in {node.op_type for node in every_node(model.graph)}
    assert any("up to 2% of max|y| off" in note for note in bundle.manifest.notes)


@pytest.mark.parametrize(
    ("hidden", "lowering", "why"),
    [
        (96, "fused", "multiples of 64, but an expert's are 64 and 96"),
        (128, "dense", "no kernel multiplies several INT8 matrices"),
    ],
)
def test_for_cuda_what_its_kernels_do_not_take_is_refused(
    hidden: int, lowering: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(MoexportError, match=why):
        exported(tmp_path, "ort-cuda", lowering, hidden=hidden, precision="int8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_loses_no_more_than_with_its_largest_number_kept_exactly(bits: Bits) -> None:
    """That is how Q4_0 of GGUF rounds; in float64 here, block by block."""
    matrix = np.random.default_rng(0).standard_t(5, (64, 40)).astype(np.float32)
    integers, scale = quantize_in_blocks(matrix, 32, bits=bits)
    levels = 2 ** (bits - 1)
    assert integers.min() >= -levels and integers.max() < levels
    lost = {"ours": 0.0, "largest kept": 0.0}
    for row, column in np.ndindex(2, 40):
        block = matrix[32 * row : 32 * row + 32, column].astype(np.float64)
        step = block[np.abs(block).argmax()] / -levels
        kept = step * np.clip(np.rint(block / step), -levels, levels - 1)
        ours = float(scale[row, column]) * integers[32 * row : 32 * row + 32, column]
        errors = [float(np.square(block - back).sum()) for back in (ours, kept)]
        assert errors[0] <= errors[1] * (1 + 1e-6)
        lost = {name: lost[name] + error for name, error in zip(lost, errors, strict=True)}
    assert bits == 8 or lost["ours"] < 0.97 * lost["largest kept"]


def test_a_block_of_zeros_stays_zeros() -> None:
    integers, scale = quantize_in_blocks(np.zeros((32, 3), np.float32), 32)
    assert not integers.any() and (scale != 0).all()


def test_two_numbers_share_a_byte_the_first_in_the_lower_half() -> None:
    packed = pack(np.array([[-8, 7], [1, -1]], np.int8))
    assert packed.tolist() == [0x78, 0xF1]
