"""The benchmark: every case's accuracy, routing and parity, then its latency in turn.

`plan` determines what is measured, `Measurement` measures one candidate (quality, timing, memory,
parts) and `bench` writes the results. If there is a folder for the results, every finished piece is
saved there, and a killed run continues from these pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..common.console import Silent
from ..common.environment import environment
from ..common.files import sha256
from ..common.threads import Threads, with_threads
from ..common.writing import exclusive_folder
from ..exporter.bundle.bundle import Bundle
from ..exporter.inputs import by_name, check_array
from ..exporter.model import Model
from .data import Labelled, LabelledData, fingerprint
from .evaluate import EvaluationState
from .journal import FILE, Journal
from .measurement import Measurement, expected_time
from .plan import Candidate, TimingGroup, describe, plan
from .prepare import Prepared, prepared
from .report.compare import compare
from .report.page import write_all
from .request import BenchRequest
from .results import Absent, ModelInfo, Results, Row
from .runners.exported import table_file
from .runners.pytorch import CUDA, without_tf32
from .studies import begin_studies, check_studies


def bench(
    candidates: Sequence[Candidate],
    data: Labelled,
    request: BenchRequest,
    *,
    absent: Sequence[Absent] = (),
    analyses: Mapping[str, Any] | None = None,
    only: int | None = None,
    earlier_evaluations: Mapping[str, EvaluationState] | None = None,
    ranges: Mapping[str, Any] | None = None,
    threads: Threads | None = None,
) -> Results:
    """Returns every row of a benchmark of `candidates`, with their engines, k and precisions.

    It writes results.json, the report and figures to `request.out`, if given. A case that cannot be
    opened, evaluated or timed becomes a row with its error. `absent` names the engines that are not
    measured, and `analyses` are additional findings for the results. With `only`, just that batch
    size is timed; candidates in `earlier_evaluations` are not evaluated again.
    `ranges` describes the source of INT8 ranges (`Ranges.record`), and `threads` how the number of
    threads was chosen. Raises UsageError and FeedError, before anything is opened, for an
    impossible benchmark.
    """
    progress, out = request.progress or Silent(), request.folder
    groups = plan(candidates, request)
    head = data.head(max(request.batches) * request.protocol.inputs)
    if only is not None:
        groups = tuple(group for group in groups if group.batch == only)
        request = replace(request, batch=(only,))
    _check_inputs(candidates, head)
    studies = begin_studies(candidates, data, request)
    on_gpu = any(case.provider == CUDA for group in groups for case in group.cases)
    tf32 = without_tf32() if on_gpu else nullcontext()
    # Only one benchmark at a time may use the folder.
    with exclusive_folder(out), with_threads(request.threads), tf32:
        machine = environment() | {"threads": torch.get_num_threads()}
        duration = expected_time(candidates, groups, head, data.samples, request)
        progress.step(describe(groups, duration))
        models = tuple(map(model_info, candidates))
        source = str(request.data) if isinstance(request.data, str | Path) else None
        conditions = _conditions(candidates, groups, request) | {
            "environment": machine,
            "models": [asdict(model) for model in models],
            "data": {"source": source, "sha256": data.fingerprint},
            "ranges": dict(ranges or {}),
        }
        journal = Journal(None if out is None else out / FILE, conditions)
        if journal.summary:
            progress.step(journal.summary)
        if threads is not None and not journal.pieces("threads"):
            journal.add("threads", of=candidates[0].model.source.path, **asdict(threads))
        rows: list[Row] = []
        samples, entries = 0, dict[str, list[dict[str, Any]]]()
        for candidate in candidates:
            measurement = Measurement(
                candidate=candidate,
                groups=groups,
                data=data,
                head=head,
                request=request,
                journal=journal,
                progress=progress,
                entries=entries,
                earlier_evaluation=(earlier_evaluations or {}).get(candidate.name),
            )
            rows += measurement.rows()
            samples = max(samples, measurement.samples)
            for study in studies.values():
                if study.follow is not None:
                    study.follow(candidate, measurement.failures, journal)
        protocol = asdict(request.protocol) | {
            "samples": samples,
            "data": conditions["data"],
            "labelled": data.labelled,
            "batches": list(request.batches),
            **({} if threads is None else {"threads": threads.sentence}),
            **({"ranges": dict(ranges)} if ranges else {}),
            **entries,
        }
        results = Results(
            models=models,
            rows=tuple(rows),
            environment=machine,
            protocol=protocol,
            command=request.command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            absent=tuple(absent),
            analyses=dict(analyses or {})
            | {name: study.findings() for name, study in studies.items()},
        )
        if results.disturbance:
            progress.step(results.disturbance)
        if out is not None:
            _write(results, out, request, candidates)
            journal.remove()
        return results


def _check_inputs(candidates: Sequence[Candidate], head: LabelledData) -> None:
    """Raises `FeedError` for inputs that do not fit a model."""
    for candidate in candidates:
        arrays = by_name(head.batch(0, len(head)), candidate.model.inputs)
        for spec in (spec for spec in candidate.model.inputs if spec.name in arrays):
            check_array(arrays[spec.name], spec, f"{candidate.name}: ")


def _conditions(
    candidates: Sequence[Candidate], groups: Sequence[TimingGroup], request: BenchRequest
) -> dict[str, Any]:
    """Returns what must be unchanged to reuse the pieces of an interrupted run."""
    files = [graph.loader.file for candidate in candidates for graph in candidate.graphs]
    return {
        "edits": [str(candidate.model.edits) for candidate in candidates],
        "rows": [asdict(case) for group in groups for case in group.cases],
        "graphs": [sha256(file) if file is not None and file.is_file() else "" for file in files],
        "settings": request.measured,
    }


def _write(
    results: Results, out: Path, request: BenchRequest, candidates: Sequence[Candidate]
) -> None:
    """Writes results, their views and the tables of ranges."""
    for table in {id(g.table): g.table for c in candidates for g in c.graphs}.values():
        if table is not None:
            table.write(out / table_file(table))
    before = request.before
    write_all(results, out, compare(before, results) if isinstance(before, Results) else None)


def sweep(
    sources: Sequence[Model | Bundle],
    request: BenchRequest,
    *,
    only: int | None = None,
    earlier_evaluations: Mapping[str, EvaluationState] | None = None,
) -> Results:
    """Returns every row of models and bundles, and writes them if requested.

    `only` and `earlier_evaluations` are as in `bench`. Raises `UsageError` and `FeedError`, before
    anything is measured, for contradictory options.
    """
    check_studies(request, sources)
    with prepared(sources, request) as setup:
        return bench(
            setup.candidates,
            setup.data,
            setup.request,
            absent=setup.absent,
            only=only,
            earlier_evaluations=earlier_evaluations,
            threads=setup.threads,
            ranges=_ranges(setup),
        )


def _ranges(setup: Prepared) -> dict[str, Any]:
    """Returns the source of INT8 ranges, with the tables that were written."""
    record, folder = setup.ranges.record(), setup.request.folder
    if not record or folder is None or "table" in record:
        return record
    tables = {
        candidate.name: next((g.table for g in candidate.graphs if g.table is not None), None)
        for candidate in setup.candidates
    }
    found = {name: str(folder / table_file(t)) for name, t in tables.items() if t is not None}
    return record | {"found": found}


def study_findings(sources: Sequence[Model | Bundle], request: BenchRequest) -> dict[str, Any]:
    """Returns the findings of those studies that need no rows; measures nothing else."""
    check_studies(request, sources)
    with prepared(sources, request) as setup:
        runs = begin_studies(setup.candidates, setup.data, request)
        return {name: run.findings() for name, run in runs.items() if run.follow is None}


def model_info(candidate: Candidate) -> ModelInfo:
    """Returns the description of a model, with the SHA-256 of its files, or of its weights."""
    model, source = candidate.model, candidate.model.source
    parameters = sum(p.numel() for p in model.module.parameters())
    state = sorted(model.module.state_dict().items())
    weights = (tensor.detach().cpu().numpy() for _, tensor in state)
    digest = source.sha256() if source.files else fingerprint(*weights)
    kind = next(layer.spec.kind for layer in model.layers.values())
    return ModelInfo(
        name=candidate.name,
        family=model.family,
        source=source.path,
        parameters=parameters,
        sha256=digest,
        kind=kind,
        bundles=tuple(each.bundle for each in candidate.parts if each.bundle is not None),
    )
