"""Inputs in batches of one size, whatever sizes a feed comes in, with a hash of what was taken."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np


class FeedHash:
    """A hash of inputs in their order that does not depend on how they were batched or stored."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._kind: tuple[object, ...] | None = None
        self.samples = 0

    def update(self, batch: np.ndarray) -> None:
        """Adds the inputs of a batch [b, …]."""
        kind = (batch.dtype.str, batch.shape[1:])
        if kind != self._kind:  # shapes are part of the content, and seldom change
            self._hash.update(repr(kind).encode())
            self._kind = kind
        self._hash.update(np.ascontiguousarray(batch).data)
        self.samples += len(batch)

    def hexdigest(self) -> str:
        """The SHA-256 of everything so far, as hex digits."""
        return self._hash.hexdigest()


Pair = tuple[np.ndarray, np.ndarray | None]
"""Inputs [b, …] and what belongs to each, [b, …], if there is anything."""


def limited(batches: Iterable[np.ndarray], count: int | None) -> Iterator[np.ndarray]:
    """Yields batches until `count` inputs have come, all of them for None."""
    return (x for x, _ in limited_pairs(((batch, None) for batch in batches), count))


def limited_pairs(pairs: Iterable[Pair], count: int | None) -> Iterator[Pair]:
    """Yields inputs and labels until `count` inputs have come, all of them for None."""
    left = count
    for pair in pairs:
        inputs, labels = pair if left is None else _cut(pair, 0, left)
        if left is not None:
            left -= len(inputs)
        if len(inputs):
            yield inputs, labels
        if left == 0:
            return


def rebatched(batches: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yields the same inputs in the same order as batches of `size`.

    The last batch, and the last before inputs of another shape, may be smaller. So what is computed
    from them does not depend on the sizes that came in, to the last bit. Holds no more than one
    batch in and one out.
    """
    return (x for x, _ in rebatched_pairs(((batch, None) for batch in batches), size))


def rebatched_pairs(pairs: Iterable[Pair], size: int) -> Iterator[Pair]:
    """Yields the same inputs and labels in the same order as batches of `size` (`rebatched`)."""
    held: list[Pair] = []
    count = 0
    for pair in pairs:
        inputs, _ = pair
        if held and inputs.shape[1:] != held[0][0].shape[1:]:
            yield _joined(held)
            held, count = [], 0
        start = 0
        while len(inputs) - start >= size - count:
            end = start + size - count
            yield _joined([*held, _cut(pair, start, end)])
            held, count, start = [], 0, end
        if start < len(inputs):
            # A copy, so that a small rest does not keep a large batch alive.
            rest, theirs = _cut(pair, start, len(inputs))
            held.append((rest.copy(), theirs))
            count += len(rest)
    if held:
        yield _joined(held)


def _cut(pair: Pair, start: int, end: int) -> Pair:
    inputs, labels = pair
    return inputs[start:end], None if labels is None else labels[start:end]


def _joined(parts: list[Pair]) -> Pair:
    if len(parts) == 1:
        return parts[0]
    labels = [labels for _, labels in parts if labels is not None]
    inputs = np.concatenate([inputs for inputs, _ in parts])
    return inputs, np.concatenate(labels) if labels else None
