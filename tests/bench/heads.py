"""A muMoE classifier trained on scikit-learn's digits within a second or two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from moexport.bench.demo.digits import load_digits
from moexport.graphs.layers.mumoe import FactorisedSpec, MuMoE, MuMoESpec, MuMoEWeights
from torch.nn import functional as F

DIM, CLASSES, RANK = 49, 10, 16


def vectors(images: np.ndarray) -> torch.Tensor:
    """Digits at 28×28 as 7×7 vectors."""
    return F.avg_pool2d(torch.from_numpy(images), 4).flatten(1)


def trained_head(folder: Path, levels: tuple[int, ...] = (12,)) -> tuple[Path, Path]:
    """Writes a head as the published code saves one, and `test.npz`; returns their paths.

    `test.npz` holds `input`, `label` and the subgroups `odd`.
    """
    digits = load_digits()
    x, labels = vectors(digits.train.inputs), torch.from_numpy(digits.train.labels)
    spec = MuMoESpec("layer", (FactorisedSpec("cp", levels, DIM, CLASSES, (RANK,), bias=True),))
    random = torch.Generator().manual_seed(0)
    factors = [
        torch.randn(*shape, generator=random) * shape[0] ** -0.5 for shape in spec.tensors[0].shapes
    ]
    layer = MuMoE(
        spec,
        MuMoEWeights(
            tuple(torch.randn(DIM, n, generator=random) for n in levels),
            (tuple(factors),),
            tuple(torch.zeros(n) for n in levels),
            tuple(torch.ones(n) for n in levels),
        ),
    ).requires_grad_(True)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.03)
    for _ in range(120):
        optimiser.zero_grad()
        F.cross_entropy(layer(x)[:, 0], labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    state = {f"projs.{e}": p for e, p in enumerate(layer.projections)}
    for level in range(len(levels)):
        mean, variance = layer.statistics(level)
        state |= {f"bn.{level}.running_mean": mean, f"bn.{level}.running_var": variance}
    (tensor,) = layer.tensors
    for index, factor in enumerate(tensor.parameters()):
        state[f"MuMoE.factors.{index}"] = factor
    torch.save({key: value.detach() for key, value in state.items()}, folder / "head.pt")
    assert digits.test.labels is not None
    np.savez(
        folder / "test.npz",
        input=vectors(digits.test.inputs).numpy(),
        label=digits.test.labels,
        odd=digits.test.labels % 2 == 1,
    )
    return folder / "head.pt", folder / "test.npz"
