"""muMoE layers and blocks at the papers' shapes: the exported graph against published PyTorch.

PyTorch runs the published formulation: einsum over the factors, entmax15 by sorting. One input per
call: a vector for the heads, 1024 tokens for the GPT-2 block, 196 for the Mixer's channel block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np
import torch
from moexport.bench.results import ModelInfo, Results, Row
from moexport.bench.roofline import layer_parts, limit_ms, machine_rates
from moexport.bench.subjects import Asked, exported
from moexport.exporter import timing
from moexport.exporter.environment import environment, usable_cores
from moexport.exporter.hosts.layer import TokenHost
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.graphs.lowerings.base import WorkOf
from moexport.graphs.mumoe import MuMoE, MuMoEWeights
from moexport.graphs.mumoe_spec import FactorisedSpec, GateNorm, MuMoESpec


@dataclass(frozen=True, slots=True)
class Subject:
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


MIXER = _block(512, 2048, 64, 384, "bn")
SUBJECTS = (
    Subject("CP head (d=768, o=1000, n=128, R=512)", _head("cp", (512,)), 1, 5.0),
    Subject("TR head (d=768, o=1000, n=128, R=4, 4, 512)", _head("tr", (4, 4, 512)), 1, 7.0),
    Subject("GPT-2 CP block (d=768, n=256, R=556)", _block(768, 3072, 256, 556, "ln"), 1024, 2.0),
    Subject("Mixer S/16 CP channel block (n=64, R=384)", MIXER, 196, 2.0),
)


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


def layer_model(subject: Subject) -> Model:
    """The layer alone as a model, its token count a constant."""
    spec, m = subject.spec, subject.tokens
    return Model(
        TokenHost(random_layer(spec)).eval(),
        "mumoe",
        {},
        Source(subject.name, ()),
        TensorSpec("input", "float32", ("batch", m, spec.dim)),
        TensorSpec("output", "float32", ("batch", m, spec.out)),
    )


def run(
    subjects: tuple[Subject, ...] = SUBJECTS,
    *,
    round_s: float = 0.5,
    progress: Callable[[str], None] = print,
) -> Results:
    """Returns two rows per subject, PyTorch eager and ONNX Runtime, all experts, batch 1."""
    threads = usable_cores()
    torch.set_num_threads(threads)
    rates = machine_rates(threads)
    rows: list[Row] = []
    for subject in subjects:
        progress(subject.name)
        with ExitStack() as stack:
            model = layer_model(subject)
            graphs = stack.enter_context(exported(model, Asked(ks=("n",), threads=threads))).graphs
            graph = graphs[0].open()
            x = np.random.default_rng(1).standard_normal((1, subject.tokens, subject.spec.dim))
            x = x.astype(np.float32)
            calls: dict[str, Callable[[], object]] = {
                "pytorch-eager": partial(model.module, torch.from_numpy(x)),
                "onnxruntime": partial(graph, x),
            }
            contestants = {name: (lambda _, call=call: call()) for name, call in calls.items()}
            with torch.inference_mode():
                measured = timing.measure(contestants, timing.Protocol(round_s=round_s))
            for name, error in measured.failures.items():
                progress(f"failed: {name}: {error}")
            n = subject.spec.experts
            work = WorkOf(subject.spec, n, 1, subject.tokens)
            rows += [
                Row(
                    engine=name,
                    k=n,
                    experts=n,
                    batch=1,
                    model=subject.name,
                    provider="cpu",
                    lowering=graphs[0].lowering if name == "onnxruntime" else None,
                    latency_ms=latency,
                    limit_ms=limit_ms(tuple(layer_parts(work)), rates),
                    throughput=1000 / latency.median,
                )
                for name, latency in measured.latencies.items()
            ]
    return Results(
        tuple(ModelInfo(s.name, "mumoe", "random weights", s.spec.parameters) for s in subjects),
        tuple(rows),
        environment() | {"threads": threads},
        {"rounds": timing.MIN_ROUNDS, "round_s": round_s} | rates.as_json(),
        command="python -m benchmarks mumoe",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
