"""Layers in 16-bit floats: the router keeps FP32, and the rest is off by 16-bit rounding alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from moexport.exporter.bundle.fp16_emulation import fp16_emulation
from moexport.graphs.precision.fp16 import lacks_headroom, misfit
from moexport.graphs.precision.types import ComputeTypes
from moexport.tests.graphs.soft_moe_layers import (
    Array,
    TinyLayer,
    lowered,
    soft_moe,
    tiny_layer,
    tokens,
)

STEP = {ir.DataType.FLOAT16: 2.0**-11, ir.DataType.BFLOAT16: 2.0**-8}
LOWERINGS = ["dense", "gather", "grouped", "conditional"]


def rounded(
    layer: TinyLayer, lowering: str, dtype: ir.DataType, folder: Path, x: Array
) -> tuple[Array, Array]:
    """The layer's output as a 16-bit engine computes it, and the experts that it chose."""
    made = lowered(layer, lowering, 2, compute=ComputeTypes(dtype), stream=dtype)
    ir.save(made.model, folder / "layer.onnx")
    twin = fp16_emulation(onnx.load(folder / "layer.onnx", load_external_data=False))
    selected = made.values["layer"].selected
    assert selected is not None
    twin.graph.output.append(_output(selected))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(twin.SerializeToString(), options)
    y, chosen = session.run(None, {"input": x})
    return y, np.sort(chosen, axis=1)


def _output(name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None)


@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_rounding_is_all_that_changes(lowering: str, dtype: ir.DataType, tmp_path: Path) -> None:
    for expert in ("mlp", "gated", "linear"):
        layer = tiny_layer(expert=expert, slots=2)
        # Tokens that 16 bits hold exactly: the graph's input is its router's input.
        x = tokens(3, 4).astype(dtype.numpy()).astype(np.float32)
        y, chosen = rounded(layer, lowering, dtype, tmp_path, x)
        expected, sets = soft_moe(layer, x, 2)
        off = np.abs(y - expected).max() / np.abs(expected).max()
        assert STEP[dtype] / 100 < off < 4 * STEP[dtype]  # rounded, and no more than that
        assert np.array_equal(chosen, sets)


def test_overflow_shows_where_there_is_any(tmp_path: Path) -> None:
    layer = tiny_layer(expert="linear", norm="none", biases=False)
    layer = replace(layer, w1=layer.w1 * 1e4)
    x = tokens(3, 4) * 10
    expected, _ = soft_moe(layer, x, 2)
    assert np.abs(expected).max() > 65504
    y, _ = rounded(layer, "grouped", ir.DataType.FLOAT16, tmp_path, x)
    assert not np.isfinite(y).all()
    y, _ = rounded(layer, "grouped", ir.DataType.BFLOAT16, tmp_path, x)
    assert np.isfinite(y).all()


def test_weights_that_a_type_cannot_hold_are_told() -> None:
    ones = np.ones(100, dtype=np.float32)
    assert misfit(ones, ir.DataType.FLOAT16) is None
    assert misfit(np.append(ones, -np.inf), ir.DataType.FLOAT16) is None  # a mask
    assert "7e+04 is above the largest FLOAT16 (6.55e+04)" in str(
        misfit(ones * 7e4, ir.DataType.FLOAT16)
    )
    assert "too small for FLOAT16" in str(misfit(ones * 1.03e-7, ir.DataType.FLOAT16))
    assert misfit(ones * 7e4, ir.DataType.BFLOAT16) is None
    assert misfit(ones * 1e-7, ir.DataType.BFLOAT16) is None


def test_a_peak_needs_headroom() -> None:
    assert lacks_headroom(40000.0, ir.DataType.FLOAT16)
    assert not lacks_headroom(30000.0, ir.DataType.FLOAT16)
    assert not lacks_headroom(1e30, ir.DataType.BFLOAT16)
