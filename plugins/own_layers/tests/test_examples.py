"""A user's network is compared on at least two different inputs, and its layers one by one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport import load
from moexport.errors import ParityError, UsageError
from moexport.plugins.own_layers.examples import differ, random_like
from torch import Tensor

CODE = '''
import moexport
import torch
from torch import nn
from torch.nn import functional as F


class Mix(nn.Module):
    """A Soft MoE layer; its `fault` is how it looks at the whole batch."""

    def __init__(self, fault="", d=8, n=4, p=2, h=12):
        super().__init__()
        self.queries, self.temperature = nn.Parameter(torch.randn(d, n, p)), 3.0
        self.enter = nn.ModuleList(nn.Linear(d, h) for _ in range(n))
        self.leave = nn.ModuleList(nn.Linear(h, d) for _ in range(n))
        self.fault = fault

    def forward(self, x):
        whole = x.shape
        if self.fault == "groups":
            x = x.reshape(1, -1, whole[-1])
        if self.fault == "statistics":
            x = F.batch_norm(x.mT, None, None, training=True).mT
        if self.fault == "noise":
            x = x + torch.rand_like(x)
        logits = torch.einsum("bmd,dnp->bmnp", x, self.temperature * self.queries)
        dispatch = logits.softmax(0 if self.fault == "softmax" else 1)
        slots = torch.einsum("bmnp,bmd->bnpd", dispatch, x)
        pairs = zip(self.enter, self.leave)
        out = torch.stack([b(F.gelu(a(slots[:, i]))) for i, (a, b) in enumerate(pairs)], 1)
        combine = logits.flatten(2).softmax(2).view_as(logits)
        return torch.einsum("bmnp,bnpo->bmo", combine, out).reshape(whole)


class Net(nn.Module):
    """Its `stem` has no bias: the layer sees zeros where the example is zeros."""

    def __init__(self, fault="", ids=0, takes="", example=None):
        super().__init__()
        self.stem = nn.Embedding(ids, 8) if ids else nn.Linear(3, 8, bias=False)
        self.mix, self.head, self.takes = Mix(fault), nn.Linear(8, 5), takes
        self.example_input = example

    def forward(self, x):
        if self.takes == "one input":
            x = x.reshape(1, 6, 3)
        if self.takes == "zeros" and x.any():
            raise ValueError("nothing but zeros")
        if self.takes == "roots":
            x = (1 - x).sqrt()
        x = self.stem(x)
        return self.head((x + self.mix(x)).mean(1))


def net(shape=(1, 6, 3), **given):
    torch.manual_seed(0)
    kind = torch.int64 if given.get("ids") else torch.float32
    return Net(example=torch.zeros(*shape, dtype=kind), **given)


def adapt(layer: Mix):
    phi = layer.temperature * layer.queries
    return moexport.SoftMoE(phi=phi, experts=list(zip(layer.enter, layer.leave)))


def forgetful(layer: Mix):
    return moexport.SoftMoE(phi=layer.queries, experts=list(zip(layer.enter, layer.leave)))


class Router(Mix):
    """Its experts have a room for each, over the whole batch."""

    def route(self, x):
        weights, index = (x @ self.queries[..., 0]).softmax(-1).topk(2, -1)
        return index, weights * (weights > weights.mean())

    def forward(self, x):
        index, weights = self.route(x)
        pairs = zip(self.enter, self.leave)
        every = torch.stack([b(F.gelu(a(x))) for a, b in pairs], -2)
        one_hot = F.one_hot(index, every.shape[-2]) * weights[..., None]
        return torch.einsum("...ne,...n->...e", every, one_hot.sum(-2))


def routed(batch=3):
    network = net()
    network.mix = Router()
    network.example_input = torch.randn(batch, 6, 3)
    return network


def adapt_router(layer: Router):
    pairs = list(zip(layer.enter, layer.leave))
    return moexport.Experts(router=layer.route, experts=pairs, activation="gelu")
'''
ONE = "the example has no two different inputs, so the replaced layers were "


@pytest.fixture(autouse=True)
def in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "single.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "single", raising=False)


def loaded(adapter: str = "adapt", example: Any = None, **config: Any) -> moexport.Model:
    return load("single:net", config=config, adapter=f"single:{adapter}", example=example)


# --- two different inputs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [{}, {"shape": [3, 6, 3]}, {"ids": 10, "shape": [1, 6]}, {"takes": "one input"}],
    ids=str,
)
def test_a_wrong_adapter_is_refused_where_the_example_is_zeros(config: dict[str, Any]) -> None:
    with pytest.raises(ParityError, match="single:net: the layer mix does not match its adapter"):
        loaded("forgetful", **config)


@pytest.mark.parametrize("x", [np.zeros((1, 6, 3)), np.ones((4, 6, 1)) * np.arange(3.0)])
def test_inputs_that_are_equal_are_one_input(x: np.ndarray) -> None:
    model = loaded(example=x.astype(np.float32))
    assert model.example is not None and len(model.example) == 2 * len(x)
    assert f"{ONE}also checked on random ones" in model.notes
    again = loaded(example=model.example)
    assert np.array_equal(np.asarray(again.example), np.asarray(model.example))
    assert not [note for note in again.notes if note.startswith(ONE)]


def test_parity_sees_two_different_inputs(tmp_path: Path) -> None:
    bundle = moexport.export(loaded(), tmp_path / "out", k=2)
    with np.load(bundle.path / "parity.npz") as arrays:
        x = next(array for name, array in arrays.items() if array.shape[1:] == (6, 3))
    assert len(np.unique(x, axis=0)) >= 2
    assert bundle.verify()


def test_a_network_that_runs_on_one_input_at_a_time_is_checked_on_two() -> None:
    model = loaded(takes="one input")
    assert model.example is not None and len(model.example) == 1
    assert f"{ONE}also checked on random ones" in model.notes


@pytest.mark.parametrize("takes", ["zeros", "roots"])
def test_a_network_that_cannot_take_random_inputs_is_checked_on_its_example(takes: str) -> None:
    model = loaded(takes=takes)
    assert model.example is not None and len(model.example) == 1
    assert any(note.startswith(f"{ONE}checked on the example alone") for note in model.notes)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.zeros(1, 4),
        torch.full((2, 4), 7.0),
        torch.tensor([[250.0, 260.0, 240.0, -torch.inf]]),
        torch.tensor([[3, 5, 9]]),
        torch.zeros(1, 4, dtype=torch.int64),
        torch.tensor([5]),
        torch.full((2, 3), 255, dtype=torch.uint8),
        torch.ones(1, 4, dtype=torch.bool),
    ],
    ids=str,
)
def test_random_inputs_differ_from_the_example_and_are_of_its_kind(inputs: Tensor) -> None:
    further = [*random_like(inputs)]
    assert further and not differ(inputs)
    for each in further:
        assert each.shape == inputs.shape and each.dtype == inputs.dtype
        assert differ(torch.cat([inputs, each])) and bool(each.isfinite().all())


def test_random_inputs_keep_the_scale_and_the_values_of_the_example() -> None:
    pixels = 100 + 10 * torch.randn(1, 4000, generator=torch.Generator().manual_seed(1))
    normal, drawn = random_like(pixels)
    assert abs(float(normal.mean()) - 100) < 1 and abs(float(normal.std()) - 10) < 1
    assert set(drawn.flatten().tolist()) <= set(pixels.flatten().tolist())
    (ids,) = random_like(torch.tensor([[3, 5, 9, 3, 5]]))
    assert set(ids.flatten().tolist()) <= {3, 5, 9}
    up, down = random_like(torch.full((1, 20), 4))
    assert set(up.flatten().tolist()) == {4, 5} and set(down.flatten().tolist()) == {4, 3}


@pytest.mark.parametrize(
    ("example", "says"),
    [
        (np.zeros((0, 6, 3), np.float32), r"the example has the shape \[0, 6, 3\]"),
        (np.array([["a"]]), "the example: can't convert"),
    ],
)
def test_an_example_without_inputs_is_refused(example: np.ndarray, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        loaded(example=example)


def test_an_example_that_fails_shows_what_it_says() -> None:
    code = "from single import *\ndef fails():\n    network = net()\n    network.example_input = "
    Path("failing.py").write_text(f"{code}lambda: 1 / 0\n    return network\n")
    with pytest.raises(UsageError, match=r"example_input\(\) failed: ZeroDivisionError"):
        load("failing:fails", adapter="single:adapt")
    del sys.modules["failing"]


# --- one input does not depend on the others -----------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("fault", ["groups", "statistics", "softmax"])
def test_a_layer_that_looks_at_the_whole_batch_is_refused_by_name(fault: str, batch: int) -> None:
    x = np.random.default_rng(0).standard_normal((batch, 6, 3)).astype(np.float32)
    with pytest.raises(ParityError, match="the layer mix mixes the inputs of its batch"):
        loaded(example=x, fault=fault)


def test_a_layer_that_looks_at_the_batch_is_refused_where_the_network_takes_one_input() -> None:
    with pytest.raises(ParityError, match="the layer mix mixes the inputs of its batch"):
        loaded(fault="groups", takes="one input")


def test_noise_is_told_from_a_look_at_the_batch() -> None:
    with pytest.raises(ParityError, match="the layer mix returns a different result each time"):
        loaded(fault="noise")


def test_what_a_router_does_with_the_batch_is_left_to_the_graph() -> None:
    assert list(load("single:routed", adapter="single:adapt_router").layers) == ["mix.experts"]
