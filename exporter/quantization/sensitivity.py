"""Which layers INT8 harms: each quantised alone, and compared with PyTorch on real inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...calibration.feeds import Feed
from ...calibration.table import CalibrationTable
from ...common.progress import Progress, Silent
from ..bundle.bundle import graph_parity
from ..edited import edited
from ..export import expect, traced
from ..inputs import feed_inputs
from ..model import Model
from ..numbers import Numbers
from ..options import ExportOptions
from ..parity import Reference
from .calibrate import CalibrationOptions
from .exporter_trial import Trial, trial
from .retention import HOST


@dataclass(frozen=True, slots=True)
class LayerHarm:
    """What quantising one MoE layer, or the host's linear layers, alone does to the whole model.

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
        numbers=Numbers(precision="int8"),
    )
    x = feed_inputs(model, data, min(SAMPLES, options.samples or SAMPLES))
    return sensitivity(model, asked, table, x, progress=progress)


def sensitivity(
    model: Model,
    options: ExportOptions,
    table: CalibrationTable | None,
    x: np.ndarray,
    *,
    portable: ir.Model | None = None,
    first_by: Callable[[Trial], float] = lambda tried: 0.0,
    workspace: Path | None = None,
    progress: Progress | None = None,
) -> tuple[LayerHarm, ...]:
    """Returns the harm of each part that `options` quantise on inputs x, the most harmful first.

    The parts are the MoE layers that do not stay in floats anyhow, and with `--quantize all` the
    host's linear layers, all together. Routing counts first: an input that goes to other experts is
    an error that no tolerance describes; before it only what `first_by` finds, least being worst.
    The model is written once a part to a temporary folder in `workspace`; `portable` is its trace
    (`export.traced`), where that is known already.
    """
    progress = progress or Silent()
    if portable is None:
        portable = traced(edited(model, options.edits), options)
    alone = _each_alone(options.numbers, list(model.layers))
    progress.step("quantising each layer alone", total=len(alone), unit="layers")
    harms: list[tuple[float, LayerHarm]] = []
    expected: Reference | None = None
    for name, numbers in alone.items():
        chosen = replace(options, numbers=numbers)
        with trial(model, chosen, table, portable, workspace) as tried:
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


def _each_alone(numbers: Numbers, layers: list[str]) -> dict[str, Numbers]:
    """By part of a model, the numbers that quantise it and nothing else."""
    alone = {
        name: replace(numbers, scope="experts", floating=frozenset(layers) - {name})
        for name in layers
        if name not in numbers.floating
    }
    if numbers.scope == "all":
        alone[HOST] = replace(numbers, floating=frozenset(layers))
    return alone
