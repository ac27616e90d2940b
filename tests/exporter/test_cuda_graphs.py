"""The graphs of `ort-cuda`: how few nodes they have, and that their values are the same.

What is counted is the file. ONNX Runtime's CPU provider, which is what there is here, must not add
to it; its kernels of the same ops compute the values, in FP32 with the rounding of 16 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.common.onnx_runtime import ort
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.exporter.session import SessionOptions
from moexport.graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from moexport.graphs.names import MICROSOFT
from moexport.graphs.targets import TARGETS
from moexport.tests.exporter.cuda_kernels import without_bf16_kernel
from moexport.tests.exporter.families.reference import vit
from moexport.tests.exporter.families.states import VIT, State, vit_state
from moexport.tests.recorded import read_case
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, BLOCKS = 6, 12
FUSED = ("MultiHeadAttention", "SkipLayerNormalization", "BiasGelu", "FastGelu", "Attention")


def graph_of(bundle: Bundle) -> onnx.GraphProto:
    return onnx.load(bundle.path / "model.onnx", load_external_data=False).graph


def ops_of(bundle: Bundle) -> Counter[str]:
    return Counter(node.op_type for node in graph_of(bundle).node)


def exported(state: State, folder: Path, name: str = "out", **options: Any) -> Bundle:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "vit.pt")
    said = options.pop("config", {})
    model = moexport.load(folder / "vit.pt", config={**VIT, **said})
    return moexport.export(model, folder / name, **{"target": "ort-cuda", **options})


def deep(**changes: Any) -> State:
    """A ViT of twelve blocks, the last six of which are Soft MoE blocks, as ViT-S/16 is built."""
    return vit_state(depth=BLOCKS, moe=tuple(range(LAYERS, BLOCKS)), p=1, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_a_vit_with_six_soft_moe_blocks_has_at_most_240_nodes(
    qkv_bias: bool, tmp_path: Path
) -> None:
    bundle = exported(deep(qkv_bias=qkv_bias), tmp_path, precision="fp16")
    ops = ops_of(bundle)
    assert ops.total() <= 240, ops
    assert ops["Cast"] <= 3 * LAYERS + 4, ops
    assert ops["Transpose"] <= 24, ops
    assert ops["MultiHeadAttention"] == BLOCKS and ops["SkipLayerNormalization"] == 2 * BLOCKS, ops
    assert ops["BiasGelu"] == BLOCKS - LAYERS and ops["LayerNormalization"] == 1, ops
    assert bundle.manifest.opset == 20


@pytest.mark.slow
def test_onnx_runtimes_own_optimisation_adds_nothing_to_it(tmp_path: Path) -> None:
    """Of the same graph in FP32: the CPU provider puts casts into one of FP16."""
    bundle = exported(deep(), tmp_path, precision="fp32")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(bundle.path / "model.onnx", options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph
    ops = ops_of(bundle)
    assert len(optimised.node) <= ops.total() <= 240 - (3 * LAYERS + 4), ops
    kept = Counter(node.op_type for node in optimised.node)
    assert all(kept[op] == ops[op] for op in FUSED), kept


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, "input"])
def test_a_choice_of_experts_takes_no_cast(k: int | str, tmp_path: Path) -> None:
    bundle = exported(deep(), tmp_path, precision="fp16", k=k, lowering="dense")
    ops = ops_of(bundle)
    assert ops["Cast"] <= 3 * LAYERS + 4 and ops["Transpose"] <= 24, ops
    assert ops.total() <= 240 + 7 * LAYERS, ops  # the scores, TopK, and what is left out


MUMOE_NODES = {"mumoe_mixer_cp": 240, "mumoe_mixer_tr": 264, "mumoe_gpt2_cp": 142}
"""Of four, four and two layers: more than half of them find the gate's threshold."""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mumoe_mixer_cp", "mumoe_mixer_tr", "mumoe_gpt2_cp"])
def test_a_mumoe_network_has_three_casts_a_layer_and_norms_that_add(
    case: str, tmp_path: Path
) -> None:
    recorded = read_case(case)
    model = moexport.load(recorded.weights, config=recorded.config)
    bundle = moexport.export(model, tmp_path / "out", target="ort-cuda", precision="fp16")
    ops, layers = ops_of(bundle), len(bundle.manifest.layers)
    assert ops["Cast"] <= 3 * layers + 4, ops
    assert ops.total() <= MUMOE_NODES[case], ops
    attentions = layers if "gpt2" in case else 0
    assert ops["Attention"] == attentions and not ops["Softmax"], ops
    assert ops["SkipLayerNormalization"] == layers, ops
    assert bundle.manifest.opset == (23 if attentions else 20)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no bias of queries, keys and values": ({"qkv_bias": False}, {}),
    "normed queries and keys": ({"qk_norm": True}, {}),
    "layer scale": ({"layer_scale": True}, {}),
    "mean of tokens": ({"class_token": False, "fc_norm": True}, {"global_pool": "avg"}),
    "tanh": ({}, {"act_layer": "gelu_tanh"}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_vit_computes_what_the_float64_formula_does(option: str, tmp_path: Path) -> None:
    """In the ops of `ort-cuda`, with FP32 and with the rounding of FP16."""
    built, said = OPTIONS[option]
    state = vit_state(**built)
    x = np.random.default_rng(1).standard_normal((3, 3, 12, 12)).astype(np.float32)
    arrays = {name: tensor.double().numpy() for name, tensor in state.items()}
    pool, tanh = said.get("global_pool", "token"), "act_layer" in said
    act = "gelu_tanh" if tanh else "gelu"
    expected = vit(x.astype(np.float64), arrays, heads=3, pool=pool, act=act)
    size = np.abs(expected).max()
    for precision, bound in (("fp32", 1e-5), ("fp16", 5e-3)):
        bundle = exported(
            state, tmp_path, precision, precision=precision, config=said, verify=False
        )
        ops = ops_of(bundle)
        assert ops["MultiHeadAttention"] == 2, ops
        assert ops["FastGelu" if tanh else "BiasGelu"] == 1, ops
        session = bundle.session(options=SessionOptions(rounded=precision == "fp16"))
        assert np.abs(session(x) - expected).max() <= bound * size


@pytest.mark.parametrize("target", sorted({r.name for r in TARGETS} - {"ort-cuda", "ort-cpu"}))
def test_other_targets_get_none_of_these_ops(target: str, tmp_path: Path) -> None:
    bundle = exported(vit_state(), tmp_path, target=target, verify=False)
    found = {n.op_type for n in graph_of(bundle).node if n.domain == MICROSOFT} & {*FUSED}
    assert not found


@pytest.mark.slow
def test_an_opset_that_was_asked_for_has_those_that_are_of_no_opset(tmp_path: Path) -> None:
    bundle = exported(vit_state(), tmp_path, precision="fp16", opset=20)
    assert bundle.manifest.opset == 20 and ops_of(bundle)["MultiHeadAttention"] == 2
    case = read_case("mumoe_gpt2_cp")
    model = moexport.load(case.weights, config=case.config)
    masked = moexport.export(model, tmp_path / "masked", target="ort-cuda", opset=20)
    assert masked.manifest.opset == 20 and not ops_of(masked)["Attention"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ort-cuda", "tensorrt"])
def test_what_comes_near_to_the_end_of_fp16_keeps_fp32(target: str, tmp_path: Path) -> None:
    """−40000 before a GELU is 0 behind it: it is seen inside of the op that takes the bias."""
    state = vit_state()
    state["blocks.0.mlp.fc1.bias"][0] = -4e4
    x = np.random.default_rng(0).standard_normal((8, 3, 12, 12)).astype(np.float32)
    np.savez(tmp_path / "x.npz", input=x)
    options: dict[str, Any] = {"target": target, "precision": "fp16", "data": tmp_path / "x.npz"}
    bundle = exported(state, tmp_path, **options)
    kept = {record["op_type"]: record["reason"] for record in bundle.manifest.numbers["fp32_nodes"]}
    assert kept.keys() == ({"BiasGelu"} if target == "ort-cuda" else {"Add", "Gelu"})
    assert all("seen at blocks.0.mlp.fc1/Add" in reason for reason in kept.values())
    usual = exported(vit_state(), tmp_path / "usual", **options)
    assert not usual.manifest.numbers["fp32_nodes"]


WIDTH, TOKENS, HEADS = 12, 5, 3


class Block(nn.Module):
    """A residual and a norm of it, then a Soft MoE layer; `form` says what is unusual."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.norm = nn.LayerNorm(WIDTH, bias=form != "no shift", eps=1e-6)
        self.other = nn.LayerNorm(WIDTH, elementwise_affine=form != "no gain")
        self.wide = nn.LayerNorm((TOKENS, WIDTH))
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(3))
        self.row = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        w = [torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5 for _ in range(2)]
        b = [torch.randn(4, WIDTH) for _ in range(2)]
        phi = 3 * torch.randn(WIDTH, 4, 1)
        spec = SoftMoESpec("moe", 4, 1, WIDTH, WIDTH, WIDTH, norm="l2", norm_eps=1e-6)
        self.moe = SoftMoE(spec, SoftMoEWeights(phi, w[0], b[0], w[1], b[1]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(self.mixed(x))
        return out

    def mixed(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        y = self.outer(F.gelu(hidden))
        total = x + y
        forms: dict[str, Callable[[], Tensor]] = {
            "sum read again": lambda: total + self.norm(total),
            "two norms of a sum": lambda: self.norm(total) * self.other(total),
            "no gain": lambda: self.other(total),
            "of a row of tokens": lambda: self.norm(y + self.row),
            "four axes": lambda: self.norm(x[:, :, None] + y[:, :, None])[:, :, 0],
            "norm of two axes": lambda: self.wide(total),
            "biased sum read twice": lambda: self.norm(total) + y + hidden[..., :WIDTH],
            "attention to other tokens": lambda: self.norm(total + self.attended(x[:, :2], y)),
        }
        out: Tensor = forms[self.form]() if self.form in forms else self.norm(total)
        return out

    def attended(self, rows: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            product(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for product, tokens in zip(self.products, (rows, memory, memory), strict=True)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return y.repeat(1, 3, 1)[:, :TOKENS]


FORMS: Mapping[str, tuple[int, int, int]] = {
    # norms that add, GELUs with a bias, attentions
    "residual alone": (1, 1, 0),
    "sum read again": (1, 1, 0),
    "two norms of a sum": (1, 1, 0),
    "no shift": (1, 1, 0),
    "no gain": (1, 1, 0),
    "of a row of tokens": (0, 1, 0),
    "four axes": (0, 1, 0),
    "norm of two axes": (0, 1, 0),
    "biased sum read twice": (1, 0, 0),
    "attention to other tokens": (1, 1, 1),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_what_the_ops_do_not_take_stays_in_small_ones(
    form: str, precision: str, tmp_path: Path
) -> None:
    """The export compares all of it with PyTorch."""
    torch.manual_seed(0)
    network = Block(form).eval()
    torch.save(network.state_dict(), tmp_path / "w.pt")
    x, y = (TensorSpec(name, "float32", ("batch", TOKENS, WIDTH)) for name in "xy")
    model = Model(network, "test", {"form": form}, Source("w.pt", (tmp_path / "w.pt",)), (x,), (y,))
    options: dict[str, Any] = {"target": "ort-cuda", "precision": precision, "k": 2}
    bundle = moexport.export(model, tmp_path / "out", **options)
    assert bundle.manifest.parity is not None and bundle.manifest.parity["passed"]
    ops = ops_of(bundle)
    found = (ops["SkipLayerNormalization"], ops["BiasGelu"], ops["MultiHeadAttention"])
    assert found == FORMS[form], ops


@pytest.mark.parametrize("name", ["soft_moe_vit", "mumoe_mixer_tr"])
def test_a_graph_in_bf16_has_kernels_on_a_gpu(name: str, tmp_path: Path) -> None:
    case = read_case(name)
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, tmp_path / "out", target="ort-cuda", precision="bf16")
    assert without_bf16_kernel(bundle.path / "model.onnx") == set()
    kept = bundle.manifest.numbers["usual_fp32_nodes"]
    assert kept.get("Conv", 0) == (name == "soft_moe_vit"), kept
