"""`soft-moe-vit` and `soft-moe-conv`: bwconrad/soft-moe and its forks.

`soft-moe-vit` is a timm ViT with Soft MoE in place of MLPs, and is recognised by
`blocks.{l}.mlp.phi` [d, n, p] among timm's names. The experts are separate
(`experts.{i}.fc1.weight` [h, d]) or stacked (`stacked_expert_fc1_weight` [n, h, d]). Keys and
shapes determine the MoE blocks and nearly all of the constructor's arguments.

`soft-moe-conv` is only the layer of the Astroformer variant, whose experts are 1x1 convolutions
(`experts.{i}.fc1.weight` [h, d, 1, 1]) and whose tokens are the pixels of (b, d, H, W). No key
determines its activation: ReLU is the default of timm's ConvMlp, but Astroformer sets GELU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import CheckpointError, FamilyError
from ...graphs.layers.expert import apply_activation
from ...graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from ..model import TensorSpec
from .base import (
    ACT_LAYER,
    Config,
    Constructor,
    ExpertMatrices,
    Family,
    FamilyModel,
    PublishedLayer,
    Question,
    SeparateExperts,
    Tensors,
    TensorShape,
    activation_of,
    block_numbers,
    check_heads,
    check_tensors,
    filled,
    find_layers,
    height_width,
    number_above_zero,
    one_or_pair,
    prefixed,
    shape_of,
    shapes_of,
    soft_moe_layer,
    under,
    unit_phi,
)
from .layer_only import PixelBackbone, layer_family, pixel_io

NAME, CONV_NAME = "soft-moe-vit", "soft-moe-conv"

# --- the layer ---------------------------------------------------------------------------------

STACKED = "stacked_expert_fc1_weight"
COSINE_EPS = 1e-12
"""The eps of F.normalize: a vector is divided by its length, or by this if that is larger."""


EXPERTS = SeparateExperts("experts.{}.fc1", "experts.{}.fc2")


def _layer(family: str, experts: SeparateExperts) -> PublishedLayer[SoftMoE]:
    """Returns the layout of a layer with such separate experts, or with stacked ones."""

    def match(tensors: Tensors) -> bool:
        first = experts.any_of(tensors, experts.first, "weight")
        separate = first is not None and first.ndim == 2 + len(experts.kernel)
        return tensors["phi"].ndim == 3 and (separate or _is_stacked(tensors, experts))

    shapes = partial(_shapes, family, experts)
    return soft_moe_layer(family, "phi", match, shapes, partial(_read, experts), ("base_expert.",))


def _is_stacked(tensors: Tensors, experts: SeparateExperts) -> bool:
    return STACKED in tensors and not experts.kernel


def _shapes(family: str, experts: SeparateExperts, tensors: Tensors) -> dict[str, TensorShape]:
    d, n, p = shape_of(family, tensors, "phi", "d, n, p")
    expected: dict[str, TensorShape] = {"phi": (d, n, p)}
    if "scale" in tensors:
        expected["scale"] = (1,)
    if not _is_stacked(tensors, experts):
        return expected | experts.shapes(tensors, n, d)
    h = tensors[STACKED].shape[1] if tensors[STACKED].ndim == 3 else 0
    return expected | {
        STACKED: (n, h, d),
        "stacked_expert_fc1_bias": (n, h),
        "stacked_expert_fc2_weight": (n, d, h),
        "stacked_expert_fc2_bias": (n, d),
    }


def _read(experts: SeparateExperts, name: str, tensors: Tensors) -> SoftMoE:
    """Returns the layer, which has a scale and normalises x and phi unless normalize=False."""
    phi, scale = tensors["phi"], tensors.get("scale")
    d, n, p = phi.shape
    if _is_stacked(tensors, experts):
        w1, w2 = (tensors[f"stacked_expert_fc{i}_weight"].transpose(1, 2) for i in (1, 2))
        b1, b2 = (tensors[f"stacked_expert_fc{i}_bias"] for i in (1, 2))
        matrices: ExpertMatrices = w1, b1, w2, b2
    else:
        matrices = experts.matrices(tensors, n)
    hidden = matrices[0][0].shape[1]
    spec = SoftMoESpec(name=name, experts=n, slots=p, dim=d, hidden=hidden, out=d)
    if scale is not None:
        spec = replace(spec, norm="l2", norm_eps=COSINE_EPS)
        phi = unit_phi(phi, scale, eps=COSINE_EPS)
    return SoftMoE(spec, SoftMoEWeights(phi, *matrices))


def _activate(family: str, layer: SoftMoE, config: Config) -> tuple[str, ...]:
    activation = activation_of(family, config["act_layer"])
    layer.spec = replace(layer.spec, activation=activation)
    return ()


LAYER = _layer(NAME, EXPERTS)

CONV_SIZES = ("dim", "num_experts", "hidden")

CONV_FAMILY = layer_family(
    _layer(CONV_NAME, replace(EXPERTS, kernel=(1, 1))),
    "one layer on (batch, dim, height, width), experts of 1x1 convolutions (Astroformer variant)",
    Constructor(
        family=CONV_NAME,
        shapes={**dict.fromkeys(CONV_SIZES, ...), "slots_per_expert": 1},
        questions={"act_layer": ACT_LAYER},
        sizes=CONV_SIZES,
    ),
    lambda layer, *_: {
        "dim": layer.spec.dim,
        "num_experts": layer.spec.experts,
        "slots_per_expert": layer.spec.slots,
        "hidden": layer.spec.hidden,
    },
    apply=partial(_activate, CONV_NAME),
    io=pixel_io,
    backbone=PixelBackbone,
)


# --- the configuration -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ViT:
    """The published constructor's arguments that have an effect, with their defaults.

    `norm_eps` and `act_layer` have other names there, or none. The sizes of images and patches are
    one number or (height, width).
    """

    num_experts: int = 128
    slots_per_expert: int = 1
    moe_layer_index: int | list[int] = 6
    img_size: int | list[int] = 224
    patch_size: int | list[int] = 16
    in_chans: int = 3
    num_classes: int = 1000
    global_pool: str = "token"
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    moe_mlp_ratio: float = 4.0
    qkv_bias: bool = True
    qk_norm: bool = False
    init_values: float | None = None
    class_token: bool = True
    no_embed_class: bool = False
    pre_norm: bool = False
    fc_norm: bool | None = None
    act_layer: str = "gelu"
    norm_eps: float = 1e-6

    @property
    def image(self) -> tuple[int, int]:
        return height_width(NAME, "img_size", self.img_size)

    @property
    def patch(self) -> tuple[int, int]:
        return height_width(NAME, "patch_size", self.patch_size)

    @property
    def hidden(self) -> int:
        """The hidden width of a dense block's MLP."""
        return round(self.mlp_ratio * self.embed_dim)

    @property
    def moe_blocks(self) -> Sequence[int]:
        index = self.moe_layer_index
        return range(index, self.depth) if isinstance(index, int) else index

    @property
    def patches(self) -> int:
        return (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1])

    @property
    def tokens(self) -> int:
        """m: the number of patches, plus one for a class token."""
        return self.patches + int(self.class_token)


ARGUMENTS = {field.name: field.default for field in fields(ViT)}
TRAINING_ONLY = (
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate"),
    *("drop_path_rate", "weight_init"),
)
"""Arguments of the published constructor that change nothing at inference."""

NULLABLE = ("img_size", "patch_size", "mlp_ratio", "moe_mlp_ratio", "fc_norm", "norm_layer")
"""Arguments for which None stands for the value from the shapes."""

NORM_LAYERS = ("LayerNorm", "nn.LayerNorm", "torch.nn.LayerNorm")

MOE_KEY = re.compile(r"blocks\.(\d+)\.mlp\.(?:phi|scale|experts\.|stacked_expert_|base_expert\.)")
LEFTOVER = re.compile(r"blocks\.\d+\.mlp\.base_expert\.")


def _mlp(block: int) -> str:
    return f"blocks.{block}.mlp."


def _as_read(settings: Config, read: Config) -> Config:
    """Returns the user's values in the form of `read`, so that both can be compared."""
    given = {k: v for k, v in settings.items() if v is not None or k not in NULLABLE}
    if "input_size" in given:  # the name in the scripts of timm and DeiT
        given.setdefault("img_size", given.pop("input_size"))
    for key in ("img_size", "patch_size"):
        if key in given:
            given[key] = one_or_pair(*height_width(NAME, key, given[key]))
    index = given.get("moe_layer_index")
    if isinstance(index, list | tuple) and all(isinstance(i, int) for i in index):
        given["moe_layer_index"] = _moe_layer_index(sorted(index), read["depth"]) if index else []
    for key in ("mlp_ratio", "moe_mlp_ratio"):
        ratio, dim = given.get(key), read["embed_dim"]
        finite = isinstance(ratio, int | float) and math.isfinite(ratio)
        if finite and int(ratio * dim) == round(read[key] * dim):
            given[key] = read[key]
    # Only the presence of LayerScale matters, not its initial value.
    if given.get("init_values") and read["init_values"]:
        given["init_values"] = read["init_values"]
    # Without an explicit value, fc_norm is only used with the mean.
    if "fc_norm" in settings and settings["fc_norm"] is None and read["fc_norm"]:
        given.setdefault("global_pool", "avg")
    if "norm_layer" in given:
        if given["norm_layer"] not in NORM_LAYERS:
            raise FamilyError(
                f"{NAME}: norm_layer={given['norm_layer']} is unknown: only LayerNorm is supported",
                hint="give the eps of a LayerNorm: --set norm_eps=1e-6",
            )
        del given["norm_layer"]
        given.setdefault("norm_eps", 1e-5)  # the default of the class
    return given


QUESTIONS = {
    "num_heads": Question(12, "any number that divides embed_dim gives the same shapes"),
    "img_size": Question(224, "the same positions fit several heights and widths"),
    "global_pool": Question("token", "token, avg or '': the keys are the same for all"),
    "act_layer": ACT_LAYER,
    "norm_eps": Question(1e-6, "the eps of every LayerNorm; 1e-5 if norm_layer=nn.LayerNorm"),
}

CONSTRUCTOR = Constructor(
    family=NAME,
    shapes={
        **{key: value for key, value in ARGUMENTS.items() if key not in QUESTIONS},
        **dict.fromkeys(("embed_dim", "depth", "fc_norm", "no_embed_class"), ...),
    },
    questions=QUESTIONS,
    free=dict.fromkeys(TRAINING_ONLY),
    aliases=("norm_layer", "input_size"),
    sizes=("img_size", "embed_dim", "depth", "num_heads"),
    write=_as_read,
)


def configure(
    tensors: Tensors, settings: Config, moe_blocks: Sequence[int]
) -> tuple[ViT, dict[str, Any]]:
    """Returns the constructor's arguments that have an effect, and the complete configuration.

    `moe_blocks` are the blocks with a Soft MoE layer. Raises FamilyError for settings that neither
    shapes nor the user determine, CheckpointError if the backbone's main tensors are missing.
    """
    if not moe_blocks:
        raise CheckpointError(f"not the weights of a {NAME} model: no Soft MoE at blocks.*.mlp.phi")
    read = _read_sizes(tensors, moe_blocks)
    config = CONSTRUCTOR.settle(settings, read, _questions(tensors, settings, read))
    config |= {
        "img_size": one_or_pair(*height_width(NAME, "img_size", config["img_size"])),
        "num_heads": check_heads(NAME, "num_heads", config["num_heads"], read["embed_dim"]),
        "norm_eps": number_above_zero(NAME, "norm_eps", config["norm_eps"]),
    }
    spec = ViT(**{key: config[key] for key in ARGUMENTS if key in config})
    spec = replace(spec, no_embed_class=_no_embed_class(tensors, settings, spec))
    _check_pool(spec)
    activation_of(NAME, spec.act_layer)
    training = {key: settings[key] for key in TRAINING_ONLY if key in settings}
    return spec, asdict(spec) | training


def _questions(tensors: Tensors, settings: Config, read: Config) -> dict[str, Question]:
    """Returns the settings that no key or shape determines, with defaults that fit this model."""
    positions = tensors["pos_embed"].shape[1]
    side = math.isqrt(positions)  # rounded down: valid with and without a class token
    square = side**2 in (positions, positions - int(read["class_token"]))
    patch = height_width(NAME, "patch_size", read["patch_size"])
    # By default the constructor places the norm after the pooling only if it is the mean.
    token = read["class_token"] and (not read["fc_norm"] or bool(settings.get("fc_norm")))
    pool = "token" if token else "avg"
    return QUESTIONS | {
        "img_size": Question(
            one_or_pair(side * patch[0], side * patch[1]) if square else 224,
            f"{positions} positions fit several heights and widths",
            fits=square,
        ),
        "global_pool": replace(QUESTIONS["global_pool"], value=pool, fits=token),
    }


def _read_sizes(tensors: Tensors, moe_blocks: Sequence[int]) -> dict[str, Any]:
    """Returns the constructor's arguments that keys and shapes determine, in its order."""
    dim, channels, *patch = shape_of(NAME, tensors, "patch_embed.proj.weight", "d, c, h, w")
    shape_of(NAME, tensors, "pos_embed", "1, m, d")
    depth = len(block_numbers(NAME, tensors, "blocks."))
    phis = (tensors.get(_mlp(block) + "phi") for block in moe_blocks)
    experts, slots = next((t.shape[1:] for t in phis if t is not None and t.ndim == 3), (0, 0))
    hidden = moe_hidden = _moe_hidden(tensors, moe_blocks[0])
    dense = next((block for block in range(depth) if block not in moe_blocks), None)
    if dense is not None:
        hidden = shape_of(NAME, tensors, f"{_mlp(dense)}fc1.weight", "h, d")[0]
    heads = {}
    if "blocks.0.attn.q_norm.weight" in tensors:
        heads["num_heads"] = (
            dim // shape_of(NAME, tensors, "blocks.0.attn.q_norm.weight", "head")[0]
        )
    return {
        "num_experts": experts,
        "slots_per_expert": slots,
        "moe_layer_index": _moe_layer_index(moe_blocks, depth),
        "patch_size": one_or_pair(*patch),
        "in_chans": channels,
        "num_classes": tensors["head.weight"].shape[0] if "head.weight" in tensors else 0,
        "embed_dim": dim,
        "depth": depth,
        **heads,
        "mlp_ratio": hidden / dim,
        "moe_mlp_ratio": moe_hidden / dim,
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "qk_norm": bool(heads),
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
    """Returns the constructor's form: a number if all blocks from this one on are MoE."""
    if list(moe_blocks) == list(range(moe_blocks[0], depth)):
        return moe_blocks[0]
    return list(moe_blocks)


def _no_embed_class(tensors: Tensors, settings: Config, spec: ViT) -> bool:
    """Whether the class token has no position; raises FamilyError if the image does not fit.

    The positions belong to the patches, or to the patches and the class token.
    """
    positions = tensors["pos_embed"].shape[1]
    patches_only = positions == spec.patches
    if not patches_only and not (spec.class_token and positions == spec.tokens):
        (height, width), (patch_h, patch_w) = spec.image, spec.patch
        raise FamilyError(
            f"{NAME}: img_size={height},{width} gives {spec.patches} patches of "
            f"{patch_h}x{patch_w}, but pos_embed has {positions} positions",
            hint="give the size that the model was trained for: --set img_size=224 or 224,192",
        )
    given = settings.get("no_embed_class")
    if given is not None and spec.class_token and bool(given) != patches_only:
        raise FamilyError(
            f"{NAME}: no_embed_class={given} was given, but pos_embed has {positions} positions "
            f"for {spec.patches} patches",
            hint="leave no_embed_class out, or check that this is the right checkpoint",
        )
    return patches_only if spec.class_token else bool(given)


def _check_pool(spec: ViT) -> None:
    if spec.global_pool not in ("token", "avg", ""):
        raise FamilyError(
            f"{NAME}: global_pool={spec.global_pool!r} is not one of 'token', 'avg' and ''",
            hint="--set global_pool=avg",
        )
    if spec.global_pool == "token" and not spec.class_token:
        raise FamilyError(
            f"{NAME}: global_pool='token' was given, but the checkpoint has no cls_token",
            hint="--set global_pool=avg",
        )


# --- the network -------------------------------------------------------------------------------


class PatchEmbed(nn.Module):
    """Maps images (b, c, H, W) to one token per patch (b, patches, d)."""

    def __init__(self, spec: ViT) -> None:
        super().__init__()
        self.shape = (-1, spec.embed_dim, spec.patches)
        self.proj = nn.Conv2d(
            spec.in_chans, spec.embed_dim, spec.patch, stride=spec.patch, bias=not spec.pre_norm
        )

    def forward(self, x: Tensor) -> Tensor:
        # A constant shape with -1 for the batch exports as one Reshape; flatten() adds Shape nodes.
        patches: Tensor = self.proj(x)
        return patches.reshape(self.shape).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the softmax attention of q, k and v, which are all (b, heads, m, head)."""
    if torch.compiler.is_exporting():
        # The ONNX translation of the fused call adds Shape nodes to transpose k; these operations
        # become four nodes.
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        return scores.softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """Multi-head self-attention on (b, m, d)."""

    def __init__(self, spec: ViT) -> None:
        super().__init__()
        self.dim = spec.embed_dim
        self.split = (-1, spec.tokens, spec.num_heads, spec.embed_dim // spec.num_heads)
        self.join = (-1, spec.tokens, spec.embed_dim)
        self.qkv = nn.Linear(spec.embed_dim, 3 * spec.embed_dim, bias=spec.qkv_bias)
        head = spec.embed_dim // spec.num_heads
        self.q_norm = nn.LayerNorm(head, eps=spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head, eps=spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.proj = nn.Linear(spec.embed_dim, spec.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.reshape(self.split).transpose(1, 2) for part in self.qkv(x).split(self.dim, dim=-1)
        )
        y = attend(self.q_norm(q), self.k_norm(k), v)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(self.join))
        return out


class Mlp(nn.Module):
    """A dense block's MLP: linear, activation, linear."""

    def __init__(self, spec: ViT) -> None:
        super().__init__()
        self.activation = partial(apply_activation, activation=activation_of(NAME, spec.act_layer))
        self.fc1 = nn.Linear(spec.embed_dim, spec.hidden)
        self.fc2 = nn.Linear(spec.hidden, spec.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.activation(self.fc1(x)))
        return y


class LayerScale(nn.Module):
    """Multiplies each of the d channels by a learned factor."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ViTBlock(nn.Module):
    """Pre-norm residual block; in MoE blocks, `mlp` is a placeholder for the MoE layer."""

    def __init__(self, spec: ViT, *, moe: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(spec.embed_dim, eps=spec.norm_eps)
        self.attn = Attention(spec)
        self.ls1 = LayerScale(spec.embed_dim) if spec.init_values is not None else nn.Identity()
        self.norm2 = nn.LayerNorm(spec.embed_dim, eps=spec.norm_eps)
        self.mlp: nn.Module = nn.Identity() if moe else Mlp(spec)
        self.ls2 = LayerScale(spec.embed_dim) if spec.init_values is not None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        y: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return y


class VisionTransformer(nn.Module):
    """Maps images (b, c, H, W) to logits (b, classes), or (b, m, classes) with pool `''`.

    It is built on the meta device, with placeholders in its MoE blocks. Call `set_embedding` after
    loading the weights.
    """

    embedding: Tensor

    def __init__(self, spec: ViT) -> None:
        super().__init__()
        self.spec = spec
        dim = spec.embed_dim
        self.patch_embed = PatchEmbed(spec)
        embedded = spec.patches if spec.no_embed_class else spec.tokens
        self.cls_token = (
            nn.Parameter(torch.empty(1, 1, spec.embed_dim)) if spec.class_token else None
        )
        self.pos_embed = nn.Parameter(torch.empty(1, embedded, spec.embed_dim))
        self.norm_pre = nn.LayerNorm(dim, eps=spec.norm_eps) if spec.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            ViTBlock(spec, moe=index in spec.moe_blocks) for index in range(spec.depth)
        )
        self.norm = nn.Identity() if spec.fc_norm else nn.LayerNorm(dim, eps=spec.norm_eps)
        self.fc_norm = nn.LayerNorm(dim, eps=spec.norm_eps) if spec.fc_norm else nn.Identity()
        self.head = (
            nn.Linear(spec.embed_dim, spec.num_classes) if spec.num_classes else nn.Identity()
        )
        self.register_buffer(
            "embedding", torch.empty(1, spec.tokens, spec.embed_dim), persistent=False
        )

    @torch.no_grad()
    def set_embedding(self) -> None:
        """Adds the class token to the positions [1, m, d], which `embed` adds to padded patches."""
        position: Tensor = self.pos_embed
        token = self.cls_token
        if token is not None and self.spec.no_embed_class:
            position = torch.cat((token, position), dim=1)
        elif token is not None:
            position = torch.cat((token + position[:, :1], position[:, 1:]), dim=1)
        self.embedding = position

    def embed(self, x: Tensor) -> Tensor:
        """Maps images to tokens with their positions (b, m, d)."""
        x = self.patch_embed(x)
        if self.cls_token is not None:
            # A row of zeros in front, to which the class token is added with the positions, is the
            # same as concatenation, but does not expand the token to the batch size.
            x = F.pad(x, (0, 0, 1, 0))
        return x + self.embedding

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_pre(self.embed(x))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.spec.global_pool == "token":
            x = x[:, 0]
        elif self.spec.global_pool == "avg":
            x = x[:, int(self.spec.class_token) :].mean(dim=1)
        logits: Tensor = self.head(self.fc_norm(x))
        return logits


# --- from a checkpoint to the network ----------------------------------------------------------


def _detect(tensors: Tensors) -> bool:
    backbone = "patch_embed.proj.weight" in tensors and "pos_embed" in tensors
    return backbone and any(MOE_KEY.match(p + "phi") for p in find_layers(tensors, LAYER))


def _build(tensors: Tensors, settings: Config) -> FamilyModel:
    depth = block_numbers(NAME, tensors, "blocks.")
    numbers = {m[1] for m in map(MOE_KEY.match, tensors) if m}
    blocks = [block for block in depth if str(block) in numbers]
    spec, config = configure(tensors, settings, blocks)
    with torch.device("meta"):
        backbone = VisionTransformer(spec)
    expected = shapes_of(backbone)
    used = {key: tensor for key, tensor in tensors.items() if not LEFTOVER.match(key)}
    shared = _example_layer(tensors, blocks)
    for block in blocks:
        local = {**under(used, _mlp(block)), **shared}
        expected |= prefixed(_shapes(NAME, EXPERTS, local), _mlp(block))
    check_tensors(NAME, used, expected)
    layers = {}
    for block in blocks:
        path = _mlp(block).removesuffix(".")
        layers[path] = LAYER.make(_mlp(block), tensors, path)
        _activate(NAME, layers[path], config)
    backbone = filled(backbone, used, layers)
    backbone.set_embedding()
    width = spec.num_classes or spec.embed_dim
    leftovers = len(tensors) - len(used)
    scores = ("batch", width) if spec.global_pool else ("batch", spec.tokens, width)
    return FamilyModel(
        module=backbone,
        config=config,
        inputs=(TensorSpec("input", "float32", ("batch", spec.in_chans, *spec.image)),),
        outputs=(TensorSpec("output", "float32", scores),),
        notes=(f"skipped {leftovers} leftover keys base_expert.*",) if leftovers else (),
    )


def _example_layer(tensors: Tensors, blocks: list[int]) -> dict[str, Tensor]:
    """Returns the tensors that all MoE layers of a model share: phi, and scale if there is one."""
    for block in blocks:
        shared = {k: t for k, t in under(tensors, _mlp(block)).items() if k in ("phi", "scale")}
        if "phi" in shared:
            return shared
    raise CheckpointError(
        f"not the weights of a {NAME} model: no Soft MoE layer at blocks.*.mlp.phi"
    )


FAMILY = Family(
    name=NAME,
    options=CONSTRUCTOR.options,
    summary="timm Vision Transformer with Soft MoE MLPs (bwconrad/soft-moe and forks)",
    detect=_detect,
    build=_build,
    layer=LAYER,
    questions=(*QUESTIONS, "input_size"),
)
