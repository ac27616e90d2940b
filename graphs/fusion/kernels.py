"""Limits of ONNX Runtime's CPU kernels for the fused ops.

The kernels support less than the ops' definitions allow: other inputs fail at run time or crash
the process. For such inputs, the small ops stay.
"""

from __future__ import annotations

import onnx_ir as ir

CACHE_WIDTHS = 8
"""`GroupQueryAttention` requires a head width that is a multiple of this."""

SKIP_RANKS = (2, 3)
"""`SkipSimplifiedLayerNormalization` supports values of these ranks."""


def are_float32(*values: ir.Value | None) -> bool:
    """Returns whether all values are FP32, the only type that these kernels support."""
    return all(value is None or value.dtype == ir.DataType.FLOAT for value in values)


def supports_heads(width: int | ir.SymbolicDim) -> bool:
    """Returns whether `GroupQueryAttention` supports heads of this width."""
    return isinstance(width, int) and width % CACHE_WIDTHS == 0


def supports_mask(mask: ir.Value | None, q: ir.Value, k: ir.Value) -> bool:
    """Returns whether `Attention` supports a mask of q and k: one row per token."""
    if mask is None:
        return True
    if mask.shape is None or q.shape is None or k.shape is None or len(mask.shape) not in (2, 4):
        return False
    sizes = zip(mask.shape[-2:], (q.shape[2], k.shape[2]), strict=True)
    return all(size == tokens for size, tokens in sizes if isinstance(size, int))
