"""muMoE layers and blocks at the papers' shapes: the exported graph against published PyTorch.

PyTorch runs the published formulation, einsum over the factors and entmax15 by sorting, in two
forms: by the calls of the authors' code (`published`), and as moexport's own reference does, with
`torch.einsum` of two operands and nothing around it. One input per call: a vector for the heads,
1024 tokens for the GPT-2 block, 196 for the Mixer's channel block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np
import torch
from einops import einsum, rearrange
from entmax import entmax15
from moexport.bench.measure.roofline import Rates, layer_parts, limit_ms, machine_rates
from moexport.bench.results import ONNXRUNTIME, PYTORCH_EAGER, ModelInfo, Results, Row
from moexport.bench.runners.candidates import Sweep, exported
from moexport.common import timing
from moexport.common.environment import environment, usable_cores
from moexport.exporter.families.layer_only import TokenBackbone
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.graphs.layers.mumoe import (
    FactorisedSpec,
    GateNorm,
    MuMoE,
    MuMoESpec,
    MuMoEWeights,
    mumoe_layers,
)
from moexport.graphs.lowerings.cost import WorkOf
from torch import Tensor, nn

from .layers import timed_calls


class PublishedMuMoE(nn.Module):
    """The weights of a `MuMoE` of one level, entmax15 and no edits, in the published calls."""

    def __init__(self, layer: MuMoE) -> None:
        super().__init__()
        (self.experts,) = layer.spec.levels
        self.spec = layer.spec
        self.projection = layer.projections[0]
        self.factors = [[*held.factors] for held in layer.tensors]  # type: ignore[misc]
        self.norm: nn.Module
        if self.spec.norm == "bn":
            self.norm = nn.BatchNorm1d(self.experts, affine=False)
            mean, variance = layer.statistics(0)
            self.norm.load_state_dict({"running_mean": mean, "running_var": variance}, strict=False)
        else:
            self.norm = nn.LayerNorm(self.experts, elementwise_affine=False)
        self.input_norm: nn.Module = nn.Identity()
        if layer.gain is not None:
            self.input_norm = nn.LayerNorm(self.spec.dim)
            self.input_norm.load_state_dict({"weight": layer.gain, "bias": layer.shift})
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens x [b, m, d] to [b, m, o]."""
        logits = x @ self.projection
        if self.spec.norm == "bn":
            logits = rearrange(self.norm(rearrange(logits, "b m n -> b n m")), "b n m -> b m n")
        else:
            logits = self.norm(logits)
        a = entmax15(logits, dim=-1)
        x = self.input_norm(x)
        for index, (spec, factors) in enumerate(zip(self.spec.tensors, self.factors, strict=True)):
            if index:
                x = self.gelu(x)
            x = _contracted(spec, factors, a, x)
        return x


def _contracted(spec: FactorisedSpec, factors: list[Tensor], a: Tensor, z: Tensor) -> Tensor:
    """Returns W(a, z) [b, m, o] for coefficients a [b, m, n] and inputs z [b, m, d]."""
    experts, inputs, outputs = factors
    if spec.bias:
        z = torch.cat((z, torch.ones(*z.shape[:-1], 1, device=z.device)), dim=-1)
    if spec.form == "cp":
        of_experts = einsum(a, experts, "b m n, n r -> b m r")
        of_inputs = einsum(z, inputs, "b m d, d r -> b m r")
        return einsum(of_experts, of_inputs, outputs, "b m r, b m r, o r -> b m o")
    if spec.form == "tr":
        of_experts = einsum(a, experts, "b m n, q n r -> b m q r")
        of_inputs = einsum(z, inputs, "b m d, r d s -> b m r s")
        ring = einsum(of_inputs, of_experts, "b m r s, b m q r -> b m q s")
        return einsum(outputs, ring, "s o q, b m q s -> b m o")
    raise ValueError(f"{spec.form}: the published code has cp and tr")


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """A layer or block, how many tokens one input has, and the speed-up asked of it."""

    name: str
    spec: MuMoESpec
    tokens: int
    asked: float


def _head(form: str, ranks: tuple[int, ...]) -> MuMoESpec:
    tensor = FactorisedSpec(form, (128,), 768, 1000, ranks, bias=True)  # type: ignore[arg-type]
    return MuMoESpec("layer", (tensor,), norm="bn")


def _block(dim: int, hidden: int, experts: int, rank: int, norm: GateNorm) -> MuMoESpec:
    first = FactorisedSpec("cp", (experts,), dim, hidden, (rank,), bias=True)
    second = FactorisedSpec("cp", (experts,), hidden, dim, (rank,), bias=True)
    return MuMoESpec("layer", (first, second), norm=norm)


GPT2 = _block(768, 3072, 256, 556, "ln")
MIXER = _block(512, 2048, 64, 384, "bn")

LAYERS = (
    TimedLayer("CP head (d=768, o=1000, n=128, R=512)", _head("cp", (512,)), 1, 5.0),
    TimedLayer("TR head (d=768, o=1000, n=128, R=4, 4, 512)", _head("tr", (4, 4, 512)), 1, 7.0),
    TimedLayer("GPT-2 CP block (d=768, n=256, R=556)", GPT2, 1024, 2.0),
    TimedLayer("Mixer S/16 CP channel block (n=64, R=384)", MIXER, 196, 2.0),
)

REFERENCE = "pytorch-einsum"
"""The engine of rows of moexport's own reference in PyTorch."""

CALIBRATION_TOKENS = 256
"""Tokens that give INT8 its ranges, in inputs of a layer's size."""


def random_layer(spec: MuMoESpec) -> MuMoE:
    """A layer whose logits spread over a few units, so that entmax leaves a support of a few."""
    random = torch.Generator().manual_seed(0)

    def draw(*size: int, scale: float) -> torch.Tensor:
        return torch.randn(*size, generator=random) * scale

    batch_norm = spec.norm == "bn"
    return MuMoE(
        spec,
        MuMoEWeights(
            tuple(draw(spec.dim, n, scale=2 * spec.dim**-0.5) for n in spec.levels),
            tuple(tuple(draw(*shape, scale=0.05) for shape in t.shapes) for t in spec.tensors),
            tuple(draw(n, scale=0.1) for n in spec.levels) if batch_norm else (),
            tuple(torch.ones(n) for n in spec.levels) if batch_norm else (),
        ),
    )


def layer_model(layer: TimedLayer) -> Model:
    """The layer alone as a model, its token count a constant."""
    spec, m = layer.spec, layer.tokens
    return Model(
        TokenBackbone(random_layer(spec)).eval(),
        "mumoe",
        {},
        Source(layer.name, ()),
        (TensorSpec("input", "float32", ("batch", m, spec.dim)),),
        (TensorSpec("output", "float32", ("batch", m, spec.out)),),
    )


def run(
    timed: tuple[TimedLayer, ...] = LAYERS,
    *,
    round_s: float = 0.5,
    progress: Callable[[str], None] = print,
) -> Iterator[Results]:
    """Yields four rows a layer, both in PyTorch and the graphs in FP32 and INT8: b = 1, k = n.

    Raises AssertionError where the two in PyTorch differ.
    """
    threads = usable_cores()
    torch.set_num_threads(threads)
    rates = machine_rates(threads)
    rows: list[Row] = []
    for layer in timed:
        progress(layer.name)
        rows += _rows(layer, threads, round_s, rates, progress)
    yield Results(
        tuple(ModelInfo(s.name, "mumoe", "random weights", s.spec.parameters) for s in timed),
        tuple(rows),
        environment() | {"threads": threads},
        {"rounds": timing.MIN_ROUNDS, "round_s": round_s} | asdict(rates),
        command="python -m perf mumoe",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _rows(
    layer: TimedLayer,
    threads: int,
    round_s: float,
    rates: Rates,
    progress: Callable[[str], None],
) -> list[Row]:
    model = layer_model(layer)
    random = np.random.default_rng(1)
    x = random.standard_normal((1, layer.tokens, layer.spec.dim)).astype(np.float32)
    seen = random.standard_normal((CALIBRATION_TOKENS // layer.tokens or 1, *x.shape[1:]))
    asked = Sweep(
        ks=("n",),
        precisions=("fp32", "int8"),
        calibration=seen.astype(np.float32),
        threads=threads,
    )
    calls = _in_pytorch(model, torch.from_numpy(x))
    lowerings: dict[tuple[str, str], str] = {}
    with exported(model, asked) as exports:
        for graph in exports.graphs:
            key = (ONNXRUNTIME, graph.precision)
            calls[key], lowerings[key] = partial(graph.open().infer, x), graph.lowering
        latencies, _ = timed_calls(calls, timing.Protocol(round_s=round_s), progress)
    n = layer.spec.experts
    work = WorkOf(layer.spec, n, 1, layer.tokens)
    return [
        Row(
            engine=engine,
            precision=precision,
            k=n,
            experts=n,
            batch=1,
            model=layer.name,
            provider="cpu",
            lowering=lowerings.get((engine, precision)),
            latency_ms=latency,
            limit_ms=limit_ms(tuple(layer_parts(work, int8_experts=precision == "int8")), rates),
            throughput=1000 / latency.median,
        )
        for (engine, precision), latency in latencies.items()
    ]


def _in_pytorch(model: Model, x: torch.Tensor) -> dict[tuple[str, str], Callable[[], object]]:
    """The model in both of PyTorch's forms, which agree on x [1, m, d]."""
    (layer,) = mumoe_layers(model.module).values()
    published = PublishedMuMoE(layer).eval()
    with torch.inference_mode():
        expected = model.module(x)
        assert (published(x) - expected).abs().max() < 1e-4 * expected.abs().max()
    return {
        (PYTORCH_EAGER, "fp32"): partial(published, x),
        (REFERENCE, "fp32"): partial(model.module, x),
    }
