"""Attention of a ViT as one op of ONNX Runtime, with the same values; `verify` compares them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from moexport.graphs.names import MICROSOFT
from moexport.graphs.targets import Precision, Target
from moexport.tests.recorded import VIT_CONFIG, read_case
from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS, D, HEADS = 4, 32, 4


def exported(source: Any, folder: Path, **options: Any) -> Counter[str]:
    """The ops of a graph of ONNX Runtime's own, after the outputs were compared with PyTorch's."""
    bundle = moexport.export(source, folder / "out", **options)
    assert bundle.manifest.parity is not None and bundle.manifest.parity["passed"]
    graph = onnx.load(bundle.path / "model.onnx", load_external_data=False).graph
    return Counter(node.op_type for node in graph.node if node.domain == MICROSOFT)


@pytest.mark.parametrize(
    ("target", "precision", "joined", "apart"),
    [("ort-cpu", "fp32", BLOCKS, 0), ("ort-cpu", "int8", 0, BLOCKS), ("onnx", "fp32", 0, 0)],
)
def test_a_vit_has_one_op_for_each_attention(
    target: Target, precision: Precision, joined: int, apart: int, tmp_path: Path
) -> None:
    """With the product of queries, keys and values in it, where that stays in floats."""
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=VIT_CONFIG)
    np.savez(tmp_path / "seen.npz", x=case.x)
    options: dict[str, Any] = {"target": target, "precision": precision}
    if precision == "int8":
        options |= {"quantize": "all", "data": tmp_path / "seen.npz"}
    ops = exported(model, tmp_path, **options)
    assert (ops["Attention"], ops["MultiHeadAttention"]) == (joined, apart)


@pytest.mark.plugins
def test_openvino_gets_the_softmax_of_bf16_in_the_type_of_its_products(tmp_path: Path) -> None:
    """It makes one kernel of them then, in which it sums in FP32."""
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=VIT_CONFIG)
    options: dict[str, Any] = {"target": "openvino", "precision": "bf16", "verify": False}
    bundle = moexport.export(model, tmp_path / "out", **options)
    nodes = onnx.load(bundle.path / "model.onnx", load_external_data=False).graph.node
    made = {name: node for node in nodes for name in node.output}
    before = [made[node.input[0]].op_type for node in nodes if node.op_type == "Softmax"]
    assert before.count("MatMul") == BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ort-cpu", "openvino"])
def test_a_vit_may_have_no_bias_of_queries_keys_and_values(target: Target, tmp_path: Path) -> None:
    """As with `qkv_bias=False` of the published constructor."""
    case = read_case("soft_moe_vit")
    weights = torch.load(case.weights, weights_only=True)
    kept = {name: w for name, w in weights.items() if not name.endswith("attn.qkv.bias")}
    assert len(weights) - len(kept) == BLOCKS
    torch.save(kept, tmp_path / "w.pt")
    model = moexport.load(tmp_path / "w.pt", config=VIT_CONFIG)
    ops = exported(model, tmp_path, target=target)
    assert ops["Attention"] == (BLOCKS if target == "ort-cpu" else 0)


class Block(nn.Module):
    """Attention with a product of its own for each of q, k and v, then a Soft MoE layer."""

    def __init__(self, *, shared_query: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.probe = nn.Parameter(torch.randn(1, 1, D)) if shared_query else None
        spec = SoftMoESpec("moe", 4, 1, D, D, D, norm="l2", norm_eps=1e-6)
        self.moe = SoftMoE(
            spec,
            SoftMoEWeights(
                phi=3 * torch.randn(D, 4, 1),
                w1=torch.randn(4, D, D) / D**0.5,
                b1=torch.randn(4, D),
                w2=torch.randn(4, D, D) / D**0.5,
                b2=torch.randn(4, D),
            ),
        )

    def forward(self, x: Tensor) -> Tensor:
        query = x if self.probe is None else self.probe
        q, k, v = (
            product(rows).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for product, rows in ((self.q, query), (self.k, x), (self.v, x))
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.moe(x + self.out(y))
        return out


@pytest.mark.parametrize("shared_query", [False, True])
def test_an_own_network_has_it_but_for_a_query_that_all_inputs_share(
    shared_query: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network = Block(shared_query=shared_query).eval()
    torch.save(network.state_dict(), tmp_path / "w.pt")
    x, y = (TensorSpec(name, "float32", ("batch", 17, D)) for name in "xy")
    model = Model(network, "test", {}, Source("w.pt", (tmp_path / "w.pt",)), (x,), (y,))
    ops = exported(model, tmp_path, target="ort-cpu", k=2)
    assert ops["MultiHeadAttention"] == (0 if shared_query else 1)


ODD, ODD_HEADS, TOKENS = 21, 3, 5
FORMS = {
    # What the network has, and the ops of its attention and of its norm of a sum.
    "plain": ("MultiHeadAttention", 0),
    "no_bias": ("MultiHeadAttention", 0),
    "mask": ("Attention", 0),
    "mask_of_keys": (None, 0),
    "mask_of_heads": (None, 0),
    "one_query_head": (None, 0),
    "one_key_head": ("Attention", 0),
    "other_values": ("Attention", 0),
    "shared_values": (None, 0),
    "double": (None, 0),
    "norm": ("MultiHeadAttention", 1),
    "norm_of_four_axes": ("MultiHeadAttention", 0),
    "norm_of_one_gain": ("MultiHeadAttention", 1),  # and a product with the gain
}


class OddBlock(nn.Module):
    """Attention of odd widths, and a norm, each with a part that is absent or is another."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, width = form, ODD // ODD_HEADS
        values = width + 1 if form == "other_values" else width
        heads = {"q": ODD_HEADS, "k": ODD_HEADS, "v": ODD_HEADS}
        if form == "one_query_head":
            heads["q"] = 1
        if form == "one_key_head":
            heads["k"] = heads["v"] = 1
        self.heads = heads
        sizes = {name: count * (values if name == "v" else width) for name, count in heads.items()}
        bias = form != "no_bias"
        self.products = nn.ModuleDict({n: nn.Linear(ODD, s, bias=bias) for n, s in sizes.items()})
        self.out = nn.Linear(ODD_HEADS * values, ODD)
        masks = {
            "mask": (TOKENS, TOKENS),
            "mask_of_keys": (1, 1, 1, TOKENS),
            "mask_of_heads": (1, ODD_HEADS, 1, TOKENS),
        }
        self.mask = nn.Parameter(torch.randn(masks[form])) if form in masks else None
        self.values = nn.Parameter(torch.randn(1, ODD_HEADS, TOKENS, width))
        self.gain = nn.Parameter(torch.randn(1 if form == "norm_of_one_gain" else ODD))
        spec = SoftMoESpec("moe", 4, 1, ODD, ODD, ODD, norm="l2", norm_eps=1e-6)
        weights = SoftMoEWeights(
            phi=3 * torch.randn(ODD, 4, 1),
            w1=torch.randn(4, ODD, ODD) / ODD**0.5,
            b1=torch.randn(4, ODD),
            w2=torch.randn(4, ODD, ODD) / ODD**0.5,
            b2=torch.randn(4, ODD),
        )
        self.moe = SoftMoE(spec, weights)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.products[name](x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for name, heads in self.heads.items()
        )
        if self.form == "shared_values":
            v = self.values
        if self.form == "double":
            q, k, v = q.double(), k.double(), v.double()
        scores = q @ k.transpose(-1, -2) * 0.3
        if self.mask is not None:
            scores = scores + self.mask
        y = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2).float()
        z = x + self.out(y)
        if self.form.startswith("norm"):
            z = self._norm(x, z)
        out: Tensor = self.moe(z)
        return out

    def _norm(self, x: Tensor, z: Tensor) -> Tensor:
        if self.form == "norm_of_four_axes":
            x, z = x[:, :, None].repeat(1, 1, 2, 1), z[:, :, None].repeat(1, 1, 2, 1)
        total = x + z
        total = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain
        return total[:, :, 0] + total[:, :, 1] if total.ndim == 4 else total


@pytest.mark.parametrize("form", FORMS)
def test_what_a_kernel_does_not_take_stays_in_small_ops(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = OddBlock(form).eval()
    torch.save(network.state_dict(), tmp_path / "w.pt")
    x, y = (TensorSpec(name, "float32", ("batch", TOKENS, ODD)) for name in "xy")
    source = Source("w.pt", (tmp_path / "w.pt",))
    model = Model(network, "test", {"form": form}, source, (x,), (y,))
    bundle = moexport.export(model, tmp_path / "out", target="ort-cpu", k=2)
    nodes = onnx.load(bundle.path / "model.onnx", load_external_data=False).graph.node
    ops = Counter(node.op_type for node in nodes)
    attention, of_sums = FORMS[form]
    found = {op for op in ("Attention", "MultiHeadAttention") if ops[op]}
    assert found == ({attention} if attention else set()), ops
    assert ops["SkipSimplifiedLayerNormalization"] == of_sums, ops
