"""Removes what a graph does not need, after tracing and after lowering."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common


def simplify(model: ir.Model) -> None:
    """Drops identities, dead nodes, unused weights, duplicate constants and metadata, in place.

    PyTorch's exporter leaves stack traces with the paths of the machine in the metadata.
    """
    passes = ir.passes.Sequential(
        common.IdentityEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0),
        common.RemoveUnusedNodesPass(),
        common.CommonSubexpressionEliminationPass(),
        common.ClearMetadataAndDocStringPass(),
        common.RemoveUnusedOpsetsPass(),
    )
    passes(model)
    for graph in model.graphs():  # that pass leaves the notes on values where they are
        outputs = (value for node in graph for value in node.outputs)
        for value in (*graph.inputs, *graph.initializers.values(), *outputs):
            value.metadata_props.clear()
