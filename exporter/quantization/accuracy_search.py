"""`--min-retention`: leaves the most harmful layers in floats until INT8 keeps what is asked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...calibration.feeds import Feed
from ...calibration.table import CalibrationTable
from ...common.console import Progress, Silent
from ...errors import ParityError, UsageError
from ...graphs.precision.types import FloatName
from ..bundle.verify import checking_session, graph_parity
from ..export import expect, trace_for
from ..inputs import feed_inputs
from ..model import Model, edited
from ..options import ExportOptions, PrecisionOptions
from ..parity import Reference
from .calibrate import CalibrationOptions
from .retention import HOST, KeptPart, Retention
from .trial import ReferenceOutputs, Trial, reference_outputs, trial


@dataclass(frozen=True, slots=True)
class LayerHarm:
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


SAMPLES = 64
"""Inputs of the feed that a ranking compares."""


def rank(
    model: Model,
    options: CalibrationOptions,
    table: CalibrationTable,
    data: Feed,
    *,
    progress: Progress | None = None,
) -> tuple[LayerHarm, ...]:
    """Returns the harm of each layer in an INT8 export for ONNX Runtime, on a feed's first inputs.

    Raises `LoweringError` for a layer that INT8 does not serve.
    """
    asked = ExportOptions(
        k=options.k,
        target="ort-cpu",
        renormalize=options.renormalize,
        numbers=PrecisionOptions(precision="int8"),
    )
    x = feed_inputs(model, data, min(SAMPLES, options.samples or SAMPLES))
    return sensitivity(model, asked, table, x, progress=progress)


def sensitivity(
    model: Model,
    options: ExportOptions,
    table: CalibrationTable | None,
    x: np.ndarray,
    *,
    traced: ir.Model | None = None,
    first_by: Callable[[Trial], float] = lambda tried: 0.0,
    workspace: Path | None = None,
    progress: Progress | None = None,
) -> tuple[LayerHarm, ...]:
    """Returns the harm of each part that `options` quantise on inputs x, the most harmful first.

    The parts are the MoE layers that do not stay in floats anyhow, and with `--quantize all` the
    backbone's linear layers, all together. Routing counts first: an input that goes to other
    experts is an error that no tolerance describes; before it only what `first_by` finds, least
    being worst. The model is written once a part to a temporary folder in `workspace`; `traced`
    is its trace (`export.trace_for`), where that is known already.
    """
    progress = progress or Silent()
    if traced is None:
        traced = trace_for(edited(model, options.edits), options)
    alone = _each_alone(options.numbers, list(model.layers))
    progress.step("quantising each layer alone", total=len(alone), unit="layers")
    harms: list[tuple[float, LayerHarm]] = []
    expected: Reference | None = None
    for name, numbers in alone.items():
        chosen = replace(options, numbers=numbers)
        with trial(model, chosen, table, traced, workspace) as tried:
            expected = expected or expect(tried.prepared, x)  # of every precision the same
            parity = graph_parity(
                tried.directory,
                tried.graph,
                expected,
                fixed_batch=options.batch.opt if options.batch.fixed else None,
                k_input=options.k == "input",
                tolerance=options.tolerance,
            )
            first = first_by(tried)
        routing, jaccard = parity.routing_agreement, parity.jaccard
        harms.append((first, LayerHarm(name, parity.cosine, parity.max_rel, routing, jaccard)))
        progress.advance(1)
    harms.sort(key=lambda each: (each[0], each[1].routing, each[1].jaccard, each[1].cosine))
    return tuple(harm for _, harm in harms)


def _each_alone(numbers: PrecisionOptions, layers: list[str]) -> dict[str, PrecisionOptions]:
    """By part of a model, the numbers that quantise it and nothing else."""
    alone = {
        name: replace(numbers, scope="experts", floating=frozenset(layers) - {name})
        for name in layers
        if name not in numbers.floating
    }
    if numbers.scope == "all":
        alone[HOST] = replace(numbers, floating=frozenset(layers))
    return alone


def with_retention(
    model: Model,
    options: ExportOptions,
    table: CalibrationTable | None,
    data: Feed | None,
    *,
    workspace: Path | None = None,
    progress: Progress | None = None,
) -> ExportOptions:
    """Returns the options with the parts in floats that INT8 would harm too much.

    All MoE layers are tried in INT8 first, and with `--quantize all` the backbone's linear layers,
    which are given up together; then the part that harms most alone goes to floats, and the next,
    until `numbers.min_retention` is held on up to `answers.SAMPLES` inputs of the feed. The options
    are returned as they are where it is not asked for.

    Raises `UsageError` without a feed, what `reference_outputs` raises for inputs that do not
    serve, and `ParityError` where not even floats alone hold it.
    """
    numbers = options.numbers
    if numbers.min_retention is None:
        return options
    if data is None:
        raise UsageError(
            f"--min-retention {numbers.min_retention:g}: it is measured on real inputs, and there "
            "are none",
            hint="give a feed with --data, with labels where there are any",
        )
    progress = progress or Silent()
    progress.step("tracing")
    untraced = edited(model, options.edits)
    traced = trace_for(untraced, options)
    with tempfile.TemporaryDirectory(prefix=".moexport-retention-", dir=workspace) as folder:
        answers = reference_outputs(untraced, options, data, Path(folder), progress)
        search = _Search(model, options, table, traced, answers, workspace, progress)
        return replace(options, numbers=search.numbers(numbers.min_retention))


class _Search:
    """The search for what stays in floats."""

    def __init__(
        self,
        model: Model,
        options: ExportOptions,
        table: CalibrationTable | None,
        traced: ir.Model,
        answers: ReferenceOutputs,
        workspace: Path | None,
        progress: Progress,
    ) -> None:
        self._model, self._options, self._table = model, options, table
        self._portable, self._answers = traced, answers
        self._workspace, self._progress = workspace, progress

    def numbers(self, asked: float) -> PrecisionOptions:
        """The numbers that hold the retention asked for, with the record of how."""
        numbers = self._options.numbers
        left = [name for name in self._model.layers if name not in numbers.floating]
        if numbers.scope == "all":
            left.append(HOST)
        kept: list[KeptPart] = []
        ranked = False
        while (reached := self._measured(numbers, kept)) < asked:
            if not left:
                raise self._out_of_reach(asked, reached)
            if len(left) > 1 and not ranked:
                left, ranked = self._by_harm(), True
            kept.append(KeptPart(left.pop(0), reached))
            numbers = _without(numbers, kept[-1].name)
        retention = Retention(
            asked=asked,
            reached=reached,
            measure=self._answers.measure,
            samples=self._answers.samples,
            floats=self._floats,
            kept=tuple(kept),
            whole=not left,
        )
        return replace(numbers, retention=retention)

    def _measured(self, numbers: PrecisionOptions, kept: list[KeptPart]) -> float:
        """The retention of an export with these numbers."""
        what = f"{', '.join(part.name for part in kept)} in {self._floats}" if kept else "INT8"
        self._progress.step(
            f"measuring retention: {what}", total=self._answers.samples, unit="inputs"
        )
        options = replace(self._options, numbers=numbers)
        with trial(self._model, options, self._table, self._portable, self._workspace) as tried:
            return self._retention(tried, self._progress)

    def _retention(self, tried: Trial, progress: Progress | None = None) -> float:
        return self._answers.retention(checking_session(tried.directory, tried.graph), progress)

    def _by_harm(self) -> list[str]:
        """The parts that may go to floats, the one that retains least alone in INT8 first.

        Where several retain the same, `sensitivity` tells them apart.
        """
        batches: list[np.ndarray] = []
        for x in self._answers.inputs():
            # Whole batches, where their size is fixed, of inputs that stack.
            if sum(map(len, batches)) >= SAMPLES or x.shape[1:] != (batches or [x])[0].shape[1:]:
                break
            batches.append(x)
        harms = sensitivity(
            self._model,
            self._options,
            self._table,
            np.concatenate(batches),
            traced=self._portable,
            first_by=self._retention,
            workspace=self._workspace,
            progress=self._progress,
        )
        return [harm.layer for harm in harms]

    @property
    def _floats(self) -> FloatName:
        return self._options.numbers.float_name(self._options.target)

    def _out_of_reach(self, asked: float, reached: float) -> ParityError:
        floats = self._floats
        rounding = "the rounding of another runtime" if floats == "fp32" else f"{floats} itself"
        return ParityError(
            f"--min-retention {asked:g}: {reached:.7g} is reached with every layer in {floats}, so "
            f"what is missing is not INT8's doing but that of {rounding}",
            hint="ask for less" + ("" if floats == "fp32" else ", or for --rest fp32"),
        )


def _without(numbers: PrecisionOptions, part: str) -> PrecisionOptions:
    """The numbers with one part less in INT8."""
    if part == HOST:
        return replace(numbers, scope="experts")
    return replace(numbers, floating=numbers.floating | {part})
