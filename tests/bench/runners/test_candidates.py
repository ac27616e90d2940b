"""Lowerings that cannot serve a precision are rows with the reason; the others are measured."""

from __future__ import annotations

from dataclasses import replace

import moexport
import pytest
from moexport.bench.plan import GraphSource
from moexport.bench.runners.candidates import Refused, Sweep, exported
from moexport.bench.runners.onnxruntime import OnnxLoader
from moexport.errors import LoweringError
from moexport.exporter.model import Model
from moexport.tests.recorded import read_case

ASKED = Sweep(ks=(2,), lowerings=("gather", "fused"), engines=("onnxruntime",))


@pytest.fixture(scope="module")
def model() -> Model:
    case = read_case("soft_moe_mnist_normalized")
    return moexport.load(case.weights, config=case.config)


def opened_by(source: GraphSource) -> type:
    return type(source.loader)


def test_a_lowering_without_a_kernel_does_not_take_the_others_with_it(model: Model) -> None:
    with exported(model, replace(ASKED, precisions=("fp32", "fp16"))) as candidate:
        found = {(s.precision, s.lowering): opened_by(s) for s in candidate.graphs}
        assert found == {
            ("fp32", "gather"): OnnxLoader,
            ("fp32", "fused"): OnnxLoader,
            ("fp16", "gather"): OnnxLoader,
            ("fp16", "fused"): Refused,
        }
        (refused,) = (s for s in candidate.graphs if isinstance(s.loader, Refused))
        with pytest.raises(LoweringError, match=r"com\.microsoft\.MoE has no FP16 kernel"):
            refused.open()


def test_where_nothing_can_be_exported_that_is_said_at_once(model: Model) -> None:
    nothing = replace(ASKED, lowerings=("fused",), precisions=("fp16",))
    with pytest.raises(LoweringError, match="no FP16 kernel"), exported(model, nothing):
        pass
