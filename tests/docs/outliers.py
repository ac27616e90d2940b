"""A ViT of which INT8 harms one MoE layer, and labelled inputs for it, as a page has them."""

from __future__ import annotations

from pathlib import Path

import moexport
import numpy as np
import torch
from moexport.tests.recorded import DATA

INPUTS = 64


def vit_with_outliers(folder: Path) -> None:
    """Writes `vit.pt`, of a width that 12 heads divide, and `train.npz` with inputs and labels.

    In the last layer's experts one hidden unit is as large as it is rare to be, so that one range
    for all units leaves the others few of INT8's levels. The labels are the model's own classes.
    """
    state = torch.load(DATA / "soft_moe_vit" / "weights.pt", weights_only=True)
    for expert in range(8):
        fc1, fc2 = (f"blocks.3.mlp.experts.{expert}.{name}" for name in ("fc1", "fc2"))
        state[f"{fc1}.bias"][0] = 500.0
        state[f"{fc2}.weight"][:, 0] = 0.0
        state[f"{fc2}.weight"] *= 8
    x = np.random.default_rng(0).standard_normal((INPUTS, 3, 32, 32)).astype(np.float32)
    torch.save(state, folder / "vit.pt")
    y = _scores(folder / "vit.pt", x)
    state["head.bias"] -= torch.from_numpy(y.mean(axis=0))
    torch.save(state, folder / "vit.pt")
    labels = _scores(folder / "vit.pt", x).argmax(axis=1)
    np.savez(folder / "train.npz", input=x, label=labels)


@torch.no_grad()
def _scores(checkpoint: Path, x: np.ndarray) -> np.ndarray:
    model = moexport.load(checkpoint, config={"num_heads": 12, "rest": "default"})
    scores: torch.Tensor = model.module(torch.from_numpy(x))
    return scores.numpy()
