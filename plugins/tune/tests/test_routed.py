"""Models whose routers choose k: every k of every layer from two traces, and a search over them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
from moexport.bench.data import LabelledData
from moexport.errors import UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.job import ExportJob, export_job
from moexport.exporter.model import Model
from moexport.exporter.options import ExportOptions
from moexport.exporter.trace import trace
from moexport.plugins.tune.routed import Traces, _differences, _same_op

CODE = '''
import moexport
import torch
from torch import nn
from torch.nn import functional as F


class Sparse(nn.Module):
    def __init__(self, d=16, n=8, h=32, k=3):
        super().__init__()
        self.router = nn.Linear(d, n, bias=False)
        self.w1 = nn.Parameter(torch.randn(n, d, h) / 4)
        self.w2 = nn.Parameter(torch.randn(n, h, d) / 40)
        self.k = k

    def choose(self, x, k=3):
        weights, index = self.router(x).softmax(-1).topk(k, -1)
        return index, weights

    def forward(self, x):
        index, weights = self.choose(x, self.k)
        every = torch.einsum("...d,ndh->...nh", x, self.w1).relu()
        every = torch.einsum("...nh,nhd->...nd", every, self.w2)
        chosen = every.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))
        return (chosen * weights[..., None]).sum(-2)


class Words(nn.Module):
    """Foretells the next token from the last one."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 16)
        self.layers = nn.ModuleList([nn.ModuleDict({"moe": Sparse()}) for _ in range(2)])
        self.head = nn.Linear(16, 12)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer["moe"](x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Words().eval()


@moexport.adapts(Sparse)
def adapt(layer):
    return moexport.Experts(
        router=layer.choose, w1=layer.w1, w2=layer.w2, gate="none", activation="relu")
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_words.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    try:
        return moexport.load("own_words:net", example=np.arange(20).reshape(2, 10) % 12)
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def base(model: Model) -> ExportJob:
    return export_job(model, ExportOptions(target="ort-cpu", verify=False))


def test_two_traces_tell_those_of_every_k_of_every_layer(model: Model, base: ExportJob) -> None:
    traces = Traces(base, trace(base.model, fixed=base.fixed))
    for k in ((2, 3), (1, 2)):
        job = export_job(model, base.options, k=k)
        found, wanted = traces.of(job), trace(job.model, fixed=job.fixed)
        for one, two in zip(found.graph, wanted.graph, strict=True):
            assert _same_op(one, two)
            assert not list(_differences(one, two))
    assert traces._places is not None


def test_a_router_that_refuses_one_expert_is_traced_for_each_k(
    model: Model, base: ExportJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, with_k = type(model.host), type(model.host).with_k

    def from_two(self: Any, model: Model, k: Mapping[str, int | None]) -> Model:
        if 1 in k.values():
            raise UsageError("the router needs k of 2 or more")
        return with_k(self, model, k)

    job = export_job(model, base.options, k=2)
    monkeypatch.setattr(host, "with_k", from_two)
    traces = Traces(base, trace(base.model, fixed=base.fixed))
    found, wanted = traces.of(job), trace(job.model, fixed=job.fixed)
    assert traces._places is None
    assert [node.op_type for node in found.graph] == [node.op_type for node in wanted.graph]


@pytest.mark.slow
def test_a_token_routed_model_is_tuned_by_the_perplexity_of_its_next_tokens(
    model: Model, tmp_path: Path
) -> None:
    ids = np.random.default_rng(0).integers(0, 12, (48, 10))
    tuned = moexport.tune(
        model,
        LabelledData(ids, None, model.input.name),
        tmp_path / "out",
        keep="95%",
        threads=1,
        precision="fp32,int8",
    )
    assert tuned.metric.name == "perplexity"
    assert tuned.chosen.quality.low >= 0.95
    tried = {choice.k for trial in tuned.all_trials for _, choice in trial.point.layers}
    assert {1, 3} <= tried
    assert {layer.k for layer in tuned.bundle.manifest.layers} <= {1, 2, 3}
    assert tuned.bundle.manifest.contract["metric"] == "perplexity"
    again = moexport.export(model, tmp_path / "again", recipe=tuned.bundle.path / "recipe.yaml")
    for name in ("model.onnx", "weights.bin"):
        assert (again.path / name).read_bytes() == (tuned.bundle.path / name).read_bytes(), name
    assert all(check.passed for check in Bundle.open(again.path).verify())
