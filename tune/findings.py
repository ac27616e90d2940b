"""What a search found, as results: rows of what was chosen, and every point for the report."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ..bench.analyses.findings import TUNING, FrontPoint, TunedLayer, TuningRecord
from ..bench.data import LabelledData
from ..bench.demo.demo import THREADS, TrainedNetwork
from ..bench.engines import ONNXRUNTIME, PYTORCH_EAGER
from ..bench.journal import FILE
from ..bench.plan import Candidate
from ..bench.report.page import write_all
from ..bench.results import Accuracy, Interval, Perplexity, Results, Row
from ..bench.run import model_info
from ..calibration.table import CALIBRATION_FILE
from ..common.console import Progress
from ..common.environment import environment
from ..common.text import size, table
from ..common.writing import remove_folder
from ..exporter.bundle.recipe import RECIPE_FILE
from .confirm import Confirmed
from .graphs import Look
from .quality import Quality
from .request import SearchOptions
from .substitutes.substitutes import FOLDER
from .tune import Tuned, search_and_export

KEEP = 0.97
"""Of the demo: what 180 inputs can confirm: half of those that the network was not trained on."""

SECONDS = 45.0
"""Of its search, at the most: a busy machine looks at less."""


def write_findings(found: Tuned, folder: Path, command: str = "") -> tuple[Path, ...]:
    """Writes results.json and every view of it to a folder, where the search's journal ends."""
    written = write_all(results_of(found, command), folder)
    remove_folder(folder / FOLDER)
    for name in (FILE, CALIBRATION_FILE):
        (folder / name).unlink(missing_ok=True)
    return written


def results_of(found: Tuned, command: str = "") -> Results:
    """Returns a search as results."""
    name = Path(found.model.source.path).stem
    info = model_info(Candidate(name, found.model))
    n = max(found.experts.values())
    quality, batch = found.chosen.quality, found.request.batch.opt
    rows = []
    if found.untouched is not None:
        rows.append(
            Row(
                PYTORCH_EAGER,
                n,
                n,
                batch,
                name,
                latency_ms=found.untouched,
                throughput=1e3 * batch / found.untouched.median,
                **_judged(found, quality, of_untouched=True),
            )
        )
    listed = [found.sequence[0], found.chosen]
    for each in dict.fromkeys(one.look.point.key for one in listed):
        confirmed = next(one for one in listed if one.look.point.key == each)
        rows.append(_row(found, confirmed, name, n))
    record = TuningRecord(
        model=name,
        metric=found.metric.title or found.metric.name,
        batch=batch,
        searching=found.seen,
        confirming=quality.inputs,
        seconds=round(found.seconds, 1),
        keep=found.request.keep,
        max_latency_ms=found.request.latency_ms,
        max_bytes=found.request.bytes,
        recipe=str(found.bundle.path / RECIPE_FILE),
        points=tuple(sorted(_points(found), key=lambda point: -point.ms)),
    )
    return Results(
        (info,),
        tuple(rows),
        environment(),
        {
            "rounds": found.protocol.rounds,
            "round_s": found.protocol.round_s,
            "samples": quality.inputs,
            "labelled": found.metric.name == "accuracy",
        },
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        analyses={TUNING: msgspec.to_builtins(record)},
    )


def text(found: Tuned, report: Path) -> str:
    """Returns the front and the contract."""
    rows = [
        (
            "→" if each is found.chosen else "",
            f"{each.look.ms:.3g}",
            size(each.look.bytes),
            f"{each.quality.kept:.2%}",
            f"{each.quality.low:.2%} to {each.quality.high:.2%}",
            each.look.point.text(found.experts),
        )
        for each in found.sequence
    ]
    header = ("", "ms", "bytes", "kept", "95% interval", "k, experts and precision of each layer")
    quality = found.chosen.quality
    times = found.base.ms / found.chosen.look.ms
    return (
        f"{table(header, rows)}\n\n"
        f"{found.bundle.path}: {found.metric.name} kept {quality.kept:.2%}, between "
        f"{quality.low:.2%} and {quality.high:.2%} on {quality.inputs} inputs that the search did "
        f"not see;\n{found.chosen.look.ms:.3g} ms a batch, {times:.3g} times as fast as k = n in "
        f"FP32; {found.looks} graphs in {found.seconds:.0f} s\n"
        f"again: moexport export MODEL --recipe {found.bundle.path / 'recipe.yaml'} -o BUNDLE\n"
        f"report: {report / 'report.html'}"
    )


def demonstrated(progress: Progress, network: TrainedNetwork, data: LabelledData, directory: Path) -> str:
    """Returns what a search finds for a network; its bundle and report go to a demo's folder."""
    request = SearchOptions(
        keep=KEEP, threads=THREADS, precisions=("fp32", "int8"), seconds=SECONDS
    )
    place, report = directory / "tuned", directory / "tuned-report"
    progress.step(f"tuning {network.name}: {KEEP:.0%} kept")
    found = search_and_export(
        network.load(), data, place, request, work=report, force=True, progress=progress
    )
    write_findings(found, report, f"moexport demo -o {directory}")
    return text(found, report)


def _row(found: Tuned, confirmed: Confirmed, name: str, n: int) -> Row:
    look, batch = confirmed.look, found.request.batch.opt
    latency = found.latencies.get(look.point.key)
    return Row(
        ONNXRUNTIME,
        max(choice.k for _, choice in look.point.layers),
        n,
        batch,
        name,
        provider="cpu",
        precision=look.point.precision,
        lowering="+".join(sorted(set(look.lowerings.values()))),
        point=look.point.text(found.experts) if look.point.fewer else None,
        latency_ms=latency,
        throughput=None if latency is None else 1e3 * batch / latency.median,
        **_judged(found, confirmed.quality),
    )


def _judged(found: Tuned, quality: Quality, *, of_untouched: bool = False) -> dict[str, Any]:
    """Accuracy or perplexity as a row has them; nothing for other metrics."""
    score = quality.untouched if of_untouched else quality.score
    kept = 1.0 if of_untouched else quality.kept
    low, high = (1.0, 1.0) if of_untouched else (quality.low, quality.high)
    if found.metric.name == "accuracy":
        return {
            "accuracy": Accuracy(
                score, kept, quality.inputs, retention_interval=Interval(low, high)
            )
        }
    if found.metric.name == "perplexity":
        interval = Interval(low, high)
        return {"perplexity": Perplexity(score, kept, quality.tokens, retention_interval=interval)}
    return {}


def _points(found: Tuned) -> list[FrontPoint]:
    confirmed = {each.look.point.key: each.quality for each in found.sequence}
    front = {look.point.key: look for look in (*found.front, found.base)}
    chosen = found.chosen.look.point.key
    return [
        _point(
            found,
            front.get(look.point.key, look),
            confirmed,
            front=look.point.key in front,
            chosen=chosen,
        )
        for look in found.all_looks
    ]


def _point(
    found: Tuned, look: Look, confirmed: dict[str, Quality], *, front: bool, chosen: str
) -> FrontPoint:
    key, quality = look.point.key, look.quality
    held = confirmed.get(key)
    layers = tuple(
        TunedLayer(
            name,
            choice.k,
            found.experts[name],
            choice.precision,
            look.lowerings[name],
            choice.experts,
            choice.merged,
        )
        for name, choice in look.point.layers
    )
    return FrontPoint(
        ms=look.ms,
        predicted_ms=look.predicted_ms,
        bytes=look.bytes,
        kept=quality.kept,
        searched=Interval(quality.low, quality.high),
        text=look.point.text(found.experts),
        layers=layers,
        around=look.point.around,
        front=front,
        chosen=key == chosen,
        confirmed_kept=None if held is None else held.kept,
        confirmed=None if held is None else Interval(held.low, held.high),
    )
