"""Experts with a user's own router, described by an adapter: supported forms, and clear errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import ParityError, UsageError
from moexport.exporter.job import export_job
from moexport.exporter.model import fingerprint
from moexport.exporter.options import ExportOptions
from moexport.graphs.layers.base import MoELayer
from moexport.plugins.own_layers.descriptions import ExpertsDescription as Experts
from moexport.plugins.token_routed.own_forward import Code, OwnForward, RouterHost
from moexport.tests.command import run

CODE = '''
import moexport
import torch
from torch import nn
from torch.nn import functional as F


class Gated(nn.Module):
    """Top-k of n SwiGLU experts; `form` says how its weights are kept."""

    def __init__(self, form, d=8, n=6, h=12, o=8, k=2):
        super().__init__()
        self.router = nn.Linear(d, n, bias=False)
        self.form, self.k = form, k
        shapes = {"gate": (n, h, d), "up": (n, h, d), "down": (n, o, h)}
        self.maps = nn.ParameterDict({key: torch.randn(s) for key, s in shapes.items()})

    def choose(self, x, k=None):
        weights, index = self.router(x).softmax(-1).topk(k or self.k, -1)
        return index, weights / weights.sum(-1, keepdim=True)

    def expert(self, e, x):
        gate, up = x @ self.maps["gate"][e].T, x @ self.maps["up"][e].T
        return (F.silu(gate) * up) @ self.maps["down"][e].T

    def forward(self, x):
        index, weights = self.choose(x)
        every = torch.stack([self.expert(e, x) for e in range(len(self.maps["gate"]))], -2)
        one_hot = F.one_hot(index, every.shape[-2]).to(x.dtype) * weights[..., None]
        return torch.einsum("...ne,...no->...e", every, one_hot.sum(-2)[..., None])


class Net(nn.Module):
    def __init__(self, layer, rows=False):
        super().__init__()
        self.stem, self.moe, self.rows = nn.Linear(3, 8), layer, rows

    def forward(self, x):
        x = self.stem(x)
        if self.rows:
            return self.moe(x.flatten(0, 1)).unflatten(0, (-1, 6))
        return self.moe(x)


def net(form="listed", rows=False, **given):
    torch.manual_seed(0)
    return Net(Gated(form, **given), rows)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 32)
        self.first, self.second = (
            Gated("concatenated", d=32, h=h, o=32) for h in (64, 40))

    def forward(self, x):
        return self.second(self.first(self.stem(x)))


def two():
    torch.manual_seed(0)
    return Two()


def alone():
    torch.manual_seed(0)
    return Gated("listed")


@moexport.adapts(Gated)
def adapt(layer):
    maps = layer.maps
    if layer.form == "listed":
        triples = list(zip(maps["gate"], maps["up"], maps["down"]))
        # A closure, not a method: it stays that of the layer.
        return moexport.Experts(router=lambda x, k=None: layer.choose(x, k), experts=triples)
    both = [maps["gate"].mT, maps["up"].mT]
    first = torch.cat(both, -1)
    if layer.form == "lists":
        second = [each.T for each in maps["down"]]
        return moexport.Experts(
            router=layer.choose, w1=list(first), w2=second, gate="concatenated")
    if layer.form == "interleaved":
        first = torch.stack(both, -1).flatten(-2)
    return moexport.Experts(router=layer.choose, w1=first, w2=maps["down"].mT, gate=layer.form)
'''


@pytest.fixture(autouse=True)
def in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "routed.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "routed", raising=False)


X = np.random.default_rng(0).standard_normal((4, 6, 3)).astype(np.float32)


def loaded(factory: str = "net", **given: Any) -> Any:
    return moexport.load(f"routed:{factory}", config=given, example=X)


@pytest.mark.parametrize(
    "given",
    [
        {"form": "listed", "o": 10},
        {"form": "concatenated"},
        {"form": "interleaved"},
        {"form": "lists"},
        {"form": "listed", "rows": True},
    ],
    ids=str,
)
def test_gated_experts_of_ones_own_become_a_verified_bundle(
    given: Mapping[str, Any], tmp_path: Path
) -> None:
    model = loaded(**given)
    assert list(model.layers) == ["moe.experts"]
    assert model.layers["moe.experts"].spec.trained_k == 2
    bundle = moexport.export(model, tmp_path / "out", k=1)
    parity = bundle.manifest.parity
    assert parity is not None and parity["passed"] and parity["agreeing"] == parity["choices"]
    network = sys.modules["routed"].net(**given).eval()
    network.moe.k = 1
    with torch.no_grad():
        wanted = network(torch.from_numpy(X[:3])).numpy()
    found = bundle.session().run(X[:3])["output"]
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_an_export_says_what_a_share_came_to_and_which_layer_stays_in_floats() -> None:
    """0.25 of the 2 trained experts is less than one; 40 rows are not a multiple of 32."""
    np.save("x.npy", X)
    asked = ("--k", "0.25", "--precision", "int4", "--target", "ort-cpu", "--no-verify")
    told = run("export", "routed:two", "--data", "x.npy", "-o", "out", *asked)
    assert told.code == 0, told.err
    lines = told.err.splitlines()
    assert any("--k 0.25: 0.25 × the trained 2 → 1 of 6 experts" in line for line in lines)
    float_layers = [line for line in lines if "in fp32" in line]
    (line,) = float_layers
    assert "second.experts: in fp32: experts.w2 has 40 rows, not a multiple of 32" in line


@pytest.mark.parametrize(
    ("batch", "sizes"), [("1:4:16", "at 6 and 24 and 96 tokens"), ("4", "at 24 tokens")]
)
def test_a_lowering_is_chosen_for_the_tokens_that_a_network_takes(batch: str, sizes: str) -> None:
    planned = moexport.plan(loaded(), "out", batch=batch)
    ((layer,),) = (graph.layers for graph in planned.graphs)
    assert sizes in layer.reason


def test_the_experts_weights_are_held_once_and_the_routers_are_part_of_the_model() -> None:
    model = loaded()
    names = [name for name, _ in model.module.named_parameters()]
    assert "moe.host.router.weight" in names
    assert not [name for name in names if name.startswith("moe.host.maps")]
    before = fingerprint(model)
    with torch.no_grad():
        model.module.get_parameter("moe.host.router.weight").mul_(2)
    assert fingerprint(model) != before


def test_k_is_asked_of_a_copy_and_can_be_taken_back() -> None:
    model = loaded()
    smaller = RouterHost().with_k(model, {"moe.experts": 1})
    assert RouterHost().with_k(model, {"moe.experts": 2}) is model
    back = RouterHost().with_k(smaller, {"moe.experts": 2})
    x = torch.from_numpy(X)
    with torch.no_grad():
        y = model.module(x)
        assert not torch.allclose(smaller.module(x), y)
        assert torch.equal(back.module(x), y)


def test_the_network_may_be_the_layer_itself() -> None:
    x = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32)
    model = moexport.load("routed:alone", example=x)
    assert isinstance(model.module, OwnForward) and list(model.layers) == ["experts"]


def adapted(**changes: Any) -> Any:
    """An adapter that differs from the correct one."""

    def adapt(layer: Any) -> Experts:
        routed = sys.modules["routed"]
        right: Experts = routed.adapt(layer)
        return replace(right, **changes)

    sys.path.insert(0, str(Path.cwd()))
    adapt.__annotations__ = {"layer": importlib.import_module("routed").Gated}
    return adapt


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation": "gelu"}, "it matches with activation='silu'"),
        ({"weights_on": "input"}, "it matches with weights_on='output'"),
        ({"alpha": 1.7}, "it matches with alpha=1"),
    ],
    ids=str,
)
def test_options_that_are_another_layers_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ParityError) as refused:
        moexport.load("routed:net", example=X, adapter=adapted(**changes))
    assert said in refused.value.message


def test_gate_and_up_exchanged_are_told() -> None:
    sys.path.insert(0, str(Path.cwd()))
    routed = importlib.import_module("routed")
    maps = routed.net().moe.maps
    wrong = list(zip(maps["up"], maps["gate"], maps["down"], strict=True))
    with pytest.raises(ParityError, match="it matches with gate and up exchanged"):
        moexport.load("routed:net", example=X, adapter=adapted(experts=wrong))


def of(index: Any, weights: Any = None) -> Any:
    """A router that returns these for every token."""

    def route(x: torch.Tensor) -> Any:
        made = torch.as_tensor(index).expand(*x.shape[:-1], -1)
        return made, torch.ones(made.shape) if weights is None else weights

    return route


@pytest.mark.parametrize(
    ("router", "said"),
    [
        (of([0, 6]), "the layer moe: its router chose expert 6, but the experts are 0 to 5"),
        (of([-1]), "its router chose expert -1"),
        (of([0.5]), "its router returned index float32"),
        (of([0, 1], torch.ones(4, 6, 1)), "its router returned index int64 [4, 6, 2] and weights"),
        (lambda x: x.argmax(-1), "its router returned Tensor, not index and weights"),
        (lambda x: (x.argmax(-1), x.amax(-1)), "its router returned index int64 [4, 6] and"),
        (lambda x, mask: (x, mask), "its router failed: TypeError"),
        ("choose", "router is a str, not a function"),
        (None, "the layer is called with nothing, not index and weights"),
    ],
)
def test_a_router_that_cannot_be_one_is_refused(router: Any, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        moexport.load("routed:net", example=X, adapter=adapted(router=router))
    assert said in refused.value.message and refused.value.hint


W = torch.zeros


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"b1": W(4, 12)}, "no experts are given"),
        ({"w1": W(4, 8, 24), "w2": W(4, 12, 8)}, "w1 [4, 8, 24] returns 24 numbers"),
        (
            {"w1": W(4, 8, 12), "w2": W(4, 12, 8), "experts": [W(2, 2)]},
            "the experts are given twice",
        ),
        ({"w1": [W(8, 12), W(8, 11)], "w2": W(2, 12, 8)}, "matrices of different shapes"),
        ({"experts": [(W(12, 8),) * 4]}, "experts[0] is a tuple, not (first, second)"),
        ({"experts": [(W(12, 8), W(8, 12)), (W(12, 8), W(8, 11))]}, "experts[1]: its last weight"),
        ({"experts": [(W(12, 8), W(11, 8), W(8, 12))]}, "a gated expert's first two weights"),
        ({"experts": [(W(12, 8), W(8, 12))], "limit": 7.0}, "limit and up_offset need a gate"),
        ({"experts": [(W(12, 8), W(8, 12))], "activation": "tanh"}, "activation='tanh'"),
        ({"w1": W(4, 8, 12), "w2": W(4, 12, 8), "b1": W(4, 8)}, "b1 has the shape [4, 8]"),
        (
            {"experts": [(W(12, 8), W(8, 12))], "activation": "relu", "alpha": 2.0},
            "alpha=2 needs activation='silu'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_layer_of_experts_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Experts(**given).build("layer")
    assert said in refused.value.message


def test_a_router_that_gives_another_number_than_it_is_asked_for_is_refused() -> None:
    def stubborn(x: torch.Tensor, k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        del k
        weights, index = x[..., :6].topk(2)
        return index, weights

    class Plain(torch.nn.Module):
        pass

    model = loaded()
    routed = model.module.moe
    assert isinstance(routed, OwnForward) and isinstance(routed.experts, MoELayer)
    model.module.moe = OwnForward(routed.experts, Code(None, stubborn), Plain())
    with pytest.raises(UsageError, match="was called with k=1, but returns 2"):
        export_job(model, ExportOptions(k=1))
