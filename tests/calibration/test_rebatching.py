"""Re-batching: the same inputs in the same order, in batches that do not depend on the feed's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from moexport.data.batches import Fields, limited, rebatched, rebatched_pairs
from moexport.data.feeds import FeedHash

X = np.random.default_rng(0).standard_normal((23, 3)).astype(np.float32)


def cut(size: int) -> Iterator[np.ndarray]:
    return (X[start : start + size] for start in range(0, len(X), size))


def named(parts: Iterable[np.ndarray]) -> Iterator[Fields]:
    return ({"x": part} for part in parts)


@pytest.mark.parametrize("size", [1, 4, 5, 7, 23, 64])
def test_batches_are_the_same_whatever_came_in(size: int) -> None:
    parts = [batch["x"] for batch in rebatched(named(cut(size)), 5)]
    assert [len(part) for part in parts] == [5, 5, 5, 5, 3]
    assert np.array_equal(np.concatenate(parts), X)


def test_another_shape_begins_another_batch() -> None:
    parts = rebatched(named([X[:3], X[:4, :2], X[:1]]), 3)
    assert [part["x"].shape for part in parts] == [(3, 3), (3, 2), (1, 2), (1, 3)]


def test_labels_stay_beside_their_inputs() -> None:
    x = np.arange(10)
    pairs = [(x[:1], x[:1]), (x[1:8], x[1:8]), (x[8:], x[8:])]
    found = list(rebatched_pairs(pairs, 3, 8))
    assert [len(part) for part, _ in found] == [3, 3, 2]
    for part, labels in found:
        assert labels is not None and part.tolist() == labels.tolist()
    assert all(labels is None for _, labels in rebatched_pairs([(x, None)], 3))


def test_every_field_is_cut_alike() -> None:
    x = np.arange(10)
    parts = list(rebatched([{"x": x[:7], "mask": x[:7]}, {"x": x[7:], "mask": x[7:]}], 4))
    assert [len(part["x"]) for part in parts] == [4, 4, 2]
    assert all((part["x"] == part["mask"]).all() for part in parts)


def test_a_hash_does_not_depend_on_batches_but_on_order_and_shape() -> None:
    def digest(*parts: np.ndarray) -> str:
        feed_hash = FeedHash()
        for part in parts:
            feed_hash.update(part)
        return feed_hash.hexdigest()

    assert digest(X) == digest(*cut(1)) == digest(*cut(7))
    assert digest(X) != digest(X[::-1])
    assert digest(X[:4].reshape(2, 6)) != digest(X[:4])


def test_no_more_is_taken_than_asked_for() -> None:
    taken = []

    def feed() -> Iterator[np.ndarray]:
        for part in cut(4):
            taken.append(len(part))
            yield part

    assert sum(len(part["x"]) for part in limited(named(feed()), 6)) == 6
    assert taken == [4, 4]
