"""Dropped experts leave constants: every lowering and PyTorch add them as the formula says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from moexport.graphs.layers.soft_moe import SoftMoE
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.precision.types import FP32, ComputeTypes
from moexport.tests.graphs.soft_moe_layers import (
    Array,
    ConvertedTensors,
    TinyLayer,
    _expert,
    _normalised,
    lowered,
    session,
    tiny_layer,
    tokens,
    torch_module,
)

KEPT, DROPPED = (1, 2, 4), (0, 3)

RTOL = 2e-5


def by_formula(layer: TinyLayer, constants: Array, x: Array, k: int) -> Array:
    """y [b, m, o] in float64: k of the kept experts by their scores, constants for the others."""
    y = []
    for one in x.astype(np.float64):
        met = _normalised(layer, one)
        logits = np.einsum("md,dnp->mnp", met, layer.phi)
        combine = np.exp(logits - logits.max(axis=(1, 2), keepdims=True))
        combine /= combine.sum(axis=(1, 2), keepdims=True)
        dispatch = np.exp(logits - logits.max(axis=0))
        dispatch /= dispatch.sum(axis=0)
        scores = combine.sum(axis=(0, 2))
        chosen = sorted(KEPT, key=lambda e: -scores[e])[:k]
        result = np.zeros((len(one), layer.spec.out))
        for e in chosen:
            outputs = _expert(layer, e, dispatch[:, e].T @ met, lambda _, rows: rows)
            result += combine[:, e] @ outputs
        for index, e in enumerate(DROPPED):
            result += combine[:, e] @ constants[index]
        y.append(result)
    return np.stack(y)


def smaller(slots: int) -> tuple[TinyLayer, SoftMoE, Array]:
    """A layer of five experts, the same with three of them, and the constants of the others."""
    layer = tiny_layer(slots=slots)
    random = np.random.default_rng(5)
    constants = random.standard_normal((2, slots, layer.spec.out)).astype(np.float32)
    kept = torch_module(layer).with_experts(KEPT, constants)
    assert kept is not None
    return layer, kept, constants


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("lowering", list(lowerings_of("soft-moe")))
def test_every_lowering_adds_the_constants_for_every_k_and_batch(lowering: str, slots: int) -> None:
    layer, module, constants = smaller(slots)
    tensors = ConvertedTensors(module.stored(), FP32)
    fewer = replace(layer, spec=module.spec)
    for kept, k in ((3, 3), (2, 2), (None, 1)):
        running = session(lowered(fewer, lowering, kept, tensors=tensors))
        for batch, count in ((1, 9), (5, 4)):
            x = tokens(batch, count)
            feeds = {"input": x} if kept is not None else {"input": x, "k": np.array([k])}
            expected = by_formula(layer, constants, x, k)
            y = running.run(None, feeds)[0]
            assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("algorithm", ["masked", "selected"])
def test_pytorch_adds_the_constants(algorithm: str, slots: int) -> None:
    layer, module, constants = smaller(slots)
    module.algorithm = algorithm  # type: ignore[assignment]
    x = tokens(3, 5)
    for k in (1, 3):
        module.keep = k
        with torch.inference_mode():
            y = module(torch.from_numpy(x)).numpy()
        expected = by_formula(layer, constants, x, k)
        assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


def test_in_16_bits_the_constants_stay_in_32_and_the_output_is_of_16() -> None:
    layer, module, constants = smaller(3)
    half = ComputeTypes(inner=ir.DataType.FLOAT16)
    made = lowered(
        replace(layer, spec=module.spec),
        "dense",
        3,
        tensors=ConvertedTensors(module.stored(), half),
        compute=half,
        stream=ir.DataType.FLOAT16,
    )
    weights = {value.name: value.dtype for value in made.model.graph.initializers.values()}
    (name,) = (name for name in weights if name is not None and name.endswith("constants"))
    assert weights[name] == ir.DataType.FLOAT
    x = tokens(3, 5).astype(np.float16)
    y = session(made).run(None, {"input": x})[0]
    expected = by_formula(layer, constants, x.astype(np.float32), 3)
    assert y.dtype == np.float16
    assert np.abs(y - expected).max() <= 5e-3 * np.abs(expected).max()


def test_what_constants_cost_is_counted() -> None:
    _, module, _ = smaller(3)
    without = replace(module.spec, constants=False)
    own, others = (spec.macs(tokens=4, k=2)["combine"] for spec in (module.spec, without))
    assert own - others == 4 * len(DROPPED) * 3 * module.spec.out
