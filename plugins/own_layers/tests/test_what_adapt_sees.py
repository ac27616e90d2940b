"""`moexport adapt` does not miss a limit, a mask or a branch, and reads any name."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import moexport
import pytest
import torch
from moexport.common.console import Silent
from moexport.errors import UsageError
from moexport.plugins.own_layers.adapters import describe
from moexport.plugins.own_layers.calls import LayerCall
from moexport.plugins.own_layers.comparison import result_of_code, wrapper_for
from moexport.plugins.own_layers.descriptions import ExpertsDescription
from moexport.plugins.token_routed.own_forward import result_of
from moexport.tests.command import run

SOURCE = Path(__file__).with_name("adapted_layers.py")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "mine.py").write_text(SOURCE.read_text(encoding="utf-8"))
    for name in ("mine", "found"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def assert_right(name: str, code: str) -> None:
    """The code of an adapter computes the same as its layer, with other weights and inputs."""
    Path("found.py").write_text(code)
    torch.manual_seed(5)
    layer = getattr(importlib.import_module("mine"), name)().eval()
    sys.modules.pop("found", None)
    adapter = importlib.import_module("found").adapt
    for inputs, weights in ((1.0, 1.0), (20.0, 1.0), (1.0, 20.0)):
        with torch.no_grad():
            for key, p in layer.named_parameters():
                if "experts" not in key and "bank" not in key and p.ndim > 1 and "w" not in key[:2]:
                    p.mul_(weights)
            x = inputs * torch.randn(4, 9, 16)
            y = layer(x)
        description = describe(adapter, layer, "the layer")
        call = LayerCall(args=(x,), named={}, y=y)
        if isinstance(description, ExpertsDescription):
            ours = result_of_code(description, call, "the layer")[0]
        else:
            ours = result_of(wrapper_for(description, call)(description.build(""))(x))  # type: ignore[assignment]
        off = (ours - y).abs().flatten(1).amax(1) / y.abs().flatten(1).amax(1)
        assert float(off.max()) < 1e-3, (inputs, weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Clamped", "layer.gate(x).clamp(min=-5, max=5)"),
        ("SoftClamped", ".clamp(max=30)"),
        ("NormedClamped", ".clamp(min=-9, max=9)"),
        ("OutputClamped", ".clamp(min=-20, max=20)"),
    ],
)
def test_a_clamp_that_usual_inputs_do_not_reach_is_in_the_adapter(name: str, line: str) -> None:
    adapter = moexport.adapt(f"mine:{name}")
    assert adapter.missing == () and line in adapter.code, adapter
    assert_right(name, adapter.code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("Where", "inputs 10 times as large", "torch.where(logits.abs() > 8"),
        ("LongBranch", "101 tokens", "if x.shape[1] > 100:"),
        ("LongByName", "51 tokens", "if x.shape[1] > LONG else logits"),
        ("LongByAttribute", "61 tokens", "logits if x.shape[1] <= self.long else"),
        ("Capacity", "16 tokens", "room = before < 6"),
    ],
)
def test_what_an_adapter_has_not_is_said_and_no_success(name: str, words: str, line: str) -> None:
    outcome = run("adapt", f"mine:{name}", "-o", "found.py")
    assert outcome.code == 3
    assert f"of max|y| for {words}; the layer's forward also has mine.py line " in outcome.error
    assert line in outcome.error
    text = Path("found.py").read_text()
    assert f"of max|y| for {words}." in text and line in text  # and the nearest adapter
    assert "return experts(x, index, w)" in text


@pytest.mark.slow
def test_what_no_input_reaches_is_said() -> None:
    outcome = run("adapt", "mine:Unreached")
    assert outcome.code == 0
    assert "`logits = self.gate(x).clamp(-1e9, 1e9)` (no value reached the limit)" in outcome.err
    assert "the layer also accepts bias, which no trial passed" in outcome.err
    assert "bias is not None" not in outcome.err
    outcome = run("adapt", "mine:LongUnreached")  # branches on one line with their conditions
    assert outcome.code == 0
    assert "> 4000: logits = logits / 2  # fmt: skip  # noqa: E701` (it was not" in outcome.err
    assert "`return logits / 2 if x.shape[1] > 5000 else logits` (it was not" in outcome.err


@pytest.mark.slow
def test_a_layer_is_tried_with_the_sizes_of_the_user() -> None:
    assert run("adapt", "mine:Batched").code == 0  # it differs from a batch of 36 on
    outcome = run("adapt", "mine:Batched", "--batch", "1:4:40")
    assert outcome.code == 3 and "for a batch of 40" in outcome.error
    (missing, *_) = moexport.adapt("mine:Long").missing
    assert re.search(r"48 tokens at least.*moexport read layer.experts as 6", missing)
    assert moexport.adapt("mine:Long", tokens=48).missing == ()
    with pytest.raises(UsageError, match="fails, or returns NaN, for 12 tokens"):
        moexport.adapt("mine:Long", tokens="12:48:64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("InSequential", "layer.gate(x)"),
        ("InTables", "layer.routers['class'](x)"),
        ("InParameterList", "phi=layer.queries[0].unflatten(1, (4, 2))"),
        ("NoIdentifier", "getattr(layer, 'my gate')(x)"),
        ("Nested", "experts=layer.moe.experts"),
        ("SharedInSequential", "layer.shared(x) + experts("),
        ("SharedMaps", "layer.shared[1](F.relu(layer.shared[0](x))) + experts("),
        ("SharedGated", "layer.share(x).sigmoid() * layer.second(F.silu(layer.first(x))) + expe"),
        ("Corrected", "(scores + layer.correction).topk(k, dim=-1)"),
        ("ThreeStacks", "torch.cat([layer.w1.mT, layer.w3.mT], dim=-1)"),
    ],
)
def test_any_name_and_any_shared_expert_is_read(name: str, code: str) -> None:
    adapter = moexport.adapt(f"mine:{name}")
    assert adapter.missing == () and code in adapter.code, adapter
    assert_right(name, adapter.code)


@pytest.mark.slow
def test_a_start_is_the_layers_own_forward_with_the_experts_marked() -> None:
    outcome = run("adapt", "mine:Halves", "-o", "found.py")
    assert outcome.code == 3
    assert (
        "read layer.experts as 6 experts (Expert), but no usual form returns [3, 2,"
        in outcome.error
    )
    text = Path("found.py").read_text()
    # `layer` is a name in it.
    assert "    own_layer = layer\n    def forward(experts, x):\n" in text
    assert "for expert in own_layer.experts], -2)  # <- experts\n" in text
    assert "shares = [gate(x).softmax(-1) for gate in own_layer.gates]\n" in text
    compile(text, "found.py", "exec")
    torch.manual_seed(0)
    layer = importlib.import_module("mine").Halves().eval()
    description = describe(importlib.import_module("found").adapt, layer, "the layer")
    x = torch.randn(2, 5, 16)
    assert torch.equal(description.code.run(lambda *_: x, (x,), {}), layer(x))  # type: ignore[union-attr]


def test_a_start_is_code_whatever_the_forward_looks_like() -> None:
    outcome = run("adapt", "mine:Mangled", "-o", "found.py")
    assert outcome.code == 3
    torch.manual_seed(0)
    layer = importlib.import_module("mine").Mangled().eval()
    description = describe(importlib.import_module("found").adapt, layer, "the layer")
    x = torch.randn(2, 5, 16)
    assert torch.equal(description.code.run(lambda *_: x, (x,), {}), layer(x))  # type: ignore[union-attr]


class Steps(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        self.said.append(text)


@pytest.mark.slow
def test_a_search_says_how_far_it_is_and_is_done_once(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    first, again, changed = Steps(), Steps(), Steps()
    found = moexport.adapt("mine:Waves", progress=first)
    assert "their outputs are correct, but their weights were not found" in found.missing[0]
    assert any(text.endswith(": 50 forms") for text in first.said)
    assert torch.get_num_threads() == before
    assert moexport.adapt("mine:Waves", progress=again) == found
    assert again.said == ["using the result of an earlier search for mine:Waves"]
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "\n# changed\n")
    moexport.adapt("mine:Waves", progress=changed)
    assert len(changed.said) > 1
