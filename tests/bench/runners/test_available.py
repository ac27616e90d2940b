"""Engines that are here compute; those that are not are named with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.bench import request
from moexport.bench.engines import KINDS
from moexport.bench.plan import select_engines
from moexport.bench.request import BenchRequest
from moexport.bench.runners.pytorch import CompiledPyTorch, PyTorch
from moexport.errors import EngineError, UsageError
from moexport.tests.recorded import read_case


@pytest.mark.slow
@pytest.mark.skipif(KINDS["pytorch-compile"].missing() is not None, reason="no C++ compiler")
def test_a_compiled_model_computes_batches_of_any_size() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU()).requires_grad_(False)
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    compiled = CompiledPyTorch(module, (2,))
    np.testing.assert_allclose(compiled.infer(x), PyTorch(module).infer(x), rtol=1e-5, atol=1e-6)


def test_engines_that_are_not_there_are_named_with_the_reason() -> None:
    selection = select_engines(BenchRequest(engine="onnxruntime").engines)
    assert [kind.name for kind in selection.present] == ["pytorch-eager", "onnxruntime"]
    reasons = {each.engine: each.reason for each in selection.absent}
    assert reasons["pytorch-algorithm-2"] == "not requested: --engine pytorch-algorithm-2"
    assert set(reasons) | {"pytorch-eager", "onnxruntime"} == set(KINDS)
    assert "tensorrt" in reasons
    with pytest.raises(UsageError, match="--engine tvm: there is no such engine"):
        BenchRequest(engine="onnxruntime,tvm").engines  # noqa: B018  asked for its error
    assert BenchRequest().engines == tuple(KINDS)


def test_a_runtime_without_a_target_is_no_engine_and_is_said_to_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request, "runtime_names", lambda: ("onnxruntime", "theirs"))
    with pytest.raises(UsageError, match="--engine theirs: a runtime that no target") as told:
        BenchRequest(engine="onnxruntime,theirs").engines  # noqa: B018  asked for its error
    assert "moexport run BUNDLE --engine theirs" in str(told.value.hint)


@pytest.mark.skipif(KINDS["tensorrt"].missing() is None, reason="TensorRT is here")
def test_a_benchmark_of_engines_that_are_not_there_is_refused_before_it_begins(
    tmp_path: Path,
) -> None:
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    with pytest.raises(EngineError, match="none of the engines can run here: tensorrt: TensorRT"):
        moexport.bench(model, engine="tensorrt", data=case.x, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


LISTED = """
import json, sys
from moexport.bench import request
from moexport.bench.engines import KINDS

names = list(KINDS)
loaded = [name for name in sys.modules if name.startswith("moexport.plugins.")]
print(json.dumps([names, loaded]))
"""


@pytest.mark.parametrize("plugins", ["", "off"])
def test_a_runtime_of_a_plugin_is_listed_without_loading_it(plugins: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTED],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MOEXPORT_PLUGINS": plugins},
    )
    names, loaded = json.loads(done.stdout)
    assert names == [name for name in KINDS if not plugins or name != "openvino"]
    assert "moexport.plugins.openvino.runtime" not in loaded
