"""Feeds as tests read them: some inputs as one array, or batches with their labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from moexport.data.batches import LABEL, Feed, LabelledBatch
from moexport.data.feeds import named_batches, named_samples


def samples(feed: Feed, name: str, most: int) -> np.ndarray:
    """Returns the first `most` inputs of a feed as one array [most or fewer, …]."""
    return named_samples(feed, [name], most)[name]


def labelled_batches(feed: Feed, name: str, outputs: Sequence[str] = ()) -> Iterator[LabelledBatch]:
    """Yields batches [b, …] of the input called `name` with their labels, or None."""
    labelled = named_batches(feed, [name], labelled=True, outputs=outputs)
    return ((batch[name], batch.get(LABEL)) for batch in labelled)
