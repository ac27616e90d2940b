"""`soft-moe-vit`: bwconrad/soft-moe and its forks, a timm ViT with Soft MoE in place of MLPs.

Told by `blocks.{l}.mlp.phi` [d, n, p] under the names of a timm Vision Transformer. The experts are
separate (`experts.{i}.fc1.weight` [h, d]) or stacked (`stacked_expert_fc1_weight` [n, h, d]). The
keys say which blocks are MoE blocks and nearly all of the constructor's arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import CheckpointError, FamilyError
from ...graphs.layers.soft_moe import Activation, SoftMoE, SoftMoESpec, SoftMoEWeights
from ..model import TensorSpec
from .base import (
    ACT_LAYER,
    REST,
    Built,
    Call,
    Config,
    Family,
    PublishedLayer,
    Question,
    SeparateExperts,
    Shape,
    Tensors,
    activation_of,
    block_numbers,
    check_heads,
    check_options,
    check_tensors,
    cosine_layer,
    find_layers,
    height_width,
    number_above_zero,
    one_or_pair,
    prefixed,
    settle,
    shape_of,
    under,
)

NAME = "soft-moe-vit"
GlobalPool = Literal["token", "avg", ""]
POOLS = ("token", "avg", "")

TRAINING_ONLY = (
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate"),
    *("drop_path_rate", "weight_init"),
)
"""Arguments of the published constructor that change nothing at inference."""

OPTIONS = (
    *("num_experts", "slots_per_expert", "moe_layer_index", "img_size", "patch_size", "in_chans"),
    *("num_classes", "global_pool", "embed_dim", "depth", "num_heads", "mlp_ratio"),
    *("moe_mlp_ratio", "qkv_bias", "qk_norm", "init_values", "class_token", "no_embed_class"),
    *("pre_norm", "fc_norm", "act_layer", "norm_eps", "norm_layer", "input_size", REST),
    *TRAINING_ONLY,
)
ASKED = ("num_heads", "img_size", "input_size", "global_pool", "act_layer", "norm_eps")

CALL = Call(
    named=("img_size", "embed_dim", "depth", "num_heads"),
    defaults={
        "num_experts": 128,
        "slots_per_expert": 1,
        "moe_layer_index": 6,
        "patch_size": 16,
        "in_chans": 3,
        "num_classes": 1000,
        "mlp_ratio": 4.0,
        "moe_mlp_ratio": 4.0,
        "qkv_bias": True,
        "qk_norm": False,
        "init_values": None,
        "class_token": True,
        "pre_norm": False,
    },
)

NORM_LAYERS = ("LayerNorm", "nn.LayerNorm", "torch.nn.LayerNorm")

SWITCHES = ("class_token", "no_embed_class", "pre_norm", "fc_norm", "qkv_bias", "qk_norm")

MOE_KEY = re.compile(r"blocks\.(\d+)\.mlp\.(?:phi|scale|experts\.|stacked_expert_|base_expert\.)")


def _mlp(block: int) -> str:
    return f"blocks.{block}.mlp."


# --- the layer ---------------------------------------------------------------------------------

EXPERTS = SeparateExperts("experts.{}.fc1", "experts.{}.fc2")
STACKED = "stacked_expert_fc1_weight"


def _match(tensors: Tensors) -> bool:
    if tensors["phi"].ndim != 3:
        return False
    first = EXPERTS.any_of(tensors, EXPERTS.first, "weight")
    return STACKED in tensors or (first is not None and first.ndim == 2)


def _shapes(tensors: Tensors) -> dict[str, Shape]:
    d, n, p = shape_of(NAME, tensors, "phi", "d, n, p")
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
    if STACKED not in tensors:
        n = tensors["phi"].shape[1]
        return cosine_layer(name, tensors, EXPERTS.matrices(tensors, n), EXPERTS.hidden(tensors))
    stacked = (
        tensors[STACKED].transpose(1, 2),
        tensors["stacked_expert_fc1_bias"],
        tensors["stacked_expert_fc2_weight"].transpose(1, 2),
        tensors["stacked_expert_fc2_bias"],
    )
    return cosine_layer(name, tensors, stacked, stacked[0].shape[2])


LAYER = PublishedLayer(NAME, "phi", _match, _shapes, _read, leftovers=r"base_expert\.")


# --- the configuration -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ViTSpec:
    """Sizes and options of the backbone; `moe_blocks` are the blocks whose MLP is a Soft MoE layer.

    `image` and `patch` are (height, width). `hidden` is the width inside a dense block's MLP.
    """

    image: tuple[int, int]
    patch: tuple[int, int]
    channels: int
    classes: int
    dim: int
    depth: int
    heads: int
    hidden: int
    moe_blocks: frozenset[int]
    pool: GlobalPool = "token"
    class_token: bool = True
    no_embed_class: bool = False
    pre_norm: bool = False
    fc_norm: bool = False
    qkv_bias: bool = True
    qk_norm: bool = False
    layer_scale: bool = False
    activation: Activation = "gelu"
    norm_eps: float = 1e-6

    @property
    def patches(self) -> int:
        """Number of patches of one image."""
        return (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1])

    @property
    def tokens(self) -> int:
        """m: patches, and the class token where there is one."""
        return self.patches + int(self.class_token)


def configure(
    tensors: Tensors, given: Config, moe_blocks: Sequence[int]
) -> tuple[ViTSpec, dict[str, Any]]:
    """Returns the backbone's spec and its constructor configuration.

    `moe_blocks` are the blocks that hold a Soft MoE layer. Raises FamilyError for what shapes
    cannot tell and the user did not say, CheckpointError when the backbone's main tensors are
    missing.
    """
    if not moe_blocks:
        raise CheckpointError(f"not the weights of a {NAME} model: no Soft MoE at blocks.*.mlp.phi")
    check_options(NAME, given, OPTIONS)
    read = _read_sizes(tensors, moe_blocks)
    given = _as_read(given, read)
    required = _questions(tensors, given, read)
    settled = settle(
        NAME,
        given,
        read,
        required=required,
        free={key: None for key in ("no_embed_class", *TRAINING_ONLY) if key in given},
        call=CALL,
    )
    image = height_width(NAME, "img_size", settled["img_size"])
    config = {
        **settled,
        "img_size": one_or_pair(*image),
        "num_heads": check_heads(NAME, "num_heads", settled["num_heads"], read["embed_dim"]),
        "norm_eps": number_above_zero(NAME, "norm_eps", settled["norm_eps"]),
        "no_embed_class": _no_embed_class(tensors, settled, image),
    }
    _check_pool(config)
    spec = ViTSpec(
        image=image,
        patch=height_width(NAME, "patch_size", config["patch_size"]),
        channels=config["in_chans"],
        classes=config["num_classes"],
        dim=config["embed_dim"],
        depth=config["depth"],
        heads=config["num_heads"],
        hidden=round(config["mlp_ratio"] * config["embed_dim"]),
        moe_blocks=frozenset(moe_blocks),
        pool=cast(GlobalPool, config["global_pool"]),
        layer_scale=config["init_values"] is not None,
        activation=activation_of(NAME, config["act_layer"]),
        norm_eps=config["norm_eps"],
        **{key: config[key] for key in SWITCHES},
    )
    return spec, config


def _questions(tensors: Tensors, given: Config, read: dict[str, Any]) -> dict[str, Question]:
    """What no key and no shape tells."""
    positions = tensors["pos_embed"].shape[1]
    side = math.isqrt(positions)  # rounded down, that of the patches with or without a class token
    square = side**2 in (positions, positions - int(read["class_token"]))
    patch = height_width(NAME, "patch_size", read["patch_size"])
    token = read["class_token"] and (not read["fc_norm"] or bool(given.get("fc_norm")))
    questions = {
        "num_heads": Question(12, "any number that divides embed_dim has the same shapes"),
        "img_size": Question(
            one_or_pair(side * patch[0], side * patch[1]) if square else 224,
            f"{positions} positions are those of several heights and widths",
            fits=square,
        ),
        # The constructor has the norm behind the pooling for the mean alone, unless it is told.
        "global_pool": Question(
            "token" if token else "avg", "token, avg or '': the keys are the same", fits=token
        ),
        "act_layer": ACT_LAYER,
        "norm_eps": Question(1e-6, "that of every LayerNorm; 1e-5 where norm_layer=nn.LayerNorm"),
    }
    if read["qk_norm"]:
        head = shape_of(NAME, tensors, "blocks.0.attn.q_norm.weight", "head")[0]
        read["num_heads"] = read["embed_dim"] // head
        del questions["num_heads"]
    return questions


def _read_sizes(tensors: Tensors, moe_blocks: Sequence[int]) -> dict[str, Any]:
    """The constructor's arguments that keys and shapes tell, in its order."""
    dim, channels, *patch = shape_of(NAME, tensors, "patch_embed.proj.weight", "d, c, h, w")
    shape_of(NAME, tensors, "pos_embed", "1, m, d")
    depth = len(block_numbers(NAME, tensors, "blocks."))
    phis = (tensors.get(_mlp(block) + "phi") for block in moe_blocks)
    phi = next((t for t in phis if t is not None and t.ndim == 3), None)
    moe_hidden = _moe_hidden(tensors, moe_blocks[0])
    dense = next((block for block in range(depth) if block not in moe_blocks), None)
    hidden = (
        moe_hidden
        if dense is None
        else shape_of(NAME, tensors, f"{_mlp(dense)}fc1.weight", "h, d")[0]
    )
    return {
        "num_experts": phi.shape[1] if phi is not None else 0,
        "slots_per_expert": phi.shape[2] if phi is not None else 0,
        "moe_layer_index": _moe_layer_index(moe_blocks, depth),
        "patch_size": one_or_pair(*patch),
        "in_chans": channels,
        "num_classes": tensors["head.weight"].shape[0] if "head.weight" in tensors else 0,
        "embed_dim": dim,
        "depth": depth,
        "mlp_ratio": hidden / dim,
        "moe_mlp_ratio": moe_hidden / dim,
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in tensors else None,
        "class_token": "cls_token" in tensors,
        "pre_norm": "norm_pre.weight" in tensors,
        "fc_norm": "fc_norm.weight" in tensors,
    }


def _moe_hidden(tensors: Tensors, first_block: int) -> int:
    key = re.compile(r"blocks\.\d+\.mlp\.(?:experts\.\d+\.fc1\.weight|stacked_expert_fc1_weight)")
    weight = next((t for name, t in tensors.items() if key.fullmatch(name)), None)
    if weight is None or weight.ndim < 2:
        raise CheckpointError(
            f"not the weights of a {NAME} model: no experts under {_mlp(first_block)}"
        )
    return weight.shape[-2]


def _moe_layer_index(moe_blocks: Sequence[int], depth: int) -> int | list[int]:
    """As the constructor takes it: a number where every block from there on is MoE."""
    if list(moe_blocks) == list(range(moe_blocks[0], depth)):
        return moe_blocks[0]
    return list(moe_blocks)


def _as_read(given: Config, read: Config) -> dict[str, Any]:
    """The user's values, written as `read` writes the same thing, so that they can be compared."""
    # None is what shapes said: moe_mlp_ratio=None means mlp_ratio.
    silent = ("img_size", "patch_size", "mlp_ratio", "moe_mlp_ratio", "fc_norm", "norm_layer")
    same = {k: v for k, v in given.items() if v is not None or k not in silent}
    if "input_size" in same:  # what the scripts of timm and DeiT call it
        same.setdefault("img_size", same.pop("input_size"))
    for key in ("img_size", "patch_size"):
        if key in same:
            same[key] = one_or_pair(*height_width(NAME, key, same[key]))
    index = same.get("moe_layer_index")
    if isinstance(index, list | tuple) and all(isinstance(i, int) for i in index):
        same["moe_layer_index"] = _moe_layer_index(sorted(index), read["depth"]) if index else []
    for key in ("mlp_ratio", "moe_mlp_ratio"):
        if _width(same.get(key), read["embed_dim"]) == round(read[key] * read["embed_dim"]):
            same[key] = read[key]
    # The initial value of LayerScale matters only in that there is one.
    if same.get("init_values") and read["init_values"]:
        same["init_values"] = read["init_values"]
    # Without a value of its own, fc_norm is there for the mean alone.
    if "fc_norm" in given and given["fc_norm"] is None and read["fc_norm"]:
        same.setdefault("global_pool", "avg")
    if "norm_layer" in same:
        if same["norm_layer"] not in NORM_LAYERS:
            raise FamilyError(
                f"{NAME}: norm_layer={same['norm_layer']} is not LayerNorm, the only one known",
                hint="say a LayerNorm's eps: --set norm_eps=1e-6",
            )
        del same["norm_layer"]
        same.setdefault("norm_eps", 1e-5)  # that of the class without arguments
    return same


def _width(ratio: Any, dim: int) -> int | None:
    finite = isinstance(ratio, int | float) and math.isfinite(ratio)
    return int(ratio * dim) if finite else None


def _no_embed_class(tensors: Tensors, config: Config, image: tuple[int, int]) -> bool:
    """Whether the class token has no position; raises FamilyError where the image does not fit.

    n positions are those of the patches, or of the patches and the class token.
    """
    patch_h, patch_w = height_width(NAME, "patch_size", config["patch_size"])
    patches = (image[0] // patch_h) * (image[1] // patch_w)
    positions = tensors["pos_embed"].shape[1]
    without = positions == patches
    if not without and not (config["class_token"] and positions == patches + 1):
        raise FamilyError(
            f"{NAME}: img_size={image[0]},{image[1]} makes {patches} patches of "
            f"{patch_h}x{patch_w}, but pos_embed holds {positions} positions",
            hint="give the size that the model was trained for: --set img_size=224 or 224,192",
        )
    given = config.get("no_embed_class")
    if given is not None and config["class_token"] and bool(given) != without:
        raise FamilyError(
            f"{NAME}: no_embed_class={given} was given, but pos_embed holds {positions} positions "
            f"for {patches} patches",
            hint="leave no_embed_class out, or check that this is the right checkpoint",
        )
    return without if config["class_token"] else bool(given)


def _check_pool(config: Config) -> None:
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


# --- the network -------------------------------------------------------------------------------


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class PatchEmbed(nn.Module):
    """Images (b, c, H, W) to one token per patch (b, patches, d)."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.shape = (-1, spec.dim, spec.patches)
        self.proj = nn.Conv2d(
            spec.channels, spec.dim, spec.patch, stride=spec.patch, bias=not spec.pre_norm
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the patch tokens, row by row."""
        # A constant shape with -1 for the batch exports as one Reshape; flatten() would measure.
        patches: Tensor = self.proj(x)
        return patches.reshape(self.shape).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of q, k, v, all (b, heads, m, head)."""
    if torch.compiler.is_exporting():
        # The ONNX translation of the fused call measures every shape to transpose k; these four
        # operations become four nodes.
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        return scores.softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """Multi-head self-attention over (b, m, d)."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.dim = spec.dim
        self.split = (-1, spec.tokens, spec.heads, spec.dim // spec.heads)
        self.join = (-1, spec.tokens, spec.dim)
        self.qkv = nn.Linear(spec.dim, 3 * spec.dim, bias=spec.qkv_bias)
        head = spec.dim // spec.heads
        self.q_norm = nn.LayerNorm(head, eps=spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head, eps=spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.proj = nn.Linear(spec.dim, spec.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d)."""
        q, k, v = (
            part.reshape(self.split).transpose(1, 2) for part in self.qkv(x).split(self.dim, dim=-1)
        )
        y = attend(self.q_norm(q), self.k_norm(k), v)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(self.join))
        return out


class Mlp(nn.Module):
    """A dense block's MLP: linear, activation, linear."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.fc1 = nn.Linear(spec.dim, spec.hidden)
        self.fc2 = nn.Linear(spec.hidden, spec.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d)."""
        y: Tensor = self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))
        return y


class LayerScale(nn.Module):
    """Multiplies each of the d channels by a learned factor."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d)."""
        return x * self.gamma


class Block(nn.Module):
    """Pre-norm residual block; `mlp` is dense here and replaced in the MoE blocks."""

    def __init__(self, spec: ViTSpec, *, moe: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(spec.dim, eps=spec.norm_eps)
        self.attn = Attention(spec)
        self.ls1 = LayerScale(spec.dim) if spec.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(spec.dim, eps=spec.norm_eps)
        self.mlp: nn.Module = nn.Identity() if moe else Mlp(spec)
        self.ls2 = LayerScale(spec.dim) if spec.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d)."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        y: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return y


class VisionTransformer(nn.Module):
    """Images (b, c, H, W) to logits (b, classes); to (b, m, classes) with pool `''`.

    Built on the meta device and given its weights by `fill`; its MoE blocks hold placeholders.
    """

    embedding: Tensor

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.spec = spec
        norm = spec.dim
        self.patch_embed = PatchEmbed(spec)
        embedded = spec.patches if spec.no_embed_class else spec.tokens
        self.cls_token = nn.Parameter(torch.empty(1, 1, spec.dim)) if spec.class_token else None
        self.pos_embed = nn.Parameter(torch.empty(1, embedded, spec.dim))
        self.norm_pre = nn.LayerNorm(norm, eps=spec.norm_eps) if spec.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            Block(spec, moe=index in spec.moe_blocks) for index in range(spec.depth)
        )
        self.norm = nn.Identity() if spec.fc_norm else nn.LayerNorm(norm, eps=spec.norm_eps)
        self.fc_norm = nn.LayerNorm(norm, eps=spec.norm_eps) if spec.fc_norm else nn.Identity()
        self.head = nn.Linear(spec.dim, spec.classes) if spec.classes else nn.Identity()
        self.register_buffer("embedding", torch.empty(1, spec.tokens, spec.dim), persistent=False)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Takes the tensors of the backbone's own parameters as they are, without a copy."""
        self.load_state_dict(tensors, assign=True)
        with torch.no_grad():
            self.embedding = self._embedding()
        self.requires_grad_(False)

    def _embedding(self) -> Tensor:
        """What is added to the padded patches, [1, m, d]: positions, and the class token's row."""
        position = self.pos_embed
        if self.cls_token is None:
            return position
        if self.spec.no_embed_class:
            return torch.cat((self.cls_token, position), dim=1)
        return torch.cat((self.cls_token + position[:, :1], position[:, 1:]), dim=1)

    def embed(self, x: Tensor) -> Tensor:
        """Images to tokens with their positions, (b, m, d)."""
        x = self.patch_embed(x)
        if self.cls_token is not None:
            # A row of zeros in front, to which the class token is added with the positions: the
            # same sum as concatenating it, without expanding it to a batch size to be measured.
            x = F.pad(x, (0, 0, 1, 0))
        return x + self.embedding

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (b, c, H, W) to logits."""
        x = self.norm_pre(self.embed(x))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.spec.pool == "token":
            x = x[:, 0]
        elif self.spec.pool == "avg":
            x = x[:, int(self.spec.class_token) :].mean(dim=1)
        logits: Tensor = self.head(self.fc_norm(x))
        return logits


# --- from a checkpoint to the network ----------------------------------------------------------


def _detect(tensors: Tensors) -> bool:
    backbone = "patch_embed.proj.weight" in tensors and "pos_embed" in tensors
    return backbone and any(MOE_KEY.match(p + "phi") for p in find_layers(tensors, LAYER))


def _build(tensors: Tensors, given: Config) -> Built:
    depth = block_numbers(NAME, tensors, "blocks.")
    found = {m[1] for m in map(MOE_KEY.match, tensors) if m}
    blocks = [block for block in depth if str(block) in found]
    spec, config = configure(tensors, given, blocks)
    notes: tuple[str, ...] = ()
    with torch.device("meta"):
        backbone = VisionTransformer(spec)
    expected: dict[str, Shape] = {k: tuple(t.shape) for k, t in backbone.state_dict().items()}
    used = dict(tensors)
    like = _example_layer(tensors, blocks)
    for block in blocks:
        inside = under(tensors, _mlp(block))
        local = LAYER.used(inside)
        for key in inside.keys() - local.keys():
            del used[_mlp(block) + key]
        expected |= prefixed(_shapes({**local, **like}), _mlp(block))
    if len(used) < len(tensors):
        notes += (f"skipped {len(tensors) - len(used)} left-over keys base_expert.*",)
    check_tensors(NAME, used, expected)
    backbone.fill({key: used[key] for key in backbone.state_dict()})
    for block in blocks:
        path = _mlp(block).removesuffix(".")
        layer, weights = LAYER.load(path, _mlp(block), tensors)
        layer = replace(layer, activation=spec.activation)
        backbone.set_submodule(path, SoftMoE(layer, weights))
    width = spec.classes or spec.dim
    return Built(
        backbone.eval(),
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
        found = {k: t for k, t in under(tensors, _mlp(block)).items() if k in ("phi", "scale")}
        if "phi" in found:
            return found
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
    asked=ASKED,
)
