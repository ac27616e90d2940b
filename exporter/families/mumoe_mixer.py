"""`mumoe-mixer`: the MLP-Mixer of the muMoE paper, every MLP a two-layer muMoE block.

Told by `mixer_blocks.{i}.0.fn.1.*` (over the tokens) and `mixer_blocks.{i}.1.fn.*` (over the
channels), each a layer of `mumoe`. Shapes say how many patches there are and how many numbers a
patch has, not which side and channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import FamilyError
from ..model import TensorSpec
from .base import (
    Built,
    Config,
    Tensors,
    height_width,
    one_or_pair,
    settle,
    shape_of,
    whole_number,
)
from .mumoe import (
    ACTIVATION,
    CLASS_NAMES,
    backbone_family,
    block_numbers,
    filled,
    read_activation,
    read_layer,
)

NAME = "mumoe-mixer"
BLOCKS = "mixer_blocks."
OPTIONS = (
    *("image_size", "channels", "patch_size", "dim", "depth", "num_classes", "expansion_factor"),
    *("expansion_factor_token", "layer", "n_experts"),
)


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """Sizes of the backbone. `grid` is the number of patches (down, across), of side `patch`."""

    grid: tuple[int, int]
    patch: int
    channels: int
    dim: int
    depth: int
    classes: int

    @property
    def tokens(self) -> int:
        """m: patches of one image."""
        return self.grid[0] * self.grid[1]

    @property
    def pixels(self) -> int:
        """Numbers in one patch."""
        return self.patch * self.patch * self.channels


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


class Patches(nn.Module):
    """Images (b, c, H, W) to patches (b, m, s·s·c), row by row, channels innermost."""

    def __init__(self, spec: MixerSpec) -> None:
        super().__init__()
        down, across = spec.grid
        self.windows = (-1, spec.channels, down, spec.patch, across, spec.patch)
        self.rows = (-1, spec.tokens, spec.pixels)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the patches."""
        return x.reshape(self.windows).permute(0, 2, 4, 3, 5, 1).reshape(self.rows)


class Transposed(nn.Module):
    """(b, m, d) to (b, d, m) and back."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x with its last two axes swapped."""
        return x.transpose(1, 2)


class PreNormResidual(nn.Module):
    """x + fn(norm(x)); `fn` is a placeholder until the layer is put in."""

    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d)."""
        y: Tensor = self.fn(self.norm(x)) + x
        return y


class Mean(nn.Module):
    """The mean over the tokens: (b, m, d) to (b, d)."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mean."""
        return x.mean(dim=1)


class MlpMixer(nn.Module):
    """Images (b, c, H, W) to logits (b, classes)."""

    def __init__(self, spec: MixerSpec) -> None:
        super().__init__()
        self.stem = nn.Sequential(Patches(spec), nn.Linear(spec.pixels, spec.dim))
        self.mixer_blocks = nn.Sequential(
            *(
                nn.Sequential(
                    PreNormResidual(
                        spec.dim, nn.Sequential(Transposed(), nn.Identity(), Transposed())
                    ),
                    PreNormResidual(spec.dim, nn.Identity()),
                )
                for _ in range(spec.depth)
            )
        )
        self.head = nn.Sequential(nn.LayerNorm(spec.dim), Mean(), nn.Linear(spec.dim, spec.classes))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.head(self.mixer_blocks(self.stem(x)))
        return logits


def _build(tensors: Tensors, given: Config) -> Built:
    activation, notes = read_activation(NAME, given)
    blocks = block_numbers(NAME, tensors, BLOCKS)
    over_tokens = [f"{BLOCKS}{block}.0.fn.1" for block in blocks]
    over_channels = [f"{BLOCKS}{block}.1.fn" for block in blocks]
    layers = {
        path: read_layer(path, f"{path}.", tensors, activation)
        for pair in zip(over_tokens, over_channels, strict=True)
        for path in pair
    }
    dim, pixels = shape_of(NAME, tensors, "stem.1.weight", "d, pixels")
    classes, _ = shape_of(NAME, tensors, "head.2.weight", "classes, d")
    token, channel = layers[over_tokens[0]].spec, layers[over_channels[0]].spec
    grid, patch, channels = _geometry(given, token.dim, pixels)
    config = settle(
        NAME,
        dict(given) | {ACTIVATION: activation},
        {
            "image_size": one_or_pair(grid[0] * patch, grid[1] * patch),
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
        backbone = MlpMixer(spec)
    widths = dict.fromkeys(over_tokens, spec.tokens) | dict.fromkeys(over_channels, dim)
    return Built(
        filled(NAME, backbone, tensors, layers, widths),
        config,
        TensorSpec("input", "float32", ("batch", channels, grid[0] * patch, grid[1] * patch)),
        TensorSpec("output", "float32", ("batch", classes)),
        notes,
    )


FAMILY = backbone_family(
    NAME,
    "MLP-Mixer with muMoE blocks for tokens and channels (james-oldfield/muMoE)",
    OPTIONS,
    _build,
)
