"""The profiles of whole models are taken in both runtimes, at a size for a test."""

from __future__ import annotations

import pytest
from moexport.common.console import Silent
from moexport.exporter.families.mumoe_gpt2 import GPT2Spec
from moexport.exporter.families.mumoe_mixer import MixerSpec
from moexport.perf import profiles
from moexport.perf.profiles import Profiled, gpt2, images, mixer, next_token, vit

TINY = (
    Profiled(
        "ViT",
        lambda folder: vit(folder, experts=4, hidden=32, dim=32, heads=2, depth=2),
        images,
        k="2",
        precisions=("fp32", "int8"),
    ),
    Profiled(
        "mixer",
        lambda folder: mixer(folder, MixerSpec((2, 2), 4, 3, 16, 1, 5), 4, (8, 32), 4),
        images,
    ),
    Profiled(
        "GPT-2",
        lambda folder: gpt2(
            folder, GPT2Spec(256, 20, depth=1, heads=2, dim=16, bias=True), 4, 32, 4
        ),
        next_token,
    ),
)


@pytest.mark.slow
def test_each_model_is_profiled_in_both_runtimes() -> None:
    pytest.importorskip("openvino")
    body = profiles.measure(Silent(), TINY, batches=(1, 2), calls=2)
    rows = body["profiles"]
    assert isinstance(rows, list) and len(rows) == 16
    for row in rows:
        assert row["ms"] > 0 and row["kinds"]["products"] > 0, row
    attention = {row["model"] for row in rows if row["kinds"].get("attention")}
    assert attention == {"ViT", "GPT-2"}


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("QLinearMatMul", "products"),
        ("QuantizeLinear", "rounding"),
        ("MultiHeadAttention", "attention"),
        ("SkipLayerNormalization", "norms"),
        ("FusedMatMul", "products"),
        ("BiasGelu", "activations"),
        ("TopK", "other"),
    ],
)
def test_an_op_is_of_one_kind(op: str, kind: str) -> None:
    assert profiles.kind_of(op) == kind
