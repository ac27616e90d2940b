"""An export that is written to a temporary folder, measured, and left to go."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from ...calibration.table import CalibrationTable
from ..bundle.manifest import GraphRecord
from ..export import Prepared, graph_record, prepare, write_graphs
from ..model import Model
from ..options import AUTO, TUNE, ExportOptions


@dataclass(frozen=True)
class Trial:
    """The main graph of an export, with its weights, in `directory`."""

    directory: Path
    prepared: Prepared
    graph: GraphRecord


@contextmanager
def trial(
    model: Model,
    options: ExportOptions,
    table: CalibrationTable | None,
    portable: ir.Model,
    workspace: Path | None = None,
) -> Iterator[Trial]:
    """Yields an export's main graph, in a folder within `workspace` that is removed after.

    `portable` is what `export.traced` gave, which many trials may share. Lowerings are not timed
    for it.
    """
    main = options.lowerings[0]
    chosen = replace(options, lowerings=(AUTO if main == TUNE else main,))
    prepared = prepare(model, chosen, table, portable=portable)
    with tempfile.TemporaryDirectory(prefix=".moexport-trial-", dir=workspace) as folder:
        graph = prepared.plan.graphs[0]
        lowered = write_graphs(prepared, Path(folder))[graph.file]
        yield Trial(Path(folder), prepared, graph_record(graph, lowered, None))
