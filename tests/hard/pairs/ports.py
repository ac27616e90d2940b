"""Networks of every form of inputs and outputs, and what they give in float64: a matrix of ports.

`rows` are inputs × the type of one of them × the range of the batch × what is done with the bundle.
"""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

CODE = '''
import moexport
import torch
from torch import nn


class TopK(nn.Module):
    def __init__(self, d=24, n=4):
        super().__init__()
        self.gate = nn.Linear(d, n)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 32), nn.GELU(), nn.Linear(32, d)) for _ in range(n)
        )

    def route(self, x, k=2):
        weights, index = self.gate(x).softmax(-1).topk(k, -1)
        return index, weights

    def forward(self, x):
        index, weights = self.route(x)
        each = ((weights * (index == n)).sum(-1, keepdim=True) for n in range(len(self.experts)))
        return sum(expert(x) * w for expert, w in zip(self.experts, each))


def adapt(layer: TopK):
    experts = [(e[0], e[2]) for e in layer.experts]
    return moexport.Experts(router=layer.route, experts=experts, activation="gelu")


class Net(nn.Module):
    """Numbers x [b, m, 12], of another type in the end, a time t [b] and the ids y [b, 7] of a bag.

    A parameter of its own is no part of any module that it holds.
    """

    def __init__(self, form):
        super().__init__()
        self.form, self.scale = form, nn.Parameter(torch.rand(24))
        self.a, self.mix = nn.Linear(12, 24), TopK()
        self.bag, self.b, self.c = nn.EmbeddingBag(9, 24), nn.Linear(24, 5), nn.Linear(24, 3)

    def hidden(self, x, t=None, y=None):
        x = x.to(self.scale.dtype)
        h = self.a(x) * self.scale
        if t is not None:
            h = h + torch.outer(t.to(h.dtype), self.scale)[:, None]
        if y is not None:
            h = h + self.bag(y.long())[:, None]
        return h + self.mix(h)

    def forward(self, *given, **named):
        if self.form == "one":
            return self.b(self.hidden(*given))
        h = self.hidden(*given, **named)
        if self.form == "several":
            return self.b(h)
        scores = self.c(h.mean(1))
        return {"each": self.b(h), "scores": scores, "best": scores.argmax(-1), "high": h > 0}


class Positional(Net):
    def forward(self, x, t, y=None):
        return super().forward(x, t, y)


class OfDictionary(Net):
    def forward(self, batch):
        return {"score": self.b(self.hidden(batch["x"], batch["time"], batch["ids"]))}


def example(dtype, batch=4):
    x = torch.randint(0, 2, (batch, 6, 12)) if dtype != "float32" else torch.randn(batch, 6, 12)
    return x.to(getattr(torch, dtype)), torch.rand(batch), torch.randint(0, 9, (batch, 7))


def net(form, dtype="float32"):
    torch.manual_seed(0)
    network = {"one": Net, "dictionary": OfDictionary}.get(form, Positional)(form).eval()
    x, t, y = example(dtype)
    forms = {"one": x, "several": (x, t, y), "dictionary": {"x": x, "time": t, "ids": y.int()}}
    network.example_input = forms.get(form, {"x": x, "t": t, "y": y})
    return network
'''

FORMS = ("one", "several", "dictionary", "several outputs")
TYPES = ("float32", "uint8", "int8", "int16", "int32", "int64", "bool")
BATCHES = ("1:8:32", "2:3:5", "3")
DONE = ("run", "verify", "int8", "calibrate", "bench", "openvino", "inspect", "serve")

NAMES = {"one": ("input",), "dictionary": ("x", "time", "ids")}

Row = tuple[str, str, str, str]


def rows() -> list[Row]:
    """Every form with every type, and with every range and use, each type and range in turn."""
    types, batches = itertools.cycle(TYPES), itertools.cycle(BATCHES)
    typed = [(form, dtype, BATCHES[0], "run") for form in FORMS for dtype in TYPES]
    used = [(form, next(types), next(batches), done) for form in FORMS for done in DONE]
    ranged = [(form, "float32", batch, "run") for form in FORMS for batch in BATCHES]
    return list(dict.fromkeys([*typed, *used, *ranged]))


def write(folder: Path) -> None:
    """Writes the networks as a user's module, `ports_net`."""
    (folder / "ports_net.py").write_text(CODE)


def inputs(form: str, dtype: str, count: int) -> dict[str, np.ndarray]:
    """Returns other inputs than the example's, by name."""
    torch.manual_seed(1)
    given = importlib.import_module("ports_net").example(dtype, count)
    names = NAMES.get(form, ("x", "t", "y"))
    return {name: tensor.numpy() for name, tensor in zip(names, given, strict=False)}


def wanted(form: str, dtype: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what the network gives in float64."""
    network = importlib.import_module("ports_net").net(form, dtype).double()
    tensors = [torch.from_numpy(array) for array in given.values()]
    tensors = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    with torch.no_grad():
        by_name = dict(zip(given, tensors, strict=True))
        result: Any = network(by_name) if form == "dictionary" else network(*tensors)
    outputs = result if isinstance(result, dict) else {"output": result}
    return {name: tensor.numpy() for name, tensor in outputs.items()}
