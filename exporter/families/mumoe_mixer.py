"""`mumoe-mixer`: the MLP-Mixer of the muMoE paper, every MLP a two-layer muMoE block."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...errors import CheckpointError, FamilyError
from ..model import TensorSpec
from .base import Built, Config, Tensors, height_width, settle, whole_number
from .mixer import MixerSpec, MlpMixer
from .mumoe import ACTIVATION, CLASS_NAMES, read_activation, read_layer
from .mumoe_host import block_numbers, filled, host_family

NAME = "mumoe-mixer"
BLOCKS = "mixer_blocks."
OPTIONS = (
    "image_size",
    "channels",
    "patch_size",
    "dim",
    "depth",
    "num_classes",
    "expansion_factor",
    "expansion_factor_token",
    "layer",
    "n_experts",
)


def token_path(block: int) -> str:
    """Returns where the token-mixing layer of a block is."""
    return f"{BLOCKS}{block}.0.fn.1"


def channel_path(block: int) -> str:
    """Returns where the channel-mixing layer of a block is."""
    return f"{BLOCKS}{block}.1.fn"


def _matrix(tensors: Tensors, key: str) -> tuple[int, int]:
    tensor = tensors.get(key)
    if tensor is None or tensor.ndim != 2:
        raise CheckpointError(
            f"not the weights of a {NAME} model: {key} must be there, as a matrix"
        )
    return int(tensor.shape[0]), int(tensor.shape[1])


def _geometry(given: Config, tokens: int, pixels: int) -> tuple[tuple[int, int], int, int]:
    """The grid, the patch's side and the channels: any one of three sizes gives the others.

    Raises FamilyError where none was given, or where those given do not fit the shapes.
    """
    image, patch, channels = (given.get(key) for key in ("image_size", "patch_size", "channels"))
    size = None if image is None else height_width(NAME, "image_size", image)
    side = math.isqrt(tokens)
    if patch is None and channels is not None:
        patch = math.isqrt(pixels // whole_number(NAME, "channels", channels))
    if patch is None and size is not None and size[0] == size[1] and side * side == tokens:
        patch = size[0] // side
    if patch is None:
        raise FamilyError(
            f"{NAME}: shapes cannot tell patch_size ({pixels} numbers in a patch may be few "
            "channels of a large one, or many of a small one)",
            hint="say it, with your model's value: --set patch_size=16",
        )
    patch = whole_number(NAME, "patch_size", patch)
    grid = (side, side) if size is None else (size[0] // patch, size[1] // patch)
    if grid[0] * grid[1] != tokens or pixels % (patch * patch):
        raise FamilyError(
            f"{NAME}: patch_size={patch}"
            + (f" and image_size={image}" if image is not None else "")
            + f" do not fit {tokens} patches of {pixels} numbers each",
            hint="check patch_size, image_size and channels against the training run",
        )
    return grid, patch, pixels // (patch * patch)


def _build(tensors: Tensors, given: Config) -> Built:
    activation, notes = read_activation(NAME, given)
    blocks = block_numbers(NAME, tensors, BLOCKS)
    paths = [path for block in blocks for path in (token_path(block), channel_path(block))]
    layers = {path: read_layer(path, f"{path}.", tensors, activation) for path in paths}
    dim, pixels = _matrix(tensors, "stem.1.weight")
    classes, _ = _matrix(tensors, "head.2.weight")
    token, channel = layers[token_path(0)].spec, layers[channel_path(0)].spec
    grid, patch, channels = _geometry(given, token.dim, pixels)
    config = settle(
        NAME,
        dict(given) | {ACTIVATION: activation},
        {
            "image_size": _one_size(grid[0] * patch, grid[1] * patch),
            "channels": channels,
            "patch_size": patch,
            "dim": dim,
            "depth": len(blocks),
            "num_classes": classes,
            "expansion_factor": channel.hidden,
            "expansion_factor_token": token.hidden,
            "layer": CLASS_NAMES[token.tensors[0].form],
            "n_experts": token.experts,
        },
        free={ACTIVATION: activation},
    )
    spec = MixerSpec(grid, patch, channels, dim, len(blocks), classes)
    with torch.device("meta"):
        host = MlpMixer(spec)
    widths = {token_path(block): spec.tokens for block in blocks}
    return Built(
        filled(NAME, host, tensors, layers, lambda path: widths.get(path, spec.dim)),
        config,
        TensorSpec("input", "float32", ("batch", channels, grid[0] * patch, grid[1] * patch)),
        TensorSpec("output", "float32", ("batch", classes)),
        notes,
    )


def _one_size(height: int, width: int) -> Any:
    return height if height == width else [height, width]


FAMILY = host_family(
    NAME,
    "MLP-Mixer with muMoE blocks for tokens and channels (james-oldfield/muMoE)",
    OPTIONS,
    _build,
)
