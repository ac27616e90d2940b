"""PyTorch and what is installed with it: a machine that only runs bundles does without them."""

from __future__ import annotations

import importlib.util

from ..errors import MissingExtraError, install

PACKAGES = {
    "torch": "PyTorch",
    "onnx_ir": "onnx-ir",
    "onnxscript": "onnxscript",
    "safetensors": "safetensors",
    "yaml": "PyYAML",
    "matplotlib": "Matplotlib",
    "PIL": "Pillow",
}
"""What requirements-run.txt leaves out of moexport's dependencies: modules and their names."""

INSTALL = (
    f"on the machine that exports, {install('cpu')}, or '.[gpu]'; run, verify, inspect, report and "
    "build work on bundles without it"
)


def check_pytorch(what: str) -> None:
    """Raises `MissingExtraError` for `what` in an environment that is for running bundles alone."""
    for module, name in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"{what} needs {name}, which is not installed", hint=INSTALL)
