"""The Soft MoE paper's MNIST suite on handwritten digits: trained, exported, analysed, measured.

One network per n, of the same size whatever n is: h = int(784 / n). The paper trains on MNIST for
15 epochs of 235 updates; the digits have 6 updates an epoch, so that as many take 588 epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...console import table
from ...exporter.load import load
from ...exporter.progress import Progress
from .. import digits
from ..analyses.experts import Wanted, study
from ..analyses.findings import EXPERTS, ExpertStudy
from ..engines import Subject
from ..plan import Settings
from ..results import Results
from ..run import bench
from ..subjects import Asked, exported
from ..timing import Protocol
from . import published

NAME = "digits"


@dataclass(frozen=True, slots=True)
class Suite:
    """Which networks are trained, and how.

    `epochs` is enough for the layer as the paper's Eq. 1 has it. Its released experiments normalise
    tokens and phi and learn the scale of the logits, which starts at 1 and takes longer:
    `normalise` asks for that.
    """

    experts: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    normalise: bool = False
    epochs: int = 60
    threads: int = 1
    seeds: int = 10

    @property
    def title(self) -> str:
        """What the models are called, before their n."""
        return f"{NAME}, normalised" if self.normalise else NAME

    def file(self, experts: int) -> str:
        """What the checkpoint of n experts is called."""
        return f"digits-n{experts}-{self.epochs}-epochs{'-normalised' * self.normalise}.pt"


SUITE = Suite()
NORMALISED = Suite(normalise=True, epochs=588)


def run_mnist(
    suite: Suite, out: Path, progress: Progress, *, command: str = ""
) -> tuple[Results, str]:
    """Returns the results of a suite and the tables that stand beside the paper's, as text.

    Checkpoints, results.json, report and figures go to `out`.
    """
    data = digits.load_digits()
    out.mkdir(parents=True, exist_ok=True)
    studies: list[ExpertStudy] = []
    subjects: list[Subject] = []
    with ExitStack() as stack:
        for n in suite.experts:
            checkpoint = out / suite.file(n)
            if not checkpoint.is_file():  # training repeats exactly, so what is there will do
                progress.step(f"training n = {n} on {len(data.train)} digits, {suite.epochs} epochs")
                training = digits.Training(n, normalise=suite.normalise, epochs=suite.epochs)
                digits.save(digits.train(training, data.train), checkpoint)
            model, name = load(checkpoint), f"{suite.title}, n = {n}"
            ks = kept(n)
            wanted = Wanted(seeds=suite.seeds)
            studies.append(study(name, model, data.test, ks, wanted, progress=progress))
            subjects.append(
                stack.enter_context(
                    exported(
                        model, Asked((n, *ks), threads=suite.threads), name=name, progress=progress
                    )
                )
            )
        results = bench(
            subjects,
            data.test,
            Settings(
                protocol=Protocol(inputs=8, round_s=0.05),
                threads=suite.threads,
                memory=False,
                parts=False,
            ),
            out=out,
            command=command,
            progress=progress,
            analyses={EXPERTS: [one.as_json() for one in studies]},
        )
    return results, tables(studies)


def kept(n: int) -> tuple[int, ...]:
    """Returns n/2, n/4 and n/8, as far as they are whole: the paper's k."""
    return tuple(n // fraction for fraction in published.FRACTIONS if n % fraction == 0)


def tables(studies: Sequence[ExpertStudy]) -> str:
    """Returns our tables beside the paper's, as text."""
    return "\n\n".join(
        f"{title}\n{table(*rows)}"
        for title, rows in (
            ("Accuracy kept by Algorithm 1, ours (the paper's on MNIST)", retention_rows(studies)),
            ("Algorithm 1 above random selection, accuracy and σ", random_rows(studies)),
            ("Best subset of all, per input (the paper's on MNIST)", subset_rows(studies)),
            ("The share of ΣC that the top experts hold, mean", share_rows(studies)),
        )
    )


Rows = tuple[Sequence[str], Sequence[Sequence[str]]]


def retention_rows(studies: Sequence[ExpertStudy]) -> Rows:
    """Returns header and rows: what is kept at n/2, n/4 and n/8, the paper's beside it."""
    header = ("n", "top-1, all experts", *(f"k = n/{each}" for each in published.FRACTIONS))
    rows = []
    for one in studies:
        cells = [str(one.experts), percent(one.top1)]
        for fraction in published.FRACTIONS:
            paper = published.RETENTION[fraction].get(one.experts)
            ours = one.kept(one.experts // fraction) if one.experts % fraction == 0 else None
            cells.append("–" if ours is None else f"{percent(ours)} ({percent(paper)})")
        rows.append(cells)
    return header, rows


def random_rows(studies: Sequence[ExpertStudy]) -> Rows:
    """Returns header and rows: Algorithm 1 beside the random mean, by n and k."""
    header = ("n", "k", "Algorithm 1", "random", "std", "σ above")
    rows = [
        (
            *(str(one.experts), str(each.k), percent(each.algorithm_1), percent(each.mean)),
            percent(each.std),
            "–" if each.sigmas is None else f"{each.sigmas:.1f}",
        )
        for one in studies
        for each in one.random
    ]
    return header, rows


def subset_rows(studies: Sequence[ExpertStudy]) -> Rows:
    """Returns header and rows: the exhaustive searches that were small enough."""
    header = ("n", "k", "subsets", "best", "Algorithm 1", "one for all", "random", "distinct")
    rows = []
    for one in studies:
        for each in one.subsets:
            if each.best is None:
                continue
            quarter = each.k * 4 == one.experts
            paper = published.BEST_SUBSET.get(one.experts) if quarter else None
            drawn = published.RANDOM_SUBSET.get(one.experts) if quarter else None
            rows.append(
                (
                    *(str(one.experts), str(each.k), f"{each.subsets:,}"),
                    beside(each.best, paper),
                    percent(each.algorithm_1),
                    percent(each.fixed),
                    beside(each.average, drawn),
                    str(each.distinct),
                )
            )
    return header, rows


def share_rows(studies: Sequence[ExpertStudy]) -> Rows:
    """Returns header and rows: what a half, a quarter and an eighth of the experts hold."""
    header = ("n", *(f"top n/{each}" for each in published.FRACTIONS))
    rows = []
    for one in studies:
        (only,) = one.shares
        cells = [str(one.experts)]
        for fraction in published.FRACTIONS:
            k, rest = divmod(one.experts, fraction)
            cells.append("–" if rest else percent(only.mean[k - 1]))
        rows.append(cells)
    return header, rows


def percent(share: float | None) -> str:
    """Returns a share as `94.2%`, `–` for none."""
    return "–" if share is None else f"{share:.1%}"


def beside(ours: float | None, paper: float | None) -> str:
    """Returns ours, and the paper's in brackets where there is one."""
    return percent(ours) if paper is None else f"{percent(ours)} ({percent(paper)})"
