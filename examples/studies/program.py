"""Repeats the experiments of two papers and compares them with the printed figures.

    python examples/studies mnist -o DIR

Soft MoE: "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts" (TMLR 2025). muMoE:
"Multilinear Mixture of Experts: Scalable Expert Specialization through Factorization" (2024).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moexport.bench.results import Results
from moexport.common.console import Console
from moexport.common.writing import check_folder
from moexport.errors import MoexportError, UsageError
from moexport.examples.studies.l2norm import run_l2norm
from moexport.examples.studies.latency import run_latency, run_whole
from moexport.examples.studies.mnist import NORMALISED, SUITE, run_mnist
from moexport.examples.studies.multilinear import run_multilinear


@dataclass(frozen=True, slots=True)
class Study:
    """A study: its title, its function, and its optional arguments.

    The function returns results, and their tables as text.
    """

    about: str
    run: Callable[..., tuple[Results, str]]
    options: frozenset[str] = frozenset()


DATA, QUICK = "data", "quick"

STUDIES = {
    "mnist": Study(
        "the Soft MoE paper's MNIST suite, on digits or your MNIST",
        partial(run_mnist, SUITE),
        frozenset({DATA, QUICK}),
    ),
    "mnist-normalised": Study(
        "the Soft MoE paper's MNIST suite in the released code's normalised form",
        partial(run_mnist, NORMALISED),
        frozenset({DATA, QUICK}),
    ),
    "latency": Study("Table 3 of the Soft MoE paper, as large as fits in memory", run_latency),
    "latency-whole": Study("Table 3 of the Soft MoE paper at the paper's size", run_whole),
    "l2norm": Study("Appendix B of the Soft MoE paper", run_l2norm, frozenset({QUICK})),
    "mumoe": Study("Tables 6 and 8 of the muMoE paper", run_multilinear),
}


def options_of(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Returns a study's options as given; raises UsageError for an option that it does not have."""
    asked = {DATA: given.data, QUICK: given.quick}
    for option, value in asked.items():
        if value and option not in STUDIES[name].options:
            supported_by = [other for other, study in STUDIES.items() if option in study.options]
            raise UsageError(
                f"--{option}: the study {name} has no such option",
                hint=f"omit it; only {', '.join(supported_by)} have it",
            )
    return {option: asked[option] for option in STUDIES[name].options} | {"threads": given.threads}


def main() -> int:
    """Runs a study, prints its tables, and writes results, report and figures to a folder."""
    listed = "; ".join(f"{name}: {study.about}" for name, study in STUDIES.items())
    parser = argparse.ArgumentParser(prog="python examples/studies", description=listed)
    parser.add_argument("name", choices=STUDIES, metavar="NAME", help=", ".join(STUDIES))
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--threads", type=int, help="The number of threads for every engine.")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="MNIST",
        help="Your MNIST, for mnist and mnist-normalised: a folder with the four IDX files (plain "
        "or .gz), or an .npz. Default: scikit-learn's digits.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="A test run with little training, for mnist, mnist-normalised and l2norm.",
    )
    given = parser.parse_args()
    command = shlex.join(["python", "examples/studies", *sys.argv[1:]])
    with Console() as console:
        try:
            options = options_of(given.name, given)
            check_folder(given.output)
            run = STUDIES[given.name].run
            _, text = run(given.output, console, command=command, **options)
        except MoexportError as error:
            sys.exit(f"{error.message}. {error.hint or ''}".strip())
    print(text)
    return 0
