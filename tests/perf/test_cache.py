"""The benchmark of a GPT-2 with a cache runs, at a size for a test."""

from __future__ import annotations

from moexport.common.console import Silent
from moexport.common.timing import Protocol
from moexport.exporter.families.mumoe_gpt2 import GPT2Spec
from moexport.perf import cache


def test_each_way_to_the_next_token_is_timed() -> None:
    spec = GPT2Spec(32, 20, depth=1, heads=2, dim=16, bias=True)
    body = cache.measure(
        Silent(), spec, contexts=(4, 20), sizes=(4, 32, 4), protocol=Protocol(round_s=0.0)
    )
    rows = body["contexts"]
    assert isinstance(rows, list)
    assert [row["context"] for row in rows] == [4, 20]
    for row in rows:
        assert list(row["tokens_per_s"]) == ["exported", "pytorch", "pytorch_again"]
        assert all(rate > 0 for rate in row["tokens_per_s"].values())
