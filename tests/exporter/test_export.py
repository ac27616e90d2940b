"""What a missed parity check advises depends on what was missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.common.threads import with_threads
from moexport.exporter.bundle.parity import TOLERANCES, Parity
from moexport.exporter.options import ExportOptions
from moexport.exporter.reference import parity_advice
from moexport.graphs.targets import Precision
from moexport.tests.recorded import DATA
from moexport.tests.threads import SlowOnManyThreads


@pytest.mark.parametrize(("asked", "had"), [(None, 1), (2, 2)])
def test_parity_is_checked_with_the_threads_of_the_fastest_untouched_model(
    asked: int | None, had: int, tmp_path: Path
) -> None:
    loaded = moexport.load(DATA / "soft_moe_mnist" / "weights.pt")
    slow = SlowOnManyThreads(loaded.module)
    with with_threads(3):
        moexport.export(replace(loaded, module=slow), tmp_path / "out", k=2, threads=asked)
        assert torch.get_num_threads() == 3
    assert slow.had[-1] == had
    # All that compares with PyTorch; before it the network is traced and looked at.
    assert slow.had[-4:] == [had] * 4


def missed(routing_agreement: float) -> Parity:
    return Parity(
        max_abs=1.0,
        max_rel=0.5,
        cosine=0.9,
        routing_agreement=routing_agreement,
        samples=8,
        ties=0,
        bounds=TOLERANCES["fp32"],
        passed=False,
        first_difference=None,
        untouched_cosine=0.9,
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_values_that_differ_may_be_allowed(precision: Precision) -> None:
    options = ExportOptions(precision=precision)
    assert "raise --rtol" in parity_advice(missed(1.0), options)


@pytest.mark.parametrize(
    ("precision", "advice"),
    [
        ("fp32", "another --lowering"),
        ("fp16", "--precision fp32"),
        ("bf16", "--precision fp32"),
        ("int8", "--min-retention"),
    ],
)
def test_other_experts_are_not_a_matter_of_rtol(precision: Precision, advice: str) -> None:
    options = ExportOptions(precision=precision, target="onnx")
    advised = parity_advice(missed(0.9), options)
    assert advice in advised
    assert "raise --rtol" not in advised


@pytest.mark.parametrize("routing", [1.0, 0.9])
def test_without_data_int8_is_to_be_compared_on_real_inputs(routing: float) -> None:
    options = ExportOptions(precision="int8")
    assert "give real ones with --data" in parity_advice(missed(routing), options)
    assert "--data" not in parity_advice(missed(routing), replace(options, data=np.zeros((1, 2))))
