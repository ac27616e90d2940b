"""The experiments of two papers, run again beside what they print.

    python examples/studies mnist -o DIR

Soft MoE: "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts" (TMLR 2025). muMoE:
"Multilinear Mixture of Experts: Scalable Expert Specialization through Factorization" (2024).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from moexport.bench.results import Results
from moexport.common.console import Console
from moexport.common.writing import check_folder
from moexport.errors import MoexportError
from moexport.examples.studies.l2norm import run_l2norm
from moexport.examples.studies.latency import run_latency, run_whole
from moexport.examples.studies.mnist import NORMALISED, SUITE, run_mnist
from moexport.examples.studies.multilinear import run_multilinear

STUDIES: dict[str, tuple[str, Callable[..., tuple[Results, str]]]] = {
    "mnist": ("the Soft MoE paper's MNIST suite, on digits", partial(run_mnist, SUITE)),
    "mnist-normalised": ("the same in the released code's form", partial(run_mnist, NORMALISED)),
    "latency": ("its Table 3, with as much of it as fits", run_latency),
    "latency-whole": ("its Table 3 at the paper's size", run_whole),
    "l2norm": ("its Appendix B", run_l2norm),
    "mumoe": ("Tables 6 and 8 of the muMoE paper", run_multilinear),
}
"""What each study repeats, and what runs it: it returns results, and its tables as text."""


def main() -> int:
    """Runs a study and prints its tables; results, report and figures go to a folder."""
    listed = "; ".join(f"{name}: {about}" for name, (about, _) in STUDIES.items())
    parser = argparse.ArgumentParser(prog="python examples/studies", description=listed)
    parser.add_argument("name", choices=STUDIES, metavar="NAME", help=", ".join(STUDIES))
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--threads", type=int, help="Threads of every engine.")
    given = parser.parse_args()
    _, study = STUDIES[given.name]
    command = shlex.join(["python", "examples/studies", *sys.argv[1:]])
    with Console() as console:
        try:
            check_folder(given.output)
            _, text = study(given.output, console, threads=given.threads, command=command)
        except MoexportError as error:
            sys.exit(f"{error.message}. {error.hint or ''}".strip())
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
