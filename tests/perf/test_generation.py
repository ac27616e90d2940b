"""The benchmark of generated text: every engine has PyTorch's tokens, and the tables say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.common.console import Silent
from moexport.perf.generation import benchmark
from moexport.perf.generation.engines import (
    EngineName,
    GenAIEngine,
    LlamaCppEngine,
    OpenVinoGenAIEngine,
    TextCase,
    TextEngine,
    TransformersEngine,
    missing,
)
from moexport.perf.generation.gguf_files import write_gguf
from moexport.perf.measure import keep, kept
from moexport.plugins.text.tests.test_generation import text_model
from safetensors.torch import load_file

NEW = 6
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
OF: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "mixtral": SIZES,
}


def made(engine: EngineName, name: str, place: Path) -> TextEngine:
    reason = missing(engine)
    if reason is not None:
        pytest.skip(reason)
    folder = text_model(name, place / "model", **OF[name])
    if engine == "transformers":
        return TransformersEngine(TextCase(engine, "fp32", 2, folder, 1))
    if engine == "llama.cpp":
        write_gguf(folder, place / "model.gguf", "F32")
        return LlamaCppEngine(TextCase(engine, "F32", 2, place / "model.gguf", 1))
    if engine == "openvino-genai":
        benchmark.convert_for_openvino(folder, place / "openvino", "fp32")
        return OpenVinoGenAIEngine(TextCase(engine, "fp32", 2, place / "openvino", 1))
    options: dict[str, Any] = {"target": "ort-cpu", "verify": False}
    bundle = moexport.export(moexport.load(folder), place / "out", **options)
    return GenAIEngine(TextCase(engine, "fp32", 2, bundle.path, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OF))
@pytest.mark.parametrize("engine", ["genai", "llama.cpp", "openvino-genai"])
def test_an_engine_scores_text_as_transformers_does(
    engine: EngineName, name: str, tmp_path: Path
) -> None:
    """llama.cpp keeps keys and values in 16 bits, OpenVINO may compute in BF16: off by that."""
    ids = np.random.default_rng(0).integers(0, 300, 40)
    wanted = made("transformers", name, tmp_path / "untouched").logits(ids)
    found = made(engine, name, tmp_path).logits(ids)
    assert found.shape == wanted.shape == (40, 304)
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < {"genai": 1e-5, "llama.cpp": 5e-3, "openvino-genai": 2e-2}[engine]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["genai", "llama.cpp", "openvino-genai", "transformers"])
def test_a_step_is_the_next_token_of_every_prompt(engine: EngineName, tmp_path: Path) -> None:
    """With what it keeps of earlier tokens, and without."""
    opened = made(engine, "mixtral", tmp_path)
    prompts = np.random.default_rng(1).integers(0, 300, (2, 9))
    found, seconds = opened.generate(prompts, NEW)
    texts = prompts
    for _ in range(NEW):
        best = [opened.logits(text)[-1].argmax() for text in texts]
        texts = np.concatenate([texts, np.array(best)[:, None]], axis=1)
    assert found.tolist() == texts[:, -NEW:].tolist()
    assert len(seconds) == NEW and min(seconds) > 0


def test_a_gguf_holds_the_rows_of_the_checkpoint(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf, which writes these files, is not installed")
    folder = text_model("mixtral", tmp_path / "model", **OF["mixtral"])
    write_gguf(folder, tmp_path / "model.gguf", "Q4_0")
    tensors = {each.name: each for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}

    def read(name: str) -> np.ndarray:
        found = tensors[f"{name}.weight"]
        values: np.ndarray = gguf.quants.dequantize(found.data, found.tensor_type)
        return values

    layer = "model.layers.0"
    weights = load_file(folder / "model.safetensors")
    gate = torch.from_numpy(read("blk.0.ffn_gate_exps"))
    for expert, found in enumerate(gate):
        row = weights[f"{layer}.block_sparse_moe.experts.{expert}.w1.weight"]
        assert (found - row).norm() < 0.15 * row.norm()
    router = weights[f"{layer}.block_sparse_moe.gate.weight"]
    np.testing.assert_array_equal(read("blk.0.ffn_gate_inp"), router.numpy())
    keys = weights[f"{layer}.self_attn.k_proj.weight"]
    second = torch.from_numpy(read("blk.0.attn_k"))[1]  # beside the one that is turned with it
    assert int((keys - second).norm(dim=1).argmin()) == SIZES["head_dim"] // 2


@pytest.mark.slow
def test_it_runs_whole_at_tiny_sizes_and_its_tables_tell_all(tmp_path: Path) -> None:
    sizes = replace(
        benchmark.QUICK,
        speed=(benchmark.SpeedCase(layers=1, graphs=(("int4", 8),), batches=(2,)),),
        ks=(4,),
    )
    keep(tmp_path / "kept.json", "generation", **benchmark.measure(Silent(), sizes))
    body = kept(tmp_path / "kept.json")
    engines = {"genai", *(name for name in benchmark.PEERS if missing(name) is None)}
    (speed,) = body["speed"]
    assert {row["engine"] for row in speed["rows"]} == engines
    assert {(row["batch"], row["context"]) for row in speed["rows"]} == {(1, 8), (1, 40), (2, 8)}
    exact = next(row for row in body["quality"] if row["precision"] == "fp32")
    assert exact["same_token"] == 1.0
    assert "| moexport in GenAI | int4 | 8 |" in benchmark.table(body)


def test_the_tables_compare_with_the_peers_that_were_measured(tmp_path: Path) -> None:
    def row(engine: str, precision: str, seconds: float) -> dict[str, object]:
        identity = {"engine": engine, "precision": precision, "k": 8}
        times = {"first_s": 10 * seconds, "token_s": seconds}
        return {**identity, **times, "batch": 1, "context": 128}

    rows = [row("genai", "int4", 0.002), row("llama.cpp", "Q4_0", 0.003)]
    quality = [
        {"engine": "genai", "precision": "int4", "k": 4, "perplexity": 7.5, "same_token": 0.875}
        | {"tokens": 1000}
    ]
    figures: dict[str, object] = {
        "speed": [{"layers": 8, "parameters": 10**9, "rows": rows}],
        "quality": quality,
        "shape": benchmark.SHAPE,
        "threads": 2,
        "engines": {"llama-cpp-python": "0.3"},
        "absent": {"openvino-genai": "not installed: openvino_genai"},
    }
    keep(tmp_path / "kept.json", "generation", **figures)
    table = benchmark.table(kept(tmp_path / "kept.json"))
    assert "| moexport in GenAI | int4 | 8 | 20 | 500.0 |" in table
    assert "| llama.cpp | 8 | int4 | first token | 1.50 |" in table
    assert "openvino-genai was not installed" in table
    assert "| moexport in GenAI | int4 | 4 | 7.500 | 87.5% |" in table
    assert "llama-cpp-python 0.3" in table
