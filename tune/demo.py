"""What `moexport demo` ends with: the fastest bundle of a network that keeps an accuracy."""

from __future__ import annotations

from pathlib import Path

from ..bench.data import LabelledData
from ..bench.demo.demo import THREADS, TrainedNetwork
from ..common.console import Progress
from .findings import text, write_findings
from .request import SearchOptions
from .tune import tune

KEEP = 0.97
"""What 180 inputs can confirm: half of those that the network was not trained on."""

SECONDS = 45.0
"""Of the search, at the most: a busy machine looks at less."""


def tuned(progress: Progress, network: TrainedNetwork, data: LabelledData, directory: Path) -> str:
    """Returns what a search finds for a network; its bundle and report go to a demo's folder."""
    request = SearchOptions(
        keep=KEEP, threads=THREADS, precisions=("fp32", "int8"), seconds=SECONDS
    )
    place, report = directory / "tuned", directory / "tuned-report"
    progress.step(f"tuning {network.name}: {KEEP:.0%} kept")
    found = tune(
        *(network.load(), data, place, request), work=report, force=True, progress=progress
    )
    write_findings(found, report, f"moexport demo -o {directory}")
    return text(found, report)
