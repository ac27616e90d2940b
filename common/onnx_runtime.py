"""Imports ONNX Runtime from either of its packages: the one for CPUs, or the one with CUDA.

`ort` is the imported package; importing this module without either raises `MissingExtraError`.
"""

from __future__ import annotations

import re
from functools import cache

from ..errors import MissingExtraError, install

try:
    import onnxruntime as ort
except ModuleNotFoundError:
    ort = None

INSTALL = f"{install('cpu')}, or '.[gpu]' for NVIDIA GPUs; install one of them, not both"

# Both packages install the same folder: uninstalling one of them leaves an empty folder.
if not hasattr(ort, "InferenceSession"):
    raise MissingExtraError("ONNX Runtime is not installed, or only partly", hint=INSTALL)

__all__ = ["INSTALL", "message_of", "ort", "runtime_errors"]


@cache
def runtime_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that ONNX Runtime raises."""
    state = ort.capi.onnxruntime_pybind11_state
    return (
        *(state.Fail, state.InvalidGraph, state.InvalidProtobuf, state.InvalidArgument),
        *(state.NoSuchFile, state.NotImplemented, state.RuntimeException, state.EPFail),
        UnicodeDecodeError,  # for names in a damaged graph, even within messages
    )


def message_of(error: Exception) -> str:
    """Returns the message of an ONNX Runtime error without its source locations."""
    last = (str(error).splitlines() or [""])[0].rsplit("[ONNXRuntimeError] : ", 1)[-1]
    return re.sub(r"^\d+ : \w+ : |/onnxruntime_src/\S+ (.*\) )?", "", last)
