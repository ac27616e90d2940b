"""What layers choose by, in float64 and from their definitions alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from moexport.exporter.model import Model
from moexport.graphs.layers.base import MoELayer
from moexport.graphs.layers.mumoe import MuMoE
from moexport.graphs.layers.soft_moe import SoftMoE


@contextmanager
def tokens_of(model: Model) -> Iterator[dict[str, Any]]:
    """What each MoE layer is given, in float64, while the network runs."""
    seen: dict[str, Any] = {}
    module = model.module.double()
    handles = [
        layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given}))
        for name, layer in model.layers.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        module.float()


def softmax(logits: np.ndarray, axis: int) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=axis, keepdims=True))
    shares: np.ndarray = powers / powers.sum(axis=axis, keepdims=True)
    return shares


def soft_moe_scores(layer: MoELayer, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """C, D [b, m, n, p] and the column sums [b, n], from L = x̂·φ alone."""
    assert isinstance(layer, SoftMoE) and layer.phi is not None
    assert layer.spec.norm in ("l2", "none")
    d, n, p = layer.phi.shape
    if layer.spec.norm == "l2":
        length = np.sqrt((x**2).sum(axis=-1, keepdims=True))
        x = x / np.maximum(length, layer.spec.norm_eps)
    logits = x @ layer.phi.double().numpy().reshape(d, n * p)
    combine = softmax(logits, axis=2).reshape(*x.shape[:2], n, p)
    dispatch = softmax(logits, axis=1).reshape(*x.shape[:2], n, p)
    sums = np.stack([combine[:, :, e].reshape(len(x), -1).sum(axis=1) for e in range(n)], axis=1)
    return combine, dispatch, sums


def entmax15(logits: np.ndarray) -> np.ndarray:
    """p = [z/2 − τ]₊² with Σp = 1, τ by bisection."""
    half = logits / 2
    low, high = half.max(-1, keepdims=True) - 1, half.max(-1, keepdims=True)
    for _ in range(100):
        middle = (low + high) / 2
        above = (np.maximum(half - middle, 0) ** 2).sum(-1, keepdims=True) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    found: np.ndarray = np.maximum(half - low, 0) ** 2
    return found


def all_coefficients(layer: MuMoE, x: np.ndarray) -> list[np.ndarray]:
    """The coefficients [..., n] of each level for tokens x [..., d], by entmax."""
    assert layer.spec.norm == "bn" and layer.spec.activation == "entmax15"
    levels = []
    for level, projection in enumerate(layer.projections):
        mean = getattr(layer, f"mean_{level}").double().numpy()
        variance = getattr(layer, f"variance_{level}").double().numpy()
        logits = x.astype(np.float64) @ projection.double().numpy()
        levels.append(entmax15((logits - mean) / np.sqrt(variance + 1e-5)))
    return levels
