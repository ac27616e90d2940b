"""What a missed parity check advises depends on what was missed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from moexport.exporter.export import way_out
from moexport.exporter.options import ExportOptions, PrecisionOptions
from moexport.exporter.parity import Parity
from moexport.graphs.targets import Precision


def missed(routing_agreement: float) -> Parity:
    return Parity(
        max_abs=1.0,
        max_rel=0.5,
        cosine=0.9,
        routing_agreement=routing_agreement,
        samples=8,
        ties=0,
        atol=1e-6,
        rtol=1e-4,
        passed=False,
        first_difference=None,
        untouched_cosine=0.9,
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_values_that_differ_may_be_allowed(precision: Precision) -> None:
    options = ExportOptions(precision=PrecisionOptions(precision))
    assert "raise --rtol" in way_out(missed(1.0), options)


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
    options = ExportOptions(precision=PrecisionOptions(precision), target="onnx")
    advised = way_out(missed(0.9), options)
    assert advice in advised
    assert "raise --rtol" not in advised


@pytest.mark.parametrize("routing", [1.0, 0.9])
def test_without_data_int8_is_to_be_compared_on_real_inputs(routing: float) -> None:
    options = ExportOptions(precision=PrecisionOptions("int8"))
    assert "give real ones with --data" in way_out(missed(routing), options)
    assert "--data" not in way_out(missed(routing), replace(options, data=np.zeros((1, 2))))
