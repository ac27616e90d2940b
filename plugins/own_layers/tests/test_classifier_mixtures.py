"""Mixtures of classifiers, whose experts end in a softmax, and routers of two linear maps."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from moexport.tests.command import run

SOURCE = '''
"""A network whose head is a mixture of classifiers."""

import torch
from torch import nn
from torch.nn import functional as F


class Classifiers(nn.Module):
    """p(y | x) = sum of gate_e(x) * softmax(expert_e(x)), the gate of two linear maps."""

    def __init__(self, dim, classes, experts):
        super().__init__()
        self.first = nn.Linear(dim, 16)
        self.second = nn.Linear(16, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, classes), nn.Softmax(dim=-1))
            for _ in range(experts)
        )

    def forward(self, x):
        gates = self.second(GATE(self.first(x))).softmax(dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (gates.unsqueeze(-1) * outputs).sum(dim=-2)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(10, 12)
        self.mixture = Classifiers(12, 5, 4)

    def forward(self, x):
        return self.mixture(torch.relu(self.stem(x)))


def build():
    torch.manual_seed(0)
    return Network()
'''


def formula(network: torch.nn.Module, x: np.ndarray, gate: str) -> np.ndarray:
    """The network in float64, written out."""
    state = {key: value.double().numpy() for key, value in network.state_dict().items()}

    def softmax(z: np.ndarray) -> np.ndarray:
        e = np.exp(z - z.max(axis=-1, keepdims=True))
        return np.asarray(e / e.sum(axis=-1, keepdims=True))

    def linear(name: str, z: np.ndarray) -> np.ndarray:
        return np.asarray(z @ state[f"{name}.weight"].T + state[f"{name}.bias"])

    h = np.maximum(linear("stem", x.astype(np.float64)), 0)
    inner = linear("mixture.first", h)
    inner = np.tanh(inner) if gate == "torch.tanh" else np.maximum(inner, 0)
    gates = softmax(linear("mixture.second", inner))
    outputs = [
        softmax(
            linear(f"mixture.experts.{e}.2", np.maximum(linear(f"mixture.experts.{e}.0", h), 0))
        )
        for e in range(4)
    ]
    return np.asarray(np.einsum("be,ebo->bo", gates, np.stack(outputs)))


@pytest.mark.parametrize("gate", ["F.relu", "torch.tanh"])
def test_a_mixture_of_classifiers_with_a_gate_of_two_maps_is_adapted(
    gate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"classifiers_{gate.replace('.', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE.replace("GATE", gate))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    network = importlib.import_module(name).build()
    torch.save(network.state_dict(), "weights.pt")
    x = np.random.default_rng(0).standard_normal((64, 10)).astype(np.float32)
    np.savez("x.npz", input=x)
    given = (f"{name}:build", "--weights", "weights.pt", "--data", "x.npz")
    sizes = ("--set", "dim=12", "--set", "classes=5", "--set", "experts=4")
    layer = (f"{name}:Classifiers", *sizes, "-o", f"{name}_adapter.py")
    outcome = run("adapt", *layer)
    assert outcome.code == 0, outcome.err
    written = (tmp_path / f"{name}_adapter.py").read_text()
    assert "layer.second(" in written and gate in written
    wanted = formula(network, x, gate)
    for lowering in ("dense", "grouped"):
        outcome = run(
            *("export", *given, "--adapter", f"{name}_adapter:adapt", "-o", lowering),
            *("--lowering", lowering, "--target", "ort-cpu"),
        )
        assert outcome.code == 0, outcome.err
        y = onnxruntime.InferenceSession(f"{lowering}/model.onnx").run(None, {"input": x})[0]
        assert np.abs(y - wanted).max() < 1e-5
        assert np.abs(y.sum(axis=1) - 1).max() < 1e-5
    outcome = run(
        *("export", *given, "--adapter", f"{name}_adapter:adapt", "-o", "int8"),
        *("--precision", "int8", "--target", "ort-cpu"),
    )
    assert outcome.code == 0, outcome.err
    outcome = run(
        *("export", *given, "--adapter", f"{name}_adapter:adapt", "-o", "without"),
        *("--ablate", "mixture.experts:1"),
    )
    assert outcome.code == 2 and "end in a softmax" in outcome.error


HELD = '''
"""A mixture of classifiers of one map each; its router has two maps."""

import torch
from torch import nn
from torch.nn import functional as F


class Held(nn.Module):
    def __init__(self, dim, classes, experts):
        super().__init__()
        HOLDS
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, classes), nn.Softmax(dim=1)) for _ in range(experts)
        )

    def forward(self, x):
        gates = F.softmax(LOGITS, dim=1)
        return sum(gates[:, e : e + 1] * expert(x) for e, expert in enumerate(self.experts))


def build():
    torch.manual_seed(0)
    return Held(10, 5, 4)
'''

MATRICES = """
        self.v = nn.Parameter(torch.randn(dim, 9))
        self.w = nn.Parameter(torch.randn(9, experts))
        self.tau = 1.7
"""
BIASED = """
        self.v = nn.Parameter(torch.randn(9, dim))
        self.c = nn.Parameter(torch.randn(9))
        self.norm = nn.LayerNorm(9, elementwise_affine=True)
        self.top = nn.Linear(9, experts)
"""
ACTIVATION = """
        self.bottom = nn.Linear(dim, 9)
        self.act = nn.Softplus()
        self.top = nn.Linear(9, experts)
"""


@pytest.mark.parametrize(
    ("name", "holds", "logits"),
    [
        ("matrices", MATRICES, "torch.tanh(x @ self.v) @ self.w / self.tau"),
        ("biased", BIASED, "self.top(F.gelu(self.norm(F.linear(x, self.v, self.c))))"),
        ("activation", ACTIVATION, "self.top(self.act(self.bottom(x)))"),
    ],
)
def test_routers_of_two_maps_are_recognised_as_matrices_and_with_own_modules_between(
    name: str, holds: str, logits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"held_{name}"
    source = HELD.replace("HOLDS", holds.strip()).replace("LOGITS", logits)
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    network = importlib.import_module(module).build()
    torch.save(network.state_dict(), "weights.pt")
    x = np.random.default_rng(0).standard_normal((64, 10)).astype(np.float32)
    np.savez("x.npz", input=x)
    sizes = ("--set", "dim=10", "--set", "classes=5", "--set", "experts=4")
    outcome = run("adapt", f"{module}:Held", *sizes, "-o", f"{module}_adapter.py")
    assert outcome.code == 0, outcome.err
    outcome = run(
        *("export", f"{module}:build", "--weights", "weights.pt", "--data", "x.npz"),
        *("--adapter", f"{module}_adapter:adapt", "-o", "out", "--target", "ort-cpu"),
    )
    assert outcome.code == 0, outcome.err
    y = onnxruntime.InferenceSession("out/model.onnx").run(None, {"input": x})[0]

    state = {key: value.double().numpy() for key, value in network.state_dict().items()}

    def linear(at: str, z: np.ndarray) -> np.ndarray:
        return np.asarray(z @ state[f"{at}.weight"].T + state[f"{at}.bias"])

    def softmax(z: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(z) / np.exp(z).sum(axis=1, keepdims=True))

    z = x.astype(np.float64)
    if name == "matrices":
        gates = softmax(np.tanh(z @ state["v"]) @ state["w"] / 1.7)
    elif name == "biased":
        h = z @ state["v"].T + state["c"]
        h = (h - h.mean(axis=1, keepdims=True)) / np.sqrt(h.var(axis=1, keepdims=True) + 1e-5)
        erf = np.vectorize(math.erf)
        gates = softmax(linear("top", h * (1 + erf(h / np.sqrt(2))) / 2))
    else:
        gates = softmax(linear("top", np.log1p(np.exp(linear("bottom", z)))))
    outputs = np.stack([softmax(linear(f"experts.{e}.0", z)) for e in range(4)])
    assert np.abs(y - np.einsum("be,ebo->bo", gates, outputs)).max() < 1e-5
