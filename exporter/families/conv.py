"""`soft-moe-conv`: the layer of the Astroformer variant, whose experts are 1x1 convolutions.

Told by `phi` [d, n, p] beside `experts.{i}.fc1.weight` [h, d, 1, 1]. The layer is that of
`soft-moe-vit`; its tokens are the pixels of (b, d, H, W). No key says the activation: ReLU is the
default of timm's ConvMlp, and the Astroformer's configuration makes it GELU.
"""

from __future__ import annotations

from typing import Any

from ...graphs.layers.soft_moe import SoftMoESpec, SoftMoEWeights
from .base import (
    ACT_LAYER,
    Call,
    Config,
    PublishedLayer,
    SeparateExperts,
    Shape,
    Tensors,
    cosine_layer,
    shape_of,
)
from .layer_only import layer_family

NAME = "soft-moe-conv"
EXPERTS = SeparateExperts("experts.{}.fc1", "experts.{}.fc2", kernel=(1, 1))


def _match(tensors: Tensors) -> bool:
    first = EXPERTS.any_of(tensors, EXPERTS.first, "weight")
    return tensors["phi"].ndim == 3 and first is not None and first.ndim == 4


def _shapes(tensors: Tensors) -> dict[str, Shape]:
    d, n, p = shape_of(NAME, tensors, "phi", "d, n, p")
    scale: dict[str, Shape] = {"scale": (1,)} if "scale" in tensors else {}
    return {"phi": (d, n, p), **scale, **EXPERTS.shapes(tensors, n, d)}


def _read(name: str, tensors: Tensors) -> tuple[SoftMoESpec, SoftMoEWeights]:
    n = tensors["phi"].shape[1]
    return cosine_layer(name, tensors, EXPERTS.matrices(tensors, n), EXPERTS.hidden(tensors))


def _config(spec: SoftMoESpec, _: Tensors, __: Config) -> dict[str, Any]:
    return {
        "dim": spec.dim,
        "num_experts": spec.experts,
        "slots_per_expert": spec.slots,
        "hidden": spec.hidden,
    }


LAYER = PublishedLayer(NAME, "phi", _match, _shapes, _read)

FAMILY = layer_family(
    LAYER,
    "one layer on (batch, dim, height, width), experts of 1x1 convolutions (Astroformer variant)",
    _config,
    options=("dim", "num_experts", "slots_per_expert", "hidden"),
    required={"act_layer": ACT_LAYER},
    call=Call(("dim", "num_experts", "hidden"), {"slots_per_expert": 1}),
    pixels=True,
)
