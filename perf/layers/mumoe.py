"""Compares exported muMoE layers and blocks, at the papers' shapes, with published PyTorch code.

PyTorch runs the published formulation, einsum over the factors and entmax15 by sorting, in two
forms: with the calls of the authors' code (`published`), and as in moexport's reference, with only
`torch.einsum` of two operands. A call has one input: a vector for the heads, 1024 tokens for the
GPT-2 block, 196 for the Mixer's channel block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from einops import einsum, rearrange
from entmax import entmax15
from moexport.bench.engines import ONNXRUNTIME, PYTORCH_EAGER
from moexport.bench.measure.roofline import Microbenchmarks, Rates
from moexport.bench.request import BenchRequest
from moexport.bench.results import ModelInfo, Results, Row
from moexport.bench.runners.exported import exported
from moexport.common import timing
from moexport.common.console import Progress
from moexport.common.text import markdown
from moexport.examples.studies.random_layers import layer_model, random_mumoe, random_tokens
from moexport.graphs.layers.mumoe import FactorisedSpec, GateNorm, MuMoE, MuMoESpec
from torch import Tensor, nn

from ..measure import in_pytorch, ms, random_weights, results, threads, timed, times


class PublishedMuMoE(nn.Module):
    """A `MuMoE` of one level with entmax15 and no edits, computed by the published calls."""

    def __init__(self, layer: MuMoE) -> None:
        super().__init__()
        (self.experts,) = layer.spec.levels
        self.spec = layer.spec
        self.projection = layer.projections[0]
        self.factors = [[*tensor.factors] for tensor in layer.tensors]  # type: ignore[misc]
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
    """A layer or block, and the number of tokens of one input."""

    name: str
    spec: MuMoESpec
    tokens: int


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
    TimedLayer("CP head (d=768, o=1000, n=128, R=512)", _head("cp", (512,)), 1),
    TimedLayer("TR head (d=768, o=1000, n=128, R=4, 4, 512)", _head("tr", (4, 4, 512)), 1),
    TimedLayer("GPT-2 CP block (d=768, n=256, R=556)", GPT2, 1024),
    TimedLayer("Mixer S/16 CP channel block (n=64, R=384)", MIXER, 196),
)

REFERENCE = "pytorch-einsum"
"""The engine of the rows of moexport's reference in PyTorch."""

CALIBRATION_TOKENS = 256
"""The number of tokens for INT8's ranges, in inputs of a layer's size."""

PROTOCOL = timing.Protocol(round_s=0.5)


def run(
    progress: Progress,
    layers: tuple[TimedLayer, ...] = LAYERS,
    protocol: timing.Protocol = PROTOCOL,
) -> Iterator[Results]:
    """Yields four rows per layer at b = 1 and k = n: both PyTorch forms, and FP32 and INT8 graphs.

    Raises AssertionError if the two forms of PyTorch differ.
    """
    machine = Microbenchmarks(threads())
    models: list[ModelInfo] = []
    rows: list[Row] = []
    rates: list[Rates] = []
    for layer in layers:
        progress.step(f"{layer.name}: exporting")
        info, found, rate = measure(layer, protocol, machine)
        models.append(info)
        rows += found
        rates.append(rate)
        yield results("mumoe", models, rows, protocol, rates)


def measure(
    layer: TimedLayer, protocol: timing.Protocol, machine: Microbenchmarks
) -> tuple[ModelInfo, list[Row], Rates]:
    """Returns the rows of a layer or block."""
    module = random_mumoe(layer.spec)
    reference = layer_model(layer.name, module, layer.tokens)
    model = replace(reference, original=PublishedMuMoE(module).eval())
    data = random_tokens(1, layer.tokens, layer.spec.dim)
    x = torch.from_numpy(data.inputs)
    with torch.inference_mode():
        expected = reference.module(x)
        assert model.original is not None
        assert (model.original(x) - expected).abs().max() < 1e-4 * expected.abs().max()
    several = random_tokens(CALIBRATION_TOKENS // layer.tokens or 1, layer.tokens, layer.spec.dim)
    asked = BenchRequest(
        k="n", precision=("fp32", "int8"), engine=ONNXRUNTIME, target="ort-cpu", threads=threads()
    )
    with exported(model, asked, inputs=several.inputs, name=layer.name) as candidate:
        graphs = (in_pytorch(reference, REFERENCE, "einsum"), *candidate.graphs)
        names = {PYTORCH_EAGER: "published"}
        rows, rates = timed(replace(candidate, graphs=graphs), data, protocol, machine, names)
    return random_weights(model, layer.name), rows, rates


def table(results: Results) -> str:
    """Returns the layers as Markdown, with the minimum time that the machine needs for each.

    This is the time to stream the weights from memory or to compute the multiply-adds at the rate
    of a large matmul, whichever is longer; a layer whose weights stay in a cache may take less.
    """
    lines = []
    for layer in LAYERS:
        found = {(row.engine, row.precision): row for row in results.of_model(layer.name)}
        single, integers = found[ONNXRUNTIME, "fp32"], found[ONNXRUNTIME, "int8"]
        published, einsums = (
            found[engine, "fp32"].median_ms for engine in (PYTORCH_EAGER, REFERENCE)
        )
        lines.append(
            (
                *(layer.name, str(layer.tokens), ms(published), ms(einsums)),
                *(ms(single.median_ms), ms(single.limit_ms), times(published, single.median_ms)),
                *(ms(integers.median_ms), ms(integers.limit_ms)),
                *(
                    times(published, integers.median_ms),
                    times(single.median_ms, integers.median_ms),
                ),
            )
        )
    header = (
        *("layer", "tokens", "PyTorch, published", "einsum alone", "FP32", "limit", "vs published"),
        *("INT8", "limit", "vs published", "vs FP32"),
    )
    return markdown(header, lines)
