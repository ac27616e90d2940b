"""`soft-moe-mnist`: the network of the MNIST experiments of "Beyond parameter count".

It is recognised by `phi` [d, n·p] and `decoder.1.weight`. An image is cut into square patches, the
tokens; one Soft MoE layer with ReLU experts and a linear map of all tokens follow. The released
code has no biases; those in a file are used as in PyTorch's linear layers. The normalised variant
has a `normalization_scale_param`. Flipping pixels (`flip_pixels`) is a part of preparing the input,
so images must have the form with which the network was trained.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from ..model import TensorSpec
from .base import (
    Config,
    Constructor,
    Family,
    FamilyModel,
    SeparateExperts,
    Tensors,
    TensorShape,
    check_tensors,
    filled,
    shape_of,
    soft_moe_layer,
    unit_phi,
)

NAME = "soft-moe-mnist"
EPS = 1e-6
SCALE = "normalization_scale_param"
DECODER = "decoder.1.weight"
BIAS = "decoder.1.bias"
EXPERTS = SeparateExperts("experts.{}.1", "experts.{}.3")


def _match(tensors: Tensors) -> bool:
    return tensors["phi"].ndim == 2 and EXPERTS.any_of(tensors, EXPERTS.first, "weight") is not None


def _expert_count(tensors: Tensors) -> int:
    """Counts the experts by their weights, because phi has a column per slot, not per expert."""
    numbers = {
        key.split(".")[1] for key in tensors if re.fullmatch(r"experts\.\d+\.\d\.weight", key)
    }
    return len(numbers)


def _shapes(tensors: Tensors) -> dict[str, TensorShape]:
    d, slots = shape_of(NAME, tensors, "phi", "d, n·p")
    n = _expert_count(tensors)
    if n == 0 or slots % n:
        raise CheckpointError(
            f"not the weights of a {NAME} model: phi has {slots} columns, which is not a "
            f"multiple of the {n} experts"
        )
    scale: dict[str, TensorShape] = {SCALE: (1,)} if SCALE in tensors else {}
    return {"phi": (d, slots), **scale, **EXPERTS.shapes(tensors, n, d, EXPERTS.out(tensors, d))}


def _read(name: str, tensors: Tensors) -> SoftMoE:
    d, slots = tensors["phi"].shape
    n = _expert_count(tensors)
    # An expert's slots are adjacent columns.
    phi, scale = tensors["phi"].reshape(d, n, slots // n), tensors.get(SCALE)
    spec = SoftMoESpec(
        name,
        experts=n,
        slots=slots // n,
        dim=d,
        hidden=EXPERTS.hidden(tensors),
        out=EXPERTS.out(tensors, d),
        activation="relu",
        norm="none" if scale is None else "l2-plus",
        norm_eps=0.0 if scale is None else EPS,
    )
    if scale is not None:
        phi = unit_phi(phi, scale, eps=EPS, kind="l2-plus")
    return SoftMoE(spec, SoftMoEWeights(phi, *EXPERTS.matrices(tensors, n)))


CONSTRUCTOR = Constructor(
    family=NAME,
    shapes=dict.fromkeys(
        ("num_experts", "num_slots", "patch", "hidden", "expert_out_dim", "normalize"), ...
    ),
)

LAYER = soft_moe_layer(NAME, "phi", _match, _shapes, _read)


class PatchClassifier(nn.Module):
    """Images (b, 1, g·s, g·s) to logits (b, classes), with g × g patches of s × s pixels.

    `out` is the width of the layer's output per patch.
    """

    def __init__(self, grid: int, patch: int, out: int, classes: int, *, bias: bool) -> None:
        super().__init__()
        self.windows = (-1, grid, patch, grid, patch)
        self.tokens = (-1, grid * grid, patch * patch)
        self.features = (-1, grid * grid * out)
        self.layer: nn.Module = nn.Identity()
        self.decoder = nn.Linear(self.features[1], classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(self.windows).transpose(2, 3).reshape(self.tokens)
        x = self.layer(x).reshape(self.features)
        logits: Tensor = self.decoder(x)
        return logits


def _build(tensors: Tensors, settings: Config) -> FamilyModel:
    local = {key: t for key, t in tensors.items() if key not in (DECODER, BIAS)}
    d, _ = shape_of(NAME, local, "phi", "d, n·p")
    layer = LAYER.make("", local, "layer")
    spec = layer.spec
    classes, features = shape_of(NAME, tensors, DECODER, "classes, m·o")
    patch, grid = math.isqrt(d), math.isqrt(features // spec.out)
    if patch * patch != d:
        raise CheckpointError(
            f"{NAME}: phi is for tokens of width {d}, which is not a square number of pixels"
        )
    decoder = {key: tensors[key] for key in (DECODER, BIAS) if key in tensors}
    shapes: dict[str, TensorShape] = {DECODER: (classes, grid * grid * spec.out), BIAS: (classes,)}
    check_tensors(NAME, decoder, {key: shapes[key] for key in decoder})
    read = {
        "num_experts": spec.experts,
        "num_slots": spec.slots,
        "patch": patch,
        "hidden": spec.hidden,
        "expert_out_dim": spec.out,
        "normalize": spec.norm != "none",
    }
    config = CONSTRUCTOR.settle(settings, read)
    with torch.device("meta"):
        backbone = PatchClassifier(grid, patch, spec.out, classes, bias=BIAS in decoder)
    return FamilyModel(
        module=filled(
            backbone,
            {key.replace(".1.", "."): tensor for key, tensor in decoder.items()},
            {"layer": layer},
        ),
        config=config,
        inputs=(TensorSpec("input", "float32", ("batch", 1, grid * patch, grid * patch)),),
        outputs=(TensorSpec("output", "float32", ("batch", classes)),),
    )


FAMILY = Family(
    name=NAME,
    options=CONSTRUCTOR.options,
    summary="patches of one image, a Soft MoE layer, a linear head (Beyond parameter count, MNIST)",
    detect=lambda tensors: DECODER in tensors and "phi" in tensors and _match(tensors),
    build=_build,
    layer=LAYER,
)
