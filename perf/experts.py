"""Compares a layer of token-routed experts in PyTorch's forms with moexport's graphs."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from moexport.common.console import Progress
from moexport.common.text import markdown
from moexport.common.timing import IndexedCall, Protocol, measure
from moexport.errors import install
from moexport.exporter.export import write_bundle
from moexport.exporter.job import export_job
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.exporter.options import ExportOptions
from moexport.exporter.session import Session, SessionOptions
from moexport.plugins.token_routed.layers.experts import Experts, ExpertsSpec, ExpertsWeights
from torch import Tensor, nn

from .measure import measured_on

SPEC = ExpertsSpec("moe.experts", experts=32, k=8, dim=1024, hidden=512, out=1024)
TOKENS = (1, 16, 256)
SLOW = {"batched_mm": 1}
"""The largest number of tokens for `batched_mm`, which gathers weights for every pair."""

GRAPHS = (
    ("grouped", "fp32"),
    ("fused", "fp32"),
    ("grouped", "int8"),
    ("fused", "int8"),
    ("grouped", "int4"),
    ("fused", "int4"),
)


class Layer(nn.Module):
    """Experts with a softmax router that normalises over the k selected experts."""

    def __init__(self, router: Tensor, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.Parameter(router, requires_grad=False)
        self.moe = nn.ModuleDict({"experts": experts})

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens [t, d] to [t, o]."""
        best = (x @ self.router).topk(SPEC.k, dim=-1)
        y: Tensor = self.moe["experts"](x, best.indices, best.values.softmax(dim=-1))
        return y


def measured(progress: Progress) -> dict[str, object] | None:
    """Returns the median ms of each case, and of reading the active weights, by tokens."""
    if importlib.util.find_spec("transformers") is None:
        progress.step(f"transformers is not installed: {install('transformers')}")
        return None
    torch.manual_seed(0)
    n, d, h = SPEC.experts, SPEC.dim, SPEC.hidden
    gate_up, down = torch.randn(n, 2 * h, d) / d**0.5, torch.randn(n, d, h) / h**0.5
    router = torch.randn(d, n) / d**0.5
    experts = Experts(SPEC, ExpertsWeights(gate_up.transpose(1, 2), down.transpose(1, 2)))
    calls: dict[str, Any] = {
        f"PyTorch {form}": Layer(router, _published(gate_up, down, form))
        for form in ("eager", "batched_mm", "grouped_mm")
    }
    with tempfile.TemporaryDirectory(prefix="moexport-experts-") as folder:
        progress.step("exporting")
        model = _model(Layer(router, experts).eval())
        for lowering, precision in GRAPHS:
            options = ExportOptions(
                k=SPEC.k,
                target="ort-cpu",
                lowering=lowering,
                precision=precision,  # type: ignore[arg-type]
                verify=False,
                destination=Path(folder) / f"{lowering}-{precision}",
            )
            bundle = write_bundle(export_job(model, options))
            calls[f"{lowering} {precision}"] = Session(
                bundle.path / "model.onnx", SessionOptions(threads=torch.get_num_threads())
            )
        times = {tokens: _timed(calls, tokens, gate_up, progress) for tokens in TOKENS}
    return {"times": times, "threads": torch.get_num_threads()}


def _published(gate_up: Tensor, down: Tensor, form: str) -> nn.Module:
    """Returns the experts of a published architecture in one of the available forms."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    mixtral = MixtralExperts(
        SimpleNamespace(
            num_local_experts=SPEC.experts,
            hidden_size=SPEC.dim,
            intermediate_size=SPEC.hidden,
            hidden_act="silu",
            _experts_implementation=form,
        )
    )
    mixtral.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
    mixtral.down_proj = nn.Parameter(down, requires_grad=False)
    experts: nn.Module = mixtral
    return experts


def _model(layer: Layer) -> Model:
    tokens, outputs = (
        TensorSpec(name, "float32", ("batch", size))
        for name, size in (("x", SPEC.dim), ("y", SPEC.out))
    )
    return Model(layer, "experts", {}, Source("random weights", ()), (tokens,), (outputs,))


def _timed(
    calls: Mapping[str, Any], tokens: int, weights: Tensor, progress: Progress
) -> dict[str, float]:
    protocol = Protocol(rounds=5, warmup=3, round_s=0.1, inputs=4)
    random = np.random.default_rng(tokens)
    inputs = [random.standard_normal((tokens, SPEC.dim), np.float32) for _ in range(4)]
    cases: dict[str, IndexedCall] = {
        name: partial(_call, call, inputs)
        for name, call in calls.items()
        if tokens <= SLOW.get(name.removeprefix("PyTorch "), tokens)
    }
    cases["bytes"] = lambda index: weights.sum()
    with torch.inference_mode():
        found = measure(cases, protocol, title=f"{tokens} tokens", progress=progress)
    times = {name: latency.median for name, latency in found.latencies.items()}
    active = SPEC.experts * (1.0 - (1.0 - SPEC.k / SPEC.experts) ** tokens)
    times["bytes"] *= SPEC.bytes_read(1) * active / (4 * weights.numel())
    return times


def _call(call: Any, inputs: list[np.ndarray], index: int) -> None:
    x = inputs[index]
    call(torch.from_numpy(x) if isinstance(call, nn.Module) else x)


def table(body: Any) -> str:
    """Returns the results as Markdown."""
    names = list(body["times"]["1"])
    rows = [
        (tokens, *(f"{times[name]:.3g}" if name in times else "–" for name in names))
        for tokens, times in body["times"].items()
    ]
    return (
        f"Measured on {measured_on(body)}, {body['threads']} threads; ms, medians. d = {SPEC.dim}, "
        f"h = {SPEC.hidden}, k = {SPEC.k} of {SPEC.experts}; `bytes` is the time to read the FP32 "
        f"weights in use.\n\n{markdown(('tokens', *names), rows)}"
    )
