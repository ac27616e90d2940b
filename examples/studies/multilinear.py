"""Tables 6 and 8 of the muMoE paper: a layer's memory and time for one input, and its work.

Table 6 is for a classifier's head with 128 experts, 768 inputs and 1000 outputs: one dense weight
matrix per expert, compared with factors. Table 8 is for a layer with 512 experts and 768 inputs and
outputs; the paper does not state these sizes, but they reproduce its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path

import torch
from moexport.bench.engines import ONNXRUNTIME, PYTORCH_EAGER
from moexport.bench.measure.latency import group_batches, measure_group
from moexport.bench.measure.memory import measure_memory, pickled
from moexport.bench.plan import Case, TimingGroup
from moexport.bench.report.page import write_all
from moexport.bench.request import BenchRequest
from moexport.bench.results import ModelInfo, Results, Row
from moexport.bench.runners.base import Loader, Runner
from moexport.bench.runners.exported import exported
from moexport.bench.runners.pytorch import PyTorch
from moexport.common import timing
from moexport.common.console import Progress
from moexport.common.environment import environment
from moexport.common.text import count, table
from moexport.common.threads import with_threads
from moexport.examples.studies.random_layers import layer_model, random_mumoe, random_tokens
from moexport.graphs.layers.mumoe import FactorisedSpec, Form, MuMoESpec, activate
from torch import Tensor, nn

DIM, OUT, EXPERTS, CHOSEN = 768, 1000, 128, 2
RANKS: Mapping[str, tuple[int, ...]] = {"CP": (512,), "TR": (4, 4, 512)}
FORMS: Mapping[str, Form] = {"CP": "cp", "TR": "tr"}
PROTOCOL = timing.Protocol(warmup=100, round_s=0.0, inputs=20)
"""A hundred warm-up calls and a hundred timed calls, as in Table 3."""

TABLE_8_EXPERTS, TABLE_8_DIM = 512, 768

TABLE_6: Mapping[str, tuple[float, float]] = {
    "linear": (12.07, 0.01),
    "dense MoE": (390.17, 1.17),
    "sparse MoE": (765.19, 0.80),
    "TR": (15.87, 0.94),
    "CP": (14.02, 1.05),
}
"""The paper's peak MB and ms for one input, by layer."""

TABLE_8: Mapping[str, tuple[float, float]] = {"CP": (155.1e9, 1.4e6), "TR": (622.8e9, 3.5e6)}
"""The paper's FLOPs, which are multiply-adds: with the whole tensor, and with factors."""


class Experts(nn.Module):
    """One matrix per expert, [n, d + 1, o], with the bias as last row: (b, 1, d) to (b, 1, o).

    Entmax coefficients mix all matrices, or only the `chosen` with the largest coefficients.
    """

    def __init__(self, chosen: int | None = None) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)

        def random_weights(*size: int) -> nn.Parameter:
            weights = torch.randn(*size, generator=random).mul_(DIM**-0.5)
            return nn.Parameter(weights, requires_grad=False)

        self.gate = random_weights(DIM, EXPERTS)
        self.weight = random_weights(EXPERTS, DIM + 1, OUT)
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mixed experts' outputs."""
        coefficients = activate(x @ self.gate, "entmax15")[:, 0]  # [b, n]
        z = torch.cat((x, torch.ones_like(x[..., :1])), dim=-1)
        if self.chosen is None:
            mixed = (coefficients @ self.weight.flatten(1)).view(-1, DIM + 1, OUT)
            return z @ mixed
        largest = coefficients.topk(self.chosen, dim=1)
        outputs = z.unsqueeze(1) @ self.weight[largest.indices]  # [b, k, 1, o]
        return (largest.values[:, :, None, None] * outputs).sum(dim=1)


def head_spec(form: str) -> MuMoESpec:
    """Returns the factorised head: `CP` or `TR`."""
    tensor = FactorisedSpec(FORMS[form], (EXPERTS,), DIM, OUT, RANKS[form], bias=True)
    return MuMoESpec("layer", (tensor,), norm="bn")


def open_layer(name: str) -> nn.Module:
    """Returns a layer of Table 6, by its name in the table, with random weights."""
    match name:
        case "linear":
            return nn.Linear(DIM, OUT).requires_grad_(False)
        case "dense MoE":
            return Experts()
        case "sparse MoE":
            return Experts(CHOSEN)
    return random_mumoe(head_spec(name)).eval()


@dataclass(frozen=True, slots=True)
class LayerLoader(Loader):
    """Opens a layer of Table 6 in PyTorch; the loader can be sent to another process."""

    name: str

    def __call__(self) -> Runner:
        """Opens the layer."""
        return PyTorch(open_layer(self.name))


@dataclass(frozen=True, slots=True)
class Work:
    """The multiply-adds for one token, with the whole tensor and with factors."""

    layer: str
    naive: int
    factorised: int


def work(form: str) -> Work:
    """Returns the work of Table 8's layer.

    In the naive form, the whole tensor is computed from its factors, then contracted with the
    coefficients and the input. Elementwise products do not count, as in the paper.
    """
    n, d = TABLE_8_EXPERTS, TABLE_8_DIM
    tensor = FactorisedSpec(FORMS[form], (n,), d, d, RANKS[form], bias=True)
    inputs = d + 1
    if form == "CP":
        expansion = prod((n, inputs, *RANKS[form], d))
    else:
        r1, r2, r3 = RANKS[form]
        expansion = r1 * n * r2 * inputs * r3 + n * inputs * r1 * r3 * d
    spec = MuMoESpec("layer", (tensor,))
    return Work(form, expansion + (n + 1) * inputs * d, sum(spec.macs(1, n).values()))


def run_multilinear(
    out: Path, progress: Progress, *, threads: int | None = None, command: str = ""
) -> tuple[Results, str]:
    """Returns the results of Tables 6 and 8, and the tables next to the paper's, as text."""
    threads = threads or torch.get_num_threads()
    data = random_tokens(PROTOCOL.inputs, 1, DIM)
    loaders: dict[Case, Loader] = {}
    for name in TABLE_6:
        n = 1 if name == "linear" else EXPERTS
        k = CHOSEN if name == "sparse MoE" else n
        loaders[Case(name, PYTORCH_EAGER, k, n)] = LayerLoader(name)
    with with_threads(threads), ExitStack() as stack:
        for form in FORMS:
            model = layer_model(f"{form} head", random_mumoe(head_spec(form)), 1)
            asked = BenchRequest(k="n", engine=ONNXRUNTIME, target="ort-cpu", threads=threads)
            (graph,) = stack.enter_context(exported(model, asked)).graphs
            case = Case(form, ONNXRUNTIME, EXPERTS, EXPERTS, lowering="factorised")
            loaders[case] = graph.loader
        group = TimingGroup(tuple(loaders), 1, PROTOCOL)
        runners = {case: loader() for case, loader in loaders.items()}
        batches = group_batches(group, data)
        measured, _ = measure_group(group, runners, batches, benchmarks={}, progress=progress)
        rows = []
        for case, loader in loaders.items():
            progress.step(f"the memory of {case.label}")
            latency = measured.latencies.get(case.label)
            row = Row(
                **asdict(case),
                batch=1,
                latency_ms=latency,
                throughput=None if latency is None else 1000 / latency.median,
                error=measured.failures.get(case.label),
            )
            job = pickled(loader)
            if job is not None:
                memory = measure_memory(job, {1: data.batch(0, 1)}, threads=threads)
                peak, alone = memory.peak_mb[1], memory.runtime_mb
                row = replace(row, peak_memory_mb=peak, runtime_memory_mb=alone)
            rows.append(row)
    results = Results(
        tuple(
            ModelInfo(
                *(name, "mumoe", "random weights"),
                parameters=sum(p.numel() for p in open_layer(name).parameters()),
            )
            for name in TABLE_6
        ),
        tuple(rows),
        environment() | {"threads": threads},
        asdict(PROTOCOL) | {"batches": [1], "samples": 0, "labelled": False},
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        analyses={"work": [asdict(work(form)) for form in FORMS]},
    )
    write_all(results, out)
    return results, multilinear_tables(results)


HEADER_6 = ("layer", "parameters", "PyTorch, MB", "ms", "exported, MB", "ms", "paper, MB", "ms")
HEADER_8 = ("layer", "whole tensor", "in factors", "fewer", "paper", "paper, in factors")


def memory_rows(results: Results) -> list[tuple[str, ...]]:
    """Returns Table 6: how much the process grows, and the median time of one input."""
    sizes = {model.name: model.parameters or 0 for model in results.models}
    rows = []
    for name, paper in TABLE_6.items():
        cells = [name, count(sizes[name])]
        for engine in (PYTORCH_EAGER, ONNXRUNTIME):
            row = next((r for r in results.of_model(name) if r.engine == engine), None)
            cells += ["–", "–"] if row is None else [_growth(row), _ms(row)]
        rows.append((*cells, f"{paper[0]:.2f}", f"{paper[1]:.2f}"))
    return rows


def work_rows(results: Results) -> list[tuple[str, ...]]:
    """Returns Table 8."""
    rows: list[tuple[str, ...]] = []
    for measured in (Work(**each) for each in results.analyses["work"]):
        naive, factorised = TABLE_8[measured.layer]
        rows.append(
            (
                *(measured.layer, count(measured.naive), count(measured.factorised)),
                f"{measured.naive / measured.factorised:,.0f}×",
                *(count(naive), count(factorised)),
            )
        )
    return rows


def multilinear_tables(results: Results) -> str:
    """Returns both tables as text."""
    return (
        f"One input, {EXPERTS} experts, {DIM} to {OUT} (the paper's figures are from a GPU)\n"
        f"{table(HEADER_6, memory_rows(results))}\n\n"
        f"Multiply-adds per token, {TABLE_8_EXPERTS} experts, {TABLE_8_DIM} to {TABLE_8_DIM}\n"
        f"{table(HEADER_8, work_rows(results))}"
    )


def _growth(row: Row) -> str:
    if row.peak_memory_mb is None or row.runtime_memory_mb is None:
        return "–"
    return f"{row.peak_memory_mb - row.runtime_memory_mb:.1f}"


def _ms(row: Row) -> str:
    return "–" if row.median_ms is None else f"{row.median_ms:.3f}"
