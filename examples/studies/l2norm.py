"""Appendix B of the Soft MoE paper: several small experts can learn a norm, one large one cannot.

A Soft MoE layer with one expert and one slot sees only a single average of the tokens, whatever the
expert computes; the paper proves that it cannot compute even the L2 norm of the input. This study
trains layers of n experts, with about the same total size, to return the norm of ten random
numbers, arranged in tokens, as the sum of all their outputs. The shapes, n and the width of the
experts are the paper's; the random numbers, the optimiser and the number of steps are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from moexport.bench.report.charts import axis
from moexport.bench.results import Results, write
from moexport.common.console import Progress
from moexport.common.environment import environment
from moexport.common.text import table
from moexport.common.threads import with_threads
from moexport.common.writing import make_folder, whole_file
from moexport.errors import UsageError
from moexport.plugins.studies.figures import curve, curves
from moexport.plugins.studies.figures import draw as plot
from torch import Tensor, nn

ANALYSIS = "l2norm"
FIGURE = "l2norm.png"


@dataclass(frozen=True, slots=True)
class NormTask:
    """The trained layer: n experts of h = `width`·d/n units, on inputs of m tokens of width d.

    The `shapes` are m × d. For each of the `seeds`, every network is trained on `steps` batches of
    a training set of `samples` inputs and tested on as many unseen ones. Its losses are computed
    before the first step and `points` times after it.
    """

    experts: tuple[int, ...] = (1, 2, 5, 10)
    shapes: tuple[tuple[int, int], ...] = ((5, 2), (2, 5))
    width: int = 10
    samples: int = 4096
    batch: int = 256
    steps: int = 2000
    learning_rate: float = 3e-3
    seeds: int = 2
    points: int = 20

    def __post_init__(self) -> None:
        for _, dim in self.shapes:
            for n in self.experts:
                if self.width * dim % n:
                    raise UsageError(
                        f"{n} experts: {self.width}·{dim} units cannot be divided equally",
                        hint=f"use a divisor of {self.width * dim}",
                    )

    def hidden(self, experts: int, dim: int) -> int:
        """Returns h, the units of each of n experts."""
        return self.width * dim // experts


TASK = NormTask()
QUICK = replace(TASK, steps=300, seeds=1, points=6)


@dataclass(frozen=True, slots=True)
class NormLoss:
    """The losses of n experts with h units each, on inputs of m tokens of width d.

    `train` and `test` are the losses after each of the `steps`, on training inputs and on unseen
    ones, as means over the seeds. A loss is the mean squared error divided by the variance of the
    norm; always predicting the mean norm gives 1.
    """

    tokens: int
    dim: int
    experts: int
    hidden: int
    parameters: int
    steps: tuple[int, ...]
    train: tuple[float, ...]
    test: tuple[float, ...]


class NormLayer(nn.Module):
    """A Soft MoE layer with one slot per expert on (b, m, d); the sum of its outputs is returned.

    An expert is two linear maps, d to h to d, with ReLU between them.
    """

    def __init__(self, experts: int, dim: int, hidden: int, random: torch.Generator) -> None:
        super().__init__()

        def uniform(*shape: int, fan_in: int) -> nn.Parameter:
            drawn = torch.rand(*shape, generator=random) * 2 - 1
            return nn.Parameter(drawn * fan_in**-0.5)

        self.phi = nn.Parameter(torch.randn(dim, experts, generator=random) * dim**-0.5)
        self.w1 = uniform(experts, dim, hidden, fan_in=dim)
        self.b1 = uniform(experts, 1, hidden, fan_in=dim)
        self.w2 = uniform(experts, hidden, dim, fan_in=hidden)
        self.b2 = uniform(experts, 1, dim, fan_in=hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum of all outputs, [b]."""
        logits = x @ self.phi  # [b, m, n]
        slots = (logits.softmax(dim=1).mT @ x).transpose(0, 1)  # [n, b, d]
        hidden = torch.relu(torch.baddbmm(self.b1, slots, self.w1))
        outputs = torch.baddbmm(self.b2, hidden, self.w2)  # [n, b, d]
        return (logits.softmax(dim=2) @ outputs.transpose(0, 1)).sum(dim=(1, 2))


def run_l2norm(
    out: Path,
    progress: Progress,
    *,
    task: NormTask | None = None,
    quick: bool = False,
    threads: int | None = None,
    command: str = "",
) -> tuple[Results, str]:
    """Returns the losses of every shape and n as analyses of a results file, and as a table.

    Writes `results.json` and `l2norm.png`, the losses over the steps, to `out`. `quick` is a test
    run of a few seconds, too short for the networks to learn.
    """
    task = task or (QUICK if quick else TASK)
    make_folder(out)
    threads = threads or 1
    with torch.random.fork_rng(devices=[]), with_threads(threads):
        found = list(_losses(task, progress))
    results = Results(
        models=(),
        rows=(),
        environment=environment() | {"threads": threads},
        protocol={},
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        analyses={ANALYSIS: {"task": asdict(task), "losses": [asdict(each) for each in found]}},
    )
    write(results, out / "results.json")
    with whole_file(out / FIGURE) as partial:
        draw(found, partial)
    return results, norm_table(results)


def _losses(task: NormTask, progress: Progress) -> Iterator[NormLoss]:
    """Trains the networks of every shape and n, and yields their losses."""
    for tokens, dim in task.shapes:
        for experts in task.experts:
            hidden = task.hidden(experts, dim)
            progress.step(f"training n = {experts} of {hidden} units on {tokens} × {dim}")
            curves = [_trained(experts, tokens, dim, task, seed) for seed in range(task.seeds)]
            train, test = torch.tensor(curves, dtype=torch.float64).mean(dim=0).unbind(dim=1)
            layer = NormLayer(experts, dim, hidden, torch.Generator())
            yield NormLoss(
                *(tokens, dim, experts, hidden),
                parameters=sum(p.numel() for p in layer.parameters()),
                steps=tuple(_marks(task)),
                train=tuple(train.tolist()),
                test=tuple(test.tolist()),
            )


def _marks(task: NormTask) -> list[int]:
    """Returns the steps after which losses are computed."""
    return sorted({round(task.steps * point / task.points) for point in range(task.points + 1)})


def _trained(
    experts: int, tokens: int, dim: int, task: NormTask, seed: int
) -> list[tuple[float, float]]:
    """Trains a network; returns its losses on training inputs and on unseen ones."""
    random = torch.Generator().manual_seed(seed)
    train, test = (torch.randn(task.samples, tokens, dim, generator=random) for _ in range(2))
    model = NormLayer(experts, dim, task.hidden(experts, dim), random)
    optimiser = torch.optim.Adam(model.parameters(), lr=task.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, task.steps)
    target, marks = _norm(train), {*_marks(task)}
    losses = []
    for step in range(task.steps + 1):
        if step in marks:
            losses.append((_loss(model, train), _loss(model, test)))
        if step == task.steps:
            break
        rows = torch.randint(task.samples, (task.batch,), generator=random)
        optimiser.zero_grad()
        (model(train[rows]) - target[rows]).square().mean().backward()
        optimiser.step()
        schedule.step()
    return losses


@torch.no_grad()
def _loss(model: NormLayer, x: Tensor) -> float:
    target = _norm(x)
    return float((model(x) - target).square().mean() / target.var(correction=0))


def _norm(x: Tensor) -> Tensor:
    """Returns the L2 norm of each input [b, m, d]."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=(1, 2))
    return lengths


HEADER = ("input", "experts n", "units h", "parameters", "train loss", "test loss")


def norm_rows(analyses: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns a row per shape and n, from the analyses of a results file."""
    return [
        (
            f"{each['tokens']} × {each['dim']}",
            *(str(each["experts"]), str(each["hidden"]), f"{each['parameters']:,}"),
            *(f"{each[losses][-1]:.3f}" for losses in ("train", "test")),
        )
        for each in analyses[ANALYSIS]["losses"]
    ]


def norm_table(results: Results) -> str:
    """Returns the table, under a line that describes the training."""
    task = results.analyses[ANALYSIS]["task"]
    seeds = "one seed" if task["seeds"] == 1 else f"mean of {task['seeds']} seeds"
    return (
        f"The L2 norm of tokens × width random numbers after {task['steps']:,} steps: squared "
        f"error over the variance of the norm, {seeds}\n"
        f"{table(HEADER, norm_rows(results.analyses))}"
    )


def draw(found: Sequence[NormLoss], path: Path) -> None:
    """Writes a PNG of the losses on unseen inputs over the steps, a chart for each shape."""
    charts = [list(each) for _, each in groupby(found, lambda each: (each.tokens, each.dim))]
    error = curves(axis("x", "x", "steps", "near"), axis("y", "y", "error over variance", "log"))
    panels = []
    for losses in charts:
        rows = [
            row
            for index, each in enumerate(losses)
            for row in curve(index, f"n = {each.experts}", zip(each.steps, each.test, strict=True))
        ]
        title = f"Learning the norm of {losses[0].tokens} × {losses[0].dim} numbers"
        panels.append((title, error, rows))
    plot(path, panels)
