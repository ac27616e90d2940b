"""Which Vision Transformer a `soft-moe-vit` checkpoint is: read from its keys and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, cast

from ...errors import CheckpointError, FamilyError
from .base import Config, Tensors, check_heads, check_options, height_width, settle
from .hosts_vit import GlobalPool, ViTSpec

NAME = "soft-moe-vit"
MOE_KEY = re.compile(r"blocks\.(\d+)\.mlp\.(?:phi|scale|experts\.|stacked_expert_|base_expert\.)")

TRAINING_ONLY = (
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate"),
    *("drop_path_rate", "weight_init"),
)
"""Arguments of the published constructor that change nothing at inference."""

OPTIONS = (
    *("num_experts", "slots_per_expert", "moe_layer_index", "img_size", "patch_size", "in_chans"),
    *("num_classes", "global_pool", "embed_dim", "depth", "num_heads", "mlp_ratio"),
    *("moe_mlp_ratio", "qkv_bias", "qk_norm", "init_values", "class_token", "no_embed_class"),
    *("pre_norm", "fc_norm", *TRAINING_ONLY),
)

POOLS = ("token", "avg", "")


def moe_prefix(block: int) -> str:
    """The prefix of the MoE layer's keys in one block."""
    return f"blocks.{block}.mlp."


def configure(
    tensors: Tensors, given: Config, moe_blocks: Sequence[int]
) -> tuple[ViTSpec, dict[str, Any], tuple[str, ...]]:
    """Returns the host's spec, its whole constructor configuration, and notes on what was inferred.

    `moe_blocks` are the blocks that hold a Soft MoE layer. Raises FamilyError for what shapes
    cannot tell and the user did not say, CheckpointError when the host's main tensors are missing.
    """
    if not moe_blocks:
        raise CheckpointError(f"not the weights of a {NAME} model: no Soft MoE at blocks.*.mlp.phi")
    check_options(NAME, given, OPTIONS)
    read = _read_sizes(tensors, moe_blocks)
    given = _as_read(given, read)
    notes: list[str] = []
    image = _image_size(tensors, read, given, notes)
    read["img_size"] = _pair_or_one(image)
    required: dict[str, tuple[Any, str]] = {}
    free: dict[str, Any] = {key: None for key in TRAINING_ONLY if key in given}
    if read["qk_norm"]:
        read["num_heads"] = read["embed_dim"] // _shape(tensors, "blocks.0.attn.q_norm.weight")[0]
    else:
        required["num_heads"] = (12, "any number that divides embed_dim has the same shapes")
    pool = _global_pool(read, given, notes)
    if pool is None:
        required["global_pool"] = ("avg", "the class token or the mean: no key says it")
    else:
        free["global_pool"] = pool
    config = settle(NAME, given, read, required=required, free=free)
    config["num_heads"] = check_heads(NAME, "num_heads", config["num_heads"], config["embed_dim"])
    _check_values(config)
    return _spec(tensors, config, image, moe_blocks), config, tuple(notes)


def _shape(tensors: Tensors, key: str) -> tuple[int, ...]:
    if key not in tensors:
        raise CheckpointError(
            f"not the weights of a {NAME} model: {key} is missing",
            hint="check that the file is complete and that --family is the code that trained it",
        )
    return tuple(tensors[key].shape)


def _read_sizes(tensors: Tensors, moe_blocks: Sequence[int]) -> dict[str, Any]:
    """The constructor's arguments that keys and shapes tell, in its order."""
    patch = _shape(tensors, "patch_embed.proj.weight")
    if len(patch) != 4:
        raise CheckpointError(
            f"patch_embed.proj.weight has shape {list(patch)}, expected [d,c,h,w]"
        )
    dim, channels, *sizes = patch
    indices = [int(m[1]) for m in (re.match(r"blocks\.(\d+)\.", key) for key in tensors) if m]
    depth = 1 + max(indices)
    phis = (tensors.get(moe_prefix(block) + "phi") for block in moe_blocks)
    phi = next((t for t in phis if t is not None and t.ndim == 3), None)
    dense = [block for block in range(depth) if block not in moe_blocks]
    moe_hidden = _moe_hidden(tensors, moe_blocks)
    dense_hidden = _shape(tensors, f"blocks.{dense[0]}.mlp.fc1.weight")[0] if dense else moe_hidden
    embedded = _shape(tensors, "pos_embed")
    if len(embedded) != 3:
        raise CheckpointError(f"pos_embed has shape {list(embedded)}, expected [1, tokens, d]")
    return {
        "num_experts": phi.shape[1] if phi is not None else 0,
        "slots_per_expert": phi.shape[2] if phi is not None else 0,
        "moe_layer_index": _moe_layer_index(moe_blocks, depth),
        "patch_size": _pair_or_one((sizes[0], sizes[1])),
        "in_chans": channels,
        "num_classes": tensors["head.weight"].shape[0] if "head.weight" in tensors else 0,
        "embed_dim": dim,
        "depth": depth,
        "mlp_ratio": dense_hidden / dim,
        "moe_mlp_ratio": moe_hidden / dim,
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in tensors else None,
        "class_token": "cls_token" in tensors,
        "pre_norm": "norm_pre.weight" in tensors,
        "fc_norm": "fc_norm.weight" in tensors,
    }


def _moe_hidden(tensors: Tensors, moe_blocks: Sequence[int]) -> int:
    pattern = re.compile(
        r"blocks\.\d+\.mlp\.(?:experts\.\d+\.fc1\.weight|stacked_expert_fc1_weight)"
    )
    found = (t for key, t in tensors.items() if pattern.fullmatch(key))
    weight = next(found, None)
    if weight is None or weight.ndim < 2:
        raise CheckpointError(
            f"not the weights of a {NAME} model: no experts under {moe_prefix(moe_blocks[0])}"
        )
    return weight.shape[-2]


def _moe_layer_index(moe_blocks: Sequence[int], depth: int) -> int | list[int]:
    """As the constructor takes it: a number where every block from there on is MoE."""
    if list(moe_blocks) == list(range(moe_blocks[0], depth)):
        return moe_blocks[0]
    return list(moe_blocks)


def _as_read(given: Config, read: Config) -> dict[str, Any]:
    """The user's values, written as `read` writes the same thing, so that they can be compared."""
    same = dict(given)
    for key in ("img_size", "patch_size"):
        if given.get(key) is None:
            same.pop(key, None)
        else:
            same[key] = _pair_or_one(height_width(NAME, key, given[key]))
    index = given.get("moe_layer_index")
    if isinstance(index, list | tuple) and all(isinstance(i, int) for i in index):
        same["moe_layer_index"] = _moe_layer_index(sorted(index), read["depth"]) if index else []
    for key in ("mlp_ratio", "moe_mlp_ratio"):
        ratio = given.get(key)
        if ratio is None:  # moe_mlp_ratio=None means mlp_ratio: the shapes say what that was
            same.pop(key, None)
        elif _is_finite(ratio) and int(ratio * read["embed_dim"]) == round(
            read[key] * read["embed_dim"]
        ):
            same[key] = read[key]
    if given.get("fc_norm") is None:
        same.pop("fc_norm", None)
    # The initial value of LayerScale matters only in that there is one.
    if given.get("init_values") and read["init_values"]:
        same["init_values"] = read["init_values"]
    return same


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _pair_or_one(size: tuple[int, ...]) -> int | list[int]:
    return size[0] if len(set(size)) == 1 else list(size)


def _image_size(
    tensors: Tensors, read: dict[str, Any], given: Config, notes: list[str]
) -> tuple[int, int]:
    """(height, width); also settles `no_embed_class`, which decides how many positions there are.

    n positions are a square of patches, or a square and the class token: never both for n > 1.
    """
    patch = read["patch_size"]
    patch_h, patch_w = patch if isinstance(patch, list) else (patch, patch)
    positions = tensors["pos_embed"].shape[1]
    with_class = (positions - 1, False) if read["class_token"] else None
    options = [option for option in (with_class, (positions, True)) if option]
    if "img_size" in given:
        height, width = height_width(NAME, "img_size", given["img_size"])
        patches = (height // patch_h) * (width // patch_w)
        for count, no_embed_class in options:
            if count == patches:
                read["no_embed_class"] = no_embed_class and read["class_token"]
                return height, width
        raise FamilyError(
            f"{NAME}: img_size={height},{width} makes {patches} patches of {patch_h}x{patch_w}, "
            f"but pos_embed holds {positions} positions",
            hint="leave img_size out, or check that this is the right checkpoint",
        )
    for count, no_embed_class in options:
        side = math.isqrt(count)
        if count > 0 and side * side == count:
            read["no_embed_class"] = no_embed_class and read["class_token"]
            height, width = side * patch_h, side * patch_w
            notes.append(f"img_size {height}x{width} read from pos_embed, for a square of patches")
            return height, width
    raise FamilyError(
        f"{NAME}: shapes cannot tell img_size ({positions} positions are no square of patches)",
        hint="say it as height,width: --set img_size=224,192",
    )


def _global_pool(read: Config, given: Config, notes: list[str]) -> str | None:
    """What the keys say of the pooling; None where they leave it open.

    The constructor puts `fc_norm` behind the pooling exactly when that is the mean, unless told
    otherwise; without a class token there is nothing but the mean or no pooling.
    """
    if "global_pool" in given:
        return str(given["global_pool"])
    if "fc_norm" in given:
        return None
    if read["fc_norm"]:
        notes.append("global_pool 'avg' read from the fc_norm keys")
        return "avg"
    if read["class_token"]:
        notes.append("global_pool 'token' read from the norm and cls_token keys")
        return "token"
    return None


def _check_values(config: Config) -> None:
    pool = config["global_pool"]
    if pool not in POOLS:
        raise FamilyError(
            f"{NAME}: global_pool={pool!r} is none of 'token', 'avg' and ''",
            hint="--set global_pool=avg",
        )
    if pool == "token" and not config["class_token"]:
        raise FamilyError(
            f"{NAME}: global_pool='token' was given, but the checkpoint has no cls_token",
            hint="--set global_pool=avg",
        )


def _spec(
    tensors: Tensors, config: Config, image: tuple[int, int], moe_blocks: Sequence[int]
) -> ViTSpec:
    patch = tensors["patch_embed.proj.weight"].shape[2:]
    return ViTSpec(
        image=image,
        patch=(patch[0], patch[1]),
        channels=config["in_chans"],
        classes=config["num_classes"],
        dim=config["embed_dim"],
        depth=config["depth"],
        heads=config["num_heads"],
        hidden=round(config["mlp_ratio"] * config["embed_dim"]),
        moe_blocks=frozenset(moe_blocks),
        pool=cast(GlobalPool, config["global_pool"]),
        class_token=config["class_token"],
        no_embed_class=config["no_embed_class"],
        pre_norm=config["pre_norm"],
        fc_norm=config["fc_norm"],
        qkv_bias=config["qkv_bias"],
        qk_norm=config["qk_norm"],
        layer_scale=config["init_values"] is not None,
    )
