"""Perplexity is that of the next token, from logits or from targets, in one part or several."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from moexport.bench.metrics import NegativeLogLikelihood, SequenceLosses
from moexport.bench.results import Interval
from moexport.errors import FeedError


def alone(
    logits: np.ndarray, ids: np.ndarray, targets: np.ndarray | None = None
) -> NegativeLogLikelihood:
    """The sums of the untouched model itself."""
    scored = SequenceLosses.of(logits, ids, targets)
    return NegativeLogLikelihood.of(scored, scored)


def test_perplexity_is_that_of_the_next_token() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((3, 5, 7)).astype(np.float32)
    ids = random.integers(0, 7, (3, 5))
    nll = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits[:, :-1]).flatten(0, 1), torch.from_numpy(ids[:, 1:]).flatten()
    )
    whole = alone(logits, ids)
    assert (whole.tokens, whole.sequences) == (12, 3)
    found = whole.perplexity(whole)
    assert found.value == pytest.approx(math.exp(float(nll)), rel=1e-6)
    assert found.retention == 1.0
    assert found.interval is not None
    assert found.interval.low < found.value < found.interval.high
    parts = alone(logits[:2], ids[:2]) + alone(logits[2:], ids[2:])
    assert parts.nll == pytest.approx(whole.nll)
    targets = np.full_like(ids, -1)
    targets[:, :-1] = ids[:, 1:]
    assert alone(logits, ids, targets) == whole
    with pytest.raises(FeedError, match="vocabulary"):
        alone(logits[:, :2], ids)


def test_even_guesses_have_the_perplexity_of_the_vocabulary() -> None:
    found = alone(np.zeros((2, 4, 11), np.float32), np.zeros((2, 4), np.int64))
    assert found.perplexity(found).value == pytest.approx(11)


def test_the_interval_of_kept_perplexity_covers_what_is_kept_of_all_text() -> None:
    """Short texts are drawn from a long one; 95% of the intervals should hold its true value."""
    random = np.random.default_rng(0)
    texts, length = 4000, 6
    targets = random.integers(0, 9, (texts, length))
    hard = random.standard_normal((texts, length, 9)) * random.uniform(0.2, 4, (texts, 1, 1))
    other = hard + 0.5 * random.standard_normal(hard.shape)
    base, worse = (SequenceLosses.of(each, targets, targets) for each in (hard, other))
    truth = math.exp((base.nll.sum() - worse.nll.sum()) / base.tokens.sum())
    covered, widths, unpaired = 0, [], []
    for drawn in random.integers(0, texts, (300, 60)):
        before, now = (SequenceLosses(s.nll[drawn], s.tokens[drawn]) for s in (base, worse))
        found = NegativeLogLikelihood.of(now, before).perplexity(
            NegativeLogLikelihood.of(before, before)
        )
        assert found.interval is not None
        assert found.retention_interval is not None
        low, high = found.retention_interval.low, found.retention_interval.high
        assert low < found.retention < high
        covered += low <= truth <= high
        widths.append(high / low)
        unpaired.append(found.interval.high / found.interval.low)
    assert 0.90 <= covered / 300 <= 0.98
    assert np.median(widths) < np.median(unpaired)


def test_a_model_keeps_exactly_its_own_perplexity() -> None:
    random = np.random.default_rng(0)
    own = alone(random.standard_normal((3, 5, 7)), random.integers(0, 7, (3, 5)))
    assert own.perplexity(own).retention_interval == Interval(1.0, 1.0)
