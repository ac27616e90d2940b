"""Several runs, on one or more machines, in one report: their answers and their points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..results import Results
from .summary import headline, line_name, milliseconds, percent, row_name, sections, summary

HEADS = ("Run", "Machine", "ms", "Kept", "Row", "Answer")

NOTE = (
    "For each run, the row that its own report recommends; the chart of what can be deployed shows "
    "the Pareto front of each run. Times on different machines say nothing about software."
)


@dataclass(frozen=True, slots=True)
class NamedRun:
    """Results to compare with those of a report, under a distinct name."""

    name: str
    results: Results


def named_runs(paths: Sequence[Path | None], listed: Sequence[Results]) -> tuple[NamedRun, ...]:
    """Returns runs, named after the folders of their files or, without files, their dates."""
    named: list[NamedRun] = []
    for path, results in zip(paths, listed, strict=True):
        dated = f"run of {results.created[:16].replace('T', ' ')}"
        name = dated if path is None else path.absolute().parent.name or path.stem
        names = [run.name for run in named]
        number = sum(other.partition(" (")[0] == name for other in names) + 1
        named.append(NamedRun(name if number == 1 else f"{name} ({number})", results))
    return tuple(named)


def machine_of(results: Results) -> str:
    """Returns the CPU or the GPUs on which results were measured, with the threads."""
    environment = results.environment
    gpus = [gpu["name"] for gpu in environment.get("gpu") or ()]
    cpu = (environment.get("cpu") or {}).get("model") or "an unknown machine"
    threads = environment.get("threads")
    counted = [] if threads is None else [f"{threads} thread{'' if threads == 1 else 's'}"]
    return ", ".join([*dict.fromkeys(gpus), cpu, *counted])


def answers(now: Results, runs: Sequence[NamedRun]) -> dict[str, list[tuple[str, ...]]]:
    """Returns the answer of each run under `HEADS`, for each model and batch size."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for run in (NamedRun("this run", now), *runs):
        for section in sections(run.results):
            row, answer = headline(section), summary(section)
            cells = ("–", "–", "–", answer)
            if row is not None and row.median_ms is not None:
                kept = "–" if row.kept is None else percent(row.kept)
                cells = (
                    milliseconds(row.median_ms),
                    kept,
                    f"k = {row.k}, {line_name(row)}",
                    answer,
                )
            key = f"{section.model}, {section.sizes}"
            groups.setdefault(key, []).append((run.name, machine_of(run.results), *cells))
    return groups


def run_points(run: NamedRun) -> dict[str, Any]:
    """Returns the rows of another run that the page shows: those with a time and a quality."""
    rows = [
        {
            "model": row.model,
            "batch": row.batch,
            "phase": row.phase or "",
            "k": row.k,
            "ms": row.median_ms,
            "kept": row.kept,
            "name": f"{row_name(row)}, k = {row.k_of_n(' of ')}",
        }
        for row in run.results.rows
        if row.median_ms is not None and row.kept is not None
    ]
    return {"name": run.name, "rows": rows}
