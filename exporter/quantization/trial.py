"""The outputs of a model in FP32 on a feed, how much of them a graph retains, and graphs to try."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from ...calibration.feeds import (
    IGNORED,
    Labels,
    check_classes,
    count,
    labelled_batches,
    limited,
    rebatched,
)
from ...calibration.table import CalibrationTable
from ...common.console import Progress
from ...errors import FeedError, UsageError
from ...graphs.layers.base import algorithm_1
from ..bundle.manifest import GraphRecord
from ..inputs import fitted
from ..job import ExportJob
from ..model import Model
from ..options import AUTO, TUNE
from ..parity import cosines
from ..plan import plan
from ..reference import first_output
from ..write import graph_record, write_graphs
from .precision import Measure

SAMPLES = 512
"""Inputs of a feed that are taken, where it has so many: one of them is 0.002 of a retention."""

BATCH = 16


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
                found = np.where(np.isfinite(y).all(axis=-1), y.argmax(axis=-1), IGNORED - 1)
                labels = None if self.labels is None else self.labels[index]
                kept += _right(found, expected if labels is None else labels)
                of += expected.size if labels is None else _right(expected, labels)
            if progress is not None:
                progress.advance(len(x))
        return kept / of

    def _path(self, name: str, index: int) -> Path:
        return self.folder / f"{name}-{index}.npy"


def _right(found: np.ndarray, wanted: np.ndarray) -> int:
    return int(((found == wanted) & (wanted != IGNORED)).sum())


@torch.no_grad()
def reference_outputs(job: ExportJob, folder: Path, progress: Progress) -> ReferenceOutputs:
    """Runs a job's model on up to `SAMPLES` inputs of its feed and returns what it answers.

    Raises `FeedError` for a feed without inputs, for inputs or labels that do not fit the model,
    and for labels of which FP32 has none right; `UsageError` for a model with one number an input.
    """
    model, data, fixed = job.model, job.options.data, dict(job.fixed)
    assert data is not None
    size = fixed.pop("batch", None)
    total = count(data, model.input.name)
    progress.step("running FP32", total=SAMPLES if total is None else min(total, SAMPLES))
    classes = _gives_classes(model)
    labels: list[np.ndarray] = []
    unlabelled = False

    def inputs() -> Iterator[np.ndarray]:
        nonlocal unlabelled
        for x, theirs in labelled_batches(data, model.input.name):
            unlabelled |= theirs is None
            labels.extend([] if theirs is None else theirs)
            yield fitted(x, model.input, fixed)

    ks = {name: k for name, k in job.k.items() if k is not None}
    batches = seen = right = 0
    by_batch: list[Labels] = []
    for x in rebatched(limited(inputs(), SAMPLES), size or BATCH):
        if size is not None and len(x) < size:
            continue
        y = _run(model, x, ks, renormalize=job.options.renormalize)
        _check_outputs(y)
        np.save(folder / f"x-{batches}.npy", x)
        np.save(folder / f"y-{batches}.npy", y.argmax(axis=-1) if classes else y)
        if classes and not unlabelled:
            part = np.stack(labels[seen : seen + len(x)])
            _check_labels(part, y, seen)
            right += _right(y.argmax(axis=-1), part)
            by_batch.append(part)
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
        return ReferenceOutputs(folder, batches, seen, classes, None)
    if not right:
        raise FeedError(
            f"--data: FP32 gets none of {seen} labels right, so there is no accuracy to retain",
            hint="are they this model's classes, counted from 0? Without labels the agreement with "
            "FP32 is measured",
        )
    return ReferenceOutputs(folder, batches, seen, classes, tuple(by_batch))


def _gives_classes(model: Model) -> bool:
    """Whether a model's outputs are class scores: [b, c], or [b, m, c] for token ids [b, m]."""
    axes = len(model.output.shape)
    return axes == 2 or (axes == 3 and np.dtype(model.input.dtype).kind in "iu")


def _run(model: Model, x: np.ndarray, ks: Mapping[str, int], *, renormalize: bool) -> np.ndarray:
    with algorithm_1(model.module, dict(ks), renormalize=renormalize):
        return first_output(model.module(torch.from_numpy(np.ascontiguousarray(x)))).numpy()


def _check_outputs(y: np.ndarray) -> None:
    if y.ndim < 2 or y[0].size < 2:
        raise UsageError(
            f"--min-retention: the model's outputs {y.shape} hold one number an input, which is "
            "neither class scores nor a direction",
            hint="--rtol bounds its error; `calibrate --sensitivity` ranks the layers",
        )


def _check_labels(labels: Labels, y: np.ndarray, first: int) -> None:
    if labels.shape != y.shape[:-1]:
        raise FeedError(
            f"--data: labels {labels.shape} for outputs {y.shape}",
            hint="a label is a class of an input, or for a token model the next token at each "
            "position",
        )
    counted = labels[labels != IGNORED] if labels.ndim > 1 else labels
    check_classes(counted, y.shape[-1], "--data: a batch", first=first)


@dataclass(frozen=True)
class Trial:
    """The main graph of an export, with its weights, in `directory`."""

    directory: Path
    graph: GraphRecord


@contextmanager
def trial(
    job: ExportJob, traced: ir.Model, table: CalibrationTable | None, floats: Collection[str]
) -> Iterator[Trial]:
    """Yields a job's main graph with some parts in floats, in a folder that is removed after.

    Lowerings are not timed for it.
    """
    main = job.options.lowerings[0]
    options = replace(job.options, lowerings=(AUTO if main == TUNE else main,))
    planned = plan(replace(job, options=options), traced, table, floats=floats)
    with tempfile.TemporaryDirectory(prefix=".moexport-trial-") as folder:
        graph = planned.graphs[0]
        lowered = write_graphs(planned, Path(folder))[graph.file]
        yield Trial(Path(folder), graph_record(graph, lowered))
