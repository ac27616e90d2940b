"""The Soft MoE paper's MNIST suite on handwritten digits: trained, exported, analysed, measured.

One network per n, of the same size whatever n is: h = int(784 / n). The paper trains on MNIST for
15 epochs of 235 updates; the digits have 6 updates an epoch, so that as many take 588 epochs.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from moexport.bench.engines import ONNXRUNTIME, PYTORCH_ALGORITHM_2
from moexport.bench.plan import Candidate
from moexport.bench.request import BenchRequest
from moexport.bench.results import Results
from moexport.bench.run import bench
from moexport.bench.runners.exported import exported
from moexport.common.console import Progress
from moexport.common.writing import make_folder
from moexport.exporter.checkpoints.load import load
from moexport.plugins.demo import digits
from moexport.plugins.studies.experts import Wanted, study
from moexport.plugins.studies.findings import ExpertStudy, analyses_of
from moexport.plugins.studies.report import FRACTIONS, Printed, text

NAME = "digits"

RETENTION = {
    2: (0.781, 0.803, 0.885, 0.942, 0.966, 0.970, 0.973, 0.982),
    4: (0.477, 0.608, 0.762, 0.864, 0.884, 0.902, 0.932),
    8: (0.403, 0.519, 0.716, 0.762, 0.804, 0.859),
}
"""What Algorithm 1 keeps of the accuracy on MNIST, by n/k; n doubles from there to 256."""

PRINTED = Printed(
    retention={
        fraction: {fraction * 2**index: share for index, share in enumerate(shares)}
        for fraction, shares in RETENTION.items()
    },
    best_subset={4: 0.9469, 8: 0.9990, 16: 1.0},
    random_subset={4: 0.4657, 8: 0.5195, 16: 0.5894},
)
"""What the paper prints of MNIST: what is kept, and Table 1."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Which networks are trained, and how.

    `epochs` is enough for the layer as the paper's Eq. 1 has it. Its released experiments normalise
    tokens and phi and learn the scale of the logits, which starts at 1 and takes longer:
    `normalise` asks for that.
    """

    experts: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
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
NORMALISED = Suite((16, 64, 128), normalise=True, epochs=588)


def run_mnist(
    suite: Suite,
    out: Path,
    progress: Progress,
    *,
    threads: int | None = None,
    command: str = "",
) -> tuple[Results, str]:
    """Returns the results of a suite and the tables that stand beside the paper's, as text.

    Checkpoints, results.json, report and figures go to `out`.
    """
    threads = threads or suite.threads
    data = digits.load_digits()
    make_folder(out)
    asked = BenchRequest(
        target="ort-cpu",
        engine=(PYTORCH_ALGORITHM_2, ONNXRUNTIME),
        round_s=0.05,
        threads=threads,
        memory=False,
        parts=False,
    )
    studies: list[ExpertStudy] = []
    candidates: list[Candidate] = []
    with ExitStack() as stack:
        for n in suite.experts:
            checkpoint = out / suite.file(n)
            if not checkpoint.is_file():  # training repeats exactly, so what is there will do
                progress.step(
                    f"training n = {n} on {len(data.train)} digits, {suite.epochs} epochs"
                )
                training = digits.Training(n, normalise=suite.normalise, epochs=suite.epochs)
                digits.save(digits.train(training, data.train), checkpoint)
            model, name = load(checkpoint), f"{suite.title}, n = {n}"
            ks = kept(n)
            wanted = Wanted(seeds=suite.seeds)
            studies.append(study(name, model, data.test, ks, wanted, progress=progress))
            candidates.append(
                stack.enter_context(
                    exported(model, replace(asked, k=(n, *ks)), name=name, progress=progress)
                )
            )
        results = bench(
            candidates,
            data.test,
            replace(asked, out=out, command=command, progress=progress),
            analyses=analyses_of(studies),
        )
    return results, text(studies, PRINTED)


def kept(n: int) -> tuple[int, ...]:
    """Returns n/2, n/4 and n/8, as far as they are whole: the paper's k."""
    return tuple(n // fraction for fraction in FRACTIONS if n % fraction == 0)
