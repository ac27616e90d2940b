"""The benchmark: every contestant's accuracy, routing and parity, then its latency in turn.

A plan says what will be measured; `evaluate` and `measure_heat` carry out one piece of it each;
`bench` puts the pieces together and writes what they found.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..errors import FeedError, MoexportError
from ..exporter.environment import environment
from ..exporter.model import TensorSpec
from ..graphs.layers import soft_moe_layers
from . import timing
from .data import Array, LabelledData
from .engines import (
    Contestant,
    Graph,
    PyTorch,
    Runner,
    Subject,
    contestants,
    untouched,
    with_algorithm_1,
)
from .evaluate import Closeness, Hits, Overlap
from .plan import Heat, Settings, describe, plan
from .results import (
    PYTORCH_EAGER,
    Accuracy,
    ModelInfo,
    Parity,
    Results,
    RoutingAgreement,
    Row,
    write,
)

Progress = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Prints one line of progress."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Quality:
    """How good a contestant is, whatever the batch size it is timed at.

    `routing` is None where there is nothing to compare: in PyTorch, and where all experts are kept.
    """

    accuracy: Accuracy | None
    routing: RoutingAgreement | None
    parity: Parity


def evaluate(
    runners: Mapping[Contestant, Runner],
    subject: Subject,
    data: LabelledData,
    batch: int,
    *,
    progress: Progress = lambda line: None,
) -> tuple[dict[Contestant, Quality], dict[Contestant, Exception]]:
    """Returns the quality of each contestant of a subject, and the exceptions of those that failed.

    One pass over the data. The reference of a contestant is PyTorch with its k: the untouched model
    for k = n, Algorithm 1 by masking for fewer; the edited model where the graphs are edited.
    Raises FeedError when PyTorch cannot run the data.
    """
    base = untouched(subject.model)
    references = _references(subject, {c.k for c in runners})
    sums = {contestant: _Sums() for contestant in runners}
    failures: dict[Contestant, Exception] = {}
    dense = Hits()
    for rows in data.batches(batch):
        x = data.inputs[rows]
        labels = None if data.labels is None else data.labels[rows]
        base_outputs = _reference_outputs(base, x, subject.name)
        if labels is not None:
            data.check_classes(base_outputs.shape[-1])
            dense += Hits.of(base_outputs, labels)
        expected = {k: _expected(reference, x) for k, reference in references.items()}
        for contestant, runner in runners.items():
            if contestant in failures:
                continue
            outputs, chosen = expected[contestant.k]
            whole = contestant.k == contestant.experts
            if whole and (contestant.engine == PYTORCH_EAGER or not subject.model.edits):
                outputs = base_outputs
            try:
                sums[contestant].add(runner, x, labels, outputs, chosen)
            except Exception as error:  # noqa: BLE001  the row says what failed; the others go on
                failures[contestant] = error
        progress(f"{subject.name}: accuracy and parity, {rows.stop} of {len(data)} samples")
    return {c: s.quality(dense) for c, s in sums.items() if c not in failures}, failures


def _references(subject: Subject, ks: set[int]) -> dict[int, PyTorch]:
    return {
        k: with_algorithm_1(subject.model, k, "masked", renormalize=subject.renormalize)
        for k in sorted(ks)
    }


def _expected(reference: PyTorch, x: Array) -> tuple[Array, dict[str, Array]]:
    """The outputs of a reference, and the experts of the layers that choose among theirs."""
    outputs, chosen = reference.with_routing(x)
    sizes = {name: m.spec.experts for name, m in soft_moe_layers(reference.module).items()}
    return outputs, {name: s for name, s in chosen.items() if s.shape[1] < sizes[name]}


def _reference_outputs(base: PyTorch, x: Array, name: str) -> Array:
    try:
        return base(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise FeedError(
            f"the PyTorch model {name} cannot run inputs of shape {x.shape}: {error}",
            hint="the data must fit the model that is measured",
        ) from error


class _Sums:
    """The running sums of one contestant over the batches of an evaluation."""

    def __init__(self) -> None:
        self.hits = Hits()
        self.overlap = Overlap()
        self.closeness = Closeness()

    def add(
        self,
        runner: Runner,
        x: Array,
        labels: Array | None,
        expected: Array,
        chosen: dict[str, Array],
    ) -> None:
        outputs = runner(x)
        self.closeness += Closeness.of(outputs, expected)
        if labels is not None:
            self.hits += Hits.of(outputs, labels)
        if chosen and isinstance(runner, Graph):
            selected = runner.selected(x)
            choosing = {name: experts for name, experts in selected.items() if name in chosen}
            self.overlap += Overlap.of(choosing, chosen)

    def quality(self, dense: Hits) -> Quality:
        return Quality(
            self.hits.accuracy(dense) if self.hits.seen else None,
            self.overlap.agreement() if self.overlap.samples else None,
            self.closeness.parity(),
        )


def measure_heat(
    heat: Heat,
    runners: Mapping[Contestant, Runner],
    data: LabelledData,
    *,
    progress: Progress = lambda line: None,
) -> tuple[dict[Contestant, timing.Latency], dict[Contestant, Exception]]:
    """Returns the latency of each contestant that `runners` holds, and what made others fail.

    Inputs are real: distinct batches of the data, in turn, the same for every contestant.
    """
    inputs = min(heat.protocol.inputs, math.ceil(len(data) / heat.batch))
    batches = [data.batch(i, heat.batch) for i in range(inputs)]
    protocol = replace(heat.protocol, inputs=inputs)
    by_label = {c.label: c for c in heat.contestants if c in runners}

    def timed(runner: Runner) -> timing.Contestant:
        return lambda index: runner(batches[index % inputs])

    calls = {label: timed(runners[c]) for label, c in by_label.items()}
    measured = timing.measure(
        calls, protocol, progress=lambda line: progress(f"batch {heat.batch}: {line}")
    )
    return (
        {by_label[label]: latency for label, latency in measured.latencies.items()},
        {by_label[label]: error for label, error in measured.failures.items()},
    )


def bench(
    subjects: Sequence[Subject],
    data: LabelledData,
    settings: Settings,
    *,
    out: Path | None = None,
    command: str = "",
    progress: Progress = to_stderr,
) -> Results:
    """Returns every row of a benchmark; with `out`, writes results.json, report and figures there.

    A contestant that cannot be opened, evaluated or timed becomes a row with its error. Raises
    UsageError and FeedError, before anything is opened, for what cannot be measured at all.
    """
    heats = plan(subjects, settings)
    for subject in subjects:
        check_inputs(subject.model.input, data, subject.name)
    progress(describe(heats))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with _threads(settings.threads):
        for subject in subjects:
            rows += _bench_subject(subject, heats, data, settings, progress)
        results = Results(
            models=tuple(model_info(subject) for subject in subjects),
            rows=tuple(rows),
            environment=environment() | {"threads": torch.get_num_threads()},
            protocol=_protocol(settings, data),
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    if out is not None:
        write_all(results, out)
    return results


def write_all(results: Results, out: Path) -> tuple[Path, ...]:
    """Writes results.json, report.html and the figures to a folder; returns their paths."""
    from .figures import figures
    from .report import write_report

    out.mkdir(parents=True, exist_ok=True)
    write(results, out / "results.json")
    write_report(results, out / "report.html")
    return (out / "results.json", out / "report.html", *figures(results, out))


def check_inputs(spec: TensorSpec, data: LabelledData, model: str) -> None:
    """Raises FeedError unless the data have the shape and the kind of numbers a model takes."""
    shape = data.inputs.shape
    fits = len(shape) == len(spec.shape) and all(
        isinstance(wanted, str) or wanted == size
        for wanted, size in zip(spec.shape[1:], shape[1:], strict=True)
    )
    if not fits or (data.inputs.dtype.kind == "f") != spec.dtype.startswith("float"):
        raise FeedError(
            f"array '{data.input_name}' is {data.inputs.dtype} of shape {shape}, and {model} takes "
            f"{spec.dtype} of shape ({', '.join(map(str, spec.shape))})"
        )


def model_info(subject: Subject) -> ModelInfo:
    """Returns what the report says of a model."""
    model = subject.model
    parameters = sum(p.numel() for p in model.module.parameters())
    return ModelInfo(subject.name, model.family, model.source.path, parameters)


def _bench_subject(
    subject: Subject,
    heats: Sequence[Heat],
    data: LabelledData,
    settings: Settings,
    progress: Progress,
) -> list[Row]:
    runners: dict[Contestant, Runner] = {}
    failures: dict[Contestant, Exception] = {}
    for contestant, open_it in contestants(subject).items():
        try:
            runners[contestant] = open_it()
        except Exception as error:  # noqa: BLE001  the row says what failed; the others go on
            failures[contestant] = error
    seen = _first(data, settings.samples)
    qualities, failed = evaluate(
        runners, subject, seen, settings.evaluation_batch, progress=progress
    )
    failures |= failed
    rows = []
    for heat in (h for h in heats if h.contestants[0].model == subject.name):
        alive = {c: r for c, r in runners.items() if c not in failures}
        latencies, failed = measure_heat(
            heat, alive, data, progress=lambda line: progress(f"{subject.name}, {line}")
        )
        errors = failures | failed
        for contestant in heat.contestants:
            row = _row(contestant, heat.batch, qualities, latencies, errors)
            if row.error is not None:
                progress(f"failed: {contestant.label}, batch {heat.batch}: {row.error}")
            rows.append(row)
    return rows


def _row(
    contestant: Contestant,
    batch: int,
    qualities: Mapping[Contestant, Quality],
    latencies: Mapping[Contestant, timing.Latency],
    errors: Mapping[Contestant, Exception],
) -> Row:
    identity: dict[str, Any] = asdict(contestant) | {"batch": batch}
    if contestant in errors:
        return Row(**identity, error=_in_one_line(errors[contestant]))
    quality, latency = qualities[contestant], latencies[contestant]
    return Row(
        **identity,
        latency_ms=latency,
        throughput=1000 * batch / latency.median if latency.median > 0 else None,
        accuracy=quality.accuracy,
        routing=quality.routing,
        parity=quality.parity,
    )


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, MoexportError) else f"{type(error).__name__}: {text}"


def _first(data: LabelledData, samples: int | None) -> LabelledData:
    if samples is None or samples >= len(data):
        return data
    labels = None if data.labels is None else data.labels[:samples]
    return LabelledData(data.inputs[:samples], labels, data.input_name, data.label_name)


def _protocol(settings: Settings, data: LabelledData) -> dict[str, Any]:
    return asdict(settings.protocol) | {
        "samples": min(settings.samples or len(data), len(data)),
        "labelled": data.labels is not None,
        "batches": list(settings.batches),
    }


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Sets PyTorch's thread count within the context."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
