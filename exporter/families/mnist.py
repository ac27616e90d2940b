"""`soft-moe-mnist`: the network of the MNIST experiments of "Beyond parameter count".

Told by `phi` [d, n] beside `decoder.1.weight`. An image is cut into square patches, which are the
tokens; one Soft MoE layer with ReLU experts without biases, and a linear map of all tokens. The
normalised variant has a `normalization_scale_param`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from ..model import TensorSpec
from .base import (
    Built,
    Config,
    Family,
    PublishedLayer,
    SeparateExperts,
    Shape,
    Tensors,
    check_tensors,
    settle,
    shape_of,
    unit_phi,
)

NAME = "soft-moe-mnist"
EPS = 1e-6
SCALE = "normalization_scale_param"
DECODER = "decoder.1.weight"
EXPERTS = SeparateExperts("experts.{}.1", "experts.{}.3")


def _match(tensors: Tensors) -> bool:
    return tensors["phi"].ndim == 2 and EXPERTS.any_of(tensors, EXPERTS.first, "weight") is not None


def _shapes(tensors: Tensors) -> dict[str, Shape]:
    d, n = shape_of(NAME, tensors, "phi", "d, n")
    scale: dict[str, Shape] = {SCALE: (1,)} if SCALE in tensors else {}
    return {"phi": (d, n), **scale, **EXPERTS.shapes(tensors, n, d)}


def _read(name: str, tensors: Tensors) -> tuple[SoftMoESpec, SoftMoEWeights]:
    d, n = tensors["phi"].shape
    phi, scale = tensors["phi"].unsqueeze(2), tensors.get(SCALE)
    spec = SoftMoESpec(
        name,
        experts=n,
        slots=1,
        dim=d,
        hidden=EXPERTS.hidden(tensors),
        out=d,
        activation="relu",
        norm="none" if scale is None else "l2-plus",
        norm_eps=0.0 if scale is None else EPS,
    )
    if scale is not None:
        phi = unit_phi(phi, scale, eps=EPS, kind="l2-plus")
    return spec, SoftMoEWeights(phi, *EXPERTS.matrices(tensors, n))


LAYER = PublishedLayer(NAME, "phi", _match, _shapes, _read)


class PatchClassifier(nn.Module):
    """Images (b, 1, g·s, g·s) to logits (b, classes), with g × g patches of s × s pixels."""

    def __init__(self, grid: int, patch: int, classes: int) -> None:
        super().__init__()
        self.windows = (-1, grid, patch, grid, patch)
        self.tokens = (-1, grid * grid, patch * patch)
        self.features = (-1, grid * grid * patch * patch)
        self.layer: nn.Module = nn.Identity()
        self.decoder = nn.Linear(self.features[1], classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        x = x.reshape(self.windows).transpose(2, 3).reshape(self.tokens)
        x = self.layer(x).reshape(self.features)
        logits: Tensor = self.decoder(x)
        return logits


def _build(tensors: Tensors, given: Config) -> Built:
    layer = {key: t for key, t in tensors.items() if key != DECODER}
    d, _ = shape_of(NAME, layer, "phi", "d, n")
    decoder = tensors.get(DECODER)
    classes, features = decoder.shape if decoder is not None and decoder.ndim == 2 else (10, 4 * d)
    patch, grid = math.isqrt(d), math.isqrt(features // d)
    check_tensors(NAME, tensors, {DECODER: (classes, grid * grid * d), **_shapes(layer)})
    if patch * patch != d or grid == 0:
        raise CheckpointError(f"{NAME}: phi is for tokens of width {d}, no square patch of pixels")
    spec, weights = LAYER.load("layer", "", layer)
    read = {
        "num_experts": spec.experts,
        "patch": patch,
        "hidden": spec.hidden,
        "normalize": spec.norm != "none",
    }
    config = settle(NAME, given, read)
    with torch.device("meta"):
        backbone = PatchClassifier(grid, patch, classes)
    backbone.load_state_dict({"decoder.weight": tensors[DECODER]}, assign=True)
    backbone.layer = SoftMoE(spec, weights)
    backbone.requires_grad_(False)
    return Built(
        backbone.eval(),
        config,
        TensorSpec("input", "float32", ("batch", 1, grid * patch, grid * patch)),
        TensorSpec("output", "float32", ("batch", classes)),
    )


FAMILY = Family(
    name=NAME,
    options=("num_experts", "patch", "hidden", "normalize"),
    summary="patches of one image, a Soft MoE layer, a linear head (Beyond parameter count, MNIST)",
    detect=lambda tensors: DECODER in tensors and "phi" in tensors and _match(tensors),
    build=_build,
    layer=LAYER,
)
