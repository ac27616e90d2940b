"""A small trained network, and results as a benchmark would write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moexport.bench.metrics import wilson
from moexport.bench.results import (
    Accuracy,
    Interval,
    ModelInfo,
    OutputParity,
    Results,
    RoutingAgreement,
    Row,
)
from moexport.common.latency import Latency, summarise
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from moexport.plugins.demo.digits import Digits, SoftMoEMnist, Training, load_digits, patches, train
from torch import Tensor, nn


class Backbone(nn.Module):
    """The network of `bench.digits` around the package's own Soft MoE layer."""

    def __init__(self, trained: SoftMoEMnist) -> None:
        super().__init__()
        n, _, hidden = trained.w1.shape
        spec = SoftMoESpec("moe", n, 1, 196, hidden, 196, activation="relu")
        weights = SoftMoEWeights(
            trained.phi.detach()[:, :, None], trained.w1.detach(), None, trained.w2.detach(), None
        )
        self.moe = SoftMoE(spec, weights)
        self.decoder = trained.decoder

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.decoder(self.moe(patches(images)).flatten(1))
        return scores


@pytest.fixture(scope="session")
def digits() -> Digits:
    return load_digits()


@pytest.fixture(scope="session")
def trained(digits: Digits) -> SoftMoEMnist:
    """n = 4, a few epochs: seconds."""
    return train(Training(experts=4, epochs=30), digits.train)


@pytest.fixture(scope="session")
def model(trained: SoftMoEMnist) -> Model:
    return Model(
        Backbone(trained).eval().requires_grad_(False),
        "soft-moe-mnist",
        {},
        Source("digits.pt", ()),
        (TensorSpec("input", "float32", ("batch", 1, 28, 28)),),
        (TensorSpec("output", "float32", ("batch", 10)),),
    )


def latency(median: float, spread: float = 0.02) -> Latency:
    low, high = median * (1 - spread / 2), median * (1 + spread / 2)
    return summarise([[low], [median], [median], [median], [high]])


def accuracy(kept: float) -> Accuracy:
    """What is kept of 324 right answers in 360."""
    return Accuracy(
        0.9 * kept,
        kept,
        360,
        top5=1.0,
        top1_interval=wilson(round(324 * kept), 360),
        top5_interval=wilson(360, 360),
        retention_interval=Interval(kept * 0.999, kept * 1.001),
    )


RowMaker = Callable[..., Row]


@pytest.fixture
def row() -> RowMaker:
    """Makes a row of `digits` with n = 16: median ms, k and what is kept."""

    def make(k: int, median: float, kept: float | None, **changes: object) -> Row:
        values: dict[str, object] = {
            "engine": "onnxruntime",
            "lowering": "grouped",
            "provider": "cpu",
            "model": "digits",
            "k": k,
            "experts": 16,
            "batch": 1,
            "latency_ms": latency(median),
            "throughput": 1000 / median,
            "accuracy": None if kept is None else accuracy(kept),
            "routing": RoutingAgreement(1.0, 1.0),
            "parity": OutputParity(1e-6, 1.0),
        }
        if (changes.get("engine") or "onnxruntime") == "onnxruntime":
            words = ("export", "--k", str(k), "--target", "ort-cpu", "--lowering", "grouped")
            values["deploy"] = words
        return Row(**(values | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def results(row: RowMaker) -> Results:
    """PyTorch at 3.1 ms; ONNX Runtime at 2, 1 and 0.5 ms keeping 100%, 99.2% and 80%."""
    untouched = {"engine": "pytorch-eager", "lowering": None, "routing": None}
    return Results(
        models=(ModelInfo("digits", "soft-moe-mnist", "digits.pt", 318_000),),
        rows=(
            row(16, 3.1, 1.0, **untouched),
            row(16, 2.0, 1.0),
            row(4, 1.0, 0.992),
            row(2, 0.5, 0.8),
            row(8, 1.0, 1.0, latency_ms=None, error="RuntimeError: <no such op>"),
        ),
        environment={"python": "3.11", "packages": {"torch": "2.13"}, "gpu": None},
        protocol={"rounds": 5, "round_s": 0.2, "warmup": 3, "samples": 360, "labelled": True},
        command="moexport bench digits.pt --k 4,2",
        created="2030-01-02T03:04:05+00:00",
    )


@pytest.fixture(autouse=True)
def deterministic() -> None:
    torch.manual_seed(0)
