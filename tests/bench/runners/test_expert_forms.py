"""Other forms of a Soft MoE in PyTorch compute what the published one does."""

from __future__ import annotations

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.engines import KINDS
from moexport.bench.plan import Candidate, GraphSource
from moexport.bench.runners.base import Refused
from moexport.bench.runners.expert_forms import GroupedSoftMoE, StackedForm, in_stacked_form
from moexport.bench.runners.models import TorchLoader
from moexport.bench.runners.pytorch import PyTorch, PyTorchInHalf, in_precision, runner_on
from moexport.errors import UsageError
from moexport.graphs.layers.base import moe_layers
from moexport.tests.recorded import MUMOE, SOFT_MOE, read_case
from torch import nn

FORMS: tuple[StackedForm, ...] = ("stacked", "grouped_mm")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SOFT_MOE)
def test_a_form_computes_the_recorded_outputs(name: str, form: StackedForm) -> None:
    case = read_case(name)
    model = moexport.load(case.weights, config=case.config, family=case.family)
    specs = [layer.spec for layer in model.layers.values()]
    widths = {w for s in specs for w in (s.dim, s.inner, s.hidden, s.out)}  # type: ignore[attr-defined]
    if form == "grouped_mm" and any(width % 4 for width in widths):
        with pytest.raises(UsageError, match="row widths that are multiples of 4"):
            in_stacked_form(model, form)
        return
    module = in_stacked_form(model, form)
    for layer in moe_layers(module).values():
        assert isinstance(layer, GroupedSoftMoE) is (form == "grouped_mm")
        assert not any(isinstance(part, nn.ParameterList) for part in layer.children())
    x = case.x.astype(np.float32)
    wanted = case.y()
    found = PyTorch(module, model.inputs).infer(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())
    again = PyTorch(model.module, model.inputs).infer(x)  # which is as it was
    np.testing.assert_allclose(again, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


def test_layers_of_another_kind_have_no_such_form() -> None:
    case = read_case(MUMOE[0])
    model = moexport.load(case.weights, config=case.config, family=case.family)
    with pytest.raises(UsageError, match="mumoe layer has no stacked form"):
        in_stacked_form(model, "stacked")


def test_half_is_all_of_a_network_and_numpy_around_it_is_fp32() -> None:
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    runner = runner_on("cpu", "fp16")(
        in_precision(model.untouched, "fp16"), model.inputs, model.host
    )
    assert isinstance(runner, PyTorchInHalf)
    assert {p.dtype for p in runner.module.parameters()} == {torch.float16}
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    y = runner.infer(case.x)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, case.y(), atol=3e-2 * np.abs(case.y()).max())


def test_pytorch_is_measured_in_fp16_on_the_gpu_beside_graphs_in_fp16() -> None:
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    engines = tuple(n for n, k in KINDS.items() if k.provider == "cuda" and n.startswith("py"))
    refused = Refused(UsageError("not opened"))
    half = GraphSource(4, "dense", refused, provider="cuda", precision="fp16")
    cases = Candidate("m", model, ks=(2,), graphs=(half,), engines=engines).cases
    found = [c.runs_in for c in cases if c.provider == "cuda" and c.lowering is None]
    assert found == [
        "pytorch-eager cuda",
        "pytorch-eager fp16 cuda",
        "pytorch-compile cuda",
        "pytorch-compile fp16 cuda",
        "pytorch-algorithm-2 cuda",
        "pytorch-stacked cuda",
        "pytorch-stacked fp16 cuda",
        "pytorch-grouped-mm cuda",
        "pytorch-grouped-mm fp16 cuda",
    ]
    without = Candidate("m", model, ks=(2,), engines=engines).cases
    assert not [c for c in without if c.precision == "fp16"]
    on_cpu = GraphSource(4, "dense", refused, precision="fp16")
    cases = Candidate("m", model, graphs=(on_cpu,), engines=engines).cases
    assert not [c for c in cases if c.precision == "fp16" and c.lowering is None]
    loader = TorchLoader(next(iter(cases)), (1,), False, lambda: model)
    np.testing.assert_allclose(loader().infer(case.x), case.y(), rtol=1e-3, atol=1e-3)
