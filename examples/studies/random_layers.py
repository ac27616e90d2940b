"""MoE layers with random weights of a plausible scale, models of one layer, and inputs for them."""

from __future__ import annotations

import numpy as np
import torch
from moexport.bench.data import LabelledData
from moexport.exporter.families.layer_only import TokenBackbone
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.graphs.layers.base import MoELayer, MoESpec
from moexport.graphs.layers.mumoe import MuMoE, MuMoESpec, MuMoEWeights
from moexport.graphs.layers.soft_moe import SoftMoESpec, SoftMoEWeights
from torch import Tensor, nn


def soft_moe_spec(
    name: str, *, experts: int, dim: int, hidden: int, slots: int = 1, **options: object
) -> SoftMoESpec:
    """Returns a layer of the ViT family: L2-normalised tokens, exact GELU; `options` change it."""
    return SoftMoESpec(
        *(name, experts, slots, dim, hidden, dim),
        norm="l2",
        norm_eps=1e-12,
        **options,  # type: ignore[arg-type]
    )


def soft_moe_weights(spec: SoftMoESpec, seed: int = 0) -> SoftMoEWeights:
    """Returns stacked experts, with each matrix laid out as in `nn.Linear`."""
    random = torch.Generator().manual_seed(seed)
    n, p, d, h = spec.experts, spec.slots, spec.dim, spec.hidden
    return SoftMoEWeights(
        # The scale of phi spreads the routing over the experts.
        phi=nn.functional.normalize(_random(random, d, n, p), dim=0) * 10.0,
        w1=_random(random, n, h, d, scale=d**-0.5).transpose(1, 2),
        b1=_random(random, n, h, scale=0.1),
        w2=_random(random, n, d, h, scale=h**-0.5).transpose(1, 2),
        b2=_random(random, n, d, scale=0.1),
    )


def one_by_one(weights: SoftMoEWeights) -> SoftMoEWeights:
    """Returns the same weights as one matrix per expert, in the same storage."""
    assert isinstance(weights.w1, Tensor) and isinstance(weights.w2, Tensor)
    return SoftMoEWeights(
        *(weights.phi, weights.w1.unbind(), weights.b1, weights.w2.unbind(), weights.b2)
    )


def random_mumoe(spec: MuMoESpec) -> MuMoE:
    """Returns a layer whose logits spread over a few units, so that entmax keeps a few experts."""
    random = torch.Generator().manual_seed(0)
    levels = spec.levels if spec.norm == "bn" else ()
    weights = MuMoEWeights(
        tuple(_random(random, spec.dim, n, scale=2 * spec.dim**-0.5) for n in spec.levels),
        tuple(tuple(_random(random, *s, scale=0.05) for s in t.shapes) for t in spec.tensors),
        tuple(_random(random, n, scale=0.1) for n in levels),
        tuple(torch.ones(n) for n in levels),
    )
    return MuMoE(spec, weights)


def layer_model(name: str, layer: MoELayer, tokens: int) -> Model:
    """Returns a model of one layer; its number of tokens is a constant, as in a ViT."""
    return tokens_model(name, TokenBackbone(layer), layer.spec, tokens)


def tokens_model(name: str, module: nn.Module, spec: MoESpec, tokens: int) -> Model:
    """Returns a module from tokens [b, m, d] to [b, m, o] as a model."""
    return Model(
        module.eval(),
        "mumoe" if spec.kind == "mumoe" else "soft-moe-vit",
        {},
        Source(name, ()),
        (TensorSpec("input", "float32", ("batch", tokens, spec.dim)),),
        (TensorSpec("output", "float32", ("batch", tokens, spec.out)),),
    )


def random_tokens(samples: int, tokens: int, dim: int) -> LabelledData:
    """Returns inputs [samples, m, d] around different directions, so that routing differs."""
    random = np.random.default_rng(1)
    centres = random.standard_normal((samples, 1, dim), np.float32)
    noise = random.standard_normal((samples, tokens, dim), np.float32)
    return LabelledData(centres + noise, None)


def _random(random: torch.Generator, *size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*size, generator=random).mul_(scale)
