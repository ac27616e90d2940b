"""Appendix B of the Soft MoE paper: one large expert cannot learn a norm, several small ones can.

A Soft MoE layer with one expert and one slot sees its input through a single average of the tokens,
whatever the expert computes of it; the paper proves that even the L2 norm of the input is out of
its reach. Here layers of n experts, together of the same size, are trained to give the norm of a
few random tokens as the sum of their outputs. The sizes are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from moexport.bench.report.figures import COLOURS, drawn, log2_axis
from moexport.bench.results import Results, write
from moexport.common.console import Progress
from moexport.common.environment import environment
from moexport.common.text import table
from moexport.common.threads import with_threads
from moexport.common.writing import make_folder, whole_file
from torch import Tensor, nn

FOUND = "l2norm"
FIGURE = "l2norm.png"


@dataclass(frozen=True, slots=True)
class NormTask:
    """What is trained: n experts with `hidden` / n units each, on inputs of m tokens of width d.

    Every network sees `steps` batches of the `samples` inputs of its training set, and is judged on
    as many others, once for each of the `seeds`.
    """

    experts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    tokens: int = 4
    dim: int = 4
    hidden: int = 256
    samples: int = 4096
    batch: int = 256
    steps: int = 800
    learning_rate: float = 3e-3
    seeds: int = 2


TASK = NormTask()


@dataclass(frozen=True, slots=True)
class NormLoss:
    """One n: its parameters, and the mean loss over the seeds on inputs seen and not seen.

    A loss is the mean squared error over the variance of the norm: 1 is what the mean norm gives.
    """

    experts: int
    parameters: int
    train: float
    test: float


class NormLayer(nn.Module):
    """A Soft MoE layer of one slot per expert on (b, m, d), whose outputs add up to a number."""

    def __init__(self, experts: int, task: NormTask, random: torch.Generator) -> None:
        super().__init__()
        d, h = task.dim, task.hidden // experts

        def uniform(*shape: int, fan_in: int) -> nn.Parameter:
            drawn = torch.rand(*shape, generator=random) * 2 - 1
            return nn.Parameter(drawn * fan_in**-0.5)

        self.phi = nn.Parameter(torch.randn(d, experts, generator=random) * d**-0.5)
        self.w1, self.b1 = (
            uniform(experts, d, h, fan_in=d),
            nn.Parameter(torch.zeros(experts, 1, h)),
        )
        self.w2, self.b2 = (
            uniform(experts, h, 1, fan_in=h),
            nn.Parameter(torch.zeros(experts, 1, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum of all tokens' outputs [b]."""
        logits = x @ self.phi  # [b, m, n]
        slots = (logits.softmax(dim=1).mT @ x).transpose(0, 1)  # [n, b, d]
        hidden = torch.relu(torch.baddbmm(self.b1, slots, self.w1))
        outputs = torch.baddbmm(self.b2, hidden, self.w2)  # [n, b, 1]
        return (logits.softmax(dim=2) @ outputs.transpose(0, 1)).sum(dim=(1, 2))


def run_l2norm(
    out: Path,
    progress: Progress,
    *,
    task: NormTask = TASK,
    threads: int | None = None,
    command: str = "",
) -> tuple[Results, str]:
    """Returns the losses over n as analyses of a results file, and as a table.

    `results.json` and `l2norm.png` go to `out`.
    """
    make_folder(out)
    threads = threads or 1
    found: list[NormLoss] = []
    with torch.random.fork_rng(devices=[]), with_threads(threads):
        for experts in task.experts:
            progress.step(f"training n = {experts} of {task.hidden // experts} units")
            losses = [_trained(experts, task, seed) for seed in range(task.seeds)]
            train, test = (sum(each) / task.seeds for each in zip(*losses, strict=True))
            size = sum(p.numel() for p in NormLayer(experts, task, torch.Generator()).parameters())
            found.append(NormLoss(experts, size, train, test))
    results = Results(
        models=(),
        rows=(),
        environment=environment() | {"threads": threads},
        protocol={},
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        analyses={FOUND: {"task": asdict(task), "losses": [asdict(each) for each in found]}},
    )
    write(results, out / "results.json")
    with whole_file(out / FIGURE) as partial:
        draw(found, partial)
    return results, norm_table(results)


def _trained(experts: int, task: NormTask, seed: int) -> tuple[float, float]:
    """The losses of a network on the inputs that it was trained on, and on others."""
    random = torch.Generator().manual_seed(seed)
    seen, other = (
        torch.randn(task.samples, task.tokens, task.dim, generator=random) for _ in range(2)
    )
    model = NormLayer(experts, task, random)
    optimiser = torch.optim.Adam(model.parameters(), lr=task.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, task.steps)
    target = _norm(seen)
    for _ in range(task.steps):
        rows = torch.randint(task.samples, (task.batch,), generator=random)
        optimiser.zero_grad()
        (model(seen[rows]) - target[rows]).square().mean().backward()
        optimiser.step()
        schedule.step()
    return _loss(model, seen), _loss(model, other)


@torch.no_grad()
def _loss(model: NormLayer, x: Tensor) -> float:
    wanted = _norm(x)
    return float((model(x) - wanted).square().mean() / wanted.var())


def _norm(x: Tensor) -> Tensor:
    """The L2 norm of each whole input [b, m, d]."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=(1, 2))
    return lengths


HEADER = ("experts n", "units each", "parameters", "train loss", "test loss")


def norm_rows(analyses: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns a row per n, from the analyses of a results file."""
    task = analyses[FOUND]["task"]
    return [
        (
            str(each["experts"]),
            str(task["hidden"] // each["experts"]),
            f"{each['parameters']:,}",
            f"{each['train']:.3f}",
            f"{each['test']:.3f}",
        )
        for each in analyses[FOUND]["losses"]
    ]


def norm_table(results: Results) -> str:
    """Returns the table under what was trained."""
    task = results.analyses[FOUND]["task"]
    return (
        f"The L2 norm of {task['tokens']} tokens of width {task['dim']}: squared error over the "
        f"variance of the norm, mean of {task['seeds']} seeds\n"
        f"{table(HEADER, norm_rows(results.analyses))}"
    )


def draw(found: list[NormLoss], path: Path) -> None:
    """Writes a PNG of both losses over n."""
    counts = [each.experts for each in found]
    with drawn([path], (5.2, 3.2), columns=1) as ((axes,),):
        axes.set_title("Learning the L2 norm with n experts of one total size")
        axes.plot(counts, [each.train for each in found], "o-", color=COLOURS[0], label="train")
        axes.plot(counts, [each.test for each in found], "s--", color=COLOURS[1], label="test")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("error over variance")
        log2_axis(axes, counts, "experts n")
