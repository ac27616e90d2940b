"""`--min-retention`: leaves the most sensitive parts in floats until INT8 keeps what is asked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...calibration.feeds import Feed
from ...calibration.table import CalibrationTable
from ...common.console import Progress, Silent
from ...errors import ParityError
from ...graphs.choices import FloatName
from ..bundle.verify import checking_session
from ..inputs import feed_inputs
from ..job import ExportJob, export_job
from ..model import Model
from ..options import ExportOptions, KOption, PrecisionOptions
from ..parity import Reference
from ..reference import torch_reference
from ..trace import trace
from ..write import opened_comparison
from .precision import KeptPart, Retention, quantised_parts
from .trial import ReferenceOutputs, Trial, reference_outputs, trial

SAMPLES = 64
"""Inputs of the feed that a ranking compares."""


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

    Measured on the first `samples` inputs of a feed, `SAMPLES` at the most. Raises `LoweringError`
    for a layer that INT8 does not serve.
    """
    asked = ExportOptions(k, "ort-cpu", renormalize=renormalize, precision=PrecisionOptions("int8"))
    job = export_job(model, asked, data=data, calibration=table)
    x = feed_inputs(model, data, min(SAMPLES, samples or SAMPLES))
    traced = trace(job.model, opset=asked.opset, fixed=job.fixed)
    return sensitivity(job, traced, table, x, progress=progress)


def sensitivity(
    job: ExportJob,
    traced: ir.Model,
    table: CalibrationTable | None,
    x: np.ndarray,
    *,
    first_by: Callable[[Trial], float] = lambda tried: 0.0,
    progress: Progress | None = None,
) -> tuple[LayerSensitivity, ...]:
    """Returns the sensitivity of each part that a job quantises on inputs x, the worst first.

    The parts are the MoE layers that do not stay in floats anyhow, and with `--quantize all` the
    backbone's linear layers, all together. Routing counts first: an input that goes to other
    experts is an error that no tolerance describes; before it only what `first_by` finds, least
    being worst. The model is written once a part to a temporary folder.
    """
    progress = progress or Silent()
    parts = quantised_parts(job)
    progress.step("quantising each layer alone", total=len(parts), unit="layers")
    found: list[tuple[float, LayerSensitivity]] = []
    expected: Reference = torch_reference(job, x)  # of every precision the same
    for part in parts:
        with trial(job, traced, table, {*parts} - {part}) as tried:
            comparison = opened_comparison(job, tried.directory, tried.graph, expected)
            comparison.add(expected)
            parity = comparison.parity()
            first = first_by(tried)
        routing, jaccard = parity.routing_agreement, parity.jaccard
        found.append(
            (first, LayerSensitivity(part, parity.cosine, parity.max_rel, routing, jaccard))
        )
        progress.advance(1)
    found.sort(key=lambda each: (each[0], each[1].routing, each[1].jaccard, each[1].cosine))
    return tuple(each for _, each in found)


def floats_for_retention(
    job: ExportJob, traced: ir.Model, table: CalibrationTable | None, progress: Progress
) -> Retention | None:
    """Returns the parts that stay in floats for `--min-retention`; None where it is not asked for.

    All MoE layers are tried in INT8 first, and with `--quantize all` the backbone's linear layers,
    which are given up together; then the most sensitive part goes to floats, and the next, until
    the share asked for is held on up to `trial.SAMPLES` inputs of the feed.

    Raises what `reference_outputs` raises for inputs that do not serve, and `ParityError` where not
    even floats alone hold it.
    """
    asked = job.options.precision.min_retention
    if asked is None:
        return None
    with tempfile.TemporaryDirectory(prefix=".moexport-retention-") as folder:
        outputs = reference_outputs(job, Path(folder), progress)
        return _Search(job, traced, table, outputs, progress).found(asked)


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for what stays in floats."""

    job: ExportJob
    traced: ir.Model
    table: CalibrationTable | None
    outputs: ReferenceOutputs
    progress: Progress

    def found(self, asked: float) -> Retention:
        """What holds the retention asked for, and how it was reached."""
        left = quantised_parts(self.job)
        kept: list[KeptPart] = []
        ranked = False
        while (reached := self._measured(kept)) < asked:
            if not left:
                raise self._out_of_reach(asked, reached)
            if len(left) > 1 and not ranked:
                left, ranked = self._by_sensitivity(), True
            kept.append(KeptPart(left.pop(0), reached))
        return Retention(
            asked=asked,
            reached=reached,
            measure=self.outputs.measure,
            samples=self.outputs.samples,
            floats=self._floats,
            kept=tuple(kept),
            whole=not left,
        )

    def _measured(self, kept: list[KeptPart]) -> float:
        """The retention of an export with these parts in floats."""
        names = [part.name for part in kept]
        what = f"{', '.join(names)} in {self._floats}" if kept else "INT8"
        total = self.outputs.samples
        self.progress.step(f"measuring retention: {what}", total=total, unit="inputs")
        with trial(self.job, self.traced, self.table, names) as tried:
            return self._retention(tried, self.progress)

    def _retention(self, tried: Trial, progress: Progress | None = None) -> float:
        return self.outputs.retention(checking_session(tried.directory, tried.graph), progress)

    def _by_sensitivity(self) -> list[str]:
        """The parts that may go to floats, the one that retains least alone in INT8 first.

        Where several retain the same, `sensitivity` tells them apart.
        """
        batches: list[np.ndarray] = []
        for x in self.outputs.inputs():
            # Whole batches, where their size is fixed, of inputs that stack.
            if sum(map(len, batches)) >= SAMPLES or x.shape[1:] != (batches or [x])[0].shape[1:]:
                break
            batches.append(x)
        found = sensitivity(
            self.job,
            self.traced,
            self.table,
            np.concatenate(batches),
            first_by=self._retention,
            progress=self.progress,
        )
        return [each.layer for each in found]

    @property
    def _floats(self) -> FloatName:
        options = self.job.options
        return options.precision.float_name(options.target)

    def _out_of_reach(self, asked: float, reached: float) -> ParityError:
        floats = self._floats
        rounding = "the rounding of another runtime" if floats == "fp32" else f"{floats} itself"
        return ParityError(
            f"--min-retention {asked:g}: {reached:.7g} is reached with every layer in {floats}, so "
            f"what is missing is not INT8's doing but that of {rounding}",
            hint="ask for less" + ("" if floats == "fp32" else ", or for --rest fp32"),
        )
