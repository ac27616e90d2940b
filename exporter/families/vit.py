"""`soft-moe-vit`: bwconrad/soft-moe and its forks, a timm ViT with Soft MoE in place of MLPs."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...graphs.layers.soft_moe import SoftMoE, SoftMoEWeights
from ...graphs.layers.spec import SoftMoESpec
from ..model import TensorSpec
from .base import (
    Built,
    Config,
    Family,
    PublishedLayer,
    Shape,
    Tensors,
    check_tensors,
    find_layers,
    phi_sizes,
    prefixed,
    under,
)
from .experts import SeparateExperts, cosine_layer
from .hosts_vit import VisionTransformer
from .vit_config import MOE_KEY, NAME, OPTIONS, configure, moe_prefix

EXPERTS = SeparateExperts("experts.{}.fc1", "experts.{}.fc2")
STACKED = "stacked_expert_fc1_weight"


def _match(tensors: Tensors) -> bool:
    if tensors["phi"].ndim != 3:
        return False
    first = EXPERTS.any_of(tensors, EXPERTS.first, "weight")
    return STACKED in tensors or (first is not None and first.ndim == 2)


def _shapes(tensors: Tensors) -> dict[str, Shape]:
    d, n, p = phi_sizes(NAME, tensors)
    expected: dict[str, Shape] = {"phi": (d, n, p)}
    if "scale" in tensors:
        expected["scale"] = (1,)
    if STACKED not in tensors:
        return expected | EXPERTS.shapes(tensors, n, d)
    h = tensors[STACKED].shape[1] if tensors[STACKED].ndim == 3 else 0
    return expected | {
        STACKED: (n, h, d),
        "stacked_expert_fc1_bias": (n, h),
        "stacked_expert_fc2_weight": (n, d, h),
        "stacked_expert_fc2_bias": (n, d),
    }


def _read(name: str, tensors: Tensors) -> tuple[SoftMoESpec, SoftMoEWeights]:
    _, n, _ = phi_sizes(NAME, tensors)
    if STACKED not in tensors:
        return cosine_layer(name, tensors, EXPERTS.matrices(tensors, n), EXPERTS.hidden(tensors))
    stacked = (
        tensors[STACKED].transpose(1, 2),
        tensors["stacked_expert_fc1_bias"],
        tensors["stacked_expert_fc2_weight"].transpose(1, 2),
        tensors["stacked_expert_fc2_bias"],
    )
    return cosine_layer(name, tensors, stacked, stacked[0].shape[2])


LAYER = PublishedLayer(NAME, "phi", _match, _shapes, _read, leftovers=r"base_expert\.")


def _detect(tensors: Tensors) -> bool:
    host = "patch_embed.proj.weight" in tensors and "pos_embed" in tensors
    return host and any(MOE_KEY.match(p + "phi") for p in find_layers(tensors, LAYER))


def _build(tensors: Tensors, given: Config) -> Built:
    blocks = sorted({int(m[1]) for m in map(MOE_KEY.match, tensors) if m})
    spec, config, notes = configure(tensors, given, blocks)
    with torch.device("meta"):
        host = VisionTransformer(spec)
    expected: dict[str, Shape] = {k: tuple(t.shape) for k, t in host.state_dict().items()}
    used = dict(tensors)
    like = _example_layer(tensors, blocks)
    for block in blocks:
        prefix = moe_prefix(block)
        inside = under(tensors, prefix)
        kept = LAYER.used(inside)
        for key in inside.keys() - kept.keys():
            del used[prefix + key]
        expected |= prefixed(_shapes({**kept, **like}), prefix)
    if len(used) < len(tensors):
        notes += (f"skipped {len(tensors) - len(used)} left-over keys base_expert.*",)
    check_tensors(NAME, used, expected)
    host.fill({key: used[key] for key in host.state_dict()})
    for block in blocks:
        prefix = moe_prefix(block)
        host.place(block, SoftMoE(*LAYER.load(prefix.removesuffix("."), prefix, tensors)))
    width = spec.classes or spec.dim
    return Built(
        host.eval(),
        config,
        TensorSpec("input", "float32", ("batch", spec.channels, *spec.image)),
        TensorSpec(
            "output", "float32", ("batch", width) if spec.pool else ("batch", spec.tokens, width)
        ),
        notes,
    )


def _example_layer(tensors: Tensors, blocks: list[int]) -> dict[str, Tensor]:
    """What all MoE layers of a model share the shapes of: phi, and scale where there is one."""
    for block in blocks:
        prefix = moe_prefix(block)
        if prefix + "phi" in tensors:
            return {
                key: tensors[prefix + key] for key in ("phi", "scale") if prefix + key in tensors
            }
    raise CheckpointError(
        f"not the weights of a {NAME} model: no Soft MoE layer at blocks.*.mlp.phi"
    )


FAMILY = Family(
    name=NAME,
    options=OPTIONS,
    summary="timm Vision Transformer with Soft MoE MLPs (bwconrad/soft-moe and forks)",
    detect=_detect,
    build=_build,
    layer=LAYER,
)
