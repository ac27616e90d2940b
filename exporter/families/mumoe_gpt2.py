"""`mumoe-gpt2`: nanoGPT's GPT-2 with a two-layer muMoE block for every MLP."""

from __future__ import annotations

import re

import torch

from ...errors import CheckpointError
from ..model import TensorSpec
from .base import Built, Config, Tensors, check_heads, settle
from .gpt2 import GPT2, GPT2Spec
from .mumoe import ACTIVATION, CLASS_NAMES, read_activation, read_layer
from .mumoe_host import block_numbers, filled, host_family

NAME = "mumoe-gpt2"
BLOCKS = "transformer.h."
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
MASK = re.compile(r"transformer\.h\.\d+\.attn\.bias")
"""The causal mask that older PyTorch versions made the code keep as a buffer."""

OPTIONS = (
    "block_size",
    "layer_type",
    "n_experts",
    "vocab_size",
    "n_layer",
    "n_head",
    "n_embd",
    "bias",
    "dropout",
)


def layer_path(block: int) -> str:
    """Returns where the muMoE block of a transformer block is."""
    return f"{BLOCKS}{block}.mlp.MuMoE_layer"


def _build(tensors: Tensors, given: Config) -> Built:
    activation, notes = read_activation(NAME, given)
    tensors = {key: t for key, t in tensors.items() if not MASK.fullmatch(key)}
    head = tensors.pop(HEAD, None)
    blocks = block_numbers(NAME, tensors, BLOCKS)
    layers = {
        path: read_layer(path, f"{path}.", tensors, activation) for path in map(layer_path, blocks)
    }
    for key in (WTE, WPE):
        if key not in tensors or tensors[key].ndim != 2:
            raise CheckpointError(f"not the weights of a {NAME} model: {key} must be there")
    vocabulary, dim = tensors[WTE].shape
    first = layers[layer_path(0)].spec
    config = settle(
        NAME,
        dict(given) | {ACTIVATION: activation},
        {
            "block_size": tensors[WPE].shape[0],
            "layer_type": CLASS_NAMES[first.tensors[0].form],
            "n_experts": first.experts,
            "vocab_size": vocabulary,
            "n_layer": len(blocks),
            "n_embd": dim,
            "bias": "transformer.ln_f.bias" in tensors,
        },
        required={"n_head": (12, "the projections of all heads are one matrix")},
        free={"dropout": 0.0, ACTIVATION: activation},
    )
    heads = config["n_head"] = check_heads(NAME, "n_head", config["n_head"], dim)
    spec = GPT2Spec(config["block_size"], vocabulary, len(blocks), heads, dim, config["bias"])
    with torch.device("meta"):
        host = GPT2(spec)
    host = filled(NAME, host, tensors, layers, lambda _: dim)
    if head is not None and not torch.equal(head, tensors[WTE]):
        raise CheckpointError(
            f"{HEAD} and {WTE} differ, and in this code they are one tensor",
            hint="give a network with an output layer of its own as package.module:factory",
        )
    limits = (("tokens", spec.block_size),)
    return Built(
        host,
        config,
        TensorSpec("input_ids", "int64", ("batch", "tokens"), limits=limits, below=vocabulary),
        TensorSpec("logits", "float32", ("batch", "tokens", vocabulary)),
        notes,
    )


FAMILY = host_family(
    NAME, "nanoGPT's GPT-2 with muMoE blocks for MLPs (james-oldfield/muMoE)", OPTIONS, _build
)
