"""Small random state dicts in the layouts of the published codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]

VIT: dict[str, Any] = {"num_heads": 3, "rest": "default"}
"""What the user of `vit_state` says that no shape tells."""


def random_state(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: 1 + 0.5 * torch.randn(shape, generator=generator)
        if key.endswith(("gamma", "norm.weight", "norm1.weight", "norm2.weight"))
        else torch.randn(shape, generator=generator) * 0.5
        for key, shape in shapes.items()
    }


def vit_layer_shapes(
    prefix: str, *, d: int, n: int, p: int, h: int, normalised: bool = True
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}phi": (d, n, p)}
    if normalised:
        shapes[f"{prefix}scale"] = (1,)
    for i in range(n):
        shapes |= {
            f"{prefix}experts.{i}.fc1.weight": (h, d),
            f"{prefix}experts.{i}.fc1.bias": (h,),
            f"{prefix}experts.{i}.fc2.weight": (d, h),
            f"{prefix}experts.{i}.fc2.bias": (d,),
        }
    return shapes


def vit_state(
    *,
    grid: tuple[int, int] = (3, 3),
    patch: tuple[int, int] = (4, 4),
    channels: int = 3,
    d: int = 12,
    heads: int = 3,
    depth: int = 2,
    h: int = 20,
    moe: tuple[int, ...] = (1,),
    n: int = 4,
    p: int = 2,
    moe_h: int = 16,
    classes: int = 5,
    class_token: bool = True,
    no_embed_class: bool = False,
    pre_norm: bool = False,
    fc_norm: bool = False,
    qkv_bias: bool = True,
    qk_norm: bool = False,
    layer_scale: bool = False,
    seed: int = 0,
) -> State:
    """A ViT with Soft MoE layers in the blocks `moe`, under timm's names."""
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (d, channels, *patch)}
    norms: list[str] = []
    if not pre_norm:
        shapes["patch_embed.proj.bias"] = (d,)
    else:
        norms.append("norm_pre")
    if class_token:
        shapes["cls_token"] = (1, 1, d)
    extra = int(class_token and not no_embed_class)
    shapes["pos_embed"] = (1, grid[0] * grid[1] + extra, d)
    norms.append("fc_norm" if fc_norm else "norm")
    for i in range(depth):
        block = f"blocks.{i}."
        norms += [f"{block}norm1", f"{block}norm2"]
        shapes[f"{block}attn.qkv.weight"] = (3 * d, d)
        if qkv_bias:
            shapes[f"{block}attn.qkv.bias"] = (3 * d,)
        shapes |= {f"{block}attn.proj.weight": (d, d), f"{block}attn.proj.bias": (d,)}
        if qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"{block}attn.{name}.weight"] = (d // heads,)
                shapes[f"{block}attn.{name}.bias"] = (d // heads,)
        if layer_scale:
            shapes |= {f"{block}ls1.gamma": (d,), f"{block}ls2.gamma": (d,)}
        if i in moe:
            shapes |= vit_layer_shapes(f"{block}mlp.", d=d, n=n, p=p, h=moe_h)
        else:
            shapes |= {f"{block}mlp.fc1.weight": (h, d), f"{block}mlp.fc1.bias": (h,)}
            shapes |= {f"{block}mlp.fc2.weight": (d, h), f"{block}mlp.fc2.bias": (d,)}
    for norm in norms:
        shapes |= {f"{norm}.weight": (d,), f"{norm}.bias": (d,)}
    if classes:
        shapes |= {"head.weight": (classes, d), "head.bias": (classes,)}
    return random_state(shapes, seed)


def lucidrains_state(prefix: str = "", *, n: int = 3, p: int = 2, d: int = 8, h: int = 16) -> State:
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}slot_embeds": (n, p, d),
        f"{prefix}norm.gamma": (d,),
        f"{prefix}slot_norm.gamma": (d,),
    }
    for i in range(n):
        expert = f"{prefix}experts.experts.{i}"
        shapes |= {f"{expert}.0.weight": (h, d), f"{expert}.0.bias": (h,)}
        shapes |= {f"{expert}.3.weight": (d, h), f"{expert}.3.bias": (d,)}
    return random_state(shapes)


def vmoe_state(*, n: int = 4, p: int = 2, d: int = 8, h: int = 16) -> State:
    """With the slashes of a flattened JAX tree."""
    return random_state(
        {
            "Router/mu": (d, n, p),
            "Router/scale": (),
            "Mlp/Dense_0/kernel": (n, d, h),
            "Mlp/Dense_0/bias": (n, h),
            "Mlp/Dense_1/kernel": (n, h, d),
            "Mlp/Dense_1/bias": (n, d),
        }
    )
