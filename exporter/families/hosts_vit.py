"""The Vision Transformer that holds Soft MoE layers in place of some MLPs.

Parameter names and numerics are those of timm's VisionTransformer, so that a state dict saved there
loads here. Sizes: `b` batch, `m` tokens (patches and the class token), `d` width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GlobalPool = Literal["token", "avg", ""]

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class ViTSpec:
    """Sizes and options of the host; `moe_blocks` are the blocks whose MLP is a Soft MoE layer.

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

    @property
    def patches(self) -> int:
        """Number of patches of one image."""
        return (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1])

    @property
    def tokens(self) -> int:
        """m: patches, and the class token where there is one."""
        return self.patches + int(self.class_token)


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
        self.q_norm = nn.LayerNorm(head, eps=NORM_EPS) if spec.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head, eps=NORM_EPS) if spec.qk_norm else nn.Identity()
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
    """A dense block's MLP: linear, exact GELU, linear."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d)."""
        y: Tensor = self.fc2(F.gelu(self.fc1(x)))
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
        self.norm1 = nn.LayerNorm(spec.dim, eps=NORM_EPS)
        self.attn = Attention(spec)
        self.ls1 = LayerScale(spec.dim) if spec.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(spec.dim, eps=NORM_EPS)
        self.mlp: nn.Module = nn.Identity() if moe else Mlp(spec.dim, spec.hidden)
        self.ls2 = LayerScale(spec.dim) if spec.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d)."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        y: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return y


class VisionTransformer(nn.Module):
    """Images (b, c, H, W) to logits (b, classes); to (b, m, classes) with pool `''`.

    Built on the meta device and given its weights by `fill`; its MoE blocks hold placeholders until
    `place` puts their layers in.
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
        self.norm_pre = nn.LayerNorm(norm, eps=NORM_EPS) if spec.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            Block(spec, moe=index in spec.moe_blocks) for index in range(spec.depth)
        )
        self.norm = nn.Identity() if spec.fc_norm else nn.LayerNorm(norm, eps=NORM_EPS)
        self.fc_norm = nn.LayerNorm(norm, eps=NORM_EPS) if spec.fc_norm else nn.Identity()
        self.head = nn.Linear(spec.dim, spec.classes) if spec.classes else nn.Identity()
        self.register_buffer("embedding", torch.empty(1, spec.tokens, spec.dim), persistent=False)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Takes the tensors of the host's own parameters as they are, without a copy."""
        self.load_state_dict(tensors, assign=True)
        with torch.no_grad():
            self.embedding = self._embedding()
        self.requires_grad_(False)

    def place(self, block: int, layer: nn.Module) -> None:
        """Puts a layer in place of the MLP of one block."""
        self.blocks[block].mlp = layer

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
