"""`soft-moe-fkodom`: the layer of fkodom/soft-mixture-of-experts, one linear map per expert.

It is recognised by `phi` [d, n, p] and `experts.weight` [n, d, o]. Nothing is normalised. Version
0.1 wrote the same keys but took the dispatch softmax over the batch, so users must name the
version.
"""

from __future__ import annotations

import re
from typing import Any

from ...errors import FamilyError
from ...graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from .base import Config, Constructor, Question, Tensors, TensorShape, shape_of, soft_moe_layer
from .layer_only import layer_family

NAME = "soft-moe-fkodom"


def _match(tensors: Tensors) -> bool:
    weight = tensors.get("experts.weight")
    return tensors["phi"].ndim == 3 and weight is not None and weight.ndim == 3


def _shapes(tensors: Tensors) -> dict[str, TensorShape]:
    d, n, p = shape_of(NAME, tensors, "phi", "d, n, p")
    weight = tensors.get("experts.weight")
    o = weight.shape[-1] if weight is not None else d
    bias: dict[str, TensorShape] = {"experts.bias": (n, o)} if "experts.bias" in tensors else {}
    return {"phi": (d, n, p), "experts.weight": (n, d, o), **bias}


def _read(name: str, tensors: Tensors) -> SoftMoE:
    phi, w1 = tensors["phi"], tensors["experts.weight"]
    d, n, p = phi.shape
    spec = SoftMoESpec(
        name=name, experts=n, slots=p, dim=d, hidden=0, out=w1.shape[2], expert="linear"
    )
    return SoftMoE(
        spec, SoftMoEWeights(phi=phi, w1=w1, b1=tensors.get("experts.bias"), w2=None, b2=None)
    )


def _config(layer: SoftMoE, tensors: Tensors, _: Config) -> dict[str, Any]:
    return {
        "in_features": layer.spec.dim,
        "out_features": layer.spec.out,
        "num_experts": layer.spec.experts,
        "slots_per_expert": layer.spec.slots,
        "bias": "experts.bias" in tensors,
    }


def _check(_: SoftMoE, config: Config) -> tuple[str, ...]:
    version = str(config["version"])
    parts = re.match(r"v?(\d+)\.(\d+)", version)
    if parts is None:
        raise FamilyError(f"{NAME}: version={version} is not a version", hint="--set version=0.2.0")
    if (int(parts[1]), int(parts[2])) < (0, 2):
        raise FamilyError(
            f"{NAME}: version {version} took the dispatch softmax over the batch, so that an "
            "image's output depends on its batch; such a model cannot be exported",
            hint="train it again with version 0.2.0 or later",
        )
    return ()


FAMILY = layer_family(
    soft_moe_layer(NAME, "phi", _match, _shapes, _read),
    "one layer, one linear map per expert, on (batch, tokens, dim) (soft-mixture-of-experts)",
    Constructor(
        family=NAME,
        shapes=dict.fromkeys(
            ("in_features", "out_features", "num_experts", "slots_per_expert", "bias"), ...
        ),
        questions={
            "version": Question(
                "0.2.0",
                "the package's version in training: 0.1 saved the same keys but "
                "computes differently",
                fits=False,
            )
        },
    ),
    _config,
    apply=_check,
)
