"""The graphs of language models for `ort-cuda` in FP16: how few casts, and the library's values.

The CPU's kernels of the same ops compute the values, in FP32 with the rounding of 16 bits.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.session import SessionOptions
from moexport.plugins.token_routed.tests.architectures import (
    ARCHITECTURES,
    Library,
    save,
    transformers,
)
from moexport.tests.exporter.cuda_kernels import without_bf16_kernel

HALF = 5e-3
"""Of max|y|: the tolerance of Soft MoE networks in FP16."""

AROUND = 5
"""The casts around all layers: of the mask, the positions, both tables of angles, the outputs."""

ROUTER_AND_WEIGHTS = 2
"""The casts of a layer: its tokens for the router, and the router's weights."""

OTHER = {"muse_spark_text": 11}
"""Its experts' outputs are normalised in FP32, which takes one more cast for each of two layers."""


def ops_of(bundle: Bundle) -> Counter[str]:
    graph = onnx.load(bundle.path / "model.onnx", load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


def exported(name: str, folder: Path, **options: Any) -> Bundle:
    model = moexport.load(save(ARCHITECTURES[name], folder / "model"))
    return moexport.export(
        model, folder / "out", target="ort-cuda", **{"precision": "fp16", **options}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_router_alone_and_its_weights_are_cast(name: str, tmp_path: Path) -> None:
    bundle = exported(name, tmp_path, verify=False)
    ops, layers = ops_of(bundle), len(bundle.manifest.layers)
    assert ops["Cast"] <= OTHER.get(name, 3 * layers + 4), ops
    if name not in OTHER:
        assert ops["Cast"] <= ROUTER_AND_WEIGHTS * layers + AROUND + (name == "gpt_oss"), ops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lowering", "most"),
    [
        ("mixtral", "fused", 10),
        ("gpt_oss", "fused", 10),
        ("qwen2_moe", "fused", 11),  # its weights are no shares: their sum is also cast
        ("mixtral", "grouped", 11),  # the experts' rows are counted
    ],
)
def test_other_lowerings_cast_hardly_more(
    name: str, lowering: str, most: int, tmp_path: Path
) -> None:
    bundle = exported(name, tmp_path, lowering=lowering, verify=False)
    ops = ops_of(bundle)
    assert ops["Cast"] <= most, ops
    assert ops["MoE"] == (2 if lowering == "fused" else 0), ops


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["dense", "fused", "grouped"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_step_by_step_it_computes_what_the_library_does(
    name: str, lowering: str, tmp_path: Path
) -> None:
    """With padding before the tokens of one input, at places that attend to no others."""
    bundle = exported(name, tmp_path, lowering=lowering)
    cache = [port for port in bundle.manifest.inputs if port.name.startswith("past_key_values")]
    assert {port.dtype for port in cache} == {"float16"}
    session = bundle.session(options=SessionOptions(rounded=True))
    library = Library(ARCHITECTURES[name], tmp_path / "model")
    past: dict[str, np.ndarray] = {}
    held = transformers.DynamicCache(config=library.model.config)
    random, seen = np.random.default_rng(0), 0
    for tokens in (5, 1):
        ids, seen = random.integers(0, 61, (2, tokens)), seen + tokens
        mask = np.ones((2, seen), dtype=np.int64)
        mask[0, :2] = 0
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -tokens:]
        values = session.run({"input_ids": ids, "attention_mask": mask, **past})
        expected, _ = library(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            position_ids=torch.from_numpy(positions),
            past_key_values=held,
            use_cache=True,
        )
        shown = mask[:, -tokens:] == 1
        off = np.abs(values["logits"] - expected)[shown].max()
        assert off <= HALF * np.abs(expected).max()
        assert np.isfinite(values["logits"]).all()
        past = {
            name.replace("present", "past_key_values"): value
            for name, value in values.items()
            if name.startswith("present.")
        }


def test_a_cache_stays_fp32_where_the_graph_computes_in_fp32(tmp_path: Path) -> None:
    bundle = exported("mixtral", tmp_path, precision="fp32", verify=False)
    assert {p.dtype for p in bundle.manifest.inputs} == {"int64", "float32"}


@pytest.mark.parametrize("lowering", ["dense", "fused"])
def test_a_graph_in_bf16_has_kernels_on_a_gpu(lowering: str, tmp_path: Path) -> None:
    """Of experts whose values are limited: CUDA's Clip has no BF16."""
    bundle = exported("gpt_oss", tmp_path, precision="bf16", lowering=lowering, verify=False)
    assert without_bf16_kernel(bundle.path / "model.onnx") == set()
