"""The benchmark: every case's accuracy, routing and parity, then its latency in turn.

`plan` says what will be measured, `measure.rows` measures a candidate's pieces (quality, timing,
memory, parts) and `bench` writes what they found. With a folder for the results, every piece that
is complete is kept there, and a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..common.console import Progress, Silent
from ..common.environment import environment
from ..common.files import sha256
from ..common.writing import check_file, check_folder, make_folder, told, write_text
from ..errors import UsageError
from ..exporter.inputs import check_array
from .cases import Candidate, GraphSource, TimingGroup
from .data import Labelled, LabelledData, fingerprint
from .journal import FILE as JOURNAL_FILE
from .journal import Journal
from .measure.latency import disturbance
from .measure.memory import worker_count
from .measure.rows import Measurement
from .plan import CallTimes, Estimate, Settings, describe, estimate, plan
from .report.compare import Comparison, compare
from .results import Absent, ModelInfo, Results, Row, write
from .runners.pytorch import CUDA, PyTorch, outputs_of, untouched, without_tf32

TRIAL_CALLS = 3
"""Calls of which the fastest stands for the others: the first one allocates."""

UNKNOWN_SAMPLES = 1000
"""Taken for an estimate where a feed does not tell how many samples it has."""


def bench(
    candidates: Sequence[Candidate],
    data: Labelled,
    settings: Settings,
    *,
    out: Path | None = None,
    command: str = "",
    progress: Progress | None = None,
    absent: Sequence[Absent] = (),
    before: Results | None = None,
    analyses: Mapping[str, Any] | None = None,
) -> Results:
    """Returns every row of a benchmark; with `out`, writes results.json, report and figures there.

    A case that cannot be opened, evaluated or timed becomes a row with its error. `absent`
    names the engines that are not measured; with `before` the report tells what changed; `analyses`
    is what else was found, for the results. Raises UsageError and FeedError, before anything is
    opened, for what cannot be measured at all.
    """
    progress = progress or Silent()
    if out is not None:
        check_folder(out)
    groups = plan(candidates, settings)
    head = data.head(max(settings.batches) * settings.protocol.inputs)
    for candidate in candidates:
        check_array(head.inputs, candidate.model.input, f"{candidate.name}: ")
    on_gpu = any(c.provider == CUDA for group in groups for c in group.cases)
    with with_threads(settings.threads), without_tf32() if on_gpu else nullcontext():
        facts = environment() | {"threads": torch.get_num_threads()}
        progress.step(
            describe(groups, expected_time(candidates, groups, head, data.samples, settings))
        )
        models = tuple(model_info(candidate) for candidate in candidates)
        if out is not None:
            make_folder(out)
        journal = Journal(
            None if out is None else out / JOURNAL_FILE,
            {
                "environment": facts,
                "models": [asdict(model) for model in models],
                "edits": [str(candidate.model.edits) for candidate in candidates],
                "rows": [asdict(c) for group in groups for c in group.cases],
                "graphs": [_graph_hash(graph) for c in candidates for graph in c.graphs],
                "data": data.fingerprint,
                "settings": asdict(settings),
            },
        )
        _say_what_is_done(journal, progress)
        rows: list[Row] = []
        protocol = asdict(settings.protocol) | {
            "samples": 0,
            "labelled": data.labelled,
            "batches": list(settings.batches),
            **({"calibration": settings.calibration} if settings.calibration else {}),
        }
        for candidate in candidates:
            one = Measurement(candidate, groups, data, head, settings, journal, progress)
            rows += one.rows()
            protocol["samples"] = max(protocol["samples"], one.seen)
            for name, found in one.beside.items():
                protocol[name] = [*protocol.get(name, ()), *found]
        results = Results(
            models=models,
            rows=tuple(rows),
            environment=facts,
            protocol=protocol,
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            absent=tuple(absent),
            analyses=dict(analyses or {}),
        )
        if disturbance(results):
            progress.step(disturbance(results))
    if out is not None:
        write_all(results, out, None if before is None else compare(before, results))
        journal.remove()
    return results


def write_all(
    results: Results, out: Path, comparison: Comparison | None = None
) -> tuple[Path, ...]:
    """Writes results.json and every view of it to a folder; returns their paths."""
    write(results, out / "results.json")
    return (out / "results.json", *write_views(results, out / "report.html", comparison))


def write_views(
    results: Results, page: Path, comparison: Comparison | None = None
) -> tuple[Path, ...]:
    """Writes the page, and beside it the rows as Markdown and CSV and the figures.

    Raises UsageError for a page that one of the others would take the place of.
    """
    check_file(page)
    if page.suffix not in (".html", ".htm"):
        raise UsageError(
            f"--output {page}: the page is HTML",
            hint=f"for example -o {page.stem or 'report'}.html",
        )
    from .analyses.findings import studies_in
    from .analyses.report import figures as charts
    from .report.figures import figures
    from .report.page import write_report
    from .report.text import to_csv, to_markdown

    write_report(results, page, comparison)
    markdown, rows = page.with_suffix(".md"), page.with_suffix(".csv")
    write_text(to_markdown(results, comparison), markdown)
    write_text(to_csv(results), rows)
    with told(page.parent):
        drawn = (*figures(results, page.parent), *charts(studies_in(results.analyses), page.parent))
    return (page, markdown, rows, *drawn)


def expected_time(
    candidates: Sequence[Candidate],
    groups: Sequence[TimingGroup],
    head: LabelledData,
    samples: int | None,
    settings: Settings,
) -> Estimate:
    """Returns how long a benchmark will take, by a few calls of the untouched models."""
    calls: dict[tuple[str, int], float] = {}
    evaluation: dict[str, float] = {}
    for candidate in candidates:
        base = untouched(candidate.model)
        for batch in settings.batches:
            calls[candidate.name, batch] = _call_ms(base, head, batch, candidate.name)
        size = min(settings.evaluation_batch, len(head))
        each = _call_ms(base, head, size, candidate.name)
        evaluation[candidate.name] = each * settings.evaluation_batch / size
    known = UNKNOWN_SAMPLES if samples is None else samples
    seen = min(known, settings.samples or known)
    workers = worker_count(max(candidate.weights_bytes for candidate in candidates))
    return estimate(groups, settings, seen, CallTimes(calls, evaluation), workers=workers)


def _call_ms(base: PyTorch, head: LabelledData, batch: int, name: str) -> float:
    x = head.batch(0, batch)
    times = []
    for _ in range(TRIAL_CALLS):
        started = time.perf_counter()
        outputs_of(base, x, name)
        times.append(1e3 * (time.perf_counter() - started))
    return min(times)


def model_info(candidate: Candidate) -> ModelInfo:
    """Returns what the report says of a model, with the SHA-256 of its files, else its weights."""
    model, source = candidate.model, candidate.model.source
    parameters = sum(p.numel() for p in model.module.parameters())
    weights = (tensor.detach().cpu().numpy() for tensor in model.module.state_dict().values())
    sha256 = source.sha256() if source.files else fingerprint(*weights)
    return ModelInfo(candidate.name, model.family, source.path, parameters, sha256)


def _graph_hash(graph: GraphSource) -> str:
    """The hash of a graph's file; empty for one that is not a file."""
    file = graph.loader.file
    return sha256(file) if file is not None and file.is_file() else ""


def _say_what_is_done(journal: Journal, progress: Progress) -> None:
    if journal.resumed:
        progress.step(f"going on with an unfinished run: {journal.resumed} measurements are done")
    elif journal.discarded:
        changed = ", ".join(journal.discarded)
        progress.step(f"an unfinished run of something else was discarded (changed: {changed})")


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Sets PyTorch's thread count within the context."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
