"""Compares the precision that was built with the one that was asked for."""

from __future__ import annotations

from ...errors import EngineError
from ..bundle.manifest import GraphRecord, Manifest
from .engines_build import Built


def check_precision(manifest: Manifest, graph: GraphRecord, built: Built) -> None:
    """Raises `EngineError` where a MoE layer's experts do not compute in the bundle's precision.

    The router stays in FP32 at every precision, so only the experts' products are looked at.
    """
    for layer in manifest.layers:
        wanted = layer.precision
        found = {
            each["precision"] for each in built.layers if f"{layer.name}/experts/" in each["name"]
        }
        if found and found != {wanted}:
            raise EngineError(
                f"{graph.file}: the experts of layer {layer.name} were asked for in {wanted} and "
                f"built in {', '.join(sorted(found))}",
                hint="export again with this --target and --precision, or another --lowering",
            )
