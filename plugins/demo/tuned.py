"""What `tune` finds for a network of the demo."""

from __future__ import annotations

from pathlib import Path

from ...bench.data import LabelledData
from ...common.console import Progress
from ..tune.findings import text, write_findings
from ..tune.request import SearchOptions
from ..tune.tune import search_and_export
from .demo import TrainedNetwork

KEEP = 0.97
"""Of the demo: what 180 inputs can confirm: half of those that the network was not trained on."""


SECONDS = 45.0
"""Of its search, at the most: a busy machine looks at less."""


def demonstrated(
    progress: Progress, network: TrainedNetwork, data: LabelledData, directory: Path
) -> str:
    """Returns what a search finds for a network; its bundle and report go to a demo's folder."""
    request = SearchOptions(keep=KEEP, precisions=("fp32", "int8"), seconds=SECONDS)
    place, report = directory / "tuned", directory / "tuned-report"
    progress.step(f"tuning {network.name}: {KEEP:.0%} kept")
    tuned = search_and_export(
        network.load(), data, place, request, work=report, force=True, progress=progress
    )
    write_findings(tuned, report, f"moexport demo -o {directory}")
    return text(tuned, report)
