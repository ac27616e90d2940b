"""The accuracy that INT8 costs: each layer's sensitivity, and the parts that must stay in floats.

`--min-retention` leaves the most sensitive parts in floats until INT8 retains the requested share
of the FP32 model's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from ...calibration.table import CalibrationTable
from ...common.console import Progress, Silent
from ...common.writing import scratch_folder
from ...data.batches import IGNORED, LABEL, Feed, Labels, limited, rebatched
from ...data.feeds import check_classes, count, named_batches
from ...errors import FeedError, ParityError, UsageError
from ...graphs.k import KOption
from ...graphs.layers.base import algorithm_1
from ...graphs.targets import Target
from ..bundle.manifest import GraphRecord
from ..bundle.parity import cosines
from ..bundle.verify import checking_session
from ..checks.accuracy import one_per_sample, score
from ..inputs import Inputs, feed_inputs, fitted
from ..job import ExportJob, export_job
from ..model import Model
from ..options import AUTO, TUNE, ExportOptions
from ..plan import plan_traced
from ..reference import all_outputs, open_comparison, torch_reference
from ..trace import trace
from ..write import graph_record, write_graphs
from .precision import KeptPart, Measure, Retention, quantised_parts

RANKED = 64
"""The largest number of inputs that a ranking compares."""

SAMPLES = 512
"""The largest number of inputs to measure retention on: each counts for 0.002 of it."""

BATCH = 16


@dataclass(frozen=True, slots=True)
class LayerSensitivity:
    """The effect on the whole model of quantising one MoE layer, or the backbone's linear layers.

    `cosine` is the smallest cosine between an input's outputs and PyTorch's, `max_rel` the largest
    difference over max|y|; `routing` the share of inputs for which every layer chose the same
    experts, `jaccard` the mean overlap of the choices.
    """

    layer: str
    cosine: float
    max_rel: float
    routing: float
    jaccard: float


def rank(
    model: Model,
    k: KOption,
    table: CalibrationTable,
    data: Feed,
    samples: int | None = None,
    *,
    renormalize: bool = False,
    progress: Progress | None = None,
) -> tuple[LayerSensitivity, ...]:
    """Returns the sensitivity of each layer in an INT8 export for ONNX Runtime.

    It is measured on the first `samples` inputs of a feed, at most `RANKED`. Raises `LoweringError`
    for a layer that INT8 does not support.
    """
    options = ExportOptions(k=k, target="ort-cpu", renormalize=renormalize, precision="int8")
    job = export_job(model, options, data=data, calibration=table)
    x = feed_inputs(model, data, min(RANKED, samples or RANKED))
    traced = trace(job.model, opset=options.least_opset, fixed=job.fixed)
    return Trials(job=job, traced=traced, table=table, progress=progress or Silent()).sensitivity(x)


def floats_for_retention(
    job: ExportJob, traced: ir.Model, table: CalibrationTable | None, progress: Progress
) -> Retention | None:
    """Returns the parts that stay in floats for `--min-retention`; None without that option.

    At first all MoE layers are INT8, and with `--quantize all` also the backbone's linear layers,
    which count as one part; then the most sensitive part becomes floats, and so on, until the
    requested share is reached on up to `SAMPLES` inputs of the feed.

    Raises what `reference_outputs` raises for unsuitable inputs, and `ParityError` if the share
    is not reached even without INT8.
    """
    share = job.options.min_retention
    if share is None:
        return None
    trials = Trials(job=job, traced=traced, table=table, progress=progress)
    floats = job.options.float_name
    remaining, ranked = quantised_parts(job), False
    kept: list[KeptPart] = []
    with scratch_folder("retention") as folder:
        outputs = reference_outputs(job, folder, progress)
        while True:
            names = [part.name for part in kept]
            what = f"{', '.join(names)} in {floats}" if kept else "INT8"
            progress.step(f"measuring retention: {what}", total=outputs.samples, unit="inputs")
            with trials.graph(names) as (trial, graph):
                session = checking_session(trial / graph.file, trials.target, rounded=True)
                reached = outputs.retention(session, progress)
            if reached >= share:
                break
            if not remaining:
                fp32 = floats == "fp32"
                rounding = "the rounding of another runtime" if fp32 else f"{floats} itself"
                raise ParityError(
                    f"--min-retention {share:g}: it is {reached:.7g} with every layer in {floats}: "
                    f"the loss is caused by {rounding}, not by INT8",
                    hint="request a lower share" + ("" if fp32 else ", or --rest fp32"),
                )
            if len(remaining) > 1 and not ranked:
                remaining, ranked = trials.worst_first(outputs), True
            kept.append(KeptPart(name=remaining.pop(0), before=reached))
    return Retention(
        asked=share,
        reached=reached,
        measure=outputs.measure,
        samples=outputs.samples,
        floats=floats,
        kept=tuple(kept),
        whole=not remaining,
    )


@dataclass(frozen=True, slots=True)
class Trials:
    """The main graph of a job, written repeatedly with some of its parts in floats."""

    job: ExportJob
    traced: ir.Model
    table: CalibrationTable | None
    progress: Progress

    @property
    def target(self) -> Target:
        return self.job.options.target

    @contextmanager
    def graph(self, floats: Collection[str]) -> Iterator[tuple[Path, GraphRecord]]:
        """Yields a graph and its folder, which is removed afterwards.

        It is written without timing lowerings.
        """
        main = self.job.options.lowerings[0]
        options = replace(self.job.options, lowering=AUTO if main == TUNE else main)
        job = replace(self.job, options=options)
        planned = plan_traced(job, self.traced, self.table, floats=floats)
        with scratch_folder("trial") as folder:
            graph = planned.graphs[0]
            lowered = write_graphs(replace(planned, graphs=(graph,)), folder)[graph.file]
            yield folder, graph_record(graph, lowered)

    def sensitivity(
        self, x: Inputs, outputs: ReferenceOutputs | None = None
    ) -> tuple[LayerSensitivity, ...]:
        """Returns the sensitivity, on inputs x, of each part that a job quantises, worst first.

        The parts are the MoE layers that may be quantised, and with `--quantize all` the backbone's
        linear layers together. The order is by the retained share of `outputs`, if given, then by
        routing: no tolerance covers a different choice of experts. The model is written once per
        part.
        """
        parts = quantised_parts(self.job)
        self.progress.step("quantising each layer alone", total=len(parts), unit="layers")
        ranked: list[tuple[float, LayerSensitivity]] = []
        expected = torch_reference(self.job, x)  # equal for all precisions
        for part in parts:
            with self.graph({*parts} - {part}) as (folder, graph):
                comparison = open_comparison(self.job, folder, graph, expected)
                comparison.add(expected)
                share = 0.0
                if outputs is not None:
                    session = checking_session(folder / graph.file, self.target, rounded=True)
                    share = outputs.retention(session)
            p = comparison.parity()
            layer = LayerSensitivity(
                layer=part,
                cosine=p.cosine,
                max_rel=p.max_rel,
                routing=p.routing_agreement,
                jaccard=p.jaccard,
            )
            ranked.append((share, layer))
            self.progress.advance(1)
        ranked.sort(key=lambda pair: (pair[0], pair[1].routing, pair[1].jaccard, pair[1].cosine))
        return tuple(layer for _, layer in ranked)

    def worst_first(self, outputs: ReferenceOutputs) -> list[str]:
        """Returns the parts that may become floats, those with the lowest retention first.

        `sensitivity` decides between parts with equal retention.
        """
        batches: list[np.ndarray] = []
        for x in outputs.inputs():
            # Only whole batches, whose size may be fixed, of inputs with the same shape.
            if sum(map(len, batches)) >= RANKED or x.shape[1:] != (batches or [x])[0].shape[1:]:
                break
            batches.append(x)
        return [layer.layer for layer in self.sensitivity(np.concatenate(batches), outputs)]


@dataclass(frozen=True)
class ReferenceOutputs:
    """PyTorch's answers with Algorithm 1 at an export's k and with its edits.

    Inputs and answers are files in `folder`, one per batch, so that neither is held in memory. The
    answers are the classes [b] or [b, m] with the highest scores; the signs of the logits if labels
    are `attributes` [b, o]; or, for a model without class scores, its outputs. `labels` are the
    correct answers, by batch, if the feed has them.
    """

    folder: Path
    batches: int
    samples: int
    classes: bool
    labels: tuple[Labels, ...] | None
    attributes: bool = False

    @property
    def measure(self) -> Measure:
        if not self.classes:
            return "cosine"
        return "agreement" if self.labels is None else "accuracy"

    def inputs(self) -> Iterator[np.ndarray]:
        for index in range(self.batches):
            yield np.load(self._path("x", index))

    def retention(
        self, run: Callable[[np.ndarray], np.ndarray], progress: Progress | None = None
    ) -> float:
        """Returns the share of the answers that another implementation of the model retains.

        With labels this is its accuracy over the model's own, which may exceed 1; without labels,
        the share of inputs (or tokens) with the same class; for outputs that are not class scores,
        the mean, over the inputs, of the cosine between an input's outputs and the model's. Outputs
        that are not finite count as wrong.
        """
        right = total = 0.0
        for index, x in enumerate(self.inputs()):
            expected = np.load(self._path("y", index))
            y = one_per_sample(run(x), None if self.labels is None else self.labels[index])
            if not self.classes:
                right, total = right + float(cosines(y, expected).sum()), total + len(y)
            else:
                labels = expected if self.labels is None else self.labels[index]
                found = score(y, labels)
                assert found is not None, "the first batches' labels fitted"
                right, total = right + found.right, total + _count_correct(expected, labels)
            if progress is not None:
                progress.advance(len(x))
        return right / total

    def _path(self, name: str, index: int) -> Path:
        return self.folder / f"{name}-{index}.npy"


def _count_correct(classes: np.ndarray, labels: np.ndarray) -> int:
    return int(((classes == labels) & (labels != IGNORED)).sum())


def _answers(y: np.ndarray, *, attributes: bool) -> np.ndarray:
    """Returns the class with the highest score, or 0 or 1 by each logit's sign for attributes."""
    return (y > 0).astype(np.int64) if attributes else np.asarray(y.argmax(axis=-1))


def reference_outputs(job: ExportJob, folder: Path, progress: Progress) -> ReferenceOutputs:
    """Runs a job's model on up to `SAMPLES` inputs of its feed and returns its answers.

    Raises `FeedError` for a feed without inputs, for inputs or labels that do not fit the model,
    and if FP32 predicts none of the labels; `UsageError` for a model with one number per input.
    """
    # Class scores are [b, c], or [b, m, c] for token ids [b, m].
    shape, ids = job.model.output.shape, job.model.input
    has_ids = np.dtype(ids.dtype).kind in "iu" and len(ids.shape) == 2
    classes = len(shape) == 2 or (len(shape) == 3 and (has_ids or shape[1] == 1))
    classes &= shape[-1] != 1  # one number has no largest: cosines compare it
    unlabelled = attributes = False
    batches = samples = right = 0
    by_batch: list[Labels] = []
    for x, y, labels in _run_feed(job, progress):
        unlabelled |= labels is None
        if y is None:
            continue
        np.save(folder / f"x-{batches}.npy", x)
        if not batches and labels is not None:
            each_output = classes and y.ndim == 2 and labels.shape == y.shape
            attributes = each_output and bool(((labels == 0) | (labels == 1)).all())
            classes &= attributes or not each_output  # a regression's outputs are not class scores
        answers = _answers(y, attributes=attributes) if classes else y
        np.save(folder / f"y-{batches}.npy", answers)
        if classes and not unlabelled and labels is not None:
            _check_labels(labels, y, samples, attributes=attributes)
            right += _count_correct(answers, labels)
            by_batch.append(labels)
        batches, samples = batches + 1, samples + len(x)
        progress.advance(len(x))
    if not batches:
        size = job.whole_batch
        needed = f"batch of {size} inputs" if size is not None else "inputs"
        raise FeedError(
            f"--data: the feed contains no {needed} to measure retention on",
            hint="give at least one array; a generator can be read only once, and the "
            "calibration has already read it",
        )
    scored = classes and not unlabelled
    if scored and not right:
        raise FeedError(
            f"--data: FP32 predicts none of {samples} labels, so there is no accuracy to retain",
            hint="are they this model's classes, counted from 0? Without labels the agreement "
            "with FP32 is measured",
        )
    return ReferenceOutputs(
        folder=folder,
        batches=batches,
        samples=samples,
        classes=classes,
        labels=tuple(by_batch) if scored else None,
        attributes=scored and attributes,
    )


def _run_feed(
    job: ExportJob, progress: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray | None, Labels | None]]:
    """Yields the inputs of the feed in batches, the model's outputs, and labels, if any.

    Batches that are too small for the model have no outputs.
    """
    model, data, fixed = job.model, job.options.data, dict(job.fixed)
    assert data is not None
    fixed.pop("batch", None)
    name, size = model.input.name, job.whole_batch
    total = count(data, name)
    progress.step("running FP32", total=SAMPLES if total is None else min(total, SAMPLES))
    ks = {layer: k for layer, k in job.k.items() if k is not None}
    fitting = (
        batch | {name: fitted(batch[name], model.input, fixed)}
        for batch in named_batches(data, [name], labelled=True)
    )
    for batch in rebatched(limited(fitting, SAMPLES), size or BATCH):
        x, labels = batch[name], batch.get(LABEL)
        if size is not None and len(x) < size:
            yield x, None, labels
            continue
        with torch.no_grad(), algorithm_1(model.module, ks, renormalize=job.options.renormalize):
            y = all_outputs(model.module(torch.from_numpy(np.ascontiguousarray(x))))[0].numpy()
        y = one_per_sample(y, labels)
        if y.ndim < 2 or y[0].size < 2:
            raise UsageError(
                f"--min-retention: the model's outputs {y.shape} have one number per input, which "
                "is neither a set of class scores nor a direction",
                hint="--rtol bounds its error; `calibrate --sensitivity` ranks the layers",
            )
        yield x, y, labels


def _check_labels(labels: Labels, y: np.ndarray, first: int, *, attributes: bool) -> None:
    if attributes and labels.shape == y.shape:
        if not ((labels == 0) | (labels == 1)).all():
            raise FeedError(
                "--data: labels with a number per output must be 0 or 1, but the feed has others",
                hint="save all labels as 0 and 1",
            )
        return
    if labels.shape != y.shape[:-1]:
        raise FeedError(
            f"--data: labels of shape {labels.shape} do not fit outputs of shape {y.shape}",
            hint="a label is a class of an input, or for a token model the next token at each "
            "position",
        )
    counted = labels[labels != IGNORED] if labels.ndim > 1 else labels
    check_classes(counted, y.shape[-1], "--data: a batch", first=first)
