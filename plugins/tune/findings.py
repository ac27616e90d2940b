"""Turns the outcome of a search into results and text: the chosen point, and all points."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ...bench.engines import PYTORCH_EAGER
from ...bench.journal import FILE
from ...bench.metrics import wilson
from ...bench.plan import Candidate
from ...bench.report.page import recipe_command, write_all
from ...bench.results import Accuracy, Interval, Perplexity, Results, Row
from ...bench.run import model_info
from ...calibration.table import CALIBRATION_FILE
from ...common.environment import environment
from ...common.text import size, table
from ...graphs.targets import runtime_of
from ..service.findings import as_analyses, best
from .accuracy.quality import R2, Quality
from .graphs import UNTOUCHED
from .recipe import RECIPE_FILE, free_path
from .report.record import TUNING, FrontPoint, TuningRecord
from .substitutes.substitutes import FOLDER
from .tune import Tuned


def write_findings(tuned: Tuned, folder: Path) -> None:
    """Writes `results.json` and the report to the search's folder; removes temporary files."""
    write_all(results_of(tuned), folder)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    for name in (FILE, CALIBRATION_FILE):
        (folder / name).unlink(missing_ok=True)


def results_of(tuned: Tuned) -> Results:
    name = Path(tuned.model.source.path).stem
    info = model_info(Candidate(name, tuned.model))
    n = max(tuned.experts.values())
    quality = tuned.chosen.quality
    rows = []
    if UNTOUCHED in tuned.latencies:
        untouched = replace(
            quality,
            kept=1.0,
            low=1.0,
            high=1.0,
            score=quality.untouched,
            answers=quality.untouched_answers,
        )
        judged = _judged(tuned, untouched)
        rows.append(_row(tuned, UNTOUCHED, engine=PYTORCH_EAGER, k=n, **judged))
    by_key = {point.trial.point.key: point for point in (tuned.sequence[0], tuned.chosen)}
    for key, confirmed in by_key.items():
        point = confirmed.trial.point
        rows.append(
            _row(
                tuned,
                key,
                engine=runtime_of(point.target),
                k=max(point.k.values()),
                provider="cpu",
                precision=point.precision,
                lowering="+".join(sorted(set(confirmed.trial.lowerings.values()))),
                point=point.text(tuned.experts) if point.is_reduced else None,
                **_judged(tuned, confirmed.quality),
            )
        )
    return Results(
        models=(info,),
        rows=tuple(rows),
        environment=environment() | {"threads": tuned.threads.count},
        protocol={
            "rounds": tuned.protocol.rounds,
            "round_s": tuned.protocol.round_s,
            "samples": quality.inputs,
            "labelled": tuned.metric.name in ("accuracy", R2),
            "threads": tuned.threads.sentence,
        },
        command=tuned.request.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        analyses={TUNING: msgspec.to_builtins(_record(tuned))}
        | ({} if tuned.services is None else as_analyses(tuned.services)),
    )


def _record(tuned: Tuned) -> TuningRecord:
    return TuningRecord(
        model=Path(tuned.model.source.path).stem,
        metric=tuned.metric.title or tuned.metric.name,
        batch=tuned.request.batches.opt,
        searching=tuned.searching,
        confirming=tuned.chosen.quality.inputs,
        seconds=round(tuned.seconds, 1),
        keep=tuned.request.kept,
        max_latency_ms=tuned.request.latency_ms,
        max_bytes=tuned.request.most_bytes,
        recipe=str(tuned.bundle.path / RECIPE_FILE),
        points=tuple(sorted(_points(tuned), key=lambda point: -point.ms)),
    )


def text(tuned: Tuned) -> str:
    """Returns the confirmed points and the result as text."""
    rows = [
        (
            "→" if point is tuned.chosen else "",
            f"{point.trial.ms:.3g}",
            size(point.trial.bytes),
            f"{point.quality.kept:.2%}",
            f"{point.quality.low:.2%} to {point.quality.high:.2%}",
            point.trial.point.text(tuned.experts),
        )
        for point in tuned.sequence
    ]
    header = ("", "ms", "bytes", "kept", "95% interval", "k, experts and precision of each layer")
    quality = tuned.chosen.quality
    ratio = tuned.base.ms / tuned.chosen.trial.ms
    sentences = [_record(tuned).why_runtime]
    if tuned.services is not None:
        best_service = best([row for row in tuned.services.services if row.exported])
        sentences += [] if best_service is None else [best_service.reached]
    bundle, metric = tuned.bundle.path, tuned.metric
    metric_name = metric.title if metric.each_output else metric.name
    if metric.name == "accuracy" and not metric.each_output:
        scores = f"PyTorch {quality.untouched:.1%}, the bundle {quality.score:.1%}"
        sentences = [f"accuracy on these {quality.inputs} inputs: {scores}", *sentences]
    repeat_command = recipe_command(
        tuned.model.source.path,
        str(bundle / RECIPE_FILE),
        str(free_path(bundle)),
        shlex.split(tuned.request.command),
    )
    folder = tuned.request.report
    report = "" if folder is None else f"\nreport: {Path(folder) / 'report.html'}"
    return (
        f"{table(header, rows)}\n\n"
        f"{bundle}: {metric_name} kept {quality.kept:.2%}, between "
        f"{quality.low:.2%} and {quality.high:.2%} on {quality.inputs} inputs that the search did "
        f"not use;\n{tuned.chosen.trial.ms:.3g} ms per batch, {ratio:.3g} times as fast as k = n "
        f"in FP32; {tuned.trials} graphs in {tuned.seconds:.0f} s\n"
        f"{''.join(f'{sentence}{chr(10)}' for sentence in sentences if sentence)}"
        f"reproduce: {repeat_command}{report}"
    )


def _row(tuned: Tuned, key: str, **fields: Any) -> Row:
    """Returns a row of the results, with the latency measured under `key`."""
    latency, batch = tuned.latencies.get(key), tuned.request.batches.opt
    return Row(
        experts=max(tuned.experts.values()),
        batch=batch,
        model=Path(tuned.model.source.path).stem,
        latency_ms=latency,
        throughput=None if latency is None else 1e3 * batch / latency.median,
        **fields,
    )


def _judged(tuned: Tuned, quality: Quality) -> dict[str, Any]:
    """Returns the fields of a row for the metric; empty if the metric has none."""
    score, kept, inputs = quality.score, quality.kept, quality.inputs
    interval = Interval(quality.low, quality.high)
    if tuned.metric.each_output:
        answers = quality.answers
        return {"accuracy": answers.accuracy, "regression": answers.regression}
    if tuned.metric.name == "accuracy":
        correct = wilson(round(score * inputs), inputs)
        accuracy = Accuracy(score, kept, inputs, top1_interval=correct, retention_interval=interval)
        return {"accuracy": accuracy}
    if tuned.metric.name == "perplexity":
        return {"perplexity": Perplexity(score, kept, quality.tokens, retention_interval=interval)}
    return {}


def _points(tuned: Tuned) -> Iterator[FrontPoint]:
    confirmations = {point.trial.point.key: point.quality for point in tuned.sequence}
    front = {trial.point.key: trial for trial in (*tuned.front, tuned.base)}
    for searched in tuned.all_trials:
        key = searched.point.key
        trial, confirmed = front.get(key, searched), confirmations.get(key)
        yield FrontPoint(
            ms=trial.ms,
            predicted_ms=trial.predicted_ms,
            bytes=trial.bytes,
            kept=trial.quality.kept,
            searched=Interval(trial.quality.low, trial.quality.high),
            text=trial.point.text(tuned.experts),
            layers={
                name: replace(choice, lowering=trial.lowerings[name])
                for name, choice in trial.point.layers
            },
            around=trial.point.around,
            front=key in front,
            chosen=key == tuned.chosen.trial.point.key,
            confirmed_kept=None if confirmed is None else confirmed.kept,
            confirmed=None if confirmed is None else Interval(confirmed.low, confirmed.high),
            runtime=runtime_of(trial.point.target),
        )
