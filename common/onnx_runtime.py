"""ONNX Runtime, of which a user installs one of two packages: for CPUs alone, or with CUDA.

The name `ort` is the imported package; `MissingExtraError` where neither package is there.
"""

from __future__ import annotations

from ..errors import MissingExtraError, install

try:
    import onnxruntime as ort
except ModuleNotFoundError:
    ort = None

INSTALL = f"{install('cpu')}, or '.[gpu]' for NVIDIA GPUs; one of them, not both"

# Both packages install the same folder: removing one of two leaves an empty one behind.
if not hasattr(ort, "InferenceSession"):
    raise MissingExtraError("ONNX Runtime is not installed, or only a part of it", hint=INSTALL)

__all__ = ["INSTALL", "ort"]
