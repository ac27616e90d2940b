"""A first adapter for a layer is found and correct, or the unrecognised part is named."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.common.files import cache_folder
from moexport.docs.sources import ROOT
from moexport.errors import UsageError
from moexport.plugins.own_layers.first_adapter.cache import MAX_ENTRIES
from moexport.plugins.own_layers.first_adapter.readings import readings_of
from moexport.plugins.own_layers.first_adapter.start import start_of
from moexport.tests.command import run

FOUND = ("Tempered", "Biased", "NormedExperts", "OneMap", "Mixed", "Swapped")
FOUND_ROUTED = ("Dense", "Shared", "Sigmoid")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    # Layers without the example's adapters.
    source = (ROOT / "examples" / "own_layers.py").read_text(encoding="utf-8")
    source = source.replace("@moexport.adapts(", "@(lambda *_: lambda adapter: adapter)(")
    (tmp_path / "bare_layers.py").write_text(source)
    for name in ("bare_layers", "found", "given", "numbered"):
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


PAIRED = '''
import torch
from torch import nn
from torch.nn import functional as F


class Pairs(nn.Module):
    """Soft MoE whose experts' maps lie in a list for each map."""

    def __init__(self, gated=False):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(6, 4))
        self.up = nn.ModuleList(nn.Linear(6, 9) for _ in range(4))
        self.gate = nn.ModuleList(nn.Linear(6, 9) for _ in range(4)) if gated else None
        self.down = nn.ModuleList(nn.Linear(9, 6) for _ in range(4))

    def expert(self, e, x):
        if self.gate is None:
            return self.down[e](torch.relu(self.up[e](x)))
        return self.down[e](F.silu(self.gate[e](x)) * self.up[e](x))

    def forward(self, x):
        logits = x @ self.phi
        slots = logits.softmax(1).mT @ x
        y = torch.stack([self.expert(e, slots[:, e]) for e in range(4)], 1)
        return logits.softmax(2) @ y
'''


@pytest.mark.parametrize(
    ("gated", "experts"),
    [
        (False, "experts=[*zip(layer.up, layer.down, strict=True)]"),
        (True, "experts=[*zip(layer.gate, layer.up, layer.down, strict=True)]"),
    ],
)
def test_maps_in_a_list_for_each_map_are_experts(gated: bool, experts: str, tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text(PAIRED)
    outcome = run("adapt", "given:Pairs", "--set", f"gated={gated}".lower(), "--tokens", "7")
    assert outcome.code == 0, outcome.err
    assert experts in outcome.out
    assert ("activation='silu'" if gated else "activation='relu'") in outcome.out


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FOUND, *FOUND_ROUTED])
def test_the_adapter_that_is_written_serves_the_layer(name: str, tmp_path: Path) -> None:
    outcome = run("adapt", f"bare_layers:{name}", "-o", "found.py")
    assert outcome.code == 0 and "--adapter found:adapt" in outcome.out, outcome.err
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
def test_what_was_not_recognised_is_said_and_the_own_forward_is_a_start(tmp_path: Path) -> None:
    outcome = run("adapt", "bare_layers:ExpertChoice", "-o", "found.py")
    assert outcome.code != 0
    assert "the code around the experts: " in outcome.err and "usual forms were" in outcome.err
    text = (tmp_path / "found.py").read_text()
    assert "y = y + shares[..., e, None] * expert(normed)" in text
    assert "in enumerate(layer.experts):  # <- experts" in text
    assert "return moexport.Experts(experts=layer.experts, forward=forward)" in text
    outcome = run("adapt", "bare_layers:SpecialisedExperts")
    assert "the experts: experts[0] (Specialised): " in outcome.err.replace("layer.", "")
    assert "another linear map" in outcome.err


def test_a_layer_that_cannot_be_made_or_called_says_so() -> None:
    with pytest.raises(UsageError, match=r"bare_layers:Net\(\) failed: TypeError") as refused:
        moexport.adapt("bare_layers:Net")
    assert refused.value.hint == 'it takes layer: config={"layer": …}'
    outside = moexport.adapt("bare_layers:Outside")
    assert "rejects tokens [3, 7, 16] with logits" in outside.missing[0]
    assert "# <- experts" in outside.code


NUMBERED = '''
import torch
from torch import nn


class Numbered(nn.Module):
    """Experts under names of their own, which nobody takes for a list."""

    def __init__(self, dim=8):
        super().__init__()
        self.gate = nn.Linear(dim, 2)
        self.expert_0, self.expert_1 = nn.Linear(dim, dim), nn.Bilinear(dim, dim, dim)

    def forward(self, x):
        """Mixes them."""
        shares = self.gate(x).softmax(-1)
        return shares[..., :1] * self.expert_0(x) + shares[..., 1:] * self.expert_1(x, x)
'''


def test_a_layer_without_experts_that_are_known_has_its_own_forward_as_a_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "numbered.py").write_text(NUMBERED)
    outcome = run("adapt", "numbered:Numbered", "-o", "begun.py")
    assert outcome.code == 3
    assert "Numbered has no experts that moexport recognises" in outcome.error
    text = (tmp_path / "begun.py").read_text()
    assert "shares = layer.gate(x).softmax(-1)\n" in text
    assert "layer.expert_1(x, x)  # <- experts" in text
    assert "# Name the experts: experts=[(e.up, e.down) for e in layer.experts]" in text
    compile(text, "begun.py", "exec")


INHERITED = """
from torch import nn

class Base(nn.Module):
    settings = {}

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def mix(self, x):
        self.settings
        return sum(expert(x) for expert in self.experts)

    def forward(self, x):
        return self.mix(x)

class Inherited(Base):
    def forward(self, x):
        y = super().forward(x)
        return y + x
"""


def test_the_start_of_an_inherited_forward_calls_it_and_marks_it(tmp_path: Path) -> None:
    (tmp_path / "inherited.py").write_text(INHERITED)
    module = importlib.import_module("inherited")
    layer = module.Inherited()
    start = start_of(layer, readings_of(layer)[0].uses)
    body = "\n    ".join(start.lines)
    assert "y = super(Inherited, layer).forward(x)  # <- experts" in start.lines
    assert "return y + x" in start.lines
    x = torch.randn(2, 4)
    scope: dict[str, Any] = {"layer": layer, "Inherited": module.Inherited}
    exec(f"def forward({start.parameters}):\n    {body}", scope)
    assert torch.equal(scope["forward"](None, x), layer(x))


def test_what_was_found_before_is_bounded_and_may_be_damaged(tmp_path: Path) -> None:
    (tmp_path / "numbered.py").write_text(NUMBERED)
    found = moexport.adapt("numbered:Numbered")
    cache = cache_folder()
    assert cache is not None
    (file,) = (cache / "adapters").glob("*.json")
    for damaged in ("{", "[]", '{"code": 3}', '{"code": "x", "missing": 3, "notes": []}', ""):
        file.write_text(damaged)
        assert moexport.adapt("numbered:Numbered") == found
    for number in range(MAX_ENTRIES + 5):
        old = file.with_name(f"old{number}.json")
        old.write_text("{}")
        os.utime(old, (number, number))
    (tmp_path / "numbered.py").write_text(f"{NUMBERED}\n# changed\n")
    moexport.adapt("numbered:Numbered")
    entries = {each.name for each in file.parent.glob("*.json")}
    assert len(entries) == MAX_ENTRIES
    assert file.name in entries and "old0.json" not in entries


UNUSUAL = """
import torch
from bare_layers import DIM
from torch import nn
from torch.nn import functional as F


class Noisy(nn.Module):
    def __init__(self, width=DIM, experts=4, *, hidden):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(experts)
        )

    def forward(self, x):
        shares = F.dropout(self.gate(x).softmax(dim=-1), 0.5)
        every = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (every * shares.unsqueeze(-2)).sum(-1)


class Choosy(Noisy):
    def forward(self, x):
        if x.shape[1] != 1000:
            raise RuntimeError("1000 tokens, please")
        return torch.stack([expert(x) for expert in self.experts], dim=-1).sum(-1)


class Norms(Noisy):
    def forward(self, x):
        shares = torch.sin(3 * self.gate(x)) * x.norm(dim=-1, keepdim=True)
        every = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (every * shares.unsqueeze(-2)).sum(-1)
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Noisy", "returns a different result each time it is called, even in eval mode"),
        ("Choosy", "RuntimeError: 1000 tokens, please"),
    ],
)
def test_a_layer_that_cannot_be_compared_gets_its_own_forward_as_a_start(
    name: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "given.py").write_text(UNUSUAL)
    done = run("adapt", f"given:{name}", "--set", "hidden=5")
    assert done.code == 3
    assert why in done.error
    assert "if self.training" in done.error or "--set input_shape" in done.error
    marked = [line for line in done.out.splitlines() if line.endswith("# <- experts")]
    assert any("[expert(x) for expert in layer.experts]" in line for line in marked)
    assert "def forward(experts, x):" in done.out
    compile(done.out, "adapter", "exec")


def test_a_search_ends_when_its_time_is_over_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text(UNUSUAL)
    words = ("adapt", "given:Norms", "--set", "hidden=5", "--time", "20ms")
    done = run(*words)
    assert done.code == 3
    assert "the search ended after 0.02 s of CPU time and " in done.error
    assert "--time 0.04s searches longer" in done.error
    assert "<- experts" in done.out
    again = run(*words)
    assert (again.out, again.error) == (done.out, done.error)
    assert "an earlier search" in again.err
    whole = run(*words[:-2])  # an interrupted search is not cached
    assert "was searched before" not in whole.err
    assert "usual forms were tried" in whole.error


def test_adapt_leaves_a_file_of_the_users_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("mine")
    done = run("adapt", "bare_layers:Dense", "-o", "mine.py")
    assert (done.code, done.error) == (1, "mine.py already exists")
    assert done.hint == "--force replaces it"
    assert (tmp_path / "mine.py").read_text() == "mine"
    assert run("adapt", "bare_layers:Dense", "-o", "mine.py", "--force").code == 0
    assert "@moexport.adapts(Dense)" in (tmp_path / "mine.py").read_text()


@pytest.mark.parametrize("typed", [(), ("--set", "hiden=5"), ("--set", "hidden=none")])
def test_the_arguments_of_a_layer_are_named_as_its_class_names_them(
    typed: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "given.py").write_text(UNUSUAL)
    done = run("adapt", "given:Noisy", *typed)
    assert done.code == 2
    assert "given:Noisy(" in done.error
    assert done.hint == "it takes width=16, experts=4, hidden: --set hidden=…"
