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


def limited(batches: Iterable[np.ndarray], count: int | None) -> Iterator[np.ndarray]:
    """Yields batches until `count` inputs have come, all of them for None."""
    left = count
    for batch in batches:
        if left is not None:
            batch = batch[:left]  # noqa: PLW2901 (the part of it that is wanted)
            left -= len(batch)
        if len(batch):
            yield batch
        if left == 0:
            return


def rebatched(batches: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yields the same inputs in the same order as batches of `size`.

    The last batch, and the last before inputs of another shape, may be smaller. So what is computed
    from them does not depend on the sizes that came in, to the last bit. Holds no more than one
    batch in and one out.
    """
    held: list[np.ndarray] = []
    count = 0
    for batch in batches:
        if held and batch.shape[1:] != held[0].shape[1:]:
            yield _joined(held)
            held, count = [], 0
        start = 0
        while len(batch) - start >= size - count:
            end = start + size - count
            yield _joined([*held, batch[start:end]])
            held, count, start = [], 0, end
        if start < len(batch):
            # A copy, so that a small rest does not keep a large batch alive.
            held.append(batch[start:].copy())
            count += len(batch) - start
    if held:
        yield _joined(held)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
