"""Perplexity of token models: how well each next token is foretold, as sums over batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..calibration.labels import IGNORED
from ..errors import FeedError
from .data import Array, Labels
from .results import Interval, Perplexity
from .statistics import Z


@dataclass(frozen=True, slots=True)
class Surprise:
    """Summed negative log-likelihood (nats) of the tokens of some sequences.

    `squares`, `cross` and `lengths` are Σ nll², Σ nll · tokens and Σ tokens² over the sequences,
    from which the spread between sequences follows.
    """

    nll: float = 0.0
    tokens: int = 0
    sequences: int = 0
    squares: float = 0.0
    cross: float = 0.0
    lengths: int = 0

    @staticmethod
    def of(logits: Array, ids: Labels, targets: Labels | None = None) -> Surprise:
        """Sums over logits [b, m, v] of token ids [b, m].

        Without `targets` [b, m] the target at a position is the next id, and the last position has
        none; −1 in `targets` is not counted. Raises FeedError for logits that do not fit the ids.
        """
        if logits.ndim != 3 or logits.shape[:2] != ids.shape:
            raise FeedError(
                f"perplexity needs logits of shape (batch, tokens, vocabulary) for ids of shape "
                f"{ids.shape}, and the model gives {logits.shape}"
            )
        if targets is None:
            targets = np.full_like(ids, IGNORED)
            targets[:, :-1] = ids[:, 1:]
        total = Surprise()
        for each, wanted in zip(logits, targets, strict=True):
            total += _of_sequence(each, wanted)
        return total

    def __add__(self, other: Surprise) -> Surprise:
        return Surprise(
            self.nll + other.nll,
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.squares + other.squares,
            self.cross + other.cross,
            self.lengths + other.lengths,
        )

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    def perplexity(self, untouched: Surprise) -> Perplexity:
        """exp(mean nll), and what is kept of the untouched model's on the same tokens."""
        value = math.exp(self.mean)
        return Perplexity(value, math.exp(untouched.mean) / value, self.tokens, self._interval())

    def _interval(self) -> Interval | None:
        """The 95% interval over sequences; None for fewer than two."""
        if self.sequences < 2:
            return None
        # The variance of a ratio of two sums over sequences.
        mean = self.mean
        residual = self.squares - 2 * mean * self.cross + mean * mean * self.lengths
        scale = self.sequences / (self.sequences - 1)
        half = Z * math.sqrt(max(0.0, residual * scale)) / self.tokens
        return Interval(math.exp(mean - half), math.exp(mean + half))


def _of_sequence(logits: Array, targets: Labels) -> Surprise:
    """One sequence at a time: logits in double precision take twice their room."""
    places = np.flatnonzero(targets != IGNORED)
    if not places.size:
        return Surprise()
    values = logits[places].astype(np.float64)
    top = values.max(axis=1)
    log_sum = top + np.log(np.exp(values - top[:, None]).sum(axis=1))
    nll = float((log_sum - values[np.arange(places.size), targets[places]]).sum())
    count = int(places.size)
    return Surprise(nll, count, 1, nll * nll, nll * count, count * count)
