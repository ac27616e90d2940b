"""The benchmark of a language model with routed experts: what it counts, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moexport.perf import granite
from moexport.perf.measure import keep, kept

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")


def test_the_weights_that_a_token_needs_are_counted_as_the_model_has_them() -> None:
    config = transformers.GraniteMoeConfig(num_hidden_layers=2, **granite.CONFIG)
    with torch.device("meta"):
        model = transformers.GraniteMoeForCausalLM(config)
    share = config.num_experts_per_tok / config.num_local_experts
    active = sum(
        weight.numel() * (share if weight.ndim == 3 else 1)
        for weight in model.parameters()
        if weight.ndim > 1  # the norms' are left out
    )
    assert granite.active_weights(2) == active


def turns(ms: float) -> list[dict[str, float]]:
    """Three turns of a graph, of which the middle takes so long."""
    return [
        {"ms": factor * ms, "opened_s": 1.0, "peak_bytes": factor * 1e9}
        for factor in (0.9, 1.5, 1.0)
    ]


def test_the_table_tells_each_graph_beside_the_others(tmp_path: Path) -> None:
    milliseconds = {granite.THEIRS: 80.0, "fp32": 40.0, "int8": 16.0, "int4": 20.0}
    keep(
        tmp_path / "kept.json",
        "granite",
        layers=24,
        parameters=10**9,
        active=10**9,
        ours={"steps": {"loading": 20.0, "tracing": 60.0}, "peak_bytes": 5e9},
        theirs={"seconds": 100.0, "peak_bytes": 8e9},
        decode={name: granite.together(turns(ms)) for name, ms in milliseconds.items()},
        stream_gb_s=100.0,
        threads=2,
    )
    table = granite.table(kept(tmp_path / "kept.json"))
    assert "| int8 | 62.5 | 16.0 | 14.4 to 24.0 | 5.00 | 1.60 | 1.5 GB |" in table
    assert "took 80 s (loading 20 s, tracing 60 s)" in table
    assert "1.25 times the FP32 weights" in table
