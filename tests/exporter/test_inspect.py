"""What `inspect` tells comes from names and shapes: values in a checkpoint change none of it."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moexport.commands.inspect import model_text
from moexport.common.text import count
from moexport.errors import UsageError
from moexport.exporter.checkpoints.load import load
from moexport.exporter.inspect import inspect
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.graphs.layers.mumoe import (
    FactorisedSpec,
    Form,
    MuMoE,
    MuMoESpec,
    MuMoEWeights,
    contract,
)
from moexport.tests.recorded import MUMOE, SOFT_MOE, read_case
from torch import nn


@pytest.mark.parametrize("name", [*SOFT_MOE, *MUMOE])
def test_a_checkpoint_whose_values_are_not_read_is_told_of_as_any_other(
    name: str, tmp_path: Path
) -> None:
    case = read_case(name)
    whole = inspect(load(case.weights, config=case.config))
    state = torch.load(case.weights, weights_only=True)
    halves = tmp_path / "halves.pt"
    torch.save({k: t.half() if t.is_floating_point() else t for k, t in state.items()}, halves)
    for path in (case.weights, halves):
        found = inspect(load(path, config=case.config, values=False))
        assert replace(found, notes=()) == replace(whole, notes=())
    assert all(layer.tokens > 0 for layer in whole.layers)


def layer(form: Form, levels: tuple[int, ...], ranks: tuple[int, ...]) -> Model:
    """A muMoE layer of 24 inputs with a bias and 20 outputs, of zeros."""
    spec = MuMoESpec("layer", (FactorisedSpec(form, levels, 24, 20, ranks, bias=True),))
    weights = MuMoEWeights(
        tuple(torch.zeros(24, n) for n in levels),
        (tuple(torch.zeros(*shape) for shape in spec.tensors[0].shapes),),
        tuple(torch.zeros(n) for n in levels),
        tuple(torch.ones(n) for n in levels),
    )
    network = nn.Sequential(OrderedDict(layer=MuMoE(spec, weights)))
    shape = ("batch", "tokens", 24)
    return Model(
        module=network,
        inputs=(TensorSpec("input", "float32", shape, implied="tokens"),),
        outputs=(TensorSpec("output", "float32", ("batch", "tokens", 20)),),
        family="mumoe",
        config={},
        source=Source("layer", ()),
    )


@pytest.mark.parametrize(
    ("form", "ranks", "parameters", "one_level", "rank"),
    [
        # R (Σn + d + 1 + o) + d Σn, and with one level of 24 experts
        ("cp", (7,), 7 * (9 + 25 + 20) + 24 * 9, 7 * (24 + 25 + 20) + 24 * 24, 7),
        (
            "tr",
            (3, 2, 4, 5, 2),
            3 * 4 * 2 + 2 * 3 * 4 + 4 * 2 * 5 + 5 * 25 * 2 + 2 * 20 * 3 + 24 * 9,
            3 * 24 * 5 + 5 * 25 * 2 + 2 * 20 * 3 + 24 * 24,
            2 * 2,
        ),
        (
            "tucker",
            (2, 3, 2, 6, 5),
            2 * 3 * 2 * 6 * 5 + 4 * 2 + 3 * 3 + 2 * 2 + 25 * 6 + 20 * 5 + 24 * 9,
            12 * 6 * 5 + 24 * 12 + 25 * 6 + 20 * 5 + 24 * 24,
            5,
        ),
        ("full", (), 24 * 25 * 20 + 24 * 9, 24 * 25 * 20 + 24 * 24, 20),
    ],
)
def test_a_hierarchy_is_shown_as_the_paper_shows_it(
    form: Form, ranks: tuple[int, ...], parameters: int, one_level: int, rank: int
) -> None:
    report = inspect(layer(form, (4, 3, 2), ranks))
    (found,) = report.layers
    assert (found.levels, found.combinations, found.form) == ((4, 3, 2), 24, form)
    assert (found.tokens, found.parameters, found.expert_rank) == (1, parameters, rank)
    sizes = {each.form: each.parameters for each in report.equivalents}
    assert sizes["as it is"] == parameters and sizes["one level"] == one_level
    assert sizes["linear"] == 25 * 20
    if form != "full":
        assert sizes["dense"] == 24 * 25 * 20 + 24 * 24
    text = model_text(report)
    name = {"cp": "CP", "tr": "TR", "tucker": "Tucker", "full": "unfactorised"}[form]
    assert re.search(rf"layer +4·3·2 +24 +{name}", text)
    assert "n/2 = 2·2·1" in text or "to n/4 = 1·1·1" in text
    if form == "full":  # a smaller k is less work: 4·3·2, 2·2·1 and 1·1·1 matrices
        widths = [cost.macs - 24 * 9 for cost in report.costs]
        assert widths == [24 * 26 * 20, 4 * 26 * 20, 26 * 20]
    else:
        assert len(re.findall(r"^n.* = ", text, re.MULTILINE)) == 1


@pytest.mark.parametrize("form", ["tr", "tucker"])
def test_the_rank_of_an_experts_matrix_is_reached_by_random_factors(form: Form) -> None:
    ranks = (3, 2, 4, 5, 2) if form == "tr" else (2, 3, 2, 6, 5)
    spec = FactorisedSpec(form, (4, 3, 2), 24, 20, ranks, bias=False)
    factors = [torch.randn(*shape).double() for shape in spec.shapes]
    one = [torch.eye(n).double()[0].expand(1, 24, n) for n in (4, 3, 2)]
    matrix = contract(spec, factors, tuple(one), torch.eye(24).double()[None])[0]
    assert int(torch.linalg.matrix_rank(matrix)) == spec.expert_rank


def test_what_a_whole_network_computes_is_counted() -> None:
    case = read_case("soft_moe_vit")
    report = inspect(load(case.weights, config=case.config))
    tokens, width = 17, 48
    attention = tokens * width * (3 * width + width + 2 * tokens)
    dense = 2 * tokens * width * 192
    around = 16 * 192 * width + 4 * attention + 2 * dense + width * 10
    layers = report.costs[0].macs
    assert report.moe_macs == layers
    assert report.macs == around + layers
    assert f"{count(2 * report.macs)} FLOPs for one input" in model_text(report)


def test_one_input_has_as_many_tokens_as_are_asked_for() -> None:
    case = read_case("soft_moe_conv")
    model = load(case.weights, config=case.config)
    assert [inspect(model, tokens=n).layers[0].tokens for n in (9, 12, 7)] == [9, 12, 7]
    assert inspect(model).layers[0].tokens == 196
    vit = read_case("soft_moe_vit")
    with pytest.raises(UsageError, match="have no token axis"):
        inspect(load(vit.weights, config=vit.config), tokens=9)
    gpt = read_case("mumoe_gpt2_cp")
    with pytest.raises(UsageError, match="accepts at most 32"):
        inspect(load(gpt.weights, config=gpt.config), tokens=33)
