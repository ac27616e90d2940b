"""muMoE classifiers trained on scikit-learn's digits within a second or two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
    from moexport.plugins.demo.digits import load_digits

    digits = load_digits()
    assert digits.train.labels is not None and digits.test.labels is not None
    state = _trained(vectors(digits.train.inputs), digits.train.labels, levels)
    torch.save(state, folder / "head.pt")
    np.savez(
        folder / "test.npz",
        input=vectors(digits.test.inputs).numpy(),
        label=digits.test.labels,
        odd=digits.test.labels % 2 == 1,
    )
    return folder / "head.pt", folder / "test.npz"


RARE, CLASS = "mirrored 7", 7


def unfair_head(folder: Path, experts: int = 12) -> tuple[Path, Path, Path]:
    """Writes a head that has seen few mirrored sevens, and two files in which half are mirrored.

    3% of the sevens are mirrored in training. `choose.npz` and `held.npz` hold `input`, `label` and
    the subgroups `style`, `mirrored 7` or `usual`, of digits that were not trained on.
    """
    from moexport.plugins.demo.digits import load_digits

    digits = load_digits(test_share=0.4)
    train, test = digits.train, digits.test
    assert train.labels is not None and test.labels is not None
    images = train.inputs.copy()
    sevens = np.flatnonzero(train.labels == CLASS)
    rare = sevens[: round(0.03 * len(sevens))]
    images[rare] = images[rare][..., ::-1]
    torch.save(_trained(vectors(images), train.labels, (experts,)), folder / "unfair.pt")
    paths = folder / "choose.npz", folder / "held.npz"
    half = len(test) // 2
    for path, rows in zip(paths, (slice(half), slice(half, None)), strict=True):
        x, labels = test.inputs[rows], test.labels[rows]
        others = np.ascontiguousarray(x[labels == CLASS][..., ::-1])
        np.savez(
            path,
            input=vectors(np.concatenate([x, others])).numpy(),
            label=np.r_[labels, np.full(len(others), CLASS)],
            style=np.r_[np.full(len(x), "usual", dtype="U10"), np.full(len(others), RARE)],
        )
    return folder / "unfair.pt", *paths


def attributes_of(labels: np.ndarray) -> np.ndarray:
    """Three attributes of a digit [s, 3]: odd, greater than 4, with a loop in its shape."""
    return np.stack([labels % 2, labels > 4, np.isin(labels, (0, 6, 8, 9))], axis=1).astype(int)


def targets_of(labels: np.ndarray) -> np.ndarray:
    """Two numbers that a regression of a digit predicts [s, 2]."""
    return np.stack([labels / 3, 1.5 * np.isin(labels, (0, 6, 8, 9)) - 0.25], axis=1)


def attribute_head(folder: Path) -> tuple[Path, Path]:
    """Writes a head that decides `attributes_of` digits, and `attributes.npz`; returns both.

    It holds `input`, `label` [s, 3] and the subgroups `third`, of the digits that three divides.
    """
    return _head_of_each_output(
        folder, "attributes", attributes_of, F.binary_cross_entropy_with_logits
    )


def regression_head(folder: Path) -> tuple[Path, Path]:
    """Writes a head that predicts `targets_of` digits, and `targets.npz`; returns both."""
    return _head_of_each_output(folder, "targets", targets_of, F.mse_loss)


def _head_of_each_output(
    folder: Path,
    name: str,
    labels_of: Callable[[np.ndarray], np.ndarray],
    loss: Callable[..., torch.Tensor],
) -> tuple[Path, Path]:
    from moexport.plugins.demo.digits import load_digits

    digits = load_digits()
    assert digits.train.labels is not None and digits.test.labels is not None
    wanted, labels = labels_of(digits.train.labels), labels_of(digits.test.labels)
    state = _trained(
        vectors(digits.train.inputs), wanted.astype(np.float32), (12,), wanted.shape[1], loss
    )
    torch.save(state, folder / f"{name}.pt")
    np.savez(
        folder / f"{name}.npz",
        input=vectors(digits.test.inputs).numpy(),
        label=labels,
        third=digits.test.labels % 3 == 0,
    )
    return folder / f"{name}.pt", folder / f"{name}.npz"


def _trained(
    x: torch.Tensor,
    targets: np.ndarray,
    levels: tuple[int, ...],
    outputs: int = CLASSES,
    loss: Callable[..., torch.Tensor] = F.cross_entropy,
) -> dict[str, Any]:
    """A head's weights after 120 steps, under the keys of the published code."""
    labels = torch.from_numpy(targets)
    spec = MuMoESpec("layer", (FactorisedSpec("cp", levels, DIM, outputs, (RANK,), bias=True),))
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
        loss(layer(x)[:, 0], labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    state = {f"projs.{e}": p for e, p in enumerate(layer.projections)}
    for level in range(len(levels)):
        mean, variance = layer.statistics(level)
        state |= {f"bn.{level}.running_mean": mean, f"bn.{level}.running_var": variance}
    (tensor,) = layer.tensors
    for index, factor in enumerate(tensor.parameters()):
        state[f"MuMoE.factors.{index}"] = factor
    return {key: value.detach() for key, value in state.items()}
