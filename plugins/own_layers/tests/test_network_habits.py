"""Side effects and other habits of networks end in a correct bundle or in one clear error."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.tests.command import Outcome, run

CODE = '''
import moexport
import torch
from torch import nn
from torch.nn import functional as F


class Mix(nn.Module):
    """A Soft MoE layer; one `in_place` first multiplies its own input by 1.5."""

    def __init__(self, d=8, n=4, p=2, h=12, in_place=False):
        super().__init__()
        self.queries, self.temperature = nn.Parameter(torch.randn(d, n, p)), 3.0
        self.enter = nn.ModuleList(nn.Linear(d, h) for _ in range(n))
        self.leave = nn.ModuleList(nn.Linear(h, d) for _ in range(n))
        self.in_place = in_place

    def forward(self, x):
        x = x.mul_(1.5) if self.in_place else x
        logits = torch.einsum("bmd,dnp->bmnp", x, self.temperature * self.queries)
        slots = torch.einsum("bmnp,bmd->bnpd", logits.softmax(1), x)
        pairs = zip(self.enter, self.leave)
        out = torch.stack([b(F.gelu(a(slots[:, i]))) for i, (a, b) in enumerate(pairs)], 1)
        return torch.einsum("bmnp,bnpo->bmo", logits.flatten(2).softmax(2).view_as(logits), out)


class Net(nn.Module):
    def __init__(self, does="", in_place=False):
        super().__init__()
        self.stem, self.mix, self.head = nn.Linear(3, 8), Mix(in_place=in_place), nn.Linear(8, 5)
        self.drop, self.does = nn.Dropout(0.5), does
        if does in ("tie two layers", "hold one more"):
            self.other = Mix()
        if does == "tie two layers":
            self.other.queries = self.mix.queries
            for other, own in zip(self.other.enter, self.mix.enter):
                other.weight = own.weight
        if does == "tie the network":
            self.beside = nn.Linear(8, 12)
            self.beside.weight = self.mix.enter[0].weight
        if does == "compile the layer":
            self.mix = torch.compile(self.mix, backend="eager")
        if does == "compile in place":
            self.mix.compile(backend="eager")

    def forward(self, x):
        if self.does == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.scores(x).float()
        if self.does == "return a text":
            return {"logits": self.scores(x), "classes": "digits"}
        return self.scores(x)

    def scores(self, x):
        if self.does == "count the batch":
            x = x.reshape(len(x), 6, 3)
        if self.does == "name a number":
            x = x.reshape(int(x.shape[0]), 6, 3)
        x = self.stem(x.to(self.stem.weight.dtype))
        if self.does == "call forward":
            y = self.mix.forward(x)
        elif self.does == "call twice":
            y = self.mix(self.mix(x))
        elif self.does == "tie two layers":
            y = self.other(self.mix(x))
        elif self.does == "tie the network":
            y = self.mix(x) + self.beside(x)[..., :8]
        elif self.does == "copy the input":
            y = self.mix(x.clone())
        else:
            y = self.mix(x)
        return self.head(self.drop(x + y).mean(1))


def net(does="", dtype="float32", training=False, **given):
    torch.manual_seed(0)
    network = Net(does, **given).to(getattr(torch, dtype)).train(training)
    return torch.compile(network, backend="eager") if does == "compile all" else network


def adapt(layer: Mix):
    experts = list(zip(layer.enter, layer.leave))
    gain = torch.full((8,), 1.5) if layer.in_place else None
    return moexport.SoftMoE(phi=layer.temperature * layer.queries, experts=experts, gain=gain)
'''
RNG = np.random.default_rng(0)
SHAPE = ("--set", "input_shape=6,3")


@pytest.fixture(autouse=True)
def in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "habits.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "habits", raising=False)


EXPORT = ("export", "habits:net", *SHAPE, "--adapter", "habits:adapt", "-o", "out")


def exported(*given: str) -> Outcome:
    return run(*EXPORT, *(part for each in given for part in ("--set", each)))


def assert_right(does: str = "", **given: object) -> None:
    """The bundle computes the same as the factory's network, in float32."""
    network = importlib.import_module("habits").net(does, **given).float().eval()
    x = RNG.standard_normal((3, 6, 3)).astype(np.float32)
    with torch.no_grad():
        y = network(torch.from_numpy(x)).numpy()
    found = moexport.Bundle.open("out").session()(x)
    assert np.abs(found - y).max() <= 1e-5 * np.abs(y).max()


@pytest.mark.parametrize(
    ("does", "note"),
    [
        ("compile the layer", "torch.compile was removed from mix"),
        ("compile in place", "torch.compile was removed from mix"),
        ("compile all", "torch.compile was removed from the network"),
        ("call forward", "mix replaced as"),
        ("hold one more", "the layer other is not called, so it was not replaced"),
        ("tie two layers", "other replaced as"),
        ("tie the network", "mix replaced as"),
    ],
)
def test_a_network_that_can_be_exported_is_right(does: str, note: str) -> None:
    outcome = exported(f"does={does}")
    assert outcome.code == 0, outcome.err
    assert note in outcome.err
    assert_right(does)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_weights_of_another_type_are_exported_as_float32(dtype: str) -> None:
    outcome = exported(f"dtype={dtype}")
    assert outcome.code == 0, outcome.err
    assert "converted the network to float32" in outcome.err
    assert_right(dtype=dtype)


def test_a_network_that_counts_its_batch_is_right_for_one_size() -> None:
    outcome = run(*EXPORT, "--set", "does=count the batch", "--batch", "3")
    assert outcome.code == 0, outcome.err
    assert_right("count the batch")


def test_dropout_is_off_in_the_export_of_a_network_in_training() -> None:
    assert exported("training=true").code == 0
    assert_right()


def test_a_layer_that_changes_its_input_is_right_where_nobody_else_uses_that() -> None:
    outcome = exported("in_place=true", "does=copy the input")
    assert outcome.code == 0, outcome.err
    assert_right("copy the input", in_place=True)


@pytest.mark.parametrize(
    ("given", "code", "error", "hint"),
    [
        ("does=autocast", 1, "bfloat16 under torch.autocast", "can disable autocast"),
        ("does=call twice", 1, "the layer mix is called 2 times", "its own layer"),
        ("does=return a text", 1, "its output 'classes' is a str", "return only tensors"),
        ("does=count the batch", 1, ": x = x.reshape(len(x), 6, 3))", "x.shape[0]"),
        ("does=name a number", 1, ": x = x.reshape(int(x.shape[0]), 6, 3))", "no int(…)"),
        ("in_place=true", 3, "the layer mix changes its input in place", "x = x + …"),
    ],
)
def test_a_network_that_cannot_be_exported_names_what_to_change(
    given: str, code: int, error: str, hint: str
) -> None:
    outcome = exported(given)
    assert outcome.code == code, outcome.err
    assert error in outcome.error and hint in outcome.hint
    assert not Path("out").exists()
