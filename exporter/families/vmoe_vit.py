"""The Vision Transformer of google-research/vmoe, and `soft-moe-vmoe-vit`, the one with Soft MoE.

The family with token-routed experts is in a plugin. The parameters are those of Flax: kernels are
[in, out], and those of attention have an axis for the heads. Settings that shapes do not determine
come from the user or from the configuration of the training run (`--config`), whose names the
options have. Images are (b, H, W, c) from -1 to 1, as in the published code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, FamilyError
from ...graphs.layers.base import MoELayer
from ..model import TensorSpec
from . import vmoe
from .base import (
    Config,
    Constructor,
    Family,
    FamilyModel,
    Question,
    Tensors,
    TensorShape,
    block_numbers,
    check_heads,
    check_tensors,
    filled,
    height_width,
    one_or_pair,
    shape_of,
)
from .vit import Mlp, VisionTransformer, ViT, attend

SOFT = "soft-moe-vmoe-vit"
EPS = 1e-6
"""ε of every LayerNorm."""

POSITIONS = "Encoder.posembed_input.pos_embedding"
PROBE = "MapHead.probe"
POOLS = {"token": "token", "gap": "avg", "map": "map", "0": "token"}
"""The values of `classifier` and their names in `ViT.global_pool`: the class token, the mean,
attention and, without a class token, the first token."""


def _block(number: int) -> str:
    return f"Encoder.encoderblock_{number}."


# --- the run's configuration -------------------------------------------------------------------

TRAINING_ONLY = re.compile(
    r".*(dropout|noise|loss|init|rngs|metrics|axis|partition|deterministic|dtype|precision).*"
)
"""Settings that change nothing at inference."""

NAMES = {
    "num_classes": "num_classes",
    "patch_size": "patch_size",
    "hidden_size": "hidden_size",
    "classifier": "classifier",
    "representation_size": "representation_size",
    "image_size": "image_size",
    "encoder.num_layers": "num_layers",
    "encoder.mlp_dim": "mlp_dim",
    "encoder.num_heads": "num_heads",
    "encoder.attention_qk_norm": "attention_qk_norm",
    "encoder.position_emb.name": "position_emb",
    "encoder.moe.layers": "moe_layers",
    "encoder.moe.num_experts": "num_experts",
    "encoder.moe.group_size": "group_size",
    "encoder.moe.router.name": "router",
    "encoder.moe.router.num_slots": "num_slots",
    "encoder.moe.mlp_dim": "moe_mlp_dim",
    "encoder.moe.ensemble_size": "ensemble_size",
    "encoder.moe.router.num_selected_experts": "num_selected_experts",
    "encoder.position_emb.temperature": "temperature",
    **{
        f"encoder.moe.router.dispatcher.{key}": key
        for key in (
            *("capacity_factor", "capacity", "capacity_multiple_of", "capacity_ceil_or_round"),
            "batch_priority",
        )
    },
}
"""Options, by the paths of these settings in the configuration of a run's model."""

MODELS = ("VisionTransformerMoe", "VisionTransformerMoeEnsemble")
DEFAULTS = {
    "classifier": "token",
    "position_emb": "learned",
    "ensemble_size": 1,
    "num_selected_experts": 1,
    "router": "NoisyTopExpertsPerItemRouter",
    "capacity_multiple_of": 4,
}
"""The published code's defaults for missing settings."""

SKIPPED = (
    *("name", "encoder.moe.router.capacity_factor", "encoder.moe.router.dispatcher.name"),
    *("encoder.moe.router.dispatcher.bfloat16", "encoder.position_emb.h", "encoder.position_emb.w"),
)
"""Settings to skip: shapes or other settings determine them, or they change no result."""


def published(family: str, known: Collection[str], config: Config) -> dict[str, Any]:
    """Returns the options for a run's configuration: the complete one, or only its `model`.

    `known` has the options of the family. Settings in another form are returned unchanged. Raises
    FamilyError for an unknown setting, which may change the computation.
    """
    complete = isinstance(config.get("model"), Mapping)
    model = config["model"] if complete else config
    if not isinstance(model.get("encoder"), Mapping):
        return dict(config)
    name = str(model.get("name", MODELS[0])).rpartition(".")[2]
    if name not in MODELS:
        raise FamilyError(
            f"{family}: the configuration is for a {name}",
            hint=f"known models are {' and '.join(MODELS)}",
        )
    options: dict[str, Any] = {}
    for path, value in _flat(model):
        last = path.rpartition(".")[2]
        if path in NAMES:
            if value is not None or NAMES[path] not in ("num_slots", "capacity"):
                options[NAMES[path]] = value
        elif path.endswith("router.deterministic") and value is False:
            raise FamilyError(f"{family}: {path}=False adds noise to the router at inference")
        elif path not in SKIPPED and not TRAINING_ONLY.fullmatch(last):
            raise FamilyError(
                f"{family}: the configuration's {path}={str(value)[:60]} is unknown",
                hint="leave it out if it changes nothing at inference",
            )
    options |= {key: options.get(key) or 0 for key in ("num_classes", "representation_size")}
    return {key: value for key, value in (DEFAULTS | options).items() if key in known}


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Returns nested settings by their paths: `encoder.moe.num_experts`."""
    flat: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", value))
    return flat


# --- sizes from the shapes ---------------------------------------------------------------------


def read_sizes(family: str, tensors: Tensors, layers: Mapping[int, MoELayer]) -> dict[str, Any]:
    """Returns the settings that keys and shapes determine, by their names in a configuration."""
    if not layers:
        raise CheckpointError(f"not the weights of a {family} model: no block has a {family} layer")
    patch_h, patch_w, _, dim = shape_of(family, tensors, "embedding.kernel", "h, w, c, d")
    blocks = block_numbers(family, tensors, "Encoder.encoderblock_")
    _, heads, _ = shape_of(family, tensors, f"{_block(0)}SelfAttention.query.kernel", "d, heads, k")
    first = next(iter(layers.values())).spec
    dense = next((n for n in blocks if n not in layers), None)
    hidden = (
        first.hidden
        if dense is None
        else shape_of(family, tensors, f"{_block(dense)}Mlp.Dense_0.kernel", "d, h")[1]
    )
    if PROBE in tensors:
        hidden = shape_of(family, tensors, "MapHead.Mlp.Dense_0.kernel", "d, h")[1]
    read: dict[str, Any] = {
        "num_classes": tensors["head.bias"].numel() if "head.bias" in tensors else 0,
        "patch_size": one_or_pair(patch_h, patch_w),
        "hidden_size": dim,
        "representation_size": (
            tensors["pre_logits.bias"].numel() if "pre_logits.bias" in tensors else 0
        ),
        "num_layers": len(blocks),
        "mlp_dim": hidden,
        "num_heads": heads,
        "attention_qk_norm": f"{_block(0)}SelfAttention.query_ln.scale" in tensors,
        "moe_layers": list(layers),
        "num_experts": first.experts,
        "moe_mlp_dim": first.hidden,
    }
    if first.kind == "soft-moe":
        read["num_slots"] = first.slots
    if POSITIONS in tensors:
        read["position_emb"] = "learned"
    if "cls" in tensors or PROBE in tensors:
        read["classifier"] = "token" if "cls" in tensors else "map"
    return read


def as_read(settings: Config, read: Config) -> Config:
    """Returns a user's values in the form of those that shapes determine."""
    converted = dict(settings)
    for key in ("image_size", "patch_size"):
        if key in converted:
            converted[key] = one_or_pair(*height_width(SOFT, key, converted[key]))
    for key in ("num_classes", "representation_size"):
        if key in converted and converted[key] is None:
            converted[key] = 0
    if isinstance(converted.get("moe_layers"), int):
        converted["moe_layers"] = [converted["moe_layers"]]
    if isinstance(converted.get("moe_layers"), list | tuple):
        converted["moe_layers"] = sorted(
            converted["moe_layers"], key=lambda n: (n if isinstance(n, int) else 0, str(n))
        )
    if "classifier" in converted:
        converted["classifier"] = str(converted["classifier"])
    return converted


CLASSIFIER = Question(
    "gap", "gap is the mean of all tokens, 0 the first one: the keys are the same for both"
)
POSITION_EMB = Question("sincos2d", "sincos2d or none: neither has parameters")
IMAGE_SIZE = Question(224, "height and width: no parameter depends on them")


def tokens_of_image(tensors: Tensors, read: Config, settings: Config) -> int | None:
    """Returns the number of tokens per image; None if nothing determines it."""
    if POSITIONS in tensors:
        return shape_of(SOFT, tensors, POSITIONS, "1, m, d")[1]
    size = settings.get("group_size")
    return size if isinstance(size, int) and "num_slots" in read else None


def _square_side(tensors: Tensors, read: Config, settings: Config) -> int | None:
    """Returns the number of patches per side of a square image; None if it may not be square."""
    tokens = tokens_of_image(tensors, read, settings)
    patches = 0 if tokens is None else tokens - int("cls" in tensors)
    return math.isqrt(patches) if patches > 0 and math.isqrt(patches) ** 2 == patches else None


# --- names and shapes --------------------------------------------------------------------------

QKV = ("query", "key", "value")

BLOCK_NAMES = {
    "norm1": ("LayerNorm_0",),
    "norm2": ("LayerNorm_1",),
    "attn.qkv": tuple(f"SelfAttention.{part}" for part in QKV),
    "attn.q_norm": ("SelfAttention.query_ln",),
    "attn.k_norm": ("SelfAttention.key_ln",),
    "attn.proj": ("SelfAttention.out",),
    "mlp.fc1": ("Mlp.Dense_0",),
    "mlp.fc2": ("Mlp.Dense_1",),
}

PROBE_ATTENTION = "MapHead.MultiHeadDotProductAttention"

MODULE_NAMES = {
    **{f"blocks.{{}}.{path}": names for path, names in BLOCK_NAMES.items()},
    "patch_embed.proj": ("embedding",),
    "norm": ("Encoder.encoder_norm",),
    "map_head.q": (f"{PROBE_ATTENTION}.query",),
    "map_head.kv": (f"{PROBE_ATTENTION}.key", f"{PROBE_ATTENTION}.value"),
    "map_head.q_norm": (f"{PROBE_ATTENTION}.query_ln",),
    "map_head.k_norm": (f"{PROBE_ATTENTION}.key_ln",),
    "map_head.proj": (f"{PROBE_ATTENTION}.out",),
    "map_head.norm": ("MapHead.LayerNorm",),
    "map_head.mlp.fc1": ("MapHead.Mlp.Dense_0",),
    "map_head.mlp.fc2": ("MapHead.Mlp.Dense_1",),
    "pre_logits": ("pre_logits",),
    "head": ("head",),
}
"""The checkpoint's names for the network's modules; weights with several names are joined."""

TENSOR_NAMES = {"cls_token": "cls", "pos_embed": POSITIONS, "map_head.probe": PROBE}


def _stored_parts(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the checkpoint's keys for a tensor of the network, each with a part of the tensor."""
    if key in TENSOR_NAMES:
        yield TENSOR_NAMES[key], tensor
        return
    path, _, kind = key.rpartition(".")
    block = re.match(r"blocks\.(\d+)\.", path)
    names = MODULE_NAMES[re.sub(r"^blocks\.\d+", "blocks.{}", path)]
    if kind == "weight":
        kind = "scale" if "norm" in path.rpartition(".")[2] else "kernel"
    for name, part in zip(names, tensor.chunk(len(names)), strict=True):
        yield f"{_block(int(block[1])) if block else ''}{name}.{kind}", part


def _stored_shape(key: str, part: Tensor, heads: int) -> TensorShape:
    if part.ndim == 4:
        return tuple(part.permute(2, 3, 1, 0).shape)
    stored = part.T if part.ndim == 2 else part
    module = key.rpartition(".")[0].rpartition(".")[2]
    if module in QKV:
        stored = stored.reshape(*stored.shape[:-1], heads, -1)
    elif module == "out" and part.ndim == 2:
        stored = stored.reshape(heads, -1, stored.shape[-1])
    return tuple(stored.shape)


def _converted(stored: Tensor, part: Tensor) -> Tensor:
    """Returns a tensor of the checkpoint in the shape of `part`; a view if possible."""
    if part.ndim == 4:
        return stored.permute(3, 2, 0, 1)
    return stored.reshape(part.shape[::-1]).T if part.ndim == 2 else stored.reshape(part.shape)


# --- the network -------------------------------------------------------------------------------


class MapHead(nn.Module):
    """Attends from one learned probe to all tokens, then applies an MLP: (b, m, d) to (b, d)."""

    def __init__(self, spec: ViT) -> None:
        super().__init__()
        dim, self.heads = spec.embed_dim, spec.num_heads
        self.probe = nn.Parameter(torch.empty(1, 1, dim))
        self.q, self.kv, self.proj = (
            nn.Linear(dim, dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(dim, dim),
        )
        head = dim // self.heads
        self.q_norm = nn.LayerNorm(head, eps=EPS) if spec.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head, eps=EPS) if spec.qk_norm else nn.Identity()
        self.norm = nn.LayerNorm(dim, eps=EPS)
        self.mlp = Mlp(spec)
        self.split = (-1, spec.tokens, self.heads, head)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.q(self.probe).reshape(1, 1, self.heads, -1).transpose(1, 2))
        k, v = (part.reshape(self.split).transpose(1, 2) for part in self.kv(x).chunk(2, dim=-1))
        # All inputs of the batch have the same query.
        y = attend(q + torch.zeros_like(k[:, :, :1]), self.k_norm(k), v)
        pooled: Tensor = self.proj(y.transpose(1, 2).reshape(-1, 1, x.shape[-1]))
        result: Tensor = pooled + self.mlp(self.norm(pooled))
        return result[:, 0]


class VmoeTransformer(VisionTransformer):
    """Maps images (b, H, W, c) to logits (b, classes).

    An ensemble of M members returns the logits of each member (b, M, classes) or, with `mean`, the
    logarithm of the members' mean probabilities.
    """

    def __init__(
        self, spec: ViT, representation: int, members: int = 1, *, mean: bool = False
    ) -> None:
        super().__init__(spec)
        dim = spec.embed_dim
        self.members, self.mean = members, mean
        self.first_moe = min(spec.moe_blocks)
        self.map_head = MapHead(spec) if spec.global_pool == "map" else None
        self.pre_logits = nn.Linear(dim, representation) if representation else None
        if representation and spec.num_classes:
            self.head = nn.Linear(representation, spec.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.permute(0, 3, 1, 2))
        for number, block in enumerate(self.blocks):
            if number == self.first_moe and self.members > 1:
                # Row b·M + m is member m of input b.
                shape = (-1, self.spec.tokens, self.spec.embed_dim)
                x = (x[:, None] + x.new_zeros(1, self.members, 1, 1)).reshape(shape)
            x = block(x)
        x = self.norm(x)
        if self.map_head is not None:
            x = self.map_head(x)
        else:
            x = x[:, 0] if self.spec.global_pool == "token" else x.mean(dim=1)
        if self.pre_logits is not None:
            x = torch.tanh(self.pre_logits(x))
        logits: Tensor = self.head(x)
        if self.members == 1:
            return logits
        logits = logits.reshape(-1, self.members, logits.shape[-1])
        if self.mean:
            return logits.log_softmax(dim=-1).logsumexp(dim=1) - math.log(self.members)
        return logits


def sincos2d(height: int, width: int, dim: int, temperature: float) -> Tensor:
    """Returns the patches' positions [1, height·width, d]: sine and cosine of x, then of y."""
    if dim % 4 or dim < 8:
        raise FamilyError(f"{SOFT}: sincos2d needs a width that is a multiple of 4, not {dim}")
    frequencies = temperature ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4 - 1))
    y, x = torch.meshgrid(
        torch.arange(height, dtype=torch.float64),
        torch.arange(width, dtype=torch.float64),
        indexing="ij",
    )
    x, y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=1)[None].float()


# --- from a checkpoint to the network ----------------------------------------------------------


def _spec(config: Config, image: tuple[int, int], channels: int) -> ViT:
    dim = config["hidden_size"]
    return ViT(
        moe_layer_index=list(config["moe_layers"]),
        img_size=list(image),
        patch_size=config["patch_size"],
        in_chans=channels,
        num_classes=config["num_classes"],
        global_pool=POOLS[config["classifier"]],
        embed_dim=dim,
        depth=config["num_layers"],
        num_heads=check_heads(SOFT, "num_heads", config["num_heads"], dim),
        mlp_ratio=config["mlp_dim"] / dim,
        qk_norm=config["attention_qk_norm"],
        class_token=config["classifier"] == "token",
        no_embed_class=config["position_emb"] != "learned",
        act_layer="gelu_tanh",
        norm_eps=EPS,
    )


def moe_prefixes(tensors: Tensors, mark: str) -> dict[int, str]:
    """Returns the prefixes of the MoE layers by block, in ascending order."""
    pattern = re.compile(rf"(Encoder\.encoderblock_(\d{{1,9}})\.Moe\.){re.escape(mark)}")
    matches = (pattern.fullmatch(key) for key in tensors)
    return dict(sorted((int(m[2]), m[1]) for m in matches if m))


def settled(
    family: str,
    constructor: Constructor,
    tensors: Tensors,
    settings: Config,
    read: Config,
    questions: Mapping[str, Question] | None = None,
) -> tuple[dict[str, Any], tuple[int, int]]:
    """Returns the configuration and the grid of patches; FamilyError for missing settings."""
    questions = dict(questions or constructor.questions)
    side = _square_side(tensors, read, settings)
    if side is not None:
        del questions["image_size"]
    config = constructor.settle(settings, read, questions)
    if config["classifier"] not in POOLS or (config["classifier"] == "token") != ("cls" in tensors):
        raise FamilyError(
            f"{family}: classifier={config['classifier']} does not fit the checkpoint, which has "
            f"{'a' if 'cls' in tensors else 'no'} class token",
            hint="give token with a class token (cls); otherwise gap, map (MapHead) or 0",
        )
    if config["position_emb"] not in ("learned", "sincos2d", "none"):
        raise FamilyError(
            f"{family}: position_emb={config['position_emb']} is not learned, sincos2d or none"
        )
    patch = height_width(family, "patch_size", config["patch_size"])
    if settings.get("image_size") is not None:
        image = height_width(family, "image_size", settings["image_size"])
    elif side is not None:
        image = side * patch[0], side * patch[1]
    else:
        image = height_width(family, "image_size", config["image_size"])
    config["image_size"] = one_or_pair(*image)
    grid = image[0] // patch[0], image[1] // patch[1]
    if 0 in grid:
        raise FamilyError(f"{family}: image_size={config['image_size']} is smaller than a patch")
    tokens = math.prod(grid) + int("cls" in tensors)
    expected = tokens_of_image(tensors, read, settings)
    if expected is not None and tokens != expected:
        raise FamilyError(
            f"{family}: image_size={image[0]},{image[1]} gives {tokens} tokens, but "
            f"{POSITIONS + ' has' if POSITIONS in tensors else 'group_size is'} {expected}",
            hint="give the size that the model was trained for: --set image_size=224 or 224,192",
        )
    return config, grid


DISPATCHES = ("float32", "bfloat16")
"""The values of `dispatch`, which decides whether tokens and experts' outputs are rounded."""

TEMPERATURE = 10_000.0
"""The default temperature of sincos2d."""

IMAGES = (
    "images are float32 (batch, height, width, channels) from -1 to 1, as in the published code"
)


def rounds(family: str, config: Config) -> bool:
    """Returns whether the layers round to bfloat16; raises FamilyError for an invalid value."""
    if config["dispatch"] not in DISPATCHES:
        raise FamilyError(
            f"{family}: dispatch={config['dispatch']} is neither float32 nor bfloat16"
        )
    return bool(config["dispatch"] == DISPATCHES[1])


def rounding_note(*, rounded: bool) -> str:
    if rounded:
        return (
            "tokens and the experts' outputs are rounded to bfloat16, as in the published code: "
            "values on a rounding boundary may move an output by up to 1e-3 of the largest, and "
            "may change the choice of experts"
        )
    return (
        "the experts' tokens and outputs are float32; the published code may round them to "
        "bfloat16 (as dispatch=bfloat16 does)"
    )


# --- Soft MoE ----------------------------------------------------------------------------------

SHAPES = (
    *("num_classes", "patch_size", "hidden_size", "representation_size", "num_layers", "mlp_dim"),
    *("num_heads", "attention_qk_norm", "moe_layers", "num_experts", "moe_mlp_dim"),
)

SOFT_CONSTRUCTOR = Constructor(
    family=SOFT,
    shapes=dict.fromkeys((*SHAPES, "num_slots"), ...),
    questions={"classifier": CLASSIFIER, "position_emb": POSITION_EMB, "image_size": IMAGE_SIZE},
    free={
        "group_size": None,
        "router": None,
        "temperature": TEMPERATURE,
        "dispatch": DISPATCHES[0],
    },
    write=as_read,
)


def _build_soft(tensors: Tensors, settings: Config) -> FamilyModel:
    prefixes = moe_prefixes(tensors, vmoe.MU)
    layers: dict[int, MoELayer] = {
        number: vmoe.FAMILY.layer.make(prefix, tensors, f"blocks.{number}.mlp")
        for number, prefix in prefixes.items()
    }
    read = read_sizes(SOFT, tensors, layers)
    config, grid = settled(SOFT, SOFT_CONSTRUCTOR, tensors, settings, read)
    router = str(config.pop("router") or "SoftRouter")
    if not router.endswith("SoftRouter"):
        raise FamilyError(
            f"{SOFT}: router={router} was given, but the checkpoint has the mu of a SoftRouter"
        )
    tokens = math.prod(grid) + int("cls" in tensors)
    if config["group_size"] not in (None, tokens):
        raise FamilyError(
            f"{SOFT}: group_size={config['group_size']} is not the number of tokens in an image, "
            f"{tokens}: slots would average several images",
            hint="only models whose groups are single images can be exported",
        )
    rounded = rounds(SOFT, config)
    for layer in layers.values():
        layer.spec = replace(layer.spec, rounded=rounded)  # type: ignore[type-var]
    module, io = network_of(SOFT, tensors, config, grid, layers)
    return FamilyModel(
        module=module,
        config=config,
        inputs=io[:1],
        outputs=io[1:],
        notes=(IMAGES, rounding_note(rounded=rounded)),
        rounded=rounded,
    )


def network_of(
    family: str,
    tensors: Tensors,
    config: Config,
    grid: tuple[int, int],
    layers: Mapping[int, nn.Module],
) -> tuple[nn.Module, tuple[TensorSpec, TensorSpec]]:
    """Returns the network with its weights and layers, and its input and output."""
    channels = shape_of(family, tensors, "embedding.kernel", "h, w, c, d")[2]
    image = height_width(family, "image_size", config["image_size"])
    members = config.get("ensemble_size", 1)
    moe_shapes = {
        key: tuple(tensor.shape)
        for key, tensor in tensors.items()
        if re.match(r"Encoder\.encoderblock_\d+\.Moe\.", key)
    }
    spec = _spec(config, image, channels)
    with torch.device("meta"):
        backbone = VmoeTransformer(
            spec, config["representation_size"], members, mean=config.get("ensemble") == "mean"
        )
    # In the published code the norms of queries and keys have no bias; positions may be computed.
    computed = {
        key: torch.zeros(tensor.shape)
        for key, tensor in backbone.state_dict().items()
        if key.endswith(("q_norm.bias", "k_norm.bias"))
    }
    if config["position_emb"] == "sincos2d":
        computed["pos_embed"] = sincos2d(*grid, config["hidden_size"], config["temperature"])
    elif config["position_emb"] == "none":
        computed["pos_embed"] = torch.zeros(1, math.prod(grid), config["hidden_size"])
    stored = {
        key: list(_stored_parts(key, tensor))
        for key, tensor in backbone.state_dict().items()
        if key not in computed
    }
    expected = {
        name: _stored_shape(name, part, spec.num_heads)
        for parts in stored.values()
        for name, part in parts
    }
    check_tensors(family, tensors, expected | moe_shapes)
    weights = computed
    for key, parts in stored.items():
        converted = [_converted(tensors[name], part) for name, part in parts]
        weights[key] = torch.cat(converted) if len(converted) > 1 else converted[0]
    backbone = filled(backbone, weights, {f"blocks.{n}.mlp": layer for n, layer in layers.items()})
    backbone.set_embedding()
    width = config["num_classes"] or config["representation_size"] or config["hidden_size"]
    scores = (width,) if members == 1 or config["ensemble"] == "mean" else (members, width)
    return backbone, (
        TensorSpec("input", "float32", ("batch", *image, channels)),
        TensorSpec("output", "float32", ("batch", *scores)),
    )


SOFT_FAMILY = Family(
    name=SOFT,
    options=SOFT_CONSTRUCTOR.options,
    summary="Vision Transformer with Soft MoE MLPs, from JAX (google-research/vmoe)",
    detect=lambda tensors: "embedding.kernel" in tensors and bool(moe_prefixes(tensors, vmoe.MU)),
    build=_build_soft,
    layer=vmoe.FAMILY.layer,
    questions=tuple(SOFT_CONSTRUCTOR.questions),
    published=partial(published, SOFT, SOFT_CONSTRUCTOR.options),
)
