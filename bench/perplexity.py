"""Perplexity of token models: how well each next token is foretold, as sums over batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..calibration.labels import IGNORED
from ..errors import FeedError
from .bench_data import Array, Labels
from .results import Interval, Perplexity
from .statistics import Z


@dataclass(frozen=True, slots=True)
class Sequences:
    """The summed negative log-likelihood [b], in nats, and the tokens [b] of each sequence."""

    nll: Array
    tokens: Labels

    @staticmethod
    def of(logits: Array, ids: Labels, targets: Labels | None = None) -> Sequences:
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
        nll = [_nll(each, wanted) for each, wanted in zip(logits, targets, strict=True)]
        return Sequences(np.array(nll), (targets != IGNORED).sum(axis=1))


@dataclass(frozen=True, slots=True)
class Surprise:
    """Summed negative log-likelihood (nats) of the tokens of some sequences.

    `squares`, `cross` and `lengths` are Σ nll², Σ nll · tokens and Σ tokens² over the sequences,
    from which the spread between sequences follows. `apart_squares` and `apart_cross` are Σ d² and
    Σ d · tokens of what each sequence has more of it in the untouched model, d.
    """

    nll: float = 0.0
    tokens: int = 0
    sequences: int = 0
    squares: float = 0.0
    cross: float = 0.0
    lengths: int = 0
    apart_squares: float = 0.0
    apart_cross: float = 0.0

    @staticmethod
    def of(found: Sequences, untouched: Sequences) -> Surprise:
        """Sums over sequences, beside the same sequences in the untouched model."""
        nll, tokens = found.nll, found.tokens
        apart = untouched.nll - nll
        return Surprise(
            nll=float(nll.sum()),
            tokens=int(tokens.sum()),
            sequences=int((tokens > 0).sum()),
            squares=float(nll @ nll),
            cross=float(nll @ tokens),
            lengths=int(tokens @ tokens),
            apart_squares=float(apart @ apart),
            apart_cross=float(apart @ tokens),
        )

    def __add__(self, other: Surprise) -> Surprise:
        return Surprise(
            self.nll + other.nll,
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.squares + other.squares,
            self.cross + other.cross,
            self.lengths + other.lengths,
            self.apart_squares + other.apart_squares,
            self.apart_cross + other.apart_cross,
        )

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    def perplexity(self, untouched: Surprise) -> Perplexity:
        """exp(mean nll), and what is kept of the untouched model's on the same tokens.

        What is kept is exp(mean d): its interval is that of the mean of the differences, so that
        what makes a sequence hard for both models does not widen it.
        """
        apart = untouched.mean - self.mean
        return Perplexity(
            math.exp(self.mean),
            math.exp(apart),
            self.tokens,
            self._interval(self.mean, self.squares, self.cross),
            self._interval(apart, self.apart_squares, self.apart_cross),
        )

    def _interval(self, mean: float, squares: float, cross: float) -> Interval | None:
        """The 95% interval of exp(Σ x / Σ tokens) over sequences; None for fewer than two.

        `squares` and `cross` are Σ x² and Σ x · tokens.
        """
        if self.sequences < 2:
            return None
        # The variance of a ratio of two sums over sequences.
        residual = squares - 2 * mean * cross + mean * mean * self.lengths
        scale = self.sequences / (self.sequences - 1)
        half = Z * math.sqrt(max(0.0, residual * scale)) / self.tokens
        return Interval(math.exp(mean - half), math.exp(mean + half))


def _nll(logits: Array, targets: Labels) -> float:
    """Of one sequence at a time: logits in double precision take twice their room."""
    places = np.flatnonzero(targets != IGNORED)
    if not places.size:
        return 0.0
    values = logits[places].astype(np.float64)
    top = values.max(axis=1)
    log_sum = top + np.log(np.exp(values - top[:, None]).sum(axis=1))
    return float((log_sum - values[np.arange(places.size), targets[places]]).sum())
