"""`mumoe-mixer`: the MLP-Mixer of the muMoE paper, with a two-layer muMoE block for every MLP.

It is recognised by `mixer_blocks.{i}.0.fn.1.*` (over the tokens) and `mixer_blocks.{i}.1.fn.*`
(over the channels), which are layers of `mumoe`. Shapes determine how many patches there are and
how many values each has, but not the side length and channels of a patch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import FamilyError
from ..model import TensorSpec
from .base import (
    Config,
    Constructor,
    FamilyModel,
    Question,
    Tensors,
    block_numbers,
    height_width,
    one_or_pair,
    shape_of,
    whole_number,
)
from .mumoe import (
    ACTIVATION,
    ACTIVATION_QUESTION,
    CLASS_NAMES,
    activate,
    backbone_family,
    read_layer,
    with_layers,
)

NAME = "mumoe-mixer"
BLOCKS = "mixer_blocks."
SIZES = ("image_size", "channels", "patch_size", "dim", "depth", "num_classes", "layer")
GEOMETRY = ("image_size", "patch_size", "channels")

CONSTRUCTOR = Constructor(
    family=NAME,
    shapes={
        **dict.fromkeys(SIZES, ...),
        "expansion_factor": 2048,
        "expansion_factor_token": 256,
        "n_experts": 64,
    },
    questions={ACTIVATION: ACTIVATION_QUESTION},
    sizes=SIZES,
)


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """Sizes of the backbone: `grid` has the numbers of patches (down, across), of side `patch`."""

    grid: tuple[int, int]
    patch: int
    channels: int
    dim: int
    depth: int
    classes: int

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def pixels(self) -> int:
        return self.patch * self.patch * self.channels


def _geometry(config: Config, tokens: int, pixels: int) -> dict[str, Any]:
    """Returns the image size, patch size and channels; any one of them determines the others.

    Patches are square, as in the published network; the image is square unless `image_size`
    differs. Raises FamilyError if the given values do not fit the shapes.
    """
    image, patch, channels = (config.get(key) for key in GEOMETRY)
    size = None if image is None else height_width(NAME, "image_size", image)
    if patch is not None:
        patch = whole_number(NAME, "patch_size", patch)
    elif size is not None:
        patch = max(1, math.isqrt(size[0] * size[1] // tokens))
    else:
        patch = max(1, math.isqrt(pixels // whole_number(NAME, "channels", channels)))
    side = math.isqrt(tokens)
    height, width = size or (side * patch, side * patch)
    if (height // patch) * (width // patch) != tokens or pixels % (patch * patch):
        raise FamilyError(
            f"{NAME}: {tokens} patches of {pixels} numbers each do not fit patch_size={patch}"
            + (f" and image_size={height},{width}" if size is not None else ""),
            hint="check patch_size, image_size and channels against the training run",
        )
    sizes = (height // patch * patch, width // patch * patch)
    return {
        "image_size": one_or_pair(*sizes),
        "channels": pixels // (patch * patch),
        "patch_size": patch,
    }


class Patches(nn.Module):
    """Cuts images (b, c, H, W) into patches (b, m, s·s·c), row by row, channels innermost."""

    def __init__(self, spec: MixerSpec) -> None:
        super().__init__()
        down, across = spec.grid
        self.windows = (-1, spec.channels, down, spec.patch, across, spec.patch)
        self.rows = (-1, spec.tokens, spec.pixels)

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(self.windows).permute(0, 2, 4, 3, 5, 1).reshape(self.rows)


class Transposed(nn.Module):
    """Maps (b, m, d) to (b, d, m), and back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class PreNormResidual(nn.Module):
    """Computes x + fn(norm(x)); a muMoE layer replaces the placeholder in `fn`."""

    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fn(self.norm(x)) + x
        return y


class Mean(nn.Module):
    """Averages over the tokens: (b, m, d) to (b, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class MlpMixer(nn.Module):
    """Maps images (b, c, H, W) to logits (b, classes)."""

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
        logits: Tensor = self.head(self.mixer_blocks(self.stem(x)))
        return logits


def _build(tensors: Tensors, settings: Config) -> FamilyModel:
    blocks = block_numbers(NAME, tensors, BLOCKS)
    over_tokens = [f"{BLOCKS}{block}.0.fn.1" for block in blocks]
    over_channels = [f"{BLOCKS}{block}.1.fn" for block in blocks]
    paths = [path for pair in zip(over_tokens, over_channels, strict=True) for path in pair]
    layers = {path: read_layer(f"{path}.", tensors, path) for path in paths}
    dim, pixels = shape_of(NAME, tensors, "stem.1.weight", "d, pixels")
    classes, _ = shape_of(NAME, tensors, "head.2.weight", "classes, d")
    token, channel = layers[over_tokens[0]].spec, layers[over_channels[0]].spec
    has_size = any(settings.get(key) is not None for key in GEOMETRY)
    read = {
        **(_geometry(settings, token.dim, pixels) if has_size else {}),
        "dim": dim,
        "depth": len(blocks),
        "num_classes": classes,
        "expansion_factor": channel.hidden,
        "expansion_factor_token": token.hidden,
        "layer": CLASS_NAMES[token.tensors[0].form],
        "n_experts": token.experts,
    }
    questions = dict(CONSTRUCTOR.questions)
    if not has_size:
        questions["patch_size"] = Question(
            16, f"{pixels} numbers may be a large patch with few channels, or a small one with many"
        )
    config = CONSTRUCTOR.settle(settings, read, questions)
    config |= _geometry(config, token.dim, pixels)
    activate(NAME, layers.values(), config)
    height, width = height_width(NAME, "image_size", config["image_size"])
    patch, channels = config["patch_size"], config["channels"]
    spec = MixerSpec(
        grid=(height // patch, width // patch),
        patch=patch,
        channels=channels,
        dim=dim,
        depth=len(blocks),
        classes=classes,
    )
    with torch.device("meta"):
        backbone = MlpMixer(spec)
    widths = dict.fromkeys(over_tokens, spec.tokens) | dict.fromkeys(over_channels, dim)
    return FamilyModel(
        module=with_layers(NAME, backbone, tensors, layers, widths),
        config=config,
        inputs=(TensorSpec("input", "float32", ("batch", channels, height, width)),),
        outputs=(TensorSpec("output", "float32", ("batch", classes)),),
    )


FAMILY = backbone_family(
    CONSTRUCTOR,
    "MLP-Mixer with muMoE blocks for tokens and channels (james-oldfield/muMoE)",
    _build,
    questions=(ACTIVATION, *GEOMETRY),
)
