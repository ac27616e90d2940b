"""A first adapter for a layer: found, and right; or what was not recognised is said."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import moexport
import numpy as np
import pytest
from moexport.errors import FamilyError, UsageError
from moexport.tests.command import run
from moexport.tests.docs.documents import ROOT

FOUND = ("Tempered", "Biased", "NormedExperts", "OneMap", "Mixed", "Swapped")
FOUND_ROUTED = ("Dense", "Shared", "Sigmoid")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    # Layers without the adapters that the example has for them.
    source = (ROOT / "examples" / "own_layers.py").read_text(encoding="utf-8")
    source = source.replace("@moexport.adapts(", "@(lambda *_: lambda adapter: adapter)(")
    (tmp_path / "bare_layers.py").write_text(source)
    for name in ("bare_layers", "found", "given"):
        monkeypatch.delitem(sys.modules, name, raising=False)


GIVEN = '''
import torch
from bare_layers import DIM, Mlp
from torch import nn


class Tasks(nn.Module):
    """A gate that looks at the task of the input, and not at its tokens."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 9), nn.ReLU(), nn.Linear(9, DIM))
                                     for _ in range(4))

    def forward(self, x, task):
        shares = self.gate(task).softmax(dim=-1)
        return x + sum(shares[:, i, None, None] * e(x) for i, e in enumerate(self.experts))


class Padded(Tasks):
    """Two experts for each token by what another stream holds; padding comes out as zeros."""

    def forward(self, x, other, padding):
        weights, index = self.gate(other).softmax(dim=-1).topk(2)
        every = torch.stack([e(x) for e in self.experts], dim=2)
        chosen = every.gather(2, index[..., None].expand(*index.shape, DIM))
        return (chosen * weights[..., None]).sum(2).masked_fill(padding[..., None], 0)


class Waves(Tasks):
    """A gate of a form that nobody tries."""

    def forward(self, x, context):
        shares = self.gate(torch.sin(x) * context).softmax(dim=-1)
        return sum(shares[..., i, None] * e(x) for i, e in enumerate(self.experts))
'''


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("bare_layers:Masked", ("def forward(experts, x, mask):", "(~mask[:, :, None, None]")),
        ("given:Tasks", ("def forward(experts, x, task):", "layer.gate(task.unsqueeze(1)")),
        ("given:Padded", ("def forward(experts, x, other, padding, k=2):", "fill(padding[..., N")),
    ],
)
def test_what_a_layer_takes_besides_tokens_is_in_the_forward(
    source: str, lines: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "given.py").write_text(GIVEN)
    outcome = run("adapt", source)
    assert outcome.code == 0, outcome.err
    assert all(line in outcome.out for line in lines), outcome.out
    outcome = run("adapt", "given:Waves")
    assert outcome.code == 3 and "around the experts, with context: " in outcome.err
    assert "def forward(experts, x, context):" in outcome.out


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FOUND, *FOUND_ROUTED])
def test_the_adapter_that_is_written_serves_the_layer(name: str, tmp_path: Path) -> None:
    outcome = run("adapt", f"bare_layers:{name}", "-o", "found.py")
    assert outcome.code == 0, outcome.err
    module = importlib.import_module("bare_layers")
    (key,) = (key for key, made in module.LAYERS.items() if made.__name__ == name)
    importlib.import_module("found")
    model = moexport.load("bare_layers:build", config={"layer": key})
    moexport.export(model, tmp_path / "out")
    x = np.random.default_rng(1).standard_normal((4, 12, 6)).astype(np.float32)
    assert moexport.Bundle.open(tmp_path / "out").session()(x).shape == (4, 5)
    assert ("forward" in (tmp_path / "found.py").read_text()) == (
        name in ("Swapped", *FOUND_ROUTED)
    )


@pytest.mark.slow
def test_what_was_not_recognised_is_said_and_the_own_forward_is_a_start(
    tmp_path: Path,
) -> None:
    outcome = run("adapt", "bare_layers:ExpertChoice", "-o", "found.py")
    assert outcome.code != 0
    assert "what is around the experts: " in outcome.err and "usual forms were tried" in outcome.err
    text = (tmp_path / "found.py").read_text()
    assert "y = y + shares[..., e, None] * expert(seen)" in text
    assert "in enumerate(layer.experts):  # <- experts" in text
    assert "return moexport.Experts(experts=layer.experts, forward=forward)" in text
    outcome = run("adapt", "bare_layers:SpecialisedExperts")
    assert "the experts: experts[0] (Specialised): " in outcome.err.replace("layer.", "")
    assert "a further linear map" in outcome.err


def test_a_layer_that_cannot_be_made_or_called_says_so() -> None:
    with pytest.raises(UsageError, match=r"bare_layers:Net\(\) failed: TypeError") as refused:
        moexport.adapt("bare_layers:Net")
    assert "--set" in str(refused.value.hint)
    with pytest.raises(UsageError, match=r"takes no tokens \[3, 7, 16\] with logits"):
        moexport.adapt("bare_layers:Outside")
    with pytest.raises(FamilyError, match="Mlp holds no experts that moexport recognises"):
        moexport.adapt("bare_layers:Mlp")
