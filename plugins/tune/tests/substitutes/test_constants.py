"""The order of dropped experts, and the constants that replace them by least squares."""

from __future__ import annotations

from itertools import pairwise

import moexport
import numpy as np
import pytest
import torch
from moexport.exporter.model import Model
from moexport.graphs.layers.soft_moe import SoftMoE
from moexport.plugins.tune.substitutes.constants import RANKING_INPUTS, RIDGE, ConstantExperts
from moexport.tests.recorded import DATA

SEED = 3


@pytest.fixture(scope="module")
def model() -> Model:
    """The paper's MNIST network with random weights, recorded from its published code."""
    return moexport.load(DATA / "soft_moe_mnist" / "weights.pt")


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(SEED).random((96, 1, 28, 28), dtype=np.float32))


def soft_moe(model: Model) -> SoftMoE:
    (layer,) = model.layers.values()
    assert isinstance(layer, SoftMoE)
    return layer


def tokens_of(model: Model, images: torch.Tensor) -> list[torch.Tensor]:
    """The inputs of the model's layer, in three batches."""
    tokens: list[torch.Tensor] = []
    hook = soft_moe(model).register_forward_hook(lambda _, args, __: tokens.append(args[0].clone()))
    with torch.inference_mode():
        for part in torch.split(images, 32):
            model.module(part)
    hook.remove()
    return tokens


def both(layer: SoftMoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of all experts, [b, n, p, o], and C with the experts first, [b, n, m, p]."""
    outputs, combine = layer.outputs_and_combine(x)
    return outputs, combine.transpose(1, 2)


def test_constants_are_the_least_squares_of_what_goes_missing(
    model: Model, images: torch.Tensor
) -> None:
    layer, tokens = soft_moe(model), tokens_of(model, images)
    constants = ConstantExperts(layer, tokens)
    kept = constants.kept(2)
    dropped = [e for e in range(layer.spec.experts) if e not in kept]
    found = constants.fitted(kept).astype(np.float64).reshape(-1, layer.spec.out)
    with torch.inference_mode():
        x = torch.cat(tokens)[:RANKING_INPUTS]  # few experts: more inputs are not needed
        outputs, combine = (each[:, dropped].double().numpy() for each in both(layer, x))
    a = combine.transpose(0, 2, 1, 3).reshape(-1, len(found))
    b = np.einsum("bnmp,bnpo->bmo", combine, outputs).reshape(-1, layer.spec.out)
    weights = np.square(combine).sum(axis=2)  # [b, n, p]
    alone = np.einsum("bnp,bnpo->npo", weights, outputs) / weights.sum(axis=0)[..., None]
    alone = alone.reshape(found.shape)
    # The ridge towards each slot's own constants, as further rows of which they are the solution.
    root = np.sqrt(RIDGE * np.square(a).sum() / len(found))
    rows, wanted = np.vstack([a, root * np.eye(len(found))]), np.vstack([b, root * alone])
    best, *_ = np.linalg.lstsq(rows, wanted, rcond=None)
    assert np.abs(found - best).max() <= 1e-4 * np.abs(best).max()
    left, least = (np.square(a @ each - b).sum() for each in (found, alone))
    assert left < least < np.square(b).sum()


def test_an_expert_that_always_gives_the_same_goes_first_and_nothing_is_lost(
    images: torch.Tensor,
) -> None:
    model = moexport.load(DATA / "soft_moe_mnist" / "weights.pt")
    layer = soft_moe(model)
    assert isinstance(layer.w2, torch.nn.ParameterList)
    layer.w2[1].zero_()  # without biases it returns zeros for every input
    n = layer.spec.experts
    tokens = tokens_of(model, images)
    constants = ConstantExperts(layer, tokens)
    kept = constants.kept(n - 1)
    assert kept == tuple(e for e in range(n) if e != 1)
    smaller = layer.with_experts(kept, constants.fitted(kept))
    assert smaller is not None
    with torch.inference_mode():
        x = tokens[0]
        assert torch.allclose(smaller(x), layer(x), atol=1e-6)


def test_a_smaller_subset_is_part_of_a_larger_one(model: Model, images: torch.Tensor) -> None:
    layer = soft_moe(model)
    constants = ConstantExperts(layer, tokens_of(model, images))
    subsets = [{*constants.kept(size)} for size in range(1, layer.spec.experts + 1)]
    assert [len(each) for each in subsets] == [*range(1, layer.spec.experts + 1)]
    assert all(one < other for one, other in pairwise(subsets))
