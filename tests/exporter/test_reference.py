"""What a graph is compared with: the user's own network, at every batch, and ties that are some."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import ParityError
from moexport.graphs.layers.margins import routed_margins
from moexport.plugins.token_routed.layers.experts import Experts, ExpertsSpec, ExpertsWeights
from torch import Tensor, nn

CODE = '''
import moexport
import torch
from torch import nn
from torch.nn import functional as F


class Mix(nn.Module):
    """A Soft MoE; tokens beyond `most` are cut off, which no example of small tokens shows."""

    def __init__(self, most=None, d=6, n=4, h=8):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(d, n))
        self.w1, self.w2 = nn.Parameter(torch.randn(n, d, h)), nn.Parameter(torch.randn(n, h, d))
        self.most = most

    def forward(self, x):
        x = x if self.most is None else x.clamp(-self.most, self.most)
        logits = x @ self.phi
        slots = logits.softmax(-2).mT @ x
        y = F.gelu(slots[..., None, :] @ self.w1) @ self.w2
        return logits.softmax(-1) @ y[..., 0, :]


class Router(nn.Module):
    """Top-2 of n; with `room` an expert takes so many tokens of the whole batch and no more."""

    def __init__(self, d, n, room):
        super().__init__()
        self.gate, self.n, self.room = nn.Linear(d, n, bias=False), n, room

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2, -1)
        if self.room is None:
            return index, weights
        flat = F.one_hot(index.reshape(-1), self.n)
        place = ((flat.cumsum(0) - 1) * flat).sum(-1).reshape(index.shape)
        room = int(self.room * x.shape[0] * x.shape[1] / self.n)  # frozen at the traced batch
        return index, weights * (place < room)


class Routed(nn.Module):
    """Experts that a router chooses."""

    def __init__(self, room=None, d=6, n=4, h=8):
        super().__init__()
        self.router = Router(d, n, room)
        self.w1, self.w2 = nn.Parameter(torch.randn(n, d, h)), nn.Parameter(torch.randn(n, h, d))

    def forward(self, x):
        index, weights = self.router(x)
        every = F.relu(x[..., None, None, :] @ self.w1) @ self.w2
        gates = (F.one_hot(index, len(self.w1)) * weights[..., None]).sum(-2)
        return (every[..., 0, :] * gates[..., None]).sum(-2)


class Net(nn.Module):
    """With a `register` the layer sees one token more than there are in the whole batch."""

    def __init__(self, layer, centred=False, register=False):
        super().__init__()
        self.stem, self.mix, self.head = nn.Linear(3, 6), layer, nn.Linear(6, 5)
        self.centred = centred
        self.register = nn.Parameter(torch.randn(1, 6)) if register else None

    def forward(self, x):
        x = self.stem(x)
        x = x - x.mean(0, keepdim=True) if self.centred else x
        tokens = x
        if self.register is not None:
            rows = torch.cat([x.flatten(0, 1), self.register])[None]
            x = self.mix(rows)[0, :-1].reshape(x.shape)
        else:
            x = self.mix(x)
        return self.head((tokens + x).mean(1))


def made(layer, **more):
    torch.manual_seed(3)
    return Net(layer(), **more)


def cut():
    return made(lambda: Mix(most=2.0))


def centred():
    return made(Mix, centred=True)


def capacity():
    return made(lambda: Routed(room=1.2))


def register():
    return made(Routed, register=True)


@moexport.adapts(Mix)
def mix(layer):
    return moexport.SoftMoE(phi=layer.phi, w1=layer.w1, w2=layer.w2)


@moexport.adapts(Routed)
def routed(layer):
    return moexport.Experts(
        w1=layer.w1, w2=layer.w2, gate="none", activation="relu", router=layer.router
    )
'''


@pytest.fixture(scope="module", autouse=True)
def networks(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("networks")
    (folder / "compared_networks.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    importlib.import_module("compared_networks")


SMALL = np.random.default_rng(0).normal(scale=0.1, size=(4, 7, 3)).astype(np.float32)
LARGE = 20 * SMALL


def exported(
    factory: str, out: Path, example: np.ndarray = SMALL, **options: object
) -> moexport.Bundle:
    model = moexport.load(f"compared_networks:{factory}", example=example)
    return moexport.export(model, out, **options)


@pytest.mark.parametrize("k", ["n", 1])
def test_a_layer_that_differs_on_the_parity_inputs_alone_does_not_pass(
    tmp_path: Path, k: str | int
) -> None:
    """An example of small tokens does not show that the user's layer cuts large ones off."""
    exported("cut", tmp_path / "small", k=k, data=SMALL)
    with pytest.raises(ParityError, match=r"outputs change when its layers .* are replaced"):
        exported("cut", tmp_path / "large", k=k, data=LARGE)
    assert not (tmp_path / "large").exists()


def test_at_k_n_the_reference_is_the_untouched_network(tmp_path: Path) -> None:
    bundle = exported("cut", tmp_path / "out", data=SMALL)
    with np.load(bundle.path / "parity.npz") as recorded:
        assert np.array_equal(recorded["y"], recorded["dense"])


@pytest.mark.parametrize("example", [SMALL, SMALL[:1]])
@pytest.mark.parametrize("factory", ["centred", "capacity"])
def test_an_output_that_depends_on_the_batch_is_refused(
    tmp_path: Path, factory: str, example: np.ndarray
) -> None:
    """`centred` is traced as it is, `capacity` with the traced batch as a constant."""
    with pytest.raises(ParityError, match="depends on the others in its batch") as refused:
        exported(factory, tmp_path / "out", 10 * example)
    assert "batch=N" in str(refused.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("factory", ["centred", "capacity"])
def test_an_output_that_depends_on_the_batch_is_right_for_a_fixed_batch(
    tmp_path: Path, factory: str
) -> None:
    bundle = exported(factory, tmp_path / "out", LARGE, batch="4")
    network = moexport.load(f"compared_networks:{factory}", example=LARGE).untouched
    x = np.random.default_rng(1).normal(size=LARGE.shape).astype(np.float32)
    with torch.no_grad():
        y = network(torch.from_numpy(x)).numpy()
    assert np.abs(bundle.session()(x) - y).max() < 1e-5 * np.abs(y).max()
    assert all(check.passed for check in bundle.verify())


def test_a_bank_of_experts_may_see_rows_that_are_of_no_input(tmp_path: Path) -> None:
    """Its rows are one more than the tokens: choices are of no input, and the values decide."""
    bundle = exported("register", tmp_path / "out", LARGE)
    assert bundle.manifest.parity is not None and bundle.manifest.parity["passed"]
    network = moexport.load("compared_networks:register", example=LARGE).untouched
    with torch.no_grad():
        y = network(torch.from_numpy(LARGE)).numpy()
    assert np.abs(bundle.session()(LARGE) - y).max() < 1e-5 * np.abs(y).max()


def test_a_graph_is_compared_at_small_batches_and_those_that_were_asked_for(tmp_path: Path) -> None:
    parity = exported("cut", tmp_path / "out", SMALL[:1]).manifest.parity
    assert parity is not None and list(parity["batches"]) == [1, 2, 3, 17, 32]


class Choosing(nn.Module):
    """Routes tokens by given scores, in a way of its own."""

    def __init__(self, route: str, k: int, n: int) -> None:
        super().__init__()
        spec = ExpertsSpec("experts", n, k, 2, 3, 2, "relu", "none")
        weights = ExpertsWeights(torch.ones(n, 2, 3), torch.ones(n, 3, 2))
        self.experts, self.route, self.k = Experts(spec, weights), route, k

    def forward(self, scores: Tensor) -> Tensor:
        ranked = scores
        if self.route in ("groups", "lows"):  # of two experts each; only the best group is left
            groups = scores.reshape(len(scores), -1, 2).amax(-1)
            best = groups.topk(1, dim=-1).indices
            mask = torch.zeros_like(groups).scatter(1, best, 1.0).repeat_interleave(2, dim=-1)
            low = -torch.inf if self.route == "groups" else torch.finfo(scores.dtype).min
            ranked = scores.masked_fill(mask == 0, low)
        if self.route == "least":
            weights, index = (-scores).topk(self.k, -1, largest=False)
        elif self.route == "columns":
            weights, index = (part.mT for part in scores.mT.topk(self.k, 0))
        else:
            weights, index = ranked.topk(self.k, -1)
        x = torch.ones(len(scores), 2)
        y: Tensor = self.experts(x, index, torch.maximum(weights, torch.zeros(())))
        return y


@pytest.mark.parametrize(
    ("route", "k", "scores", "margin"),
    [
        ("scores", 1, [0.5, 0.3, 0.1, 0.05, 0.05], 0.4),
        ("scores", 3, [0.5, 0.3, 0.1, 0.05, 0.05], 0.1),
        ("scores", 4, [0.5, 0.3, 0.1, 0.05, 0.05], 0.0),  # a tie
        ("least", 1, [0.5, 0.3, 0.1, 0.05, 0.05], 0.4),
        ("columns", 1, [0.5, 0.3, 0.1, 0.05, 0.05], 0.4),
        ("groups", 2, [0.5, 0.3, 0.1, 0.1, 0.1, 0.1], 0.8),  # by the group: .5 to .1
        ("groups", 1, [0.5, 0.4, 0.1, 0.1, 0.0, 0.0], 0.2),  # within it: .5 to .4
        ("lows", 2, [0.5, 0.3, 0.1, 0.1, 0.1, 0.1], 0.8),  # masked by the least number
        ("lows", 1, [0.5, 0.4, 0.1, 0.1, 0.0, 0.0], 0.2),
    ],
)
def test_a_margin_is_from_the_last_expert_taken_to_the_next(
    route: str, k: int, scores: list[float], margin: float
) -> None:
    """Ties among those that are left out anyway are none, and masks are no scores."""
    network = Choosing(route, k, len(scores))
    with routed_margins(network) as margins:
        for _ in range(2):  # what was ranked once is forgotten
            network(torch.tensor([scores, scores[::-1] if route == "scores" else scores]))
            assert margins["experts"].tolist() == pytest.approx([margin, margin])
