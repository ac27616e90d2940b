"""What an older PyTorch or transformers cannot do is told with what can: run by `make compat`."""

from __future__ import annotations

from pathlib import Path

import pytest
from moexport.common.libraries import ROUTED_WEIGHTS, TRACES, older
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save
from moexport.tests.command import run
from moexport.tests.exporter.families.test_cache import checkpoint

__all__ = ["checkpoint"]  # a fixture


@pytest.mark.skipif(not older("torch", (2, 11)), reason="this PyTorch is new enough")
def test_the_exporter_of_transformers_asks_for_a_newer_pytorch(tmp_path: Path) -> None:
    folder = save(ARCHITECTURES["olmoe"], tmp_path / "model")
    outcome = run("export", folder, "-o", tmp_path / "out")
    assert outcome.code == 1
    assert "torch>=2.11" in outcome.error
    assert "PyTorch 2.11 or newer" in outcome.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not older("torch", TRACES), reason="this PyTorch is new enough")
def test_a_network_with_a_cache_asks_for_a_newer_pytorch(checkpoint: Path, tmp_path: Path) -> None:
    outcome = run("export", checkpoint, "--set", "use_cache=true", "-o", tmp_path / "out")
    assert outcome.code == 1
    assert "PyTorch cannot trace this mumoe-gpt2 model" in outcome.error
    assert "pip install 'torch>=2.13', or export without a cache" in outcome.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not older("onnxruntime", ROUTED_WEIGHTS), reason="ONNX Runtime is new enough")
def test_the_fused_op_for_integers_asks_for_a_newer_onnx_runtime(tmp_path: Path) -> None:
    if older("torch", (2, 11)):
        pytest.skip("this PyTorch traces no model of transformers")
    folder = save(ARCHITECTURES["mixtral"], tmp_path / "model")
    asked = ("--precision", "int8", "--target", "ort-cpu", "--lowering", "fused")
    outcome = run("export", folder, "-o", tmp_path / "out", *asked)
    assert outcome.code == 1
    assert "accepts routing weights only in ONNX Runtime 1.31 and later" in outcome.error
