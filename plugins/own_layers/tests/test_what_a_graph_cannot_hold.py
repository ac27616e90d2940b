"""Layers that read their weights' shapes, change buffers, or have as many slots as inputs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import FamilyError, UsageError
from moexport.tests.command import run

CODE = '''
import moexport
import torch
from torch import nn
from torch.nn import functional as F


class Stacked(nn.Module):
    def __init__(self, d=16, n=4, h=20):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(n, d, h) / 4)
        self.w2 = nn.Parameter(torch.randn(n, h, d) / 4)
        self.gate = nn.Linear(d, n)

    def forward(self, x):
        hidden = torch.einsum("...d,ndh->...nh", x, self.w1).relu()
        y = torch.einsum("...nh,nho->...no", hidden, self.w2)
        return torch.einsum("...no,...n->...o", y, self.gate(x).softmax(-1))


class Read(Stacked):
    pass


@moexport.adapts(Read)
def adapt_read(layer):
    def forward(experts, x):
        n, d = layer.w1.shape[0], layer.w1.mT.size(-1)
        y = layer.w1.new_zeros(*x.shape[:-1], d)
        assert len(layer.w1) == n and layer.w1.ndim == 3 and layer.w1.numel() == n * 20 * d
        w = layer.gate(x.to(layer.w1.dtype).to(layer.w2.device)).softmax(-1)
        return y + experts(x, weights=w * (n / 4))

    return moexport.Experts(w1=layer.w1, w2=layer.w2, activation="relu", forward=forward)


class Used(Stacked):
    def forward(self, x):
        return super().forward(x) + 0 * self.w1[0].sum()


@moexport.adapts(Used)
def adapt_used(layer):
    def forward(experts, x):
        return experts(x, weights=layer.gate(x).softmax(-1)) + 0 * layer.w1[0].sum()

    return moexport.Experts(w1=layer.w1, w2=layer.w2, activation="relu", forward=forward)


class Multiplied(Stacked):
    pass


@moexport.adapts(Multiplied)
def adapt_multiplied(layer):
    def forward(experts, x):
        unused = x @ layer.w1
        return experts(x, weights=layer.gate(x).softmax(-1)) + 0 * unused.sum()

    return moexport.Experts(w1=layer.w1, w2=layer.w2, activation="relu", forward=forward)


class Counting(Stacked):
    """Counts in a buffer how often each expert is chosen."""

    share = 0.0

    def __init__(self):
        super().__init__()
        self.register_buffer("load", torch.zeros(4))

    def route(self, x, k=2):
        scores = self.gate(x) - self.share * self.load
        w, index = scores.softmax(-1).topk(k, -1)
        self.load += F.one_hot(index, 4).float().flatten(0, -2).sum(0)
        return index, w

    def forward(self, x):
        hidden = torch.einsum("...d,ndh->...nh", x, self.w1).relu()
        y = torch.einsum("...nh,nho->...no", hidden, self.w2)
        index, w = self.route(x)
        every = torch.zeros_like(y[..., 0]).scatter(-1, index, w)
        return torch.einsum("...no,...n->...o", y, every)


class Balancing(Counting):
    share = 0.01


@moexport.adapts(Counting)
def adapt_counting(layer):
    return moexport.Experts(w1=layer.w1, w2=layer.w2, activation="relu", router=layer.route)


class Slots(Stacked):
    """Each expert takes as many tokens as there are inputs in the batch."""

    def route(self, x):
        best, index = self.gate(x).topk(x.shape[0], dim=1)
        return best.softmax(1), F.one_hot(index, x.shape[1]).to(x)

    def forward(self, x):
        best, taken = self.route(x)
        slots = torch.einsum("bpnm,bmd->bnpd", taken, x)
        y = torch.einsum("bnpd,ndh->bnph", slots, self.w1).relu()
        y = torch.einsum("bnph,nho->bnpo", y, self.w2)
        return torch.einsum("bpnm,bpn,bnpd->bmd", taken, best, y)


@moexport.adapts(Slots)
def adapt_slots(layer):
    def forward(experts, x):
        best, taken = layer.route(x)
        slots = torch.einsum("bpnm,bmd->bnpd", taken, x)
        return experts(slots, combine=torch.einsum("bpnm,bpn->bmnp", taken, best))

    return moexport.Experts(w1=layer.w1, w2=layer.w2, activation="relu", forward=forward)


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.moe, self.head = nn.Linear(6, 16), layer, nn.Linear(16, 5)

    def example_input(self):
        return torch.randn(4, 12, 6, generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        return self.head(self.moe(self.embed(x)).mean(1))


def build(layer="Stacked"):
    torch.manual_seed(0)
    return Net(globals()[layer]()).eval()
'''


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "kept.py").write_text(CODE)
    monkeypatch.delitem(sys.modules, "kept", raising=False)


def exported(layer: str, *options: str) -> moexport.Bundle:
    outcome = run("export", "kept:build", "--set", f"layer={layer}", "-o", layer, *options)
    assert outcome.code == 0, outcome.err
    return moexport.Bundle.open(layer)


def off(bundle: moexport.Bundle, layer: str, x: np.ndarray) -> float:
    """The error of a bundle against the network in float64 with its initial buffers."""
    build = __import__("kept").build
    with torch.no_grad():
        y = build(layer).double()(torch.from_numpy(x).double()).numpy()
    return float(np.abs(bundle.session()(x) - y).max() / np.abs(y).max())


X = np.random.default_rng(1).standard_normal((4, 12, 6)).astype(np.float32)


@pytest.mark.slow
def test_a_forward_may_read_the_shapes_and_types_of_the_experts_weights() -> None:
    assert off(exported("Read"), "Read", X) < 1e-5


@pytest.mark.parametrize("layer", ["Used", "Multiplied"])
def test_a_forward_that_computes_with_the_experts_weights_is_told_so(layer: str) -> None:
    with pytest.raises(UsageError, match=r"code computes with moe\.w1, which is an e"):
        moexport.load("kept:build", config={"layer": layer})


@pytest.mark.slow
def test_a_buffer_that_no_result_depends_on_may_change() -> None:
    outcome = run("export", "kept:build", "--set", "layer=Counting", "-o", "out")
    assert outcome.code == 0, outcome.err
    assert "the network changes moe.load when it is called; the graph does not" in outcome.err
    assert off(moexport.Bundle.open("out"), "Counting", X) < 1e-5


def test_a_buffer_that_changes_results_is_the_cause_that_is_said() -> None:
    with pytest.raises(FamilyError, match=r"changes moe\.load .* its next result depends on that"):
        moexport.load("kept:build", config={"layer": "Balancing"})
    (missing,) = moexport.adapt("kept:Balancing").missing
    assert re.search(r"a different result each time .* because it changes load", missing)


@pytest.mark.slow
def test_slots_that_follow_the_batch_need_a_fixed_one() -> None:
    outcome = run("export", "kept:build", "--set", "layer=Slots", "-o", "out")
    assert outcome.code == 2
    assert "passes a number of slots that depends on the input to experts(" in outcome.error
    assert "--batch N" in outcome.hint and not Path("out").exists()
    outcome = run("export", "kept:build", "--set", "layer=Slots", "-o", "out", "--batch", "2")
    assert outcome.code == 2
    assert "passes 2 slots to experts(slots, combine=C), but passed 4 when the" in outcome.error
    assert off(exported("Slots", "--batch", "4"), "Slots", X) < 1e-5
