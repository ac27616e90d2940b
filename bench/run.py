"""The benchmark: every case's accuracy, routing and parity, then its latency in turn.

`plan` says what will be measured, `Measurement` measures the pieces of one candidate (quality,
timing, memory, parts) and `bench` writes what they found. With a folder for the results, every
piece that is complete is kept there, and a run that was killed goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..common.console import Silent
from ..common.environment import energy_counters, environment
from ..common.files import sha256
from ..common.threads import Threads, with_threads
from ..common.writing import held
from ..exporter.bundle.bundle import Bundle
from ..exporter.inputs import by_name, check_array
from ..exporter.model import Model
from .data import Labelled, fingerprint
from .evaluate import EvaluationState
from .journal import FILE, Journal
from .measurement import Measurement, expected_time
from .plan import Candidate, TimingGroup, describe, plan
from .prepare import prepared
from .report.compare import compare
from .report.page import write_all
from .request import BenchRequest
from .results import Absent, ModelInfo, Results, Row
from .runners.base import Loader
from .runners.pytorch import CUDA, without_tf32
from .studies import begun, check_studies


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
    threads: Threads | None = None,
) -> Results:
    """Returns every row of a benchmark, whose engines, k and precisions are those of `candidates`.

    With `request.out` it writes results.json, report and figures there. A case that cannot be
    opened, evaluated or timed becomes a row with its error. `absent` names the engines that are not
    measured, and `analyses` is what else was found, for the results. `only` one of the batch sizes
    is timed where that is said, and qualities that are `known` are not taken again, by the names of
    candidates. `calibration` names the file that INT8 took its ranges from, for the report, and
    `threads` tells how the number of threads was found. Raises UsageError and FeedError, before
    anything is opened, for what cannot be measured at all.
    """
    progress, out = request.progress or Silent(), request.folder
    groups = plan(candidates, request)
    head = data.head(max(request.batches) * request.protocol.inputs)
    if only is not None:
        groups = tuple(group for group in groups if group.batch == only)
        request = replace(request, batch=(only,))
    for candidate in candidates:
        arrays = by_name(head.batch(0, len(head)), candidate.model.inputs)
        for spec in (spec for spec in candidate.model.inputs if spec.name in arrays):
            check_array(arrays[spec.name], spec, f"{candidate.name}: ")
    studies = begun(candidates, data, request)
    on_gpu = any(case.provider == CUDA for group in groups for case in group.cases)
    with ExitStack() as stack:
        # A second benchmark in the same folder is refused at once.
        stack.enter_context(held(out))
        stack.enter_context(with_threads(request.threads))
        stack.enter_context(without_tf32() if on_gpu else nullcontext())
        facts = environment() | {"threads": torch.get_num_threads()}
        takes = expected_time(candidates, groups, head, data.samples, request)
        progress.step(describe(groups, takes))
        models = tuple(map(model_info, candidates))
        same = _same_run(candidates, groups, data, request, facts, models)
        journal = Journal(None if out is None else out / FILE, same)
        if journal.summary:
            progress.step(journal.summary)
        rows: list[Row] = []
        protocol = _protocol(request, data, calibration, threads)
        if threads is not None and not journal.pieces("threads"):
            journal.add("threads", of=candidates[0].model.source.path, **asdict(threads))
        for candidate in candidates:
            one = Measurement(
                candidate=candidate,
                groups=groups,
                data=data,
                head=head,
                request=request,
                journal=journal,
                progress=progress,
                known=(known or {}).get(candidate.name),
            )
            rows += one.rows()
            for study in studies.values():
                if study.follow is not None:
                    study.follow(candidate, one.failures, journal)
            protocol["samples"] = max(protocol["samples"], one.seen)
            for name, entries in one.beside.items():
                protocol[name] = [*protocol.get(name, ()), *entries]
        results = Results(
            models=models,
            rows=tuple(rows),
            environment=facts,
            protocol=protocol,
            command=request.command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            absent=tuple(absent),
            analyses=dict(analyses or {})
            | {name: study.findings() for name, study in studies.items()},
        )
        _finish(results, request, journal)
        return results


def _finish(results: Results, request: BenchRequest, journal: Journal) -> None:
    """Writes results with every view of them, where that is asked, and ends the journal."""
    if results.disturbance and request.progress is not None:
        request.progress.step(results.disturbance)
    if request.folder is not None:
        before = request.before
        comparison = compare(before, results) if isinstance(before, Results) else None
        write_all(results, request.folder, comparison)
        journal.remove()


def _same_run(
    candidates: Sequence[Candidate],
    groups: Sequence[TimingGroup],
    data: Labelled,
    request: BenchRequest,
    facts: Mapping[str, Any],
    models: Sequence[ModelInfo],
) -> dict[str, Any]:
    """What must be as it was for a run to take the pieces that an interrupted one has kept."""
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
    """How rows are measured, for the results; the candidates add how many samples they saw."""
    ranges = {"calibration": calibration} if calibration else {}
    counted = {} if threads is None else {"threads": threads.sentence}
    return asdict(request.protocol) | {
        "samples": 0,
        "data": {
            "source": str(request.data) if isinstance(request.data, str | Path) else None,
            "sha256": data.fingerprint,
        },
        "labelled": data.labelled,
        "no_energy": energy_counters()[1],
        "batches": list(request.batches),
        **ranges,
        **counted,
    }


def sweep(
    listed: Sequence[Model | Bundle],
    request: BenchRequest,
    *,
    only: int | None = None,
    known: Mapping[str, EvaluationState] | None = None,
) -> Results:
    """Returns every row of models and bundles, measured as asked; writes them where that is asked.

    `only` and `known` are as in `bench`. Raises `UsageError` and `FeedError`, before anything is
    measured, for what cannot be meant.
    """
    check_studies(request, listed)
    with prepared(listed, request) as plans:
        return bench(
            plans.candidates,
            plans.data,
            plans.request,
            absent=plans.absent,
            only=only,
            known=known,
            threads=plans.threads,
        )


def analysed(listed: Sequence[Model | Bundle], request: BenchRequest) -> dict[str, Any]:
    """Returns what the studies find that need no rows; measures nothing else."""
    check_studies(request, listed)
    with prepared(listed, request) as plans:
        runs = begun(plans.candidates, plans.data, request)
        return {name: run.findings() for name, run in runs.items() if run.follow is None}


def model_info(candidate: Candidate) -> ModelInfo:
    """Returns what the report says of a model, with the SHA-256 of its files, else its weights."""
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
    )


def _file_hash(loader: Loader) -> str:
    """The hash of a graph's file; empty for one that is not a file."""
    return sha256(loader.file) if loader.file is not None and loader.file.is_file() else ""
