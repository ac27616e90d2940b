"""Who runs a graph."""

from __future__ import annotations

from typing import Literal

Target = Literal["onnx", "ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx"]
"""Who runs the graph. `onnx` means standard ONNX ops alone, so that any runtime can."""
