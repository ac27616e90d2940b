"""ONNX Runtime, as moexport loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SESSION = """
import numpy as np
from moexport.common.onnx_runtime import ort
from onnx import TensorProto, helper
x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
print(session.run(None, {"x": np.ones(1, np.float32)})[0][0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="its files lie elsewhere on other systems")
def test_it_reports_to_nobody(tmp_path: Path) -> None:
    # In a continuous integration it reports nothing anyway.
    unset = ("ORT_DISABLE_TELEMETRY", "CI", "GITHUB_ACTIONS")
    folders = {"HOME": tmp_path, "XDG_CACHE_HOME": tmp_path / "cache", "TMPDIR": tmp_path / "tmp"}
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        env={name: value for name, value in os.environ.items() if name not in unset}
        | {name: str(path) for name, path in folders.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "-1.0\n", done.stderr
    # It would have made an identifier of the machine, and a database of what is to be sent.
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
