"""Some rows of the matrix, others for each day's commits; `make pairs` runs all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from moexport.tests.pairs.matrix import all_pairs, alone, commit, conflict, pairs, rows
from moexport.tests.pairs.rows import Row, attempt
from moexport.tests.pairs.sources import source

SLOW = frozenset({"mumoe-mixer", "mumoe-gpt2", "transformers", "tune", "calibrate"})
"""Values of rows that take long."""

SAMPLE = 6


def sample(seed: str) -> Iterator[Row]:
    chosen = random.Random(seed)
    every = rows()
    quick = [row for row in every if not SLOW & {*row.values()}]
    yield from chosen.sample(quick, SAMPLE - 1)
    yield chosen.choice([row for row in every if SLOW & {*row.values()}])


SEED = commit("%cd")


@pytest.mark.parametrize(
    "row", list(sample(SEED)), ids=lambda row: f"{SEED}: {' '.join(row.values())}"
)
def test_a_row_is_right_or_refused_in_words(row: Row, tmp_path: Path) -> None:
    result = attempt(row, source(row["source"], tmp_path / "source"), tmp_path / "row")
    assert result.verdict in ("right", "refused"), f"seed {SEED}: {row}: {result.said}"


def test_every_pair_is_in_a_row_of_many_or_in_one_of_its_own() -> None:
    together = {pair for row in rows() for pair in pairs(row)}
    apart = all_pairs() - together
    assert {pair for pair in apart if not {*pair} <= {*alone(pair).items()}} == set()
    assert not any(conflict(row) for row in rows())
