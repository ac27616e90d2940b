"""Fusions for targets on which each node costs a kernel launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import onnx_ir as ir

from .masks import fuse_cast, fuse_mask, fuse_none_seen, fuse_zero
from .residuals import fuse_bias, fuse_residual

IN_FEWER: Mapping[str, Callable[[ir.Graph, ir.Node], bool]] = MappingProxyType(
    {
        "LayerNormalization": fuse_residual,
        "Gelu": fuse_bias,
        "Mul": fuse_mask,
        "Less": fuse_none_seen,
        "Not": fuse_zero,
        "Cast": fuse_cast,
    }
)
"""Functions that fuse a pattern, by the op at its end; each returns whether the pattern matched."""
