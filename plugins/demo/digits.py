"""Trains the Soft MoE paper's MNIST network on real handwritten digits, in seconds.

The images are scikit-learn's `load_digits` (1,797 scans of handwritten digits, 8×8, from UCI), so
nothing is downloaded. They are enlarged to MNIST's 28×28. The network has 4 patches of 14×14, one
Soft MoE layer and one linear decoder. The paper's networks have 318K parameters for every n; with
wider experts, reading weights dominates the layer's time, as in large models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...bench.data import LabelledData
from ...common.console import Progress
from ...common.writing import whole_file
from ...errors import MissingExtraError, install

PATCH = 14
TOKENS = 4
WIDTH = PATCH * PATCH
CLASSES = 10

MANY_EXPERTS = 32
"""From this number on, experts are so small that one product for all of them is faster."""


def hidden_width(experts: int) -> int:
    """Returns h = int(784 / n), which makes the parameter count nearly the same for every n."""
    return int(TOKENS * WIDTH / experts)


@dataclass(frozen=True, slots=True)
class Digits:
    """Images [b, 1, 28, 28], float32, and labels 0..9, for training and for testing."""

    train: LabelledData
    test: LabelledData


def load_digits(*, test_share: float = 0.2, seed: int = 0) -> Digits:
    """Returns the digits at 28×28, with pixels in [0, 1].

    Both parts have the same share of each digit; a seed gives the same split on every machine.
    Raises MissingExtraError if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingExtraError(
            "the digits data set needs scikit-learn, which is not installed", hint=install("demo")
        ) from error
    pixels, labels = load(return_X_y=True)
    small = torch.from_numpy(np.asarray(pixels, np.float32)).view(-1, 1, 8, 8) / 16.0
    images = F.interpolate(small, size=(28, 28), mode="bilinear").numpy()
    train, test = train_test_split(
        np.arange(len(labels)), test_size=test_share, stratify=labels, random_state=seed
    )
    targets = np.asarray(labels, np.int64)
    return Digits(
        LabelledData(images[train], targets[train], "input", "label"),
        LabelledData(images[test], targets[test], "input", "label"),
    )


class SoftMoEMnist(nn.Module):
    """The paper's MNIST network, with batched experts for training: [b, 1, 28, 28] to [b, 10].

    `w1` [n, d, h] and `w2` [n, h, d] stack the experts; `published_state_dict` returns them one by
    one, as the released code saves them. `phi` is [d, n]. With `normalise`, tokens and phi are
    divided by (norm + 1e-6), and phi is multiplied by a learned scale, which starts at `scale`. The
    larger it is, the fewer experts have most of an input's weight. There is no residual.
    """

    def __init__(
        self,
        experts: int,
        *,
        normalise: bool = False,
        hidden: int | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        hidden = hidden or hidden_width(experts)
        self.experts = experts
        self.phi = nn.Parameter(torch.randn(WIDTH, experts) * WIDTH**-0.5)
        start = torch.full((1,), scale)
        self.normalization_scale_param = nn.Parameter(start) if normalise else None
        # The initial bounds of nn.Linear, which the released experts use.
        self.w1 = nn.Parameter(torch.empty(experts, WIDTH, hidden).uniform_(-1, 1) * WIDTH**-0.5)
        self.w2 = nn.Parameter(torch.empty(experts, hidden, WIDTH).uniform_(-1, 1) * hidden**-0.5)
        self.decoder = nn.Linear(TOKENS * WIDTH, CLASSES, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [b, 1, 28, 28] to class scores [b, 10]."""
        x = patches(images)
        phi = self.phi
        if self.normalization_scale_param is not None:
            x = x / (x.norm(dim=-1, keepdim=True) + 1e-6)
            phi = self.normalization_scale_param * phi / (phi.norm(dim=0, keepdim=True) + 1e-6)
        logits = x @ phi  # [b, m, n]
        outputs = self._by_tokens if self.experts >= MANY_EXPERTS else self._by_slots
        return F.linear(outputs(x, logits).flatten(1), self.decoder.weight)

    def _by_slots(self, x: Tensor, logits: Tensor) -> Tensor:
        """Returns the layer's outputs [b, m, d] as in the paper: a matrix product per expert."""
        slots = logits.softmax(dim=1).mT @ x  # [b, n, d]
        hidden = torch.relu(slots.transpose(0, 1) @ self.w1)  # [n, b, h]
        outputs = (hidden @ self.w2).transpose(0, 1)  # [b, n, d]
        return logits.softmax(dim=2) @ outputs

    def _by_tokens(self, x: Tensor, logits: Tensor) -> Tensor:
        """Returns the same as `_by_slots`, with sums over tokens and experts after the products.

        (Σ_m D x)·w1 = Σ_m D (x·w1) and Σ_n C (a·w2) = (C a)·w2: two products for any n, without a
        tensor of size b·n·d.
        """
        n, d, h = self.w1.shape
        first = (x @ self.w1.transpose(0, 1).reshape(d, n * h)).view(-1, TOKENS, n, h)
        hidden = torch.relu((logits.softmax(dim=1).unsqueeze(3) * first).sum(dim=1))  # [b, n, h]
        mixed = logits.softmax(dim=2).unsqueeze(3) * hidden.unsqueeze(1)  # [b, m, n, h]
        return mixed.flatten(2) @ self.w2.reshape(n * h, d)

    def published_state_dict(self) -> dict[str, Tensor]:
        """Returns copies of the weights under the keys of the released code."""
        state = {"phi": self.phi, "decoder.1.weight": self.decoder.weight}
        if self.normalization_scale_param is not None:
            state["normalization_scale_param"] = self.normalization_scale_param
        for e in range(self.experts):
            state[f"experts.{e}.1.weight"] = self.w1[e].T
            state[f"experts.{e}.3.weight"] = self.w2[e].T
        return {key: value.detach().clone().contiguous() for key, value in state.items()}


def patches(images: Tensor) -> Tensor:
    """Returns the four 14×14 patches of each image, row-major: [b, 1, 28, 28] to [b, 4, 196]."""
    grid = images.reshape(-1, 2, PATCH, 2, PATCH)
    return grid.transpose(2, 3).reshape(-1, TOKENS, WIDTH)


@dataclass(frozen=True, slots=True)
class Training:
    """How a network is trained: with the paper's optimiser, but more epochs for less data.

    `hidden` is the width of an expert (None: the paper's), and `scale` is phi's initial scale.
    """

    experts: int = 16
    normalise: bool = False
    hidden: int | None = None
    scale: float = 1.0
    epochs: int = 60
    batch: int = 256
    learning_rate: float = 1e-3
    seed: int = 0


def train(settings: Training, data: LabelledData) -> SoftMoEMnist:
    """Returns a network in eval mode, trained on labelled images; deterministic for a seed.

    The global random state of PyTorch is not changed.
    """
    assert data.labels is not None
    images, labels = torch.from_numpy(data.inputs), torch.from_numpy(data.labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = SoftMoEMnist(
            settings.experts,
            normalise=settings.normalise,
            hidden=settings.hidden,
            scale=settings.scale,
        )
        batches = (
            rows
            for _ in range(settings.epochs)
            for rows in torch.split(torch.randperm(len(images)), settings.batch)
        )
        descend(
            torch.optim.Adam(model.parameters(), lr=settings.learning_rate),
            (F.cross_entropy(model(images[rows]), labels[rows]) for rows in batches),
        )
    return model.eval()


def descend(
    optimiser: torch.optim.Optimizer,
    losses: Iterable[Tensor],
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    progress: Progress | None = None,
) -> None:
    """Takes an optimiser step for each of the losses, which are computed lazily."""
    for loss in losses:
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if schedule is not None:
            schedule.step()
        if progress is not None:
            progress.advance(1)


def save(model: SoftMoEMnist, path: Path) -> None:
    """Writes the weights as the released code does, as a state dict in a `.pt` file."""
    with whole_file(path) as partial:
        torch.save(model.published_state_dict(), partial)
