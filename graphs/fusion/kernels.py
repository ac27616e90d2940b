"""What the kernels of ONNX Runtime's CPU provider take of the ops that fusion writes.

They take less than the ops' definitions: what is outside of it fails when it runs, or ends the
process. Where a kernel takes less, the small ops stay.
"""

from __future__ import annotations

import onnx_ir as ir

CACHE_WIDTHS = 8
"""`GroupQueryAttention` takes heads of a multiple of so many numbers."""

SKIP_RANKS = (2, 3)
"""`SkipSimplifiedLayerNormalization` takes values with so many axes."""


def are_float32(*values: ir.Value | None) -> bool:
    """Whether all values that are given are FP32, the type that each of these kernels has."""
    return all(value is None or value.dtype == ir.DataType.FLOAT for value in values)


def takes_heads(width: int | ir.SymbolicDim) -> bool:
    """Whether `GroupQueryAttention` takes heads of this width."""
    return isinstance(width, int) and width % CACHE_WIDTHS == 0


def takes_mask(mask: ir.Value | None, q: ir.Value, k: ir.Value) -> bool:
    """Whether `Attention` takes a mask of q and k, [b, heads, ·, w]: it repeats none per token."""
    if mask is None:
        return True
    if mask.shape is None or q.shape is None or k.shape is None or len(mask.shape) not in (2, 4):
        return False
    sizes = zip(mask.shape[-2:], (q.shape[2], k.shape[2]), strict=True)
    return all(size == tokens for size, tokens in sizes if isinstance(size, int))
