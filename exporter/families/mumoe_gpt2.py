"""`mumoe-gpt2`: nanoGPT's GPT-2 with a two-layer muMoE block for every MLP."""

from __future__ import annotations

import re

import torch

from ...errors import CheckpointError, FamilyError
from ...graphs.mumoe import MuMoE
from ..hosts.gpt2 import GPT2, Block, GPT2Spec
from ..model import TensorSpec
from .base import Built, Config, Family, Shape, Tensors, check_tensors, settle
from .mumoe import ACTIVATION, CLASS_NAMES, LAYOUT, is_host, read_activation, read_layer

NAME = "mumoe-gpt2"
BLOCK = re.compile(r"transformer\.h\.(\d+)\.")
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
    return f"transformer.h.{block}.mlp.MuMoE_layer"


def _build(tensors: Tensors, given: Config) -> Built:
    activation, notes = read_activation(NAME, given)
    tensors = {key: t for key, t in tensors.items() if not MASK.fullmatch(key)}
    blocks = sorted({int(m[1]) for m in map(BLOCK.match, tensors) if m})
    if blocks != list(range(len(blocks))) or not blocks:
        raise CheckpointError(f"not the weights of a {NAME} model: transformer.h.* are {blocks}")
    layers = {
        block: read_layer(layer_path(block), f"{layer_path(block)}.", tensors, activation)
        for block in blocks
    }
    for key in (WTE, WPE):
        if key not in tensors or tensors[key].ndim != 2:
            raise CheckpointError(f"not the weights of a {NAME} model: {key} must be there")
    vocabulary, dim = tensors[WTE].shape
    first = layers[0].spec
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
    heads = config["n_head"]
    if not isinstance(heads, int) or heads < 1 or dim % heads:
        raise FamilyError(
            f"{NAME}: n_head={heads} does not divide the width {dim}",
            hint="give the value that the model was trained with: --set n_head=12",
        )
    spec = GPT2Spec(config["block_size"], vocabulary, len(blocks), heads, dim, config["bias"])
    host = _filled(spec, tensors, layers)
    limits = (("tokens", spec.block_size),)
    return Built(
        host,
        config,
        TensorSpec("input_ids", "int64", ("batch", "tokens"), limits=limits, below=vocabulary),
        TensorSpec("logits", "float32", ("batch", "tokens", vocabulary)),
        notes,
    )


def _filled(spec: GPT2Spec, tensors: Tensors, layers: dict[int, MuMoE]) -> GPT2:
    """The host with its weights and its layers; raises CheckpointError where they do not fit."""
    with torch.device("meta"):
        host = GPT2(spec)
    expected: dict[str, Shape] = {k: tuple(t.shape) for k, t in host.state_dict().items()}
    inside = tuple(f"{layer_path(block)}." for block in layers)
    own = {key: t for key, t in tensors.items() if key != HEAD and not key.startswith(inside)}
    check_tensors(NAME, own, expected)
    head = tensors.get(HEAD)
    if head is not None and not torch.equal(head, own[WTE]):
        raise CheckpointError(
            f"{HEAD} and {WTE} differ, and in this code they are one tensor",
            hint="give a network with an output layer of its own as package.module:factory",
        )
    host.load_state_dict(own, assign=True)
    for block, layer in layers.items():
        if (layer.spec.dim, layer.spec.out) != (spec.dim, spec.dim):
            raise CheckpointError(
                f"{layer_path(block)}: a layer from {layer.spec.dim} to {layer.spec.out}, where "
                f"tokens are {spec.dim} wide"
            )
        module = host.get_submodule(f"transformer.h.{block}")
        assert isinstance(module, Block)
        module.mlp.MuMoE_layer = layer
    return host.requires_grad_(False).eval()


FAMILY = Family(
    name=NAME,
    summary="nanoGPT's GPT-2 with muMoE blocks for MLPs (james-oldfield/muMoE)",
    options=(*OPTIONS, ACTIVATION),
    detect=lambda tensors: is_host(tensors, NAME),
    build=_build,
    layer=LAYOUT,
)
