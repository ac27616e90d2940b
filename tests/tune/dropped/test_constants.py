"""Which experts are dropped first, and constants by least squares of what goes missing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.exporter.model import Model
from moexport.graphs.layers.soft_moe import SoftMoE
from moexport.tests.recorded import DATA
from moexport.tune.dropped.constants import RANKED, RIDGE, Constants, Seen
from moexport.tune.space import Choice, Point

SEED = 3


@pytest.fixture(scope="module")
def model() -> Model:
    """The paper's MNIST network with random weights, recorded from its published code."""
    return moexport.load(DATA / "soft_moe_mnist" / "weights.pt")


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(SEED).random((96, 1, 28, 28), dtype=np.float32))


def seen(model: Model, images: torch.Tensor) -> Seen:
    """What the model's layer is given, in three batches, and the model's outputs."""
    (layer,) = model.layers.values()
    tokens: list[torch.Tensor] = []
    hook = layer.register_forward_hook(lambda _, args, __: tokens.append(args[0].clone()))
    parts = torch.split(images, 32)
    with torch.inference_mode():
        outputs = [model.module(part).numpy() for part in parts]
    hook.remove()
    (name,) = model.layers
    samples = [(part.numpy(), y) for part, y in zip(parts, outputs, strict=True)]
    return Seen({name: tokens}, samples, scores=True)


def soft_moe(model: Model) -> tuple[str, SoftMoE]:
    ((name, layer),) = model.layers.items()
    assert isinstance(layer, SoftMoE)
    return name, layer


def both(layer: SoftMoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What all experts give, [b, n, p, o], and C with the experts first, [b, n, m, p]."""
    outputs, combine = layer.computed(x)
    return outputs, combine.transpose(1, 2)


def test_constants_are_the_least_squares_of_what_goes_missing(
    model: Model, images: torch.Tensor, tmp_path: Path
) -> None:
    name, layer = soft_moe(model)
    what = seen(model, images)
    constants = Constants(model, what, tmp_path, lambda: 0.0)
    kept = constants.subset(name, 2)
    dropped = [e for e in range(layer.spec.experts) if e not in kept]
    found = (
        constants.fitted(name, Choice(len(kept), kept))[name]
        .astype(np.float64)
        .reshape(-1, layer.spec.out)
    )
    with torch.inference_mode():
        x = torch.cat([*what.tokens[name]])[:RANKED]  # few experts: more inputs are not needed
        outputs, combine = (each[:, dropped].double().numpy() for each in both(layer, x))
    a = combine.transpose(0, 2, 1, 3).reshape(-1, len(found))
    b = np.einsum("bnmp,bnpo->bmo", combine, outputs).reshape(-1, layer.spec.out)
    weights = np.square(combine).sum(axis=2)  # [b, n, p]
    alone = np.einsum("bnp,bnpo->npo", weights, outputs) / weights.sum(axis=0)[..., None]
    alone = alone.reshape(found.shape)
    # Drawn to those of each slot alone: as many more rows, in which these are the answer.
    root = np.sqrt(RIDGE * np.square(a).sum() / len(found))
    rows, wanted = np.vstack([a, root * np.eye(len(found))]), np.vstack([b, root * alone])
    best, *_ = np.linalg.lstsq(rows, wanted, rcond=None)
    assert np.abs(found - best).max() <= 1e-4 * np.abs(best).max()
    left, least = (np.square(a @ each - b).sum() for each in (found, alone))
    assert left < least < np.square(b).sum()


def test_an_expert_that_always_gives_the_same_goes_first_and_nothing_is_lost(
    images: torch.Tensor, tmp_path: Path
) -> None:
    model = moexport.load(DATA / "soft_moe_mnist" / "weights.pt")
    name, layer = soft_moe(model)
    assert isinstance(layer.w2, torch.nn.ParameterList)
    layer.w2[1].zero_()  # without biases it gives zeros for every input
    n = layer.spec.experts
    what = seen(model, images)
    constants = Constants(model, what, tmp_path, lambda: 0.0)
    kept = constants.subset(name, n - 1)
    assert kept == tuple(e for e in range(n) if e != 1)
    smaller = layer.with_experts(kept, constants.fitted(name, Choice(len(kept), kept))[name])
    with torch.inference_mode():
        x = what.tokens[name][0]
        assert torch.allclose(smaller(x), layer(x), atol=1e-6)


def test_a_smaller_subset_is_part_of_a_larger_one(
    model: Model, images: torch.Tensor, tmp_path: Path
) -> None:
    name, layer = soft_moe(model)
    constants = Constants(model, seen(model, images), tmp_path, lambda: 0.0)
    subsets = [{*constants.subset(name, size)} for size in range(1, layer.spec.experts + 1)]
    assert [len(each) for each in subsets] == [*range(1, layer.spec.experts + 1)]
    assert all(one < other for one, other in pairwise(subsets))


def test_what_was_trained_is_the_same_when_a_search_goes_on(
    model: Model, images: torch.Tensor, tmp_path: Path
) -> None:
    name, _ = soft_moe(model)
    first = Constants(model, seen(model, images), tmp_path, lambda: 2.0)
    kept = first.subset(name, 2)
    point = Point(((name, Choice(2, kept)),))
    fitted = first.fitted(name, Choice(2, kept))[name].copy()
    trained = first.trained_for(point)[name]
    # The next training starts where this one did, whatever was trained in between.
    assert np.array_equal(first.fitted(name, Choice(2, kept))[name], fitted)
    # Another that has no time to train finds what the first one kept.
    again = Constants(model, seen(model, images[:32]), tmp_path, lambda: 0.0)
    assert np.array_equal(again.trained_for(point)[name], trained)
    assert first.trained_for(Point(((name, Choice(2)),))) == {}
