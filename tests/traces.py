"""Caches traces of checkpoints, for tests that export one many times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
import pytest
from moexport.common.files import hash_files
from moexport.exporter.model import Model
from moexport.exporter.trace import trace


@contextmanager
def traced_once() -> Iterator[None]:
    """Traces a checkpoint once for all exports in the context.

    A trace does not depend on lowering, precision or target, and on k only by the configuration.
    """
    traces: dict[str, ir.Model] = {}

    def memo(
        model: Model,
        *,
        opset: int = 20,
        fixed: dict[str, int] | None = None,
        sizes: dict[str, int] | None = None,
    ) -> ir.Model:
        if not model.source.files or model.family == "factory":  # code, which has no hash
            return trace(model, opset=opset, fixed=fixed, sizes=sizes)
        sources = hash_files(model.source.files)
        what = [model.family, sources, model.config, [*model.layers], opset, fixed, sizes]
        key = json.dumps(what, sort_keys=True)
        if key not in traces:
            traces[key] = trace(model, opset=opset, fixed=fixed, sizes=sizes)
        copy = traces[key].clone()
        copy.meta.update(traces[key].meta)
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moexport.exporter.plan.trace", memo)
        patch.setattr("moexport.exporter.quantization.calibrate.trace", memo)
        patch.setattr("moexport.exporter.quantization.accuracy_search.trace", memo)
        yield
