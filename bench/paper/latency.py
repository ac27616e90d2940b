"""Table 3 of the Soft MoE paper: milliseconds by k for a stack of large experts, random data.

The paper timed 2.27 B parameters of experts on a GPU. Here the same stack runs on what there is:
the hidden width is halved until the copies of the weights that a comparison holds fit, and passes
are fewer where a hundred would take too long. The results say what became of both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ...common.console import Progress
from ...common.environment import memory_bytes
from ...common.text import count, table
from ...common.timing import MIN_ROUNDS, Protocol
from ...exporter.model import Model, Source, TensorSpec
from ...graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from ..data import LabelledData
from ..plan import Settings
from ..report.page import write_all
from ..results import ONNXRUNTIME, PYTORCH_ALGORITHM_2, Results, Row
from ..run import bench
from ..runners.candidates import Sweep, exported
from ..runners.pytorch import untouched
from . import published
from .published import TABLE_3, LatencyTable

KEPT = (8, 6, 4, 2)
BATCHES = (1, 100)
COPIES = 64
"""Of the weights must fit: PyTorch's, for each k a mapped file and what a runtime repacks, and as
much again for a batch of 100 and for whoever else uses the machine, several times over. Chosen
so that the whole protocol takes minutes, too."""

BUDGET_S = 60.0
"""The passes of one batch size may take this long, if every engine were as fast as PyTorch."""

FEWEST = 5


class Stack(nn.Module):
    """Soft MoE layers one after another, each with a residual: (b, m, d) to (b, m, d)."""

    def __init__(self, layers: list[SoftMoE]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the tokens after all layers."""
        for layer in self.layers:
            x = x + layer(x)
        return x


@dataclass(frozen=True, slots=True)
class Passes:
    """How many calls warm up and are timed, for each engine and k."""

    warmup: int
    timed: int

    @property
    def protocol(self) -> Protocol:
        """As interleaved rounds, each call on an input of its own."""
        return Protocol(warmup=self.warmup, round_s=0.0, inputs=self.timed // MIN_ROUNDS)


def fitting(shape: LatencyTable, memory: int | None) -> LatencyTable:
    """Returns the shape with h halved until 64 copies of its FP32 weights fit in the memory."""
    room = (8 << 30) if memory is None else memory
    while COPIES * 4 * parameters(shape) > room and shape.hidden > shape.experts:
        shape = replace(shape, hidden=shape.hidden // 2)
    return shape


def parameters(shape: LatencyTable) -> int:
    """Returns how many weights the experts of all layers have."""
    return shape.layers * shape.experts * 2 * shape.dim * shape.hidden


def stack_model(shape: LatencyTable, *, seed: int = 0) -> Model:
    """Returns the stack with random weights, one tensor per expert, as users' checkpoints have."""
    random = torch.Generator().manual_seed(seed)

    def draw(*size: int, scale: float) -> Tensor:
        return torch.randn(*size, generator=random) * scale

    n, d, h = shape.experts, shape.dim, shape.hidden
    layers = [
        SoftMoE(
            SoftMoESpec(f"layers.{index}", n, 1, d, h, d, norm="l2", norm_eps=1e-12),
            SoftMoEWeights(
                # The scale of phi spreads the routing over the experts.
                nn.functional.normalize(draw(d, n, 1, scale=1.0), dim=0) * 10.0,
                tuple(draw(d, h, scale=d**-0.5) for _ in range(n)),
                draw(n, h, scale=0.1),
                tuple(draw(h, d, scale=h**-0.5) for _ in range(n)),
                draw(n, d, scale=0.1),
            ),
        )
        for index in range(shape.layers)
    ]
    return Model(
        Stack(layers).eval(),
        "soft-moe-vit",
        {},
        Source(f"{shape.layers} layers, n={n}, d={d}, h={h}", ()),
        (TensorSpec("input", "float32", ("batch", shape.tokens, d)),),
        (TensorSpec("output", "float32", ("batch", shape.tokens, d)),),
    )


def random_tokens(shape: LatencyTable, samples: int) -> LabelledData:
    """Returns normal tokens [samples, m, d], each input about a direction of its own."""
    random = np.random.default_rng(1)
    size = (samples, shape.tokens, shape.dim)
    own = random.standard_normal((samples, 1, shape.dim), np.float32)
    return LabelledData(own + random.standard_normal(size, np.float32), None)


def passes_for(shape: LatencyTable, call_s: float, cases: int) -> Passes:
    """Returns the paper's passes, or as many as the budget allows: at least 1 and 5."""
    affordable = int(BUDGET_S / (2 * call_s * cases))
    if affordable < FEWEST:
        return Passes(1, FEWEST)
    timed = min(shape.timed, affordable) // MIN_ROUNDS * MIN_ROUNDS
    return Passes(min(shape.warmup, timed), timed)


def run_latency(
    out: Path,
    progress: Progress,
    *,
    shape: LatencyTable | None = None,
    batches: tuple[int, ...] = BATCHES,
    threads: int | None = None,
    command: str = "",
) -> tuple[Results, str]:
    """Returns the results of Table 3's protocol, and the table beside the paper's, as text."""
    shape = shape or fitting(TABLE_3, memory_bytes())
    progress.step(f"a stack of {describe(shape)}")
    model = stack_model(shape)
    parts: list[Results] = []
    passes: dict[str, dict[str, int]] = {}
    for batch in batches:
        asked = Sweep(ks=KEPT, batches=(batch,), threads=threads)
        with exported(model, asked, name=describe(shape), progress=progress) as candidate:
            call_s = _seconds(model, random_tokens(shape, batch).inputs)
            # Algorithm 2 for every k but n, and the untouched model.
            chosen = passes_for(shape, call_s, len(KEPT) + len(candidate.graphs))
            passes[str(batch)] = asdict(chosen)
            settings = Settings(
                batches=(batch,),
                protocol=chosen.protocol,
                evaluation_batch=1,
                samples=2,
                threads=threads,
                memory=False,
                parts=False,
            )
            data = random_tokens(shape, batch * chosen.protocol.inputs)
            parts.append(bench([candidate], data, settings, command=command, progress=progress))
    rows = tuple(row for part in parts for row in part.rows)
    results = replace(
        parts[0],
        rows=rows,
        protocol=parts[0].protocol | {"batches": list(batches)},
        analyses={"latency": {"shape": asdict(shape), "passes": passes}},
    )
    write_all(results, out)
    return results, latency_table(results)


def describe(shape: LatencyTable) -> str:
    """Returns the shape in words: `6 layers, n=8, d=768, h=1920 (141.6M parameters)`."""
    return (
        f"{shape.layers} layers, n={shape.experts}, d={shape.dim}, h={shape.hidden} "
        f"({count(parameters(shape))} parameters)"
    )


def _seconds(model: Model, x: np.ndarray) -> float:
    run = untouched(model)
    run.infer(x)
    started = time.perf_counter()
    run.infer(x)
    return time.perf_counter() - started


HEADER = ("batch", "k", "PyTorch", "loop over k", "exported", "t(k)/t(8)", "paper, ms", "t(k)/t(8)")


def latency_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table: ours on this machine, the paper's on its GPU."""
    for batch in sorted({row.batch for row in results.rows}):
        rows = [row for row in results.rows if row.batch == batch]
        whole = _best(rows, 8)
        reference = next(row for row in rows if row.is_reference)
        for k in KEPT:
            paper = published.TABLE_3_MS.get(batch, {})
            ours = _best(rows, k)
            yield (
                str(batch),
                str(k),
                _ms(reference.median_ms),
                _ms(reference.median_ms if k == 8 else _of(rows, PYTORCH_ALGORITHM_2, k)),
                _ms(ours),
                "–" if ours is None or whole is None else f"{ours / whole:.2f}",
                _ms(paper.get(k)),
                f"{paper[k] / paper[8]:.2f}" if k in paper else "–",
            )


def latency_table(results: Results) -> str:
    """Returns the table as text, under what was scaled."""
    found = results.analyses["latency"]
    shape = LatencyTable(**found["shape"])
    passes = "; ".join(
        f"batch {batch}: {each['warmup']} passes of warm-up, {each['timed']} timed"
        for batch, each in found["passes"].items()
    )
    title = f"{describe(shape)}, {shape.tokens} tokens (the paper: {describe(TABLE_3)})\n{passes}"
    return f"{title}\n{table(HEADER, list(latency_rows(results)))}"


def _best(rows: list[Row], k: int) -> float | None:
    """The exported graph's median; the fastest where the cost model chose one per batch size."""
    found = [row.median_ms for row in rows if row.engine == ONNXRUNTIME and row.k == k]
    return min((each for each in found if each is not None), default=None)


def _of(rows: list[Row], engine: str, k: int) -> float | None:
    return next((row.median_ms for row in rows if (row.engine, row.k) == (engine, k)), None)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
