"""Tables 6 and 8 of the muMoE paper: a layer's memory and time for one input, and its work.

Table 6 is of a classifier's head with 128 experts, 768 inputs and 1000 outputs: a dense layer of
weights for each expert, against the same in factors. Table 8 is of a layer with 512 experts and
768 inputs and outputs; the paper does not say so, but these sizes give its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...common import timing
from ...common.console import Progress
from ...common.environment import environment
from ...common.text import count, table
from ...exporter.families.layer_only import TokenBackbone
from ...exporter.model import Model, Source, TensorSpec
from ...graphs.layers.mumoe import FactorisedSpec, Form, MuMoE, MuMoESpec, MuMoEWeights, activate
from ..measure.memory import measure_memory, pickled
from ..report.page import write_all
from ..results import ONNXRUNTIME, PYTORCH_EAGER, ModelInfo, Results, Row
from ..run import with_threads
from ..runners.base import Loader, Runner
from ..runners.candidates import Sweep, exported
from ..runners.pytorch import PyTorch
from . import published

DIM, OUT, EXPERTS, CHOSEN = 768, 1000, 128, 2
RANKS: Mapping[str, tuple[int, ...]] = {"CP": (512,), "TR": (4, 4, 512)}
FORMS: Mapping[str, Form] = {"CP": "cp", "TR": "tr"}
PROTOCOL = timing.Protocol(warmup=100, round_s=0.0, inputs=20)
"""A hundred calls of warm-up and a hundred timed, as Table 3 has them."""

TABLE_8_EXPERTS, TABLE_8_DIM = 512, 768


class Experts(nn.Module):
    """One matrix per expert, [n, d + 1, o], the last row its bias: (b, 1, d) to (b, 1, o).

    All are mixed by entmax coefficients, or the `chosen` largest gathered and mixed.
    """

    def __init__(self, random: torch.Generator, chosen: int | None = None) -> None:
        super().__init__()
        self.gate = _parameter(torch.randn(DIM, EXPERTS, generator=random).mul_(DIM**-0.5))
        self.weight = _parameter(
            torch.randn(EXPERTS, DIM + 1, OUT, generator=random).mul_(DIM**-0.5)
        )
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


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def head_spec(form: str) -> MuMoESpec:
    """Returns the factorised head: `CP` or `TR`."""
    tensor = FactorisedSpec(FORMS[form], (EXPERTS,), DIM, OUT, RANKS[form], bias=True)
    return MuMoESpec("layer", (tensor,), norm="bn")


def open_layer(name: str) -> nn.Module:
    """Returns one of Table 6's layers with random weights, by its name there."""
    random = torch.Generator().manual_seed(0)
    match name:
        case "linear":
            return nn.Linear(DIM, OUT).requires_grad_(False)
        case "dense MoE":
            return Experts(random)
        case "sparse MoE":
            return Experts(random, CHOSEN)
    spec = head_spec(name)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).mul_(0.05)

    weights = MuMoEWeights(
        (draw(DIM, EXPERTS),),
        tuple(tuple(draw(*shape) for shape in tensor.shapes) for tensor in spec.tensors),
        (torch.zeros(EXPERTS),),
        (torch.ones(EXPERTS),),
    )
    return MuMoE(spec, weights).eval()


@dataclass(frozen=True, slots=True)
class LayerLoader(Loader):
    """Opens a layer of Table 6 in PyTorch; another process can do it too."""

    name: str

    def __call__(self) -> Runner:
        """Opens the layer."""
        return PyTorch(open_layer(self.name))


@dataclass(frozen=True, slots=True)
class Work:
    """Multiply-adds for one token, written out as a whole tensor and in factors."""

    layer: str
    naive: int
    factorised: int


def work(form: str) -> Work:
    """Returns the work of Table 8's layer.

    Naive: the tensor is made of its factors, then contracted with the coefficients and the input.
    Elementwise products count nothing, as in the paper.
    """
    n, d = TABLE_8_EXPERTS, TABLE_8_DIM
    tensor = FactorisedSpec(FORMS[form], (n,), d, d, RANKS[form], bias=True)
    inputs = d + 1
    if form == "CP":
        made = prod((n, inputs, *RANKS[form], d))
    else:
        r1, r2, r3 = RANKS[form]
        made = r1 * n * r2 * inputs * r3 + n * inputs * r1 * r3 * d
    spec = MuMoESpec("layer", (tensor,))
    return Work(form, made + (n + 1) * inputs * d, sum(spec.macs(1, n).values()))


def run_multilinear(
    out: Path, progress: Progress, *, threads: int | None = None, command: str = ""
) -> tuple[Results, str]:
    """Returns the results of Tables 6 and 8, and the tables beside the paper's, as text."""
    threads = threads or torch.get_num_threads()
    inputs = np.random.default_rng(1).standard_normal((PROTOCOL.inputs, 1, 1, DIM), np.float32)
    loaders: dict[tuple[str, str], Loader] = {
        (name, PYTORCH_EAGER): LayerLoader(name) for name in published.TABLE_6
    }
    with with_threads(threads), _exported("CP", threads) as cp, _exported("TR", threads) as tr:
        for name, candidate in (("CP", cp), ("TR", tr)):
            loaders[name, ONNXRUNTIME] = candidate.graphs[0].loader
        progress.step("timing Table 6's layers")
        measured = _measured(loaders, inputs)
        rows = []
        for (name, engine), loader in loaders.items():
            progress.step(f"the memory of {name}, {engine}")
            row = _row(name, engine, measured)
            job = pickled(loader)
            if job is not None:
                memory = measure_memory(job, {1: inputs[0]}, threads=threads)
                peak, alone = memory.peak_mb[1], memory.runtime_mb
                row = replace(row, peak_memory_mb=peak, runtime_memory_mb=alone)
            rows.append(row)
    results = Results(
        tuple(_info(name) for name in published.TABLE_6),
        tuple(rows),
        environment() | {"threads": threads},
        asdict(PROTOCOL) | {"batches": [1], "samples": 0, "labelled": False},
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        analyses={"work": [asdict(work(form)) for form in FORMS]},
    )
    write_all(results, out)
    return results, multilinear_tables(results)


def _exported(form: str, threads: int) -> Any:
    model = Model(
        TokenBackbone(open_layer(form)).eval(),
        "mumoe",
        {},
        Source(f"{form} head", ()),
        (TensorSpec("input", "float32", ("batch", 1, DIM)),),
        (TensorSpec("output", "float32", ("batch", 1, OUT)),),
    )
    return exported(model, Sweep(ks=("n",), threads=threads))


def _label(name: str, engine: str) -> str:
    return f"{name}, {engine}"


def _measured(loaders: Mapping[tuple[str, str], Loader], inputs: np.ndarray) -> timing.Measured:
    def timed(runner: Runner) -> timing.Call:
        return lambda index: runner.infer(inputs[index % len(inputs)])

    calls = {_label(*key): timed(loader()) for key, loader in loaders.items()}
    return timing.measure(calls, PROTOCOL)


def _info(name: str) -> ModelInfo:
    size = sum(p.numel() for p in open_layer(name).parameters())
    return ModelInfo(name, "mumoe", "random weights", size)


def _row(name: str, engine: str, measured: timing.Measured) -> Row:
    experts = 1 if name == "linear" else EXPERTS
    latency = measured.latencies.get(_label(name, engine))
    return Row(
        engine=engine,
        k=CHOSEN if name == "sparse MoE" else experts,
        experts=experts,
        batch=1,
        model=name,
        provider="cpu",
        lowering="factorised" if engine == ONNXRUNTIME else None,
        latency_ms=latency,
        throughput=None if latency is None else 1000 / latency.median,
        error=measured.failures.get(_label(name, engine)),
    )


HEADER_6 = ("layer", "parameters", "PyTorch, MB", "ms", "exported, MB", "ms", "paper, MB", "ms")
HEADER_8 = ("layer", "whole tensor", "in factors", "fewer", "paper", "paper, in factors")


def memory_rows(results: Results) -> list[tuple[str, ...]]:
    """Returns Table 6: what the process grew by, and the median of one input."""
    sizes = {model.name: model.parameters or 0 for model in results.models}
    rows = []
    for name, paper in published.TABLE_6.items():
        cells = [name, count(sizes[name])]
        for engine in (PYTORCH_EAGER, ONNXRUNTIME):
            row = next((r for r in results.of_model(name) if r.engine == engine), None)
            cells += ["–", "–"] if row is None else [_growth(row), _ms(row)]
        rows.append((*cells, f"{paper[0]:.2f}", f"{paper[1]:.2f}"))
    return rows


def work_rows(results: Results) -> list[tuple[str, ...]]:
    """Returns Table 8."""
    rows: list[tuple[str, ...]] = []
    for one in (Work(**each) for each in results.analyses["work"]):
        naive, factorised = published.TABLE_8[one.layer]
        rows.append(
            (
                *(one.layer, count(one.naive), count(one.factorised)),
                f"{one.naive / one.factorised:,.0f}×",
                *(count(naive), count(factorised)),
            )
        )
    return rows


def multilinear_tables(results: Results) -> str:
    """Returns both tables as text."""
    return (
        f"One input, {EXPERTS} experts, {DIM} to {OUT} (the paper's on a GPU)\n"
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
