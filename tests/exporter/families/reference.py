"""The published formulas in float64 numpy, written from the papers and apart from the package."""

# mypy: disable-error-code="no-any-return"
# numpy types an operation on mixed operands as Any.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Arrays = Mapping[str, Array]


def softmax(x: Array, axis: int | tuple[int, ...]) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def erf(x: Array) -> Array:
    """By its series where |x| < 3 and by its continued fraction beyond, to about 1e-13."""
    small = np.clip(x, -3.0, 3.0)
    term, total = small.copy(), small.copy()
    for n in range(1, 120):
        term = -term * small**2 / n
        total = total + term / (2 * n + 1)
    large = np.maximum(np.abs(x), 3.0)
    tail = np.zeros_like(large)
    for n in range(60, 0, -1):
        tail = n / 2 / (large + tail)
    beyond = np.sign(x) * (1 - np.exp(-(large**2)) / (large + tail) / np.sqrt(np.pi))
    return np.where(np.abs(x) < 3.0, 2 / np.sqrt(np.pi) * total, beyond)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def soft_moe(
    router_x: Array,
    slot_x: Array,
    phi: Array,
    expert: Callable[[int, Array], Array],
    keep: int | None = None,
) -> Array:
    """One layer on tokens [b, m, d] with phi [d, n, p]; `expert(i, slots)` maps [b, p, d]."""
    logits = np.einsum("bmd,dnp->bmnp", router_x, phi)
    dispatch, combine = softmax(logits, 1), softmax(logits, (2, 3))
    slots = np.einsum("bmnp,bmd->bnpd", dispatch, slot_x)
    out = np.stack([expert(i, slots[:, i]) for i in range(phi.shape[1])], axis=1)
    if keep is not None:
        scores = combine.sum(axis=(1, 3))
        dropped = np.argsort(-scores, axis=1, kind="stable")[:, keep:]
        for row, experts in enumerate(dropped):
            out[row, experts] = 0
    return np.einsum("bmnp,bnpo->bmo", combine, out)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight + bias


def linear(x: Array, w: Arrays, name: str) -> Array:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def unit(x: Array, axis: int) -> Array:
    return x / np.maximum(np.sqrt((x**2).sum(axis=axis, keepdims=True)), 1e-12)


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
}


def vit_moe_layer(
    x: Array, w: Arrays, prefix: str, act: str = "gelu", keep: int | None = None
) -> Array:
    """The layer of bwconrad/soft-moe with separate experts; normalised where it has a scale."""
    phi = w[f"{prefix}.phi"]
    if f"{prefix}.scale" in w:
        x, phi = unit(x, -1), w[f"{prefix}.scale"] * unit(phi, 0)

    def expert(i: int, slots: Array) -> Array:
        name = f"{prefix}.experts.{i}"
        return linear(ACTIVATIONS[act](linear(slots, w, f"{name}.fc1")), w, f"{name}.fc2")

    return soft_moe(x, x, phi, expert, keep)


def vit(
    x: Array,
    w: Arrays,
    *,
    heads: int,
    pool: str,
    no_embed_class: bool = False,
    act: str = "gelu",
    eps: float = 1e-6,
    keep: int | None = None,
) -> Array:
    """timm's VisionTransformer with such layers, as its state dict `w` says it was built."""

    def norm(x: Array, name: str) -> Array:
        if f"{name}.weight" not in w:
            return x
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def attention(x: Array, name: str) -> Array:
        b, m, d = x.shape
        q, k, v = (
            t.reshape(b, m, heads, d // heads).transpose(0, 2, 1, 3)
            for t in np.split(linear(x, w, f"{name}.qkv"), 3, axis=-1)
        )
        q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        weights = softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(d // heads), -1)
        return linear((weights @ v).transpose(0, 2, 1, 3).reshape(b, m, d), w, f"{name}.proj")

    kernel = w["patch_embed.proj.weight"]
    d, c, ph, pw = kernel.shape
    b, _, height, width = x.shape
    x = x.reshape(b, c, height // ph, ph, width // pw, pw).transpose(0, 2, 4, 1, 3, 5)
    x = x.reshape(b, -1, c * ph * pw) @ kernel.reshape(d, -1).T
    x = x + w.get("patch_embed.proj.bias", 0.0)
    prefix = "cls_token" in w
    if no_embed_class:
        x = x + w["pos_embed"]
    if prefix:
        x = np.concatenate([np.broadcast_to(w["cls_token"], (b, 1, d)), x], axis=1)
    if not no_embed_class:
        x = x + w["pos_embed"]
    x = norm(x, "norm_pre")
    for i in range(1 + max(int(key.split(".")[1]) for key in w if key.startswith("blocks."))):
        name = f"blocks.{i}"
        y = attention(norm(x, f"{name}.norm1"), f"{name}.attn")
        x = x + w.get(f"{name}.ls1.gamma", 1.0) * y
        y = norm(x, f"{name}.norm2")
        if f"{name}.mlp.phi" in w:
            y = vit_moe_layer(y, w, f"{name}.mlp", act, keep)
        else:
            y = linear(ACTIVATIONS[act](linear(y, w, f"{name}.mlp.fc1")), w, f"{name}.mlp.fc2")
        x = x + w.get(f"{name}.ls2.gamma", 1.0) * y
    x = norm(x, "norm")
    if pool:
        x = x[:, 0] if pool == "token" else x[:, int(prefix) :].mean(axis=1)
    x = norm(x, "fc_norm")
    return linear(x, w, "head") if "head.weight" in w else x
