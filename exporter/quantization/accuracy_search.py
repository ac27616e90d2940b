"""What INT8 costs in accuracy: how sensitive each layer is, and which must stay in floats.

`--min-retention` leaves the most sensitive parts in floats until INT8 keeps what is asked of what
the model answers in FP32.
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
from ...data.feeds import (
    IGNORED,
    Feed,
    Labels,
    check_classes,
    count,
    limited,
    named_batches,
    rebatched,
)
from ...data.shards import LABEL, Fields
from ...errors import FeedError, ParityError, UsageError
from ...graphs.layers.base import algorithm_1
from ...graphs.targets import Runtime, runtime_of
from ..bundle.manifest import GraphRecord
from ..bundle.verify import checking_session
from ..inputs import Inputs, feed_inputs, fitted
from ..job import ExportJob, export_job
from ..model import Model
from ..options import AUTO, TUNE, ExportOptions, KOption, PrecisionOptions
from ..parity import cosines
from ..plan import plan
from ..reference import first_output, torch_reference
from ..trace import trace
from ..write import graph_record, opened_comparison, write_graphs
from .precision import KeptPart, Measure, Retention, quantised_parts

RANKED = 64
"""Inputs of the feed that a ranking compares."""

SAMPLES = 512
"""Inputs of a feed that retention is measured on: one of them is 0.002 of it."""

BATCH = 16


@dataclass(frozen=True, slots=True)
class LayerSensitivity:
    """What quantising one MoE layer, or the backbone's linear layers, does to the whole model.

    `cosine` is the smallest of an input's outputs with PyTorch's, `max_rel` the largest difference
    over max|y|; `routing` the share of inputs for which every layer still chose the same experts,
    `jaccard` the mean overlap of what they chose.
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

    Measured on the first `samples` inputs of a feed, `RANKED` at the most. Raises `LoweringError`
    for a layer that INT8 does not serve.
    """
    numbers = PrecisionOptions("int8")
    options = ExportOptions(k, "ort-cpu", renormalize=renormalize, precision=numbers)
    job = export_job(model, options, data=data, calibration=table)
    x = feed_inputs(model, data, min(RANKED, samples or RANKED))
    traced = trace(job.model, opset=options.opset, fixed=job.fixed)
    return Trials(job=job, traced=traced, table=table, progress=progress or Silent()).sensitivity(x)


def floats_for_retention(
    job: ExportJob, traced: ir.Model, table: CalibrationTable | None, progress: Progress
) -> Retention | None:
    """Returns the parts that stay in floats for `--min-retention`; None where it is not asked for.

    All MoE layers are tried in INT8 first, and with `--quantize all` the backbone's linear layers,
    which are given up together; then the most sensitive part goes to floats, and the next, until
    the share asked for is held on up to `SAMPLES` inputs of the feed.

    Raises what `reference_outputs` raises for inputs that do not serve, and `ParityError` where not
    even floats alone hold it.
    """
    least = job.options.precision.min_retention
    if least is None:
        return None
    trials = Trials(job=job, traced=traced, table=table, progress=progress)
    floats = job.options.precision.float_name(job.options.target)
    left, ranked = quantised_parts(job), False
    kept: list[KeptPart] = []
    with scratch_folder("retention") as folder:
        outputs = reference_outputs(job, folder, progress)
        while True:
            names = [part.name for part in kept]
            what = f"{', '.join(names)} in {floats}" if kept else "INT8"
            progress.step(f"measuring retention: {what}", total=outputs.samples, unit="inputs")
            with trials.graph(names) as (place, graph):
                session = checking_session(place, graph, runtime=trials.runtime)
                reached = outputs.retention(session, progress)
            if reached >= least:
                break
            if not left:
                raise _out_of_reach(least, reached, floats)
            if len(left) > 1 and not ranked:
                left, ranked = trials.worst_first(outputs), True
            kept.append(KeptPart(name=left.pop(0), before=reached))
    return Retention(
        asked=least,
        reached=reached,
        measure=outputs.measure,
        samples=outputs.samples,
        floats=floats,
        kept=tuple(kept),
        whole=not left,
    )


def _out_of_reach(least: float, reached: float, floats: str) -> ParityError:
    rounding = "the rounding of another runtime" if floats == "fp32" else f"{floats} itself"
    return ParityError(
        f"--min-retention {least:g}: {reached:.7g} is reached with every layer in {floats}, so "
        f"what is missing is not INT8's doing but that of {rounding}",
        hint="ask for less" + ("" if floats == "fp32" else ", or for --rest fp32"),
    )


@dataclass(frozen=True, slots=True)
class Trials:
    """The main graph of a job, written to be tried with some of its parts in floats."""

    job: ExportJob
    traced: ir.Model
    table: CalibrationTable | None
    progress: Progress

    @property
    def runtime(self) -> Runtime:
        """What runs it."""
        return runtime_of(self.job.options.target)

    @contextmanager
    def graph(self, floats: Collection[str]) -> Iterator[tuple[Path, GraphRecord]]:
        """Yields a graph and the folder that it lies in, which is removed after.

        Lowerings are not timed for it.
        """
        main = self.job.options.lowerings[0]
        options = replace(self.job.options, lowerings=(AUTO if main == TUNE else main,))
        job = replace(self.job, options=options)
        planned = plan(job, self.traced, self.table, floats=floats)
        with scratch_folder("trial") as folder:
            graph = planned.graphs[0]
            lowered = write_graphs(replace(planned, graphs=(graph,)), folder)[graph.file]
            yield folder, graph_record(graph, lowered)

    def sensitivity(
        self, x: Inputs, outputs: ReferenceOutputs | None = None
    ) -> tuple[LayerSensitivity, ...]:
        """Returns the sensitivity of each part that a job quantises on inputs x, the worst first.

        The parts are the MoE layers that do not stay in floats anyhow, and with `--quantize all`
        the backbone's linear layers, all together. Routing counts first: an input that goes to
        other experts is an error that no tolerance describes; before it only how much of `outputs`
        is retained. The model is written once a part.
        """
        parts = quantised_parts(self.job)
        self.progress.step("quantising each layer alone", total=len(parts), unit="layers")
        ranked: list[tuple[float, LayerSensitivity]] = []
        expected = torch_reference(self.job, x)  # of every precision the same
        for part in parts:
            with self.graph({*parts} - {part}) as (place, graph):
                comparison = opened_comparison(self.job, place, graph, expected)
                comparison.add(expected)
                kept = 0.0
                if outputs is not None:
                    session = checking_session(place, graph, runtime=self.runtime)
                    kept = outputs.retention(session)
            p = comparison.parity()
            layer = LayerSensitivity(
                layer=part,
                cosine=p.cosine,
                max_rel=p.max_rel,
                routing=p.routing_agreement,
                jaccard=p.jaccard,
            )
            ranked.append((kept, layer))
            self.progress.advance(1)
        ranked.sort(key=lambda pair: (pair[0], pair[1].routing, pair[1].jaccard, pair[1].cosine))
        return tuple(layer for _, layer in ranked)

    def worst_first(self, outputs: ReferenceOutputs) -> list[str]:
        """Returns the parts that may go to floats, the one that retains least alone first.

        Where several retain the same, `sensitivity` tells them apart.
        """
        batches: list[np.ndarray] = []
        for x in outputs.inputs():
            # Whole batches, where their size is fixed, of inputs that stack.
            if sum(map(len, batches)) >= RANKED or x.shape[1:] != (batches or [x])[0].shape[1:]:
                break
            batches.append(x)
        return [layer.layer for layer in self.sensitivity(np.concatenate(batches), outputs)]


@dataclass(frozen=True)
class ReferenceOutputs:
    """What PyTorch answers with Algorithm 1 at an export's k and with its edits.

    Inputs and answers lie in `folder`, batch by batch, so that neither is held in memory. The
    answers are the classes [b] or [b, m] that score highest, and for a model whose outputs are no
    class scores the outputs themselves. `labels` are the right classes, by batch, where the feed
    has them.
    """

    folder: Path
    batches: int
    samples: int
    classes: bool
    labels: tuple[Labels, ...] | None

    @property
    def measure(self) -> Measure:
        """What `retention` is."""
        if not self.classes:
            return "cosine"
        return "agreement" if self.labels is None else "accuracy"

    def inputs(self) -> Iterator[np.ndarray]:
        """Yields the inputs, batch by batch."""
        for index in range(self.batches):
            yield np.load(self._path("x", index))

    def retention(
        self, run: Callable[[np.ndarray], np.ndarray], progress: Progress | None = None
    ) -> float:
        """Returns how much of the answers another implementation of the model retains.

        With labels its accuracy over the model's own, which may pass 1; without the share of inputs
        (or tokens) that get the same class; for outputs that are no class scores the mean, over the
        inputs, of the cosine of an input's outputs with the model's. An output that is not finite
        is wrong.
        """
        kept = of = 0.0
        for index, x in enumerate(self.inputs()):
            y = run(x)
            expected = np.load(self._path("y", index))
            if not self.classes:
                kept, of = kept + float(cosines(y, expected).sum()), of + len(y)
            else:
                classes = np.where(np.isfinite(y).all(axis=-1), y.argmax(axis=-1), IGNORED - 1)
                labels = None if self.labels is None else self.labels[index]
                kept += _right(classes, expected if labels is None else labels)
                of += expected.size if labels is None else _right(expected, labels)
            if progress is not None:
                progress.advance(len(x))
        return kept / of

    def _path(self, name: str, index: int) -> Path:
        return self.folder / f"{name}-{index}.npy"


def _right(classes: np.ndarray, wanted: np.ndarray) -> int:
    return int(((classes == wanted) & (wanted != IGNORED)).sum())


@torch.no_grad()
def reference_outputs(job: ExportJob, folder: Path, progress: Progress) -> ReferenceOutputs:
    """Runs a job's model on up to `SAMPLES` inputs of its feed and returns what it answers.

    Raises `FeedError` for a feed without inputs, for inputs or labels that do not fit the model,
    and for labels of which FP32 has none right; `UsageError` for a model with one number an input.
    """
    model, data, fixed = job.model, job.options.data, dict(job.fixed)
    assert data is not None
    fixed.pop("batch", None)
    size = job.whole_batch
    total = count(data, model.input.name)
    progress.step("running FP32", total=SAMPLES if total is None else min(total, SAMPLES))
    classes = _gives_classes(model)
    name, unlabelled = model.input.name, False

    def inputs() -> Iterator[Fields]:
        for batch in named_batches(data, [name], labelled=True):
            yield batch | {name: fitted(batch[name], model.input, fixed)}

    ks = {name: k for name, k in job.k.items() if k is not None}
    renormalize = job.options.renormalize
    batches = seen = right = 0
    by_batch: list[Labels] = []
    for batch in rebatched(limited(inputs(), SAMPLES), size or BATCH):
        x, labels = batch[name], batch.get(LABEL)
        unlabelled |= labels is None
        if size is not None and len(x) < size:
            continue
        with algorithm_1(model.module, ks, renormalize=renormalize):
            y = first_output(model.module(torch.from_numpy(np.ascontiguousarray(x)))).numpy()
        if y.ndim < 2 or y[0].size < 2:
            raise UsageError(
                f"--min-retention: the model's outputs {y.shape} hold one number an input, which "
                "is neither class scores nor a direction",
                hint="--rtol bounds its error; `calibrate --sensitivity` ranks the layers",
            )
        np.save(folder / f"x-{batches}.npy", x)
        np.save(folder / f"y-{batches}.npy", y.argmax(axis=-1) if classes else y)
        if classes and not unlabelled and labels is not None:
            _check_labels(labels, y, seen)
            right += _right(y.argmax(axis=-1), labels)
            by_batch.append(labels)
        batches, seen = batches + 1, seen + len(x)
        progress.advance(len(x))
    if not batches:
        least = f"batch of {size} inputs" if size is not None else "inputs"
        raise FeedError(
            f"--data: the feed holds no {least} to measure retention on",
            hint="give at least one array; a generator, which can be read once, is empty after the "
            "ranges were taken",
        )
    if not classes or unlabelled:
        return ReferenceOutputs(
            folder=folder, batches=batches, samples=seen, classes=classes, labels=None
        )
    if not right:
        raise FeedError(
            f"--data: FP32 gets none of {seen} labels right, so there is no accuracy to retain",
            hint="are they this model's classes, counted from 0? Without labels the agreement with "
            "FP32 is measured",
        )
    return ReferenceOutputs(
        folder=folder, batches=batches, samples=seen, classes=classes, labels=tuple(by_batch)
    )


def _gives_classes(model: Model) -> bool:
    """Whether a model's outputs are class scores: [b, c], or [b, m, c] for token ids [b, m]."""
    axes = len(model.output.shape)
    ids = np.dtype(model.input.dtype).kind in "iu" and len(model.input.shape) == 2
    return axes == 2 or (axes == 3 and ids)


def _check_labels(labels: Labels, y: np.ndarray, first: int) -> None:
    if labels.shape != y.shape[:-1]:
        raise FeedError(
            f"--data: labels {labels.shape} for outputs {y.shape}",
            hint="a label is a class of an input, or for a token model the next token at each "
            "position",
        )
    counted = labels[labels != IGNORED] if labels.ndim > 1 else labels
    check_classes(counted, y.shape[-1], "--data: a batch", first=first)
