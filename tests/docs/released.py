"""A checkpoint with the names, blocks and tokens of the released V-MoE S/32, but narrow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from moexport.plugins.jax.tests.vmoe_writer import rows, whole, write
from PIL import Image

NAME = "vmoe_s32_last2_ilsvrc2012_randaug_light1_ft_ilsvrc2012"


def released(folder: Path, *, dim: int = 16, hidden: int = 24, experts: int = 8) -> None:
    """Writes the checkpoint and a few validation images in `val`."""
    random = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}

    def put(name: str, *shape: int, around: float = 0.0) -> None:
        scale = shape[-2] ** -0.5 if len(shape) > 1 else 0.1
        arrays[name] = (around + random.normal(0, scale, shape)).astype(np.float32)

    def norm(name: str) -> None:
        put(f"{name}/scale", dim, around=1.0)
        put(f"{name}/bias", dim)

    def linear(name: str, *shape: int) -> None:
        put(f"{name}/kernel", *shape)
        put(f"{name}/bias", *(shape[:1] if len(shape) == 3 else ()), shape[-1])

    put("embedding/kernel", 32, 32, 3, dim)
    put("embedding/bias", dim)
    put("cls", 1, 1, dim)
    put("Encoder/posembed_input/pos_embedding", 1, 145, dim)
    norm("Encoder/encoder_norm")
    linear("head", dim, 10)
    for number in range(8):
        block = f"Encoder/encoderblock_{number}"
        norm(f"{block}/LayerNorm_0")
        norm(f"{block}/LayerNorm_1")
        for part in ("query", "key", "value"):
            put(f"{block}/SelfAttention/{part}/kernel", dim, 8, dim // 8)
            put(f"{block}/SelfAttention/{part}/bias", 8, dim // 8)
        put(f"{block}/SelfAttention/out/kernel", 8, dim // 8, dim)
        put(f"{block}/SelfAttention/out/bias", dim)
        stacked = (experts,) if number in (5, 7) else ()
        mlp = f"{block}/Moe/Mlp" if stacked else f"{block}/Mlp"
        linear(f"{mlp}/Dense_0", *stacked, dim, hidden)
        linear(f"{mlp}/Dense_1", *stacked, hidden, dim)
        if stacked:
            put(f"{block}/Moe/Router/dense/kernel", dim, experts)

    def cut(path: str, shape: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
        return rows(path, shape) if "/Moe/Mlp/" in path else whole(path, shape)

    write(folder / NAME, arrays, shards=8, cut=cut)
    for label in range(10):
        place = folder / "val" / f"n{label:08d}"
        place.mkdir(parents=True)
        pixels = random.integers(0, 255, (400, 500, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / "1.JPEG")
