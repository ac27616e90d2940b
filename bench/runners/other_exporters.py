"""Graphs of another exporter, `transformers`, for comparison."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from ...common.writing import scratch_folder
from ...errors import MoexportError, TraceError, one_line
from ...exporter.bundle.manifest import METADATA
from ...exporter.model import Model
from ...exporter.trace import trace
from ..engines import KINDS, TRANSFORMERS_ONNX, GraphEngine
from ..plan import Candidate, GraphSource
from .base import GraphFile, Refused

GRAPH, WEIGHTS = "model.onnx", "weights.bin"


@contextmanager
def with_other_exporters(candidate: Candidate, threads: int | None) -> Iterator[Candidate]:
    """Yields a candidate with the requested graphs of other exporters, in FP32.

    The graphs have the largest k, in a temporary folder. A failure becomes a row with the reason.
    """
    if TRANSFORMERS_ONNX not in candidate.engines or not candidate.jobs_by_k:
        yield candidate
        return
    with scratch_folder("bench") as folder:
        k = max(candidate.jobs_by_k)
        kind, loader = KINDS[TRANSFORMERS_ONNX], None
        assert isinstance(kind, GraphEngine)
        try:
            file = library_graph(candidate.model, candidate.k_by_layer(k), folder)
            loader = kind.loader(GraphFile(path=file, threads=threads))
        except MoexportError as error:
            loader = Refused(error)
        except Exception as error:  # noqa: BLE001  experimental, so it may fail in any way
            loader = Refused(TraceError(f"transformers cannot export the model: {one_line(error)}"))
        source = GraphSource(k, "", loader, engine=TRANSFORMERS_ONNX)
        yield replace(candidate, graphs=(*candidate.graphs, source))


def library_graph(model: Model, k: Mapping[str, int], folder: Path) -> Path:
    """Writes the graph that `transformers` exports from its model; returns its file."""
    network = model.host.in_form(model, k, None)
    folding = logging.getLogger("onnxscript.optimizer")  # logs every constant that it does not fold
    level = folding.level
    folding.setLevel(logging.ERROR)
    try:
        graph = trace(replace(model, module=network, original=None))
    finally:
        folding.setLevel(level)
    defaults = {spec.name: spec.default for spec in model.inputs if spec.default is not None}
    # Its inputs have the same names as ours and are filled in the same way.
    graph.metadata_props[METADATA] = json.dumps({"layers": {}, "defaults": defaults})
    ir.save(graph, folder / GRAPH, external_data=WEIGHTS)
    return folder / GRAPH
