"""The experiments of two papers, run again beside what they print.

Soft MoE: "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts" (TMLR 2025). muMoE:
"Multilinear Mixture of Experts: Scalable Expert Specialization through Factorization" (2024).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...common.console import Progress
    from ..results import Results


def run_paper(
    name: str, out: Path, progress: Progress, *, threads: int | None = None, command: str = ""
) -> tuple[Results, str]:
    """Returns what an experiment found, and its tables beside the paper's, as text.

    `mnist` and `mnist-normalised` train the Soft MoE paper's suite on digits, `latency` is its
    Table 3 with as much of it as fits, `latency-whole` the same at the paper's size, `l2norm` its
    Appendix B, `mumoe` Tables 6 and 8 of the muMoE paper. Results, report and figures go to `out`.
    """
    match name:
        case "latency":
            from .latency import run_latency

            return run_latency(out, progress, threads=threads, command=command)
        case "latency-whole":
            from .latency import run_whole

            return run_whole(out, progress, threads=threads, command=command)
        case "l2norm":
            from .l2norm import run_l2norm

            return run_l2norm(out, progress, threads=threads, command=command)
        case "mumoe":
            from .multilinear import run_multilinear

            return run_multilinear(out, progress, threads=threads, command=command)
        case _:
            from .mnist import NORMALISED, SUITE, run_mnist

            suite = SUITE if name == "mnist" else NORMALISED
            return run_mnist(suite, out, progress, command=command)
