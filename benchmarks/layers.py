"""One Soft MoE layer at the shapes of the speed targets: every k and lowering against PyTorch.

PyTorch's dense layer is measured in both forms in which it is published: a loop over experts that
are modules of their own, and experts stacked in one tensor with batched matmuls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np
import torch
from moexport.bench import timing
from moexport.bench.results import ModelInfo, Results, Row
from moexport.bench.subjects import Asked, exported
from moexport.exporter.environment import environment, usable_cores
from moexport.exporter.hosts.layer import TokenHost
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.graphs.cost import choose
from moexport.graphs.layers import SoftMoE, SoftMoEWeights, algorithm_1
from moexport.graphs.lowerings.base import Work
from moexport.graphs.spec import SoftMoESpec

TOKENS, DIM = 197, 768
BATCHES = (1, 16, 100)
LOWERINGS = ("dense", "gather", "grouped", "conditional")
GATHER_LIMIT_BYTES = 2 << 30
"""`gather` is left out where one batch would copy more weights than this."""

STACKED, LOOP, ALGORITHM_2 = "stacked", "loop", "algorithm-2"


@dataclass(frozen=True, slots=True)
class Shape:
    """The experts of a layer: n of them with hidden width h."""

    experts: int
    hidden: int

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"n={self.experts}, h={self.hidden}"

    @property
    def ks(self) -> tuple[int, ...]:
        """Every k that is measured."""
        n = self.experts
        return tuple(sorted({n, n // 2, n // 4, n // 8, max(1, n // 32), 1}, reverse=True))


SHAPES = (Shape(8, 7680), Shape(128, 384))


def spec_of(shape: Shape) -> SoftMoESpec:
    """The layer of the ViT family: L2-normalised tokens, exact GELU."""
    return SoftMoESpec("layer", shape.experts, 1, DIM, shape.hidden, DIM, norm="l2", norm_eps=1e-12)


def random_weights(shape: Shape, *, stacked: bool) -> SoftMoEWeights:
    """Weights of a plausible scale; the scale of phi spreads the routing over the experts."""
    random = torch.Generator().manual_seed(0)

    def draw(*size: int, scale: float) -> torch.Tensor:
        return torch.randn(*size, generator=random) * scale

    n, h = shape.experts, shape.hidden
    phi = torch.nn.functional.normalize(draw(DIM, n, 1, scale=1.0), dim=0) * 10.0
    first = draw(n, h, DIM, scale=DIM**-0.5)
    second = draw(n, DIM, h, scale=h**-0.5)
    b1, b2 = draw(n, h, scale=0.1), draw(n, DIM, scale=0.1)
    if stacked:
        return SoftMoEWeights(phi, first.transpose(1, 2), b1, second.transpose(1, 2), b2)
    return SoftMoEWeights(
        phi, tuple(w.T for w in first.unbind()), b1, tuple(w.T for w in second.unbind()), b2
    )


def layer_model(shape: Shape, *, stacked: bool) -> Model:
    """The layer alone as a model; its token count is a constant, as in a ViT."""
    layer = SoftMoE(spec_of(shape), random_weights(shape, stacked=stacked))
    port = TensorSpec("input", "float32", ("batch", TOKENS, DIM))
    return Model(
        TokenHost(layer).eval(),
        "soft-moe-vit",
        {},
        Source(shape.name, ()),
        port,
        TensorSpec("output", "float32", ("batch", TOKENS, DIM)),
    )


def tokens_of(batch: int) -> np.ndarray:
    """Inputs whose routing differs from input to input: each has its own direction and noise."""
    random = np.random.default_rng(1)
    own = random.standard_normal((batch, 1, DIM))
    return (own + random.standard_normal((batch, TOKENS, DIM))).astype(np.float32)


def run(
    shapes: tuple[Shape, ...] = SHAPES,
    batches: tuple[int, ...] = BATCHES,
    *,
    round_s: float = 0.3,
    progress: Callable[[str], None] = print,
) -> Results:
    """Returns a row per shape, batch, engine, lowering and k, all interleaved within a k."""
    threads = usable_cores()
    torch.set_num_threads(threads)
    rows: list[Row] = []
    models: list[ModelInfo] = []
    for shape in shapes:
        models.append(ModelInfo(shape.name, "soft-moe-vit", "random weights"))
        for k in shape.ks:
            progress(f"{shape.name}, k = {k}: exporting")
            with ExitStack() as stack:
                rows += _heats(shape, k, batches, round_s, threads, stack, progress)
    return Results(
        tuple(models),
        tuple(rows),
        environment() | {"threads": threads},
        {"rounds": timing.MIN_ROUNDS, "round_s": round_s, "tokens": TOKENS, "dim": DIM}
        | machine_rates(),
        command="python -m benchmarks layers",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _heats(
    shape: Shape,
    k: int,
    batches: tuple[int, ...],
    round_s: float,
    threads: int,
    stack: ExitStack,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    stacked = layer_model(shape, stacked=True)
    loop = layer_model(shape, stacked=False)
    subject = stack.enter_context(
        exported(loop, Asked(ks=(k,), lowerings=LOWERINGS, threads=threads))
    )
    graphs = {source.lowering: source.open() for source in subject.graphs}
    for batch in batches:
        x = tokens_of(batch)
        tokens = torch.from_numpy(x)
        calls: dict[str, Callable[[], object]] = {
            STACKED: partial(stacked.module, tokens),
            LOOP: partial(loop.module, tokens),
        }
        if k < shape.experts:
            calls[ALGORITHM_2] = partial(_algorithm_2, loop, k, tokens)
        copied = 4 * batch * k * spec_of(shape).parameters_per_expert
        for name, graph in graphs.items():
            if name != "gather" or copied <= GATHER_LIMIT_BYTES or k == shape.experts:
                calls[name] = partial(graph, x)
        progress(f"{shape.name}, k = {k}, batch {batch}: {', '.join(calls)}")
        contestants = {name: (lambda _, call=call: call()) for name, call in calls.items()}
        with torch.inference_mode():
            measured = timing.measure(
                contestants, timing.Protocol(round_s=round_s, warmup=2, inputs=1)
            )
        for name, error in measured.failures.items():
            progress(f"failed: {name}: {error}")
        for name, latency in measured.latencies.items():
            yield _row(shape, k, batch, name, latency)


def _algorithm_2(model: Model, k: int, tokens: torch.Tensor) -> torch.Tensor:
    with algorithm_1(model.module, {"layer": k}, algorithm="selected"):
        output: torch.Tensor = model.module(tokens)
    return output


def _row(shape: Shape, k: int, batch: int, name: str, latency: timing.Latency) -> Row:
    in_pytorch = name in (STACKED, LOOP, ALGORITHM_2)
    engine = "pytorch-algorithm-2" if name == ALGORITHM_2 else "pytorch-eager"
    return Row(
        engine=engine if in_pytorch else "onnxruntime",
        # The dense layer computes all experts whatever k it is measured beside.
        k=k,
        experts=shape.experts,
        batch=batch,
        model=shape.name,
        provider="cpu",
        lowering=name if name != ALGORITHM_2 else None,
        latency_ms=latency,
        throughput=1000 * batch / latency.median,
    )


def machine_rates() -> dict[str, float]:
    """Returns what PyTorch gets out of this machine: streamed GB/s and GFLOP/s of a large matmul.

    The stream is larger than any cache, so weights that fit one may be read faster.
    """
    stream = torch.ones(1 << 28)  # 1 GiB
    square = torch.randn(2048, 2048)
    calls = {"stream": lambda _: stream.sum(), "matmul": lambda _: square @ square}
    measured = timing.measure(calls, timing.Protocol(round_s=0.5, warmup=2)).latencies
    return {
        "stream_gb_s": stream.nbytes / 1e6 / measured["stream"].median,
        "matmul_gflop_s": 2 * 2048**3 / 1e6 / measured["matmul"].median,
    }


def chosen(shape: Shape, k: int, batch: int) -> str:
    """What `auto` takes for a cell of the grid."""
    return choose(Work(spec_of(shape), k, batch, TOKENS), "ort-cpu").lowering.name
