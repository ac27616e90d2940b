"""The inputs and outputs of networks are served as they are, or refused by name before a trace."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.data import labelled
from moexport.exporter.trace import BagsAsRows
from moexport.tests.command import run
from moexport.tests.hard.pairs import ports
from torch.nn import functional as F

CODE = '''
import torch
from torch import nn
from torch.nn import functional as F
from ports_net import Net, TopK, adapt, example


class Own(Net):
    """What a test asks for around the mixture of x [b, m, 12]."""

    def __init__(self, does):
        super().__init__("one")
        self.does, self.frames = does, nn.Conv1d(12, 24, 4, 2)
        self.positions = nn.Parameter(torch.randn(10, 24))
        if does == "causal":
            layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        if self.does == "frames":
            h = self.frames(x).mT
            return self.b(h + self.mix(h))
        if self.does == "positions":
            h = self.a(x) + self.positions[: x.shape[1]]
            return self.b(h + self.mix(h))
        if self.does == "fixed positions":
            h = self.a(x) + self.positions
            return self.b(h + self.mix(h))
        if self.does == "loop of bags":
            starts = torch.arange(0, x.numel(), x.shape[1] * x.shape[2], device=x.device)
            ids = (x > 0).long().reshape(-1)
            bags = F.embedding_bag(ids, self.bag.weight[:, :5], starts)
            return self.b(self.hidden(x)) + bags[:, None]
        if self.does == "in place":
            x *= 2
        if self.does == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            h = self.encoder(self.a(x), mask=mask)
            return self.b(h + self.mix(h))
        assert self.does != "even" or x.shape[0] % 2 == 0, "pairs alone"
        y = self.b(self.hidden(x))
        return {
            "even": lambda: y,
            "in place": lambda: y,
            "noise": lambda: (y + torch.randn_like(y), y > 0),
            "unused": lambda: 2 * x,
            "squeezed": lambda: y.squeeze(1).squeeze(-1),
            "flat": lambda: y.reshape(-1, 5),
            "loss": lambda: {"scores": y, "loss": y.square().mean()},
            "turned": lambda: y.transpose(0, 1),
            "median": lambda: y.median(-1).values,
            "distances": lambda: torch.cdist(y, y),
            "branch": lambda: 2 * y if y.sum() > 0 else y,
        }[self.does]()


def own(does):
    torch.manual_seed(0)
    network = Own(does).eval()
    x = torch.randn(4, 10, 12)
    network.example_input = x.mT if does == "frames" else x
    return network


class Named(Net):
    def forward(self, x, k):
        return self.b(self.hidden(x, k))


def odd(what):
    torch.manual_seed(0)
    network = (Named if what == "k" else type("Two", (Net,), {"forward": two}))("one").eval()
    x, t, _ = example("float32")
    network.example_input = {
        "k": {"x": x, "k": t},
        "shared": (x, torch.rand(1)),
        "number": (x, 3),
        "complex": (x, torch.rand(4) + 0j),
    }[what]
    return network


def two(self, x, t):
    return self.b(self.hidden(x, t))
'''


@pytest.fixture(autouse=True)
def in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports.write(tmp_path)
    (tmp_path / "own_net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("ports_net", "own_net"):
        monkeypatch.delitem(sys.modules, name, raising=False)


ADAPTER = ("--adapter", "ports_net:adapt")


@pytest.mark.parametrize(
    ("factory", "error", "hint"),
    [
        ("own_net:own does=flat", "'output' has shape (40, 5) for 4 inputs", "unflatten"),
        ("own_net:own does=loss", "'loss' is a scalar", "without a mean or a loss"),
        ("own_net:own does=noise", "a different result each time it is called", "self.training"),
        ("own_net:own does=turned", "'output' has shape (10, 4, 5)", "movedim(1, 0)"),
        ("own_net:odd what=k", "has an input 'k'", "rename that parameter"),
        ("own_net:odd what=shared", "'t' has shape [1], but 'x' has 4", "x.expand(b)"),
        ("own_net:odd what=number", "'t' of example_input is a int", "arguments of the factory"),
        ("own_net:odd what=complex", "'t' of example_input is complex64", "uint8"),
    ],
)
def test_an_unsupported_field_is_refused_by_its_name(factory: str, error: str, hint: str) -> None:
    source, given = factory.split(" ", 1)
    outcome = run("export", source, *ADAPTER, "--set", given, "-o", "out")
    assert outcome.code in (1, 2) and "tracing" not in outcome.err
    assert error in outcome.error and hint in outcome.hint
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("does", "error", "hint"),
    [
        ("median", "the operator aten.median.dim has no ONNX equivalent", "other operators"),
        ("distances", "_cdist_forward.default has no ONNX equivalent", "other operators"),
        ("branch", "depends on the values of its inputs (own_net.py", "torch.where"),
        ("unused", "no output of the network depends on its MoE layers (mix", "return a result"),
    ],
)
def test_a_network_that_cannot_be_traced_says_which_part(does: str, error: str, hint: str) -> None:
    outcome = run("export", "own_net:own", *ADAPTER, "--set", f"does={does}", "-o", "out")
    assert outcome.code == 1
    assert error in outcome.error and hint in outcome.hint


@pytest.mark.parametrize("does", ["squeezed", "causal", "in place"])
def test_what_pytorch_does_in_silence_is_right_in_the_graph(does: str) -> None:
    """An axis of several stays, a causal mask is read, and an input is changed in place."""
    outcome = run("export", "own_net:own", *ADAPTER, "--set", f"does={does}", "-o", "out")
    assert outcome.code == 0, outcome.err
    network = importlib.import_module("own_net").own(does).eval()
    x = torch.randn(3, *network.example_input.shape[1:], generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        y = network(x.clone()).numpy()
    found = moexport.Bundle.open("out").session()(x.numpy())
    assert np.abs(found - y).max() <= 1e-5 * np.abs(y).max()


def test_a_batch_that_a_network_refuses_is_named() -> None:
    outcome = run("export", "own_net:own", *ADAPTER, "--set", "does=even", "-o", "out")
    assert outcome.code == 2
    assert "forward failed on a batch of 1: AssertionError: pairs alone" in outcome.error
    assert "--batch N" in outcome.hint and not Path("out").exists()


def test_a_loop_over_bags_returns_values_of_its_own() -> None:
    """Each branch of PyTorch's translation may return a value from outside the branch."""
    outcome = run("export", "own_net:own", *ADAPTER, "--set", "does=loop of bags", "-o", "out")
    assert outcome.code == 0, outcome.err
    network = sys.modules["own_net"].own("loop of bags")
    x = np.random.default_rng(1).standard_normal((3, 10, 12)).astype(np.float32)
    with torch.no_grad():
        wanted = network.double()(torch.from_numpy(x).double()).numpy()
    found = moexport.Bundle.open("out").session()(x)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("padding", [None, 3, -2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size_are_those_of_pytorch(mode: str, padding: int | None) -> None:
    weight, ids = torch.randn(5, 4), torch.tensor([[3, 3, 3], [0, 3, 1], [4, 2, 2], [1, 1, 1]])
    wanted = F.embedding_bag(ids, weight, mode=mode, padding_idx=padding)
    with BagsAsRows():
        found = F.embedding_bag(ids, weight, mode=mode, padding_idx=padding)
    assert torch.allclose(found, wanted)
    if mode == "sum":
        given = torch.rand(ids.shape)
        each: dict[str, Any] = {"mode": mode, "padding_idx": padding, "per_sample_weights": given}
        with BagsAsRows():
            found = F.embedding_bag(ids, weight, **each)
        assert torch.allclose(found, F.embedding_bag(ids, weight, **each))


@pytest.mark.parametrize(
    ("does", "tokens", "lengths"), [("frames", "4:8:40", (5, 31)), ("positions", "1:4:10", (1, 10))]
)
def test_inputs_of_another_length_are_served(
    does: str, tokens: str, lengths: tuple[int, ...]
) -> None:
    given = ("--set", f"does={does}", "--tokens", tokens)
    outcome = run("export", "own_net:own", *ADAPTER, *given, "-o", "out")
    assert outcome.code == 0, outcome.err
    session, network = moexport.Bundle.open("out").session(), sys.modules["own_net"].own(does)
    for length in lengths:
        shape = (2, 12, length) if does == "frames" else (2, length, 12)
        x = np.random.default_rng(length).standard_normal(shape).astype(np.float32)
        with torch.no_grad():
            wanted = network.double()(torch.from_numpy(x).double()).numpy()
        found = session(x)
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_a_network_of_one_length_says_so() -> None:
    given = ("--set", "does=fixed positions", "--tokens", "4:8:16")
    outcome = run("export", "own_net:own", *ADAPTER, *given, "-o", "out")
    assert outcome.code == 2
    assert "accepts no other length for its input 'input' (batch, 10, 12)" in outcome.error


def net(form: str, dtype: str = "float32") -> moexport.Model:
    config = {"form": form, "dtype": dtype}
    return moexport.load("ports_net:net", config=config, adapter="ports_net:adapt")


def test_data_label_the_output_that_they_name() -> None:
    model, given = net("several outputs"), ports.inputs("several outputs", "float32", 9)
    classes = np.arange(9) % 3
    np.savez("first.npz", **given, label=classes)  # type: ignore[arg-type]
    np.savez("named.npz", **given, scores=classes)  # type: ignore[arg-type]
    first, named = (labelled(Path(name), model, 1) for name in ("first.npz", "named.npz"))
    assert (first.output, named.output) == (0, 1)
    for data in (first, named):
        ((x, labels),) = data.stream(9)
        assert labels is not None and (labels == classes).all()
        assert isinstance(x, dict) and [*x] == ["x", "t", "y"]


def test_an_input_called_y_holds_no_labels() -> None:
    given = ports.inputs("several", "float32", 9)
    np.savez("data.npz", **given)  # type: ignore[arg-type]
    assert not labelled(Path("data.npz"), net("several"), 1).labelled


def test_a_missing_input_is_named() -> None:
    given = ports.inputs("several", "float32", 9)
    del given["t"]
    np.savez("data.npz", **given)  # type: ignore[arg-type]
    setting = ("--set", "form=several", "--data", "data.npz")
    outcome = run("export", "ports_net:net", *ADAPTER, *setting, "-o", "out")
    assert outcome.code != 0 and "the input 't' is missing" in outcome.error


def test_numbers_that_an_input_cannot_hold_are_refused() -> None:
    outcome = run("export", "ports_net:net", *ADAPTER, "--set", "form=one", "--set", "dtype=uint8")
    assert outcome.code == 2  # without -o
    given = ("--set", "form=one", "--set", "dtype=uint8", "-o", "out")
    assert run("export", "ports_net:net", *ADAPTER, *given).code == 0
    np.savez("x.npz", input=np.full((2, 6, 12), 300))
    outcome = run("run", "out", "-i", "x.npz", "-o", "y.npz")
    assert "'input' contains 300, but uint8 allows 0 to 255" in outcome.error
    assert not Path("y.npz").exists()


def test_a_search_keeps_the_accuracy_of_the_first_output() -> None:
    np.savez("data.npz", **ports.inputs("several outputs", "float32", 9), scores=np.arange(9) % 3)  # type: ignore[arg-type]
    setting = ("--set", "form=several outputs", "--data", "data.npz", "--keep", "0.9")
    outcome = run("tune", "ports_net:net", *ADAPTER, *setting, "-o", "out")
    assert outcome.code == 2
    assert "the labels are of the output 'scores'" in outcome.error


def test_a_bundle_lists_each_port_with_its_type() -> None:
    setting = ("--set", "form=dictionary", "--set", "dtype=bool", "-o", "out")
    assert run("export", "ports_net:net", *ADAPTER, *setting).code == 0
    record = json.loads(Path("out/manifest.json").read_text())
    types = {port["name"]: port["dtype"] for port in record["inputs"]}
    assert types == {"x": "bool", "time": "float32", "ids": "int32"}
    assert "`ids`: int32 (batch, 7)" in Path("out/README.md").read_text()
