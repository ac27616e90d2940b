"""How attention is written in a graph: a scale, two matmuls and a softmax.

PyTorch's own translation transposes the keys through run-time shape arithmetic, about ten nodes in
every block, which serves nothing where the rank is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset20 as op
from onnxscript.function_libs.torch_lib.ops import nn as torchlib

RANK = 4  # [b, heads, m, d / heads]


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(q·kᵀ·scale)·v as five nodes; masks and grouped heads go PyTorch's own way."""
    plain = attn_mask is None and not is_causal and not enable_gqa
    if not plain or query.shape is None or len(query.shape) != RANK:
        return torchlib.aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scaled = op.Mul(query, op.Constant(value_float=factor))
    scores = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
    return op.MatMul(op.Softmax(scores, axis=-1), value)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: scaled_dot_product_attention
}
