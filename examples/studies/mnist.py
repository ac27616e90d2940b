"""The Soft MoE paper's MNIST suite, trained, exported, analysed and measured.

There is one network per n, with h = int(784 / n), so that all have about the same size. The data is
the user's MNIST or, by default, scikit-learn's handwritten digits. The paper trains on MNIST for
15 epochs of 235 updates; the digits have 6 updates per epoch, so the same number takes 588 epochs.
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
from moexport.examples.studies.mnist_files import read_mnist
from moexport.exporter.checkpoints.load import load
from moexport.plugins.demo import digits
from moexport.plugins.studies.experts import study
from moexport.plugins.studies.findings import ExpertStudy, analyses_of
from moexport.plugins.studies.report import FRACTIONS, Paper, text
from moexport.plugins.studies.request import Analyses

RETENTION = {
    2: (0.781, 0.803, 0.885, 0.942, 0.966, 0.970, 0.973, 0.982),
    4: (0.477, 0.608, 0.762, 0.864, 0.884, 0.902, 0.932),
    8: (0.403, 0.519, 0.716, 0.762, 0.804, 0.859),
}
"""Algorithm 1's share of the accuracy on MNIST by n/k, for n = n/k and its doubles up to 256."""

PRINTED = Paper(
    retention={
        fraction: {fraction * 2**index: share for index, share in enumerate(shares)}
        for fraction, shares in RETENTION.items()
    },
    best_subset={4: 0.9469, 8: 0.9990, 16: 1.0},
    random_subset={4: 0.4657, 8: 0.5195, 16: 0.5894},
)
"""The paper's figures for MNIST: the retention, and Table 1."""


ALL = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""The numbers of experts in the paper."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Which networks are trained, and how.

    On the digits, the default of `epochs` is enough for the layer of the paper's Eq. 1. With
    `normalise`, tokens and phi are normalised and the scale of the logits is learned, starting at
    1, as in the released experiments; this takes longer. `samples` limits the number of training
    images and of test images.
    """

    experts: tuple[int, ...] = ALL
    normalise: bool = False
    epochs: int = 60
    threads: int = 1
    seeds: int = 10
    samples: int | None = None

    @property
    def on_mnist(self) -> Suite:
        """Returns the suite as the paper trains it: every n, 15 epochs."""
        return replace(self, experts=ALL, epochs=15)

    @property
    def quick(self) -> Suite:
        """Returns a test suite of a minute or two, too short for the networks to learn."""
        return replace(self, experts=(4, 16), epochs=2, seeds=2, samples=512)


SUITE = Suite()
NORMALISED = Suite((16, 64, 128), normalise=True, epochs=588)


@dataclass(frozen=True, slots=True)
class _Source:
    """The data, the prefixes of model and file names, and a description for readers."""

    name: str
    file: str
    about: str
    data: digits.Digits


def _source(mnist: Path | None, samples: int | None) -> _Source:
    complete = digits.load_digits() if mnist is None else read_mnist(mnist)
    limit = samples or len(complete.train)
    data = digits.Digits(complete.train.head(limit), complete.test.head(limit))
    # A checkpoint in the folder must have been trained on the same data.
    file = f"{data.train.fingerprint[:8]}-" if mnist is not None or samples is not None else ""
    name = "digits" if mnist is None else "MNIST"
    where = (
        f"{mnist}. The paper's numbers are in parentheses."
        if mnist is not None
        else "scikit-learn's handwritten digits (--data: your MNIST). The paper's numbers, for "
        "MNIST, are in parentheses."
    )
    about = f"Trained on {len(data.train):,} images and tested on {len(data.test):,}, from {where}"
    return _Source(name, f"{name.lower()}-{file}", about, data)


def run_mnist(
    suite: Suite,
    out: Path,
    progress: Progress,
    *,
    data: Path | None = None,
    quick: bool = False,
    threads: int | None = None,
    command: str = "",
) -> tuple[Results, str]:
    """Returns the results of a suite and the tables next to the paper's, as text.

    `data` is the user's MNIST, on which the suite trains as in the paper; the default is the
    digits. Checkpoints, results.json, report and figures are written to `out`.
    """
    suite = suite if data is None else suite.on_mnist
    suite = suite.quick if quick else suite
    source = _source(data, suite.samples)
    progress.step(source.about)
    make_folder(out)
    asked = BenchRequest(
        target="ort-cpu",
        engine=(PYTORCH_ALGORITHM_2, ONNXRUNTIME),
        round_s=0.05,
        threads=threads or suite.threads,
        memory=False,
        parts=False,
    )
    studies: list[ExpertStudy] = []
    candidates: list[Candidate] = []
    with ExitStack() as stack:
        for n in suite.experts:
            model = load(_trained(n, suite, source, out, progress))
            name, ks = f"{source.name}{', normalised' * suite.normalise}, n = {n}", kept(n)
            wanted = Analyses(seeds=suite.seeds)
            studies.append(study(name, model, source.data.test, ks, wanted, progress=progress))
            candidates.append(
                stack.enter_context(
                    exported(model, replace(asked, k=(n, *ks)), name=name, progress=progress)
                )
            )
        results = bench(
            candidates,
            source.data.test,
            replace(asked, out=out, command=command, progress=progress),
            analyses=analyses_of(studies),
        )
    return results, f"{source.about}\n\n{text(studies, PRINTED)}"


def _trained(n: int, suite: Suite, source: _Source, out: Path, progress: Progress) -> Path:
    """Returns the checkpoint for n experts, which is trained deterministically if it is missing."""
    normalised = "-normalised" * suite.normalise
    checkpoint = out / f"{source.file}n{n}-{suite.epochs}-epochs{normalised}.pt"
    if not checkpoint.is_file():
        images = len(source.data.train)
        progress.step(f"training n = {n} on {images:,} images, {suite.epochs} epochs")
        training = digits.Training(n, normalise=suite.normalise, epochs=suite.epochs)
        digits.save(digits.train(training, source.data.train), checkpoint)
    return checkpoint


def kept(n: int) -> tuple[int, ...]:
    """Returns the paper's values of k: n/2, n/4 and n/8, as far as they are whole numbers."""
    return tuple(n // fraction for fraction in FRACTIONS if n % fraction == 0)
