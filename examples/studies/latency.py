"""Table 3 of the Soft MoE paper: milliseconds by k for a stack of large experts on random data.

The paper timed 2.27 B parameters of experts on a GPU. This study runs the same stack on the
available machine, in two ways. `run_latency` times all engines in turn, each with its weights in
memory: the hidden width is halved until that number of copies fits. `run_whole` keeps the paper's
size if two copies of the weights fit, and opens one engine at a time. If a hundred passes would
take too long, there are fewer. The results record these choices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from moexport.bench.engines import ONNXRUNTIME, PYTORCH_ALGORITHM_2, PYTORCH_EAGER
from moexport.bench.report.page import write_all
from moexport.bench.request import BenchRequest
from moexport.bench.results import Results, Row, write
from moexport.bench.run import bench, model_info
from moexport.bench.runners.base import Runner
from moexport.bench.runners.exported import exported
from moexport.bench.runners.pytorch import untouched, with_algorithm_1
from moexport.common.console import Progress
from moexport.common.environment import environment, memory_bytes
from moexport.common.latency import summarise
from moexport.common.text import count, table
from moexport.common.threads import with_threads
from moexport.common.timing import MIN_ROUNDS
from moexport.examples.studies.random_layers import (
    one_by_one,
    random_tokens,
    soft_moe_spec,
    soft_moe_weights,
    tokens_model,
)
from moexport.exporter.model import Model
from moexport.graphs.layers.soft_moe import SoftMoE
from torch import Tensor, nn

KEPT = (8, 6, 4, 2)
BATCHES = (1, 100)
ASKED = BenchRequest(
    k=KEPT,
    engine=(PYTORCH_ALGORITHM_2, ONNXRUNTIME),
    target="ort-cpu",
    round_s=0.0,
    evaluation_batch=1,
    samples=2,
    memory=False,
    parts=False,
)
COPIES = 64
"""The number of copies of the weights that must fit: PyTorch's, for each k a mapped file and a
runtime's repacked weights, and several times as much for a batch of 100 and for other programs.
This number also limits the whole protocol to minutes."""

WHOLE_COPIES = 2
"""The number of copies of the weights that one engine at a time needs: PyTorch's and the written
file, and later the mapped file and the runtime's repacked weights."""

SPARE = 1.1
"""The memory for tokens, slots and the program itself, as a factor of the weights."""

BUDGET_S = 60.0
"""The time limit for the passes of one batch size, if every engine were as fast as PyTorch."""

MIN_PASSES = 5


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
class LatencyTable:
    """The shape that is timed, and the number of passes for each engine and k."""

    layers: int = 6
    experts: int = 8
    dim: int = 768
    hidden: int = 30720
    tokens: int = 197
    warmup: int = 100
    timed: int = 100


TABLE_3 = LatencyTable()

TABLE_3_MS: Mapping[int, Mapping[int, float]] = {
    1: {8: 21.50, 6: 19.46, 4: 14.75, 2: 9.96},
    100: {8: 99.03, 6: 78.26, 4: 78.86, 2: 51.69},
}
"""The paper's times on an RTX 2080 Ti in FP32, by batch size and k."""


@dataclass(frozen=True, slots=True)
class Passes:
    """The numbers of warm-up calls and of timed calls for each engine and k."""

    warmup: int
    timed: int

    @property
    def inputs(self) -> int:
        """The number of inputs in a round; each call has a different one."""
        return self.timed // MIN_ROUNDS


def fitting(shape: LatencyTable, memory: int, copies: float = COPIES) -> LatencyTable:
    """Returns the shape with h halved until this many copies of its FP32 weights fit in memory."""
    while copies_in(memory, shape) < copies and shape.hidden > shape.experts:
        shape = replace(shape, hidden=shape.hidden // 2)
    return shape


def copies_in(memory: int, shape: LatencyTable) -> float:
    """Returns how many copies of a shape's FP32 weights fit in `memory` bytes."""
    return memory / (4 * parameters(shape))


def parameters(shape: LatencyTable) -> int:
    """Returns how many weights the experts of all layers have."""
    return shape.layers * shape.experts * 2 * shape.dim * shape.hidden


def stack_model(shape: LatencyTable) -> Model:
    """Returns the stack with random weights, one tensor per expert, as users' checkpoints have."""
    specs = [
        soft_moe_spec(f"layers.{index}", experts=shape.experts, dim=shape.dim, hidden=shape.hidden)
        for index in range(shape.layers)
    ]
    layers = [
        SoftMoE(spec, one_by_one(soft_moe_weights(spec, seed))) for seed, spec in enumerate(specs)
    ]
    name = f"{shape.layers} layers, n={shape.experts}, d={shape.dim}, h={shape.hidden}"
    return tokens_model(name, Stack(layers), specs[0], shape.tokens)


def passes_for(shape: LatencyTable, call_s: float, cases: int) -> Passes:
    """Returns the paper's passes, or as many as the budget allows: at least 1 for warm-up and 5."""
    affordable = int(BUDGET_S / (2 * call_s * cases))
    if affordable < MIN_PASSES:
        return Passes(1, MIN_PASSES)
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
    """Returns the results of Table 3's protocol, and the table next to the paper's, as text."""
    shape = shape or fitting(TABLE_3, memory_bytes())
    progress.step(f"a stack of {describe(shape)}")
    model = stack_model(shape)
    parts: list[Results] = []
    passes: dict[str, dict[str, int]] = {}
    for batch in batches:
        asked = replace(ASKED, batch=(batch,), threads=threads)
        with exported(model, asked, name=describe(shape), progress=progress) as candidate:
            call_s = _seconds(model, random_tokens(batch, shape.tokens, shape.dim).inputs)
            # Algorithm 2 for every k but n, and the untouched model.
            chosen = passes_for(shape, call_s, len(KEPT) + len(candidate.graphs))
            passes[str(batch)] = asdict(chosen)
            timed = replace(
                asked,
                warmup=chosen.warmup,
                inputs=chosen.inputs,
                command=command,
                progress=progress,
            )
            data = random_tokens(batch * chosen.inputs, shape.tokens, shape.dim)
            parts.append(bench([candidate], data, timed))
    rows = tuple(row for part in parts for row in part.rows)
    results = replace(
        parts[0],
        rows=rows,
        protocol=parts[0].protocol | {"batches": list(batches)},
        analyses={"latency": {"shape": asdict(shape), "passes": passes}},
    )
    write_all(results, out)
    return results, latency_table(results)


def run_whole(
    out: Path,
    progress: Progress,
    *,
    shape: LatencyTable = TABLE_3,
    batches: tuple[int, ...] = BATCHES,
    threads: int | None = None,
    memory: int | None = None,
    command: str = "",
) -> tuple[Results, str]:
    """Returns Table 3 at the paper's size, or at the largest of which two copies fit, and its text.

    One engine is open at a time, and its calls are consecutive, so a disturbance of the machine
    affects only one engine, unlike in `run_latency`. `memory` is the machine's memory in bytes
    (None: measured).
    """
    room = memory_bytes() if memory is None else memory
    shape = fitting(shape, room, WHOLE_COPIES * SPARE)
    copies = int(copies_in(room, shape))
    progress.step(f"a stack of {describe(shape)}; the memory holds {copies} copies of its weights")
    model = stack_model(shape)
    rows: list[Row] = []
    passes: dict[str, dict[str, int]] = {}
    threads = threads or torch.get_num_threads()
    data = {batch: random_tokens(batch, shape.tokens, shape.dim).inputs for batch in batches}
    asked = replace(ASKED, lowering="grouped", batch=batches, threads=threads)
    with (
        with_threads(threads),
        exported(model, asked, name=describe(shape), progress=progress) as candidate,
    ):
        for batch, x in data.items():
            call_s = _seconds(model, x)
            chosen = passes_for(shape, call_s, len(KEPT) + len(candidate.graphs))
            passes[str(batch)] = asdict(chosen)

            runners: dict[tuple[str, int], Runner] = {
                (PYTORCH_EAGER, shape.experts): untouched(model)
            }
            for k in KEPT[1:]:
                runners[PYTORCH_ALGORITHM_2, k] = with_algorithm_1(model, k, "selected")
            for (engine, k), runner in runners.items():
                progress.step(f"{engine}, k = {k}, batch {batch}")
                rows.append(_timed(Row(engine, k, shape.experts, batch), runner, x, chosen))
            del runners, runner
        info = (model_info(candidate),)
        for weight in model.module.parameters():
            weight.data = torch.empty(0)  # frees memory: the graphs have their own file
        for graph in candidate.graphs:
            runner = graph.loader()
            for batch, x in data.items():
                progress.step(f"{graph.engine}, k = {graph.k}, batch {batch}")
                row = Row(graph.engine, graph.k, shape.experts, batch, lowering=graph.lowering)
                rows.append(_timed(row, runner, x, Passes(**passes[str(batch)])))
            del runner
    results = Results(
        models=info,
        rows=tuple(rows),
        environment=environment() | {"threads": threads},
        protocol={"batches": list(batches), "samples": 0, "labelled": False},
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        analyses={"latency": {"shape": asdict(shape), "passes": passes, "copies": copies}},
    )
    write(results, out / "results.json")
    return results, f"{copies} copies of the weights fit; one engine at a time\n" + latency_table(
        results
    )


def _timed(row: Row, runner: Runner, x: np.ndarray, passes: Passes) -> Row:
    """Returns a row with the latency of consecutive calls on one batch."""
    call = runner.bound(x)
    for _ in range(passes.warmup):
        call()
    rounds: list[list[float]] = []
    for _ in range(MIN_ROUNDS):
        rounds.append([])
        for _ in range(passes.timed // MIN_ROUNDS):
            started = time.perf_counter()
            call()
            rounds[-1].append(1e3 * (time.perf_counter() - started))
    return replace(row, provider="cpu", latency_ms=summarise(rounds))


def describe(shape: LatencyTable) -> str:
    """Describes the shape: `6 layers, n=8, d=768, h=1920 (141.6M parameters)`."""
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
    """Yields the rows of the table: our times on this machine, and the paper's on its GPU."""
    for batch in sorted({row.batch for row in results.rows}):
        rows = [row for row in results.rows if row.batch == batch]
        untouched = _best(rows, PYTORCH_EAGER, 8)
        dense, paper = _best(rows, ONNXRUNTIME, 8), TABLE_3_MS.get(batch, {})
        for k in KEPT:
            looped = untouched if k == 8 else _best(rows, PYTORCH_ALGORITHM_2, k)
            ours = _best(rows, ONNXRUNTIME, k)
            yield (
                *(str(batch), str(k), _ms(untouched), _ms(looped), _ms(ours)),
                "–" if ours is None or dense is None else f"{ours / dense:.2f}",
                _ms(paper.get(k)),
                f"{paper[k] / paper[8]:.2f}" if k in paper else "–",
            )


def latency_table(results: Results) -> str:
    """Returns the table as text, under lines that describe the shape and the passes."""
    found = results.analyses["latency"]
    shape = LatencyTable(**found["shape"])
    passes = "; ".join(
        f"batch {batch}: {each['warmup']} warm-up passes, {each['timed']} timed passes"
        for batch, each in found["passes"].items()
    )
    title = (
        f"{describe(shape)}, {shape.tokens} tokens (in the paper: {describe(TABLE_3)})\n{passes}"
    )
    return f"{title}\n{table(HEADER, list(latency_rows(results)))}"


def _best(rows: list[Row], engine: str, k: int) -> float | None:
    """Returns the median of a case, or the fastest if the cost model chose a graph per batch."""
    found = [row.median_ms for row in rows if (row.engine, row.k) == (engine, k)]
    return min((each for each in found if each is not None), default=None)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
