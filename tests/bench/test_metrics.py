"""Accuracy, routing agreement and parity against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from moexport.bench.metrics import ParityStatistics, RoutingOverlap, TopKCounts
from moexport.errors import FeedError, ParityError
from moexport.exporter.bundle.parity import TOLERANCES, jaccard


def test_accuracy_and_what_is_kept_of_the_untouched_model() -> None:
    labels = np.array([0, 1, 1, 0])
    untouched = TopKCounts.of(np.array([[2, 1], [0, 1], [0, 1], [0, 3]]), labels)
    pruned = TopKCounts.of(np.array([[2, 1], [0, 1], [5, 1], [0, 3]]), labels)
    found = pruned.accuracy(untouched)
    assert (found.top1, found.n) == (0.5, 4)
    assert found.retention == pytest.approx(0.5 / 0.75)


def test_nothing_is_kept_of_a_model_that_gets_nothing_right() -> None:
    assert TopKCounts(0, 4).accuracy(TopKCounts(0, 4)).retention is None


def test_jaccard_ignores_order() -> None:
    found = jaccard(np.array([[3, 1], [0, 1], [0, 1]]), np.array([[1, 3], [1, 2], [2, 3]]))
    assert found.tolist() == pytest.approx([1, 1 / 3, 0])


def test_exact_means_equal_in_every_layer() -> None:
    reference = {"a": np.array([[0, 1], [0, 1]]), "b": np.array([[2, 3], [2, 3]])}
    chosen = {"a": np.array([[1, 0], [0, 1]]), "b": np.array([[2, 3], [1, 2]])}
    found = RoutingOverlap.of(chosen, reference).agreement()
    assert found.exact == 0.5
    assert found.jaccard == pytest.approx((1 + 1 + 1 + 1 / 3) / 4)


def test_outputs_of_the_same_experts_have_the_bounds_of_their_precision() -> None:
    wanted = np.array([[3.0, 4.0], [3.0, 4.0], [3.0, 4.0]])
    found = wanted.copy()
    found[1] += 0.001
    found[2] = -wanted[2]  # other experts
    alike = np.array([True, True, False])
    sums = ParityStatistics.of(found[:2], wanted[:2], alike[:2])
    sums += ParityStatistics.of(found[2:], wanted[2:], alike[2:])
    assert sums.error_beyond(TOLERANCES["fp32"]) == pytest.approx(0.001 / 4)
    assert sums.error_beyond(TOLERANCES["int8"]) is None
    assert ParityStatistics.of(found, wanted).error_beyond(TOLERANCES["int8"]) == pytest.approx(
        1.15, abs=0.01
    )
    assert ParityStatistics.of(found, wanted, ~alike).error_beyond(TOLERANCES["fp32"]) is None


def test_parity_by_hand() -> None:
    found = ParityStatistics.of(np.array([[1.0, 0.0]]), np.array([[0.0, 2.0]])).parity()
    assert (found.max_abs, found.cosine) == (2.0, 0.0)
    same = ParityStatistics.of(np.zeros((2, 2)), np.zeros((2, 2))).parity()
    assert (same.max_abs, same.cosine) == (0.0, 1.0)


def test_batches_add_up_to_the_whole() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 9, 5))
    labels = random.integers(0, 5, 9)
    chosen, expected = random.permuted(np.tile(np.arange(6), (2, 9, 1)), axis=2)[..., :3]
    parts = [slice(0, 4), slice(4, 8), slice(8, 9)]
    hits, overlap, closeness = TopKCounts(), RoutingOverlap(), ParityStatistics()
    for part in parts:
        hits += TopKCounts.of(a[part], labels[part])
        overlap += RoutingOverlap.of({"l": chosen[part]}, {"l": expected[part]})
        closeness += ParityStatistics.of(a[part], b[part])
    assert hits == TopKCounts.of(a, labels)
    whole = RoutingOverlap.of({"l": chosen}, {"l": expected}).agreement()
    assert overlap.agreement().jaccard == pytest.approx(whole.jaccard)
    assert overlap.agreement().exact == whole.exact
    cosine = float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    assert closeness.parity().cosine == pytest.approx(cosine)
    assert closeness.parity().max_abs == float(np.abs(a - b).max())


def test_outputs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ParityError, match="shape"):
        ParityStatistics.of(np.zeros((2, 3)), np.zeros((2, 4)))
    with pytest.raises(ParityError, match="1 of 2 outputs are not finite"):
        ParityStatistics.of(np.array([[np.nan, 1]]), np.ones((1, 2)))
    with pytest.raises(ParityError, match="layer a"):
        RoutingOverlap.of({"a": np.zeros((2, 3))}, {"a": np.zeros((2, 2))})
    with pytest.raises(FeedError, match="batch, classes"):
        TopKCounts.of(np.zeros((2, 3, 4)), np.zeros(2, np.int64))
