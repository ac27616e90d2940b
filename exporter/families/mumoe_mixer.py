"""`mumoe-mixer`: the MLP-Mixer of the muMoE paper, every MLP a two-layer muMoE block."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, FamilyError
from ...graphs.mumoe import MuMoE
from ..hosts.mixer import MixerSpec, MlpMixer, PreNormResidual
from ..model import TensorSpec
from .base import Built, Config, Family, Shape, Tensors, check_tensors, settle
from .mumoe import ACTIVATION, CLASS_NAMES, LAYOUT, is_host, read_activation, read_layer

NAME = "mumoe-mixer"
BLOCK = re.compile(r"mixer_blocks\.(\d+)\.")
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
    return f"mixer_blocks.{block}.0.fn.1"


def channel_path(block: int) -> str:
    """Returns where the channel-mixing layer of a block is."""
    return f"mixer_blocks.{block}.1.fn"


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
    size = _pair(image)
    side = math.isqrt(tokens)
    if patch is None and channels is not None:
        patch = math.isqrt(pixels // int(channels))
    if patch is None and size is not None and size[0] == size[1] and side * side == tokens:
        patch = size[0] // side
    if patch is None:
        raise FamilyError(
            f"{NAME}: shapes cannot tell patch_size ({pixels} numbers in a patch may be few "
            "channels of a large one, or many of a small one)",
            hint="say it, with your model's value: --set patch_size=16",
        )
    patch = int(patch)
    grid = (side, side) if size is None else (size[0] // patch, size[1] // patch)
    if grid[0] * grid[1] != tokens or pixels % (patch * patch):
        raise FamilyError(
            f"{NAME}: patch_size={patch}"
            + (f" and image_size={image}" if image is not None else "")
            + f" do not fit {tokens} patches of {pixels} numbers each",
            hint="check patch_size, image_size and channels against the training run",
        )
    return grid, patch, pixels // (patch * patch)


def _pair(image: Any) -> tuple[int, int] | None:
    """An image's height and width, from a pair or from one number for both."""
    if image is None:
        return None
    height, width = image if isinstance(image, list | tuple) else (image, image)
    return int(height), int(width)


def _build(tensors: Tensors, given: Config) -> Built:
    activation, notes = read_activation(NAME, given)
    blocks = sorted({int(m[1]) for m in map(BLOCK.match, tensors) if m})
    if blocks != list(range(len(blocks))) or not blocks:
        raise CheckpointError(f"not the weights of a {NAME} model: mixer_blocks.* are {blocks}")
    layers: dict[str, MuMoE] = {}
    for block in blocks:
        for path in (token_path(block), channel_path(block)):
            layers[path] = read_layer(path, f"{path}.", tensors, activation)
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
    host = _filled(spec, tensors, layers)
    return Built(
        host,
        config,
        TensorSpec("input", "float32", ("batch", channels, grid[0] * patch, grid[1] * patch)),
        TensorSpec("output", "float32", ("batch", classes)),
        notes,
    )


def _one_size(height: int, width: int) -> Any:
    return height if height == width else [height, width]


def _filled(spec: MixerSpec, tensors: Tensors, layers: dict[str, MuMoE]) -> MlpMixer:
    """The host with its weights and its layers; raises CheckpointError where they do not fit."""
    with torch.device("meta"):
        host = MlpMixer(spec)
    expected: dict[str, Shape] = {k: tuple(t.shape) for k, t in host.state_dict().items()}
    own = {
        key: tensor
        for key, tensor in tensors.items()
        if not any(key.startswith(f"{path}.") for path in layers)
    }
    check_tensors(NAME, own, expected)
    for path, layer in layers.items():
        width = spec.dim if path.endswith("1.fn") else spec.tokens
        if (layer.spec.dim, layer.spec.out) != (width, width):
            raise CheckpointError(
                f"{path}: a layer from {layer.spec.dim} to {layer.spec.out}, where the network has "
                f"{width} numbers"
            )
    host.load_state_dict(own, assign=True)
    for path, layer in layers.items():
        _place(host, path, layer)
    return host.requires_grad_(False).eval()


def _place(host: MlpMixer, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    module = host.get_submodule(parent)
    if isinstance(module, nn.Sequential):
        module[int(name)] = layer
    else:
        assert isinstance(module, PreNormResidual)
        module.fn = layer


FAMILY = Family(
    name=NAME,
    summary="MLP-Mixer with muMoE blocks for tokens and channels (james-oldfield/muMoE)",
    options=(*OPTIONS, ACTIVATION),
    detect=lambda tensors: is_host(tensors, NAME),
    build=_build,
    layer=LAYOUT,
)
