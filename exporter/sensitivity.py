"""Which layers INT8 harms: each quantised alone, and compared with PyTorch on real inputs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..calibration.feeds import Feed
from ..calibration.table import CalibrationTable
from .bundle import graph_parity
from .calibrate import CalibrationOptions
from .export import expect, graph_record, prepare, write_graphs
from .inputs import feed_inputs
from .model import Model
from .numbers import Numbers
from .options import ExportOptions
from .parity import Parity
from .progress import Progress, Silent


@dataclass(frozen=True, slots=True)
class LayerHarm:
    """What quantising one MoE layer alone does to the whole model.

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
    table: CalibrationTable,
    x: np.ndarray,
    *,
    workspace: Path | None = None,
    progress: Progress | None = None,
) -> tuple[LayerHarm, ...]:
    """Returns the harm of each MoE layer on inputs x, the most harmful first.

    Routing counts first: an input that goes to other experts is an error that no tolerance
    describes. `options` ask for INT8. The model is written once a layer to a temporary folder in
    `workspace`.
    """
    progress = progress or Silent()
    layers = list(model.layers)
    progress.step("quantising each layer alone", total=len(layers), unit="layers")
    harms = []
    for name in layers:
        others = frozenset(layers) - {name}
        parity = quantised_parity(model, options, table, x, others, workspace)
        harms.append(
            LayerHarm(name, parity.cosine, parity.max_rel, parity.routing_agreement, parity.jaccard)
        )
        progress.advance(1)
    return tuple(sorted(harms, key=lambda harm: (harm.routing, harm.jaccard, harm.cosine)))


def quantised_parity(
    model: Model,
    options: ExportOptions,
    table: CalibrationTable,
    x: np.ndarray,
    floating: frozenset[str],
    workspace: Path | None = None,
) -> Parity:
    """Returns how far an INT8 graph in which some layers stay in floats is from PyTorch."""
    chosen = replace(options, numbers=replace(options.numbers, floating=floating))
    prepared = prepare(model, chosen, table)
    expected = expect(prepared, x)
    with tempfile.TemporaryDirectory(prefix=".moexport-sensitivity-", dir=workspace) as folder:
        graph = prepared.plan.graphs[0]
        lowered = write_graphs(prepared, Path(folder))[graph.file]
        return graph_parity(
            Path(folder),
            graph_record(graph, lowered, None),
            expected,
            fixed_batch=options.batch.opt if options.batch.fixed else None,
            k_input=options.k == "input",
            tolerance=options.tolerance,
        )
