"""Names that graphs carry; importing them loads nothing."""

from __future__ import annotations

DOMAIN = "ai.moexport"
"""Of the nodes that stand for MoE layers in a traced graph."""

MICROSOFT = "com.microsoft"
"""Of ONNX Runtime's own ops."""

K_INPUT = "k"
"""The graph input that holds k, int64 [1], where k is chosen per run."""
