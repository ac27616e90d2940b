"""The benchmark: every case's accuracy, routing and parity, then its latency in turn.

`plan` determines what is measured, `Measurement` measures one candidate (quality, timing, memory,
parts) and `bench` writes the results. If there is a folder for the results, every finished piece is
saved there, and a killed run continues from these pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..common.console import Silent
from ..common.environment import environment
from ..common.files import sha256
from ..common.threads import Threads, with_threads
from ..common.writing import held
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
from .runners.base import Loader
from .runners.exported import table_file
from .runners.pytorch import CUDA, without_tf32
from .studies import StudyRun, begun, check_studies


def bench(
    candidates: Sequence[Candidate],
    data: Labelled,
    request: BenchRequest,
    *,
    absent: Sequence[Absent] = (),
    analyses: Mapping[str, Any] | None = None,
    only: int | None = None,
    known: Mapping[str, EvaluationState] | None = None,
    calibration: str | None = None,
    ranges: Mapping[str, Any] | None = None,
    threads: Threads | None = None,
) -> Results:
    """Returns every row of a benchmark of `candidates`, with their engines, k and precisions.

    It writes results.json, the report and figures to `request.out`, if given. A case that cannot be
    opened, evaluated or timed becomes a row with its error. `absent` names the engines that are not
    measured, and `analyses` are further findings for the results. With `only`, just that batch size
    is timed; the qualities in `known`, by the names of candidates, are not measured again.
    `calibration` names the file of INT8 ranges for the report, or `ranges` describes their source
    (`Ranges.record`); `threads` describes how the number of threads was chosen. Raises UsageError
    and FeedError, before anything is opened, for an impossible benchmark.
    """
    progress, out = request.progress or Silent(), request.folder
    groups = plan(candidates, request)
    head = data.head(max(request.batches) * request.protocol.inputs)
    if only is not None:
        groups = tuple(group for group in groups if group.batch == only)
        request = replace(request, batch=(only,))
    _check_inputs(candidates, head)
    studies = begun(candidates, data, request)
    on_gpu = any(case.provider == CUDA for group in groups for case in group.cases)
    with ExitStack() as stack:
        # Refuses a second benchmark in the same folder at once.
        stack.enter_context(held(out))
        stack.enter_context(with_threads(request.threads))
        stack.enter_context(without_tf32() if on_gpu else nullcontext())
        facts = environment() | {"threads": torch.get_num_threads()}
        takes = expected_time(candidates, groups, head, data.samples, request)
        progress.step(describe(groups, takes))
        models = tuple(map(model_info, candidates))
        same = _run_conditions(candidates, groups, data, request, facts, models) | {
            "ranges": dict(ranges or {})
        }
        journal = Journal(None if out is None else out / FILE, same)
        if journal.summary:
            progress.step(journal.summary)
        protocol = _protocol(request, data, calibration, threads)
        protocol |= {"ranges": dict(ranges)} if ranges else {}
        if threads is not None and not journal.pieces("threads"):
            journal.add("threads", of=candidates[0].model.source.path, **asdict(threads))
        measurements = (
            Measurement(
                candidate=candidate,
                groups=groups,
                data=data,
                head=head,
                request=request,
                journal=journal,
                progress=progress,
                known=(known or {}).get(candidate.name),
            )
            for candidate in candidates
        )
        rows = _measured(measurements, studies.values(), protocol)
        results = Results(
            models=models,
            rows=rows,
            environment=facts,
            protocol=protocol,
            command=request.command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            absent=tuple(absent),
            analyses=dict(analyses or {})
            | {name: study.findings() for name, study in studies.items()},
        )
        _finish(results, request, journal, candidates)
        return results


def _check_inputs(candidates: Sequence[Candidate], head: LabelledData) -> None:
    """Raises `FeedError` for inputs that do not fit a model."""
    for candidate in candidates:
        arrays = by_name(head.batch(0, len(head)), candidate.model.inputs)
        for spec in (spec for spec in candidate.model.inputs if spec.name in arrays):
            check_array(arrays[spec.name], spec, f"{candidate.name}: ")


def _measured(
    measurements: Iterable[Measurement], studies: Collection[StudyRun], protocol: dict[str, Any]
) -> tuple[Row, ...]:
    """Returns the rows of all candidates; adds the samples that each of them saw to `protocol`."""
    rows: list[Row] = []
    for one in measurements:
        rows += one.rows()
        for study in studies:
            if study.follow is not None:
                study.follow(one.candidate, one.failures, one.journal)
        protocol["samples"] = max(protocol["samples"], one.seen)
        for name, entries in one.beside.items():
            protocol[name] = [*protocol.get(name, ()), *entries]
    return tuple(rows)


def _finish(
    results: Results, request: BenchRequest, journal: Journal, candidates: Sequence[Candidate]
) -> None:
    """Writes results and their views, if requested, and removes the journal."""
    if results.disturbance and request.progress is not None:
        request.progress.step(results.disturbance)
    if request.folder is not None:
        before = request.before
        comparison = compare(before, results) if isinstance(before, Results) else None
        for table in {id(g.table): g.table for c in candidates for g in c.graphs}.values():
            if table is not None:
                table.write(request.folder / table_file(table))
        write_all(results, request.folder, comparison)
        journal.remove()


def _run_conditions(
    candidates: Sequence[Candidate],
    groups: Sequence[TimingGroup],
    data: Labelled,
    request: BenchRequest,
    facts: Mapping[str, Any],
    models: Sequence[ModelInfo],
) -> dict[str, Any]:
    """Returns the conditions that must be equal to reuse the pieces of an interrupted run."""
    return {
        "environment": facts,
        "models": [asdict(model) for model in models],
        "edits": [str(candidate.model.edits) for candidate in candidates],
        "rows": [asdict(c) for group in groups for c in group.cases],
        "graphs": [_file_hash(g.loader) for c in candidates for g in c.graphs],
        "data": {
            "source": str(request.data) if isinstance(request.data, str | Path) else None,
            "sha256": data.fingerprint,
        },
        "settings": request.measured,
    }


def _protocol(
    request: BenchRequest, data: Labelled, calibration: str | None, threads: Threads | None
) -> dict[str, Any]:
    """Returns how rows are measured, for the results; candidates add their numbers of samples."""
    ranges = {"calibration": calibration} if calibration else {}
    counted = {} if threads is None else {"threads": threads.sentence}
    return asdict(request.protocol) | {
        "samples": 0,
        "data": {
            "source": str(request.data) if isinstance(request.data, str | Path) else None,
            "sha256": data.fingerprint,
        },
        "labelled": data.labelled,
        "batches": list(request.batches),
        **ranges,
        **counted,
    }


def sweep(
    sources: Sequence[Model | Bundle],
    request: BenchRequest,
    *,
    only: int | None = None,
    known: Mapping[str, EvaluationState] | None = None,
) -> Results:
    """Returns every row of models and bundles, and writes them if requested.

    `only` and `known` are as in `bench`. Raises `UsageError` and `FeedError`, before anything is
    measured, for contradictory options.
    """
    check_studies(request, sources)
    with prepared(sources, request) as plans:
        return bench(
            plans.candidates,
            plans.data,
            plans.request,
            absent=plans.absent,
            only=only,
            known=known,
            threads=plans.threads,
            ranges=_ranges(plans),
        )


def _ranges(plans: Prepared) -> dict[str, Any]:
    """Returns the source of INT8 ranges, with the tables that were written."""
    record, folder = plans.ranges.record(), plans.request.folder
    if not record or folder is None or "table" in record:
        return record
    tables = {
        one.name: next((graph.table for graph in one.graphs if graph.table is not None), None)
        for one in plans.candidates
    }
    found = {name: str(folder / table_file(t)) for name, t in tables.items() if t is not None}
    return record | {"found": found}


def analysed(sources: Sequence[Model | Bundle], request: BenchRequest) -> dict[str, Any]:
    """Returns the findings of studies that need no rows; measures nothing else."""
    check_studies(request, sources)
    with prepared(sources, request) as plans:
        runs = begun(plans.candidates, plans.data, request)
        return {name: run.findings() for name, run in runs.items() if run.follow is None}


def model_info(candidate: Candidate) -> ModelInfo:
    """Returns the description of a model, with the SHA-256 of its files, or of its weights."""
    model, source = candidate.model, candidate.model.source
    parameters = sum(p.numel() for p in model.module.parameters())
    weights = (tensor.detach().cpu().numpy() for tensor in model.module.state_dict().values())
    digest = source.sha256() if source.files else fingerprint(*weights)
    kind = next(layer.spec.kind for layer in model.layers.values())
    return ModelInfo(
        name=candidate.name,
        family=model.family,
        source=source.path,
        parameters=parameters,
        sha256=digest,
        kind=kind,
        bundles=tuple(own.bundle for own in candidate.each if own.bundle is not None),
    )


def _file_hash(loader: Loader) -> str:
    """Returns the hash of a graph's file; empty if there is no file."""
    return sha256(loader.file) if loader.file is not None and loader.file.is_file() else ""
