"""GPT-2 as nanoGPT writes it, with muMoE blocks in place of the MLPs.

Parameter names and numerics are those of the published code; the logits are given at every
position. Sizes: `b` batch, `m` tokens, `d` width, `v` vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class GPT2Spec:
    """Sizes and options of the host."""

    block_size: int
    vocabulary: int
    depth: int
    heads: int
    dim: int
    bias: bool


class CausalAttention(nn.Module):
    """Multi-head self-attention over (b, m, d) in which no token sees a later one."""

    def __init__(self, spec: GPT2Spec) -> None:
        super().__init__()
        self.dim = spec.dim
        self.split = (0, 0, spec.heads, spec.dim // spec.heads)
        self.c_attn = nn.Linear(spec.dim, 3 * spec.dim, bias=spec.bias)
        self.c_proj = nn.Linear(spec.dim, spec.dim, bias=spec.bias)

    def forward(self, x: Tensor, later: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d); `later` [m, m] is −∞ where the key comes after the query."""
        q, k, v = (
            part.unflatten(-1, self.split[2:]).transpose(1, 2)
            for part in self.c_attn(x).split(self.dim, dim=-1)
        )
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1) + later
        y = scores.softmax(dim=-1) @ v
        out: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Holds the muMoE block, which normalises its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.MuMoE_layer: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d)."""
        y: Tensor = self.MuMoE_layer(x)
        return y


class Block(nn.Module):
    """Attention on normalised tokens, then the muMoE block on raw ones; both residual."""

    def __init__(self, spec: GPT2Spec) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(spec.dim, eps=NORM_EPS, bias=spec.bias)
        self.attn = CausalAttention(spec)
        self.mlp = Mlp()

    def forward(self, x: Tensor, later: Tensor) -> Tensor:
        """Maps (b, m, d) to (b, m, d)."""
        x = x + self.attn(self.ln_1(x), later)
        y: Tensor = x + self.mlp(x)
        return y


class GPT2(nn.Module):
    """Token ids (b, m) to logits (b, m, v); the output projection is the embedding itself."""

    def __init__(self, spec: GPT2Spec) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(spec.vocabulary, spec.dim),
                "wpe": nn.Embedding(spec.block_size, spec.dim),
                "h": nn.ModuleList(Block(spec) for _ in range(spec.depth)),
                "ln_f": nn.LayerNorm(spec.dim, eps=NORM_EPS, bias=spec.bias),
            }
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the logits at every position."""
        wte, wpe = self.transformer["wte"], self.transformer["wpe"]
        assert isinstance(wte, nn.Embedding) and isinstance(wpe, nn.Embedding)
        length = ids.shape[1]
        position = torch.arange(length, device=ids.device)
        x = wte(ids) + wpe.weight[:length]
        later = torch.where(position > position.unsqueeze(1), -torch.inf, 0.0)
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            x = block(x, later)
        return F.linear(self.transformer["ln_f"](x), wte.weight)
