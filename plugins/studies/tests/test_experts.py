"""The analyses find the same as runs of the model for every choice."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from moexport.bench.data import LabelledData
from moexport.bench.runners.pytorch import untouched, with_algorithm_1
from moexport.errors import FeedError, UsageError
from moexport.exporter.checkpoints.load import load
from moexport.exporter.inputs import random_arrays
from moexport.exporter.model import Model
from moexport.plugins.demo.digits import Digits
from moexport.plugins.studies.experts import (
    ContributionSums,
    Passes,
    accuracy,
    adds_up,
    best_subsets,
    classifier,
    contributions,
    random_choice,
    random_experts,
    shares_of,
    study,
)
from moexport.plugins.studies.findings import PASSES, SUMS
from moexport.plugins.studies.request import Analyses, parse_analyses
from moexport.tests.recorded import DATA, VIT_CONFIG
from torch import Tensor


@pytest.fixture(scope="module")
def few(digits: Digits) -> LabelledData:
    assert digits.test.labels is not None
    return LabelledData(digits.test.inputs[:96], digits.test.labels[:96])


@pytest.fixture(scope="module")
def vit() -> tuple[Model, LabelledData]:
    """A model of two layers of 8 experts, and its scores of a few inputs, which are not sums."""
    model = load(DATA / "soft_moe_vit" / "weights.pt", config=VIT_CONFIG)
    x = random_arrays(model, 6)[model.input.name]
    labels = untouched(model).infer(x).argmax(axis=1)
    return model, LabelledData(x, labels.astype(np.int64))


def labels_of(data: LabelledData) -> Tensor:
    assert data.labels is not None
    return torch.from_numpy(data.labels)


def test_sums_are_what_the_model_computes_for_any_choice(model: Model, few: LabelledData) -> None:
    sums = classifier("digits", model, few)
    assert isinstance(sums, ContributionSums)
    passes = Passes(model, few, 40)
    ((layer, n),) = sums.experts.items()
    for k in range(1, n + 1):
        choice = {layer: random_experts(len(few), n, k, seed=k)}
        exact = passes.chosen(choice)
        assert torch.allclose(sums.chosen(choice), exact, atol=1e-5 * float(exact.abs().max()))
    for k in (1, 2, 3):
        expected = torch.from_numpy(with_algorithm_1(model, k, "masked").infer(few.inputs))
        for way in (sums, passes):
            scores = way.algorithm_1(k)
            assert torch.allclose(scores, expected, atol=1e-5 * float(expected.abs().max()))


def test_the_model_itself_is_left_as_it_was(model: Model, few: LabelledData) -> None:
    before = untouched(model).infer(few.inputs)
    study("digits", model, few, [2], Analyses())
    assert all(layer.keep is None for layer in model.layers.values())
    assert np.array_equal(untouched(model).infer(few.inputs), before)


def test_a_network_that_bends_its_layers_output_is_run_whole(
    model: Model, few: LabelledData
) -> None:
    passes = Passes(model, few, 64)
    passes.module.register_forward_hook(lambda *call: call[2].tanh())
    assert not adds_up(contributions(passes), passes)


def test_subsets_are_those_of_a_plain_search(model: Model, few: LabelledData) -> None:
    labels = labels_of(few)
    passes = Passes(model, few, 96)
    ((layer, n),) = passes.experts.items()
    found = best_subsets(classifier("digits", model, few), labels, 2, limit=6)
    scores = torch.stack(
        [
            passes.chosen({layer: torch.tensor(subset).expand(len(few), 2)})
            for subset in combinations(range(n), 2)
        ]
    )
    right = scores.argmax(dim=2) == labels
    losses = -scores.log_softmax(dim=2)[:, torch.arange(len(few)), labels]
    assert found.subsets == 6
    assert found.best == pytest.approx(float(right.any(dim=0).double().mean()))
    assert found.fixed == pytest.approx(float(right.double().mean(dim=1).max()))
    assert found.average == pytest.approx(float(right.double().mean()))
    assert found.distinct == len(set(losses.argmin(dim=0).tolist()))
    assert found.algorithm_1 == accuracy(passes.algorithm_1(2), labels)


def test_both_ways_find_the_same_subsets(model: Model, few: LabelledData) -> None:
    labels = labels_of(few)
    by_sums = best_subsets(classifier("digits", model, few), labels, 2, limit=6)
    assert best_subsets(Passes(model, few, 64), labels, 2, limit=6) == by_sums


def test_the_best_subsets_are_told_apart_where_every_one_is_nearly_certain() -> None:
    """Scores that lead by 60 and more: a cross-entropy in FP32 is 0 for every subset."""
    generator = torch.Generator().manual_seed(0)
    samples, n, classes = 40, 6, 5
    labels = torch.randint(classes, (samples,), generator=generator)
    base = 80 * torch.nn.functional.one_hot(labels, classes).float()
    parts = torch.randn(samples, n, classes, generator=generator)
    sums = ContributionSums("layer", base, parts, torch.rand(samples, n, generator=generator))
    sets = list(combinations(range(n), 3))
    scores = torch.stack([base.double() + parts[:, list(s)].double().sum(1) for s in sets])
    others = scores.masked_fill(base > 0, -torch.inf).logsumexp(dim=2)
    right = others - scores.masked_fill(base == 0, -torch.inf).amax(dim=2)
    found = best_subsets(sums, labels, 3, limit=20)
    assert found.best == 1.0
    assert found.distinct == len(set(right.argmin(dim=0).tolist())) > 10


def test_more_subsets_than_the_limit_are_only_counted(model: Model, few: LabelledData) -> None:
    found = best_subsets(classifier("digits", model, few), labels_of(few), 2, limit=5)
    assert (found.subsets, found.best, found.distinct) == (6, None, None)
    assert found.algorithm_1 > 0


def test_random_sets_are_drawn_per_input_evenly_and_repeat() -> None:
    choice = random_experts(4000, 8, 3, seed=0)
    assert torch.equal(choice, random_experts(4000, 8, 3, seed=0))
    assert not torch.equal(choice, random_experts(4000, 8, 3, seed=1))
    assert (choice.diff(dim=1) > 0).all()  # three different ones, ascending
    counts = torch.bincount(choice.flatten(), minlength=8).double()
    assert (counts / 4000 - 3 / 8).abs().max() < 0.03
    assert len({tuple(row) for row in choice.tolist()}) == 56  # every set of 3 occurs


def test_random_accuracy_is_near_the_average_of_all_subsets(
    model: Model, few: LabelledData
) -> None:
    sums, labels = classifier("digits", model, few), labels_of(few)
    found = random_choice(sums, labels, 2, seeds=10)
    average = best_subsets(sums, labels, 2, limit=6).average
    assert average is not None
    assert len(found.accuracies) == 10
    assert found.std == pytest.approx(np.std(found.accuracies, ddof=1))
    assert abs(found.mean - average) < 4 * found.std / 10**0.5
    assert found.sigmas == pytest.approx((found.algorithm_1 - found.mean) / found.std)


def test_shares_add_up_and_order() -> None:
    even = shares_of("layer", torch.ones(5, 4))
    assert even.mean == pytest.approx((0.25, 0.5, 0.75, 1.0))
    assert even.low == pytest.approx(even.high)
    one = shares_of("layer", torch.tensor([[0.0, 3.0, 1.0]]))
    assert one.mean == pytest.approx((0.75, 1.0, 1.0))


def test_a_network_of_two_layers_is_studied_by_passes(vit: tuple[Model, LabelledData]) -> None:
    model, data = vit
    found = study("vit", model, data, [7, 1], Analyses(seeds=2))
    assert (found.method, found.layers, found.experts, found.samples) == (PASSES, 2, 8, 6)
    assert found.top1 == 1.0  # the labels are its own answers
    assert [each.k for each in found.retention] == [1, 7, 8]
    assert found.kept(8) == 1.0
    by_hand = (
        with_algorithm_1(model, 7, "selected").infer(data.inputs).argmax(axis=1) == data.labels
    )
    assert found.kept(7) == pytest.approx(by_hand.mean())
    assert [each.k for each in found.random] == [7, 1]
    assert [each.subsets for each in found.subsets] == [8, 8]
    assert all(s.best is not None and s.fixed is not None for s in found.subsets)
    assert len(found.shares) == 2


def test_the_digits_are_studied_by_sums(model: Model, few: LabelledData) -> None:
    found = study("digits", model, few, [4, 2], Analyses(("retention", "shares")))
    assert found.method == SUMS
    assert [each.k for each in found.retention] == [1, 2, 3, 4]
    assert (found.random, found.subsets) == ((), ())
    assert len(found.shares[0].mean) == 4


def test_what_cannot_be_analysed_is_refused(model: Model, few: LabelledData) -> None:
    with pytest.raises(FeedError, match="the analyses of digits need labels"):
        study("digits", model, LabelledData(few.inputs, None), [2], Analyses())
    mumoe = load(DATA / "mumoe_cp" / "weights.pt", config={"act": "entmax15"})
    inputs = LabelledData(np.zeros((1, mumoe.layers["layer"].spec.dim), np.float32), None)
    with pytest.raises(UsageError, match="head has no Soft MoE layer"):
        study("head", mumoe, inputs, [2], Analyses())


def test_analyses_are_named() -> None:
    assert parse_analyses("random, shares,random") == ("random", "shares")
    assert parse_analyses("all") == ("retention", "random", "subsets", "shares")
    with pytest.raises(UsageError, match="--analysis chance: there is no such analysis"):
        parse_analyses("chance")
    with pytest.raises(UsageError, match="the list is empty"):
        parse_analyses(",")
