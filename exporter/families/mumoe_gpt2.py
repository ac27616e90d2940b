"""`mumoe-gpt2`: nanoGPT's GPT-2 with a two-layer muMoE block in place of every MLP.

It is recognised by `transformer.h.{l}.mlp.MuMoE_layer.*`. The input of attention is normalised, but
that of a muMoE block is not: the block normalises it, except for the gate. The output layer's
weight is the embedding. With `use_cache`, the keys and values of earlier tokens are inputs, and
those of all tokens are outputs: one graph computes a prompt at once, and then token by token.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import CheckpointError, FamilyError
from ..inputs import PAST_AXIS
from ..model import TensorSpec
from .base import (
    Config,
    Constructor,
    FamilyModel,
    Question,
    Tensors,
    block_numbers,
    cache_specs,
    check_heads,
    shape_of,
)
from .mumoe import ACTIVATION, CLASS_NAMES, activate, backbone_family, read_layer, with_layers

NAME = "mumoe-gpt2"
NORM_EPS = 1e-5
BLOCKS = "transformer.h."
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"

MASK = re.compile(r"transformer\.h\.\d+\.attn\.bias")
"""The causal mask, which the code keeps as a buffer with older PyTorch versions."""

SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")

CONSTRUCTOR = Constructor(
    family=NAME,
    shapes=dict.fromkeys(
        ("block_size", "layer_type", "n_experts", "vocab_size", "n_layer", "n_embd", "bias"), ...
    ),
    questions={"n_head": Question(12, "the projections of all heads are one matrix")},
    # The class fixes the activation.
    free={"dropout": 0.0, "use_cache": False, ACTIVATION: "entmax15"},
    sizes=SIZES,
)

KeyValue = tuple[Tensor, Tensor]
"""Keys and values [b, heads, m, d / heads]."""


@dataclass(frozen=True, slots=True)
class GPT2Spec:
    """Sizes and options of the backbone."""

    block_size: int
    vocabulary: int
    depth: int
    heads: int
    dim: int
    bias: bool


class CausalAttention(nn.Module):
    """Multi-head self-attention on (b, m, d) in which no token attends to a later one."""

    def __init__(self, spec: GPT2Spec) -> None:
        super().__init__()
        self.dim = spec.dim
        self.split = (0, 0, spec.heads, spec.dim // spec.heads)
        self.c_attn = nn.Linear(spec.dim, 3 * spec.dim, bias=spec.bias)
        self.c_proj = nn.Linear(spec.dim, spec.dim, bias=spec.bias)

    def forward(
        self, x: Tensor, mask: Tensor, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        """Maps (b, m, d) to (b, m, d); also returns the keys and values of all tokens, in order.

        `mask` [m, past + m] is −∞ if the key comes after the query.
        """
        q, k, v = (
            part.unflatten(-1, self.split[2:]).transpose(1, 2)
            for part in self.c_attn(x).split(self.dim, dim=-1)
        )
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1) + mask
        y = scores.softmax(dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).flatten(2)), (k, v)


class GPT2Block(nn.Module):
    """Attention on normalised tokens, then the muMoE block on raw ones, both with a residual."""

    def __init__(self, spec: GPT2Spec) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(spec.dim, eps=NORM_EPS, bias=spec.bias)
        self.attn = CausalAttention(spec)
        self.mlp = nn.Sequential(OrderedDict(MuMoE_layer=nn.Identity()))  # replaced later

    def forward(
        self, x: Tensor, mask: Tensor, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        attended, present = self.attn(self.ln_1(x), mask, past)
        x = x + attended
        return x + self.mlp(x), present


class GPT2(nn.Module):
    """Maps token ids (b, m) to logits (b, m, v); the output projection is the embedding itself."""

    def __init__(self, spec: GPT2Spec) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(spec.vocabulary, spec.dim),
                "wpe": nn.Embedding(spec.block_size, spec.dim),
                "h": nn.ModuleList(GPT2Block(spec) for _ in range(spec.depth)),
                "ln_f": nn.LayerNorm(spec.dim, eps=NORM_EPS, bias=spec.bias),
            }
        )

    def forward(self, ids: Tensor, *past: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Returns the logits at every position.

        With a `past` (a key and a value per block), the keys and values of all tokens follow.
        """
        wte, wpe = self.transformer["wte"], self.transformer["wpe"]
        assert isinstance(wte, nn.Embedding) and isinstance(wpe, nn.Embedding)
        length = ids.shape[1]
        before = past[0].shape[2] if past else 0
        keys = torch.arange(before + length, device=ids.device)
        queries = keys[before:]
        x = wte(ids) + (wpe(queries) if past else wpe.weight[:length])
        mask = torch.where(keys > queries.unsqueeze(1), -torch.inf, 0.0)
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleList)
        presents: list[Tensor] = []
        for index, block in enumerate(blocks):
            own_past = (past[2 * index], past[2 * index + 1]) if past else None
            x, present = block(x, mask, own_past)
            presents += present
        logits = F.linear(self.transformer["ln_f"](x), wte.weight)
        return (logits, *presents) if past else logits


def _build(tensors: Tensors, settings: Config) -> FamilyModel:
    tensors = {key: t for key, t in tensors.items() if not MASK.fullmatch(key)}
    head = tensors.pop(HEAD, None)
    blocks = block_numbers(NAME, tensors, BLOCKS)
    paths = [f"{BLOCKS}{block}.mlp.MuMoE_layer" for block in blocks]
    layers = {path: read_layer(f"{path}.", tensors, path) for path in paths}
    vocabulary, dim = shape_of(NAME, tensors, WTE, "v, d")
    block_size, _ = shape_of(NAME, tensors, WPE, "m, d")
    first = layers[paths[0]].spec
    config = CONSTRUCTOR.settle(
        settings,
        {
            "block_size": block_size,
            "layer_type": CLASS_NAMES[first.tensors[0].form],
            "n_experts": first.experts,
            "vocab_size": vocabulary,
            "n_layer": len(blocks),
            "n_embd": dim,
            "bias": "transformer.ln_f.bias" in tensors,
        },
    )
    activate(NAME, layers.values(), config)
    heads = config["n_head"] = check_heads(NAME, "n_head", config["n_head"], dim)
    spec = GPT2Spec(
        block_size=block_size,
        vocabulary=vocabulary,
        depth=len(blocks),
        heads=heads,
        dim=dim,
        bias=config["bias"],
    )
    with torch.device("meta"):
        backbone = GPT2(spec)
    backbone = with_layers(NAME, backbone, tensors, layers, dict.fromkeys(paths, dim))
    if head is not None and not torch.equal(head, tensors[WTE]):
        raise CheckpointError(
            f"{HEAD} and {WTE} differ, but in this code they are the same tensor",
            hint="give a network with a separate output layer as package.module:factory",
        )
    cached = config["use_cache"]
    if not isinstance(cached, bool):
        raise FamilyError(
            f"{NAME}: use_cache={cached} is neither true nor false",
            hint="--set use_cache=true adds the keys and values of earlier tokens as inputs",
        )
    limits = {"tokens": block_size}
    pasts: tuple[TensorSpec, ...] = ()
    presents: tuple[TensorSpec, ...] = ()
    if cached:
        parts = [f"{block}.{part}" for block in blocks for part in ("key", "value")]
        pasts, presents = cache_specs(dict.fromkeys(parts, (heads, dim // heads)))
        limits[f"{PAST_AXIS} + tokens"] = block_size
    ids = ("batch", "tokens")
    return FamilyModel(
        module=backbone,
        config=config,
        inputs=(TensorSpec("input_ids", "int64", ids, limits=limits, below=vocabulary), *pasts),
        outputs=(TensorSpec("logits", "float32", (*ids, vocabulary)), *presents),
    )


FAMILY = backbone_family(
    CONSTRUCTOR,
    "nanoGPT's GPT-2 with muMoE blocks for MLPs (james-oldfield/muMoE)",
    _build,
    questions=("n_head",),
)
