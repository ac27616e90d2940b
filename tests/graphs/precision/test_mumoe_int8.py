"""INT8 factors of a muMoE layer compute what rounding to integers gives; its gate is left alone."""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from moexport.graphs.layers.mumoe import Form, MuMoE, MuMoESpec
from moexport.graphs.names import operand_of
from moexport.graphs.precision.types import (
    ComputeTypes,
    QuantizedProducts,
    Range,
    Scale,
    WeightQuantization,
)
from moexport.graphs.precision.weights import quantize
from moexport.graphs.targets import QuantFormat
from moexport.tests.exporter.families.reference import Array, gelu, layer_norm
from moexport.tests.graphs.lowerings.test_mumoe import spec_of
from moexport.tests.graphs.mumoe_layers import arrays_of, formula, graph, name_of, random_layer, run
from moexport.tests.graphs.precision.test_weights import FORMS, rounded

LEVELS = ((8,), (8, 4))
FACTORISED: tuple[Form, ...] = ("cp", "tr", "tucker")
SPECS = [
    *(spec_of(form, levels) for form in FACTORISED for levels in LEVELS),
    *(spec_of(form, (8, 4), block=True, bias=False) for form in FACTORISED),
    spec_of("cp", (8,), block=True, norm="ln", input_norm=True),
]


class Factors:
    """A layer's formula in float64, factor by factor, and what meets each large factor."""

    def __init__(self, layer: MuMoE, quantized: QuantizedProducts | None = None) -> None:
        self.layer, self.quantized = layer, quantized
        self.arrays = {name: a.astype(np.float64) for name, a in arrays_of(layer).items()}
        self.seen: dict[str, Array] = {}

    def times(self, rows: Array, key: str) -> Array:
        """Rows times a large factor, both rounded where it is quantised."""
        self.seen[key] = rows
        weight = self.arrays[key]
        if self.quantized is not None:
            grid = self.quantized.weights
            integers, scale = quantize(weight.astype(np.float32), grid)
            weight = (integers.astype(np.float64) - grid.zero_point) * scale
            signed = self.quantized.format == "qdq"
            rows = rounded(rows, self.quantized.inputs[key], signed=signed)
        return rows @ weight

    def __call__(self, x: Array) -> Array:
        layer = copy.deepcopy(self.layer).double()
        gates = [a.numpy() for a in layer.coefficients(torch.from_numpy(x))]
        if self.layer.spec.input_norm:
            x = layer_norm(x, self.arrays["gain"], self.arrays["shift"], 1e-5)
        for index in range(len(self.layer.spec.tensors)):
            x = self.tensor(index, gates, gelu(x) if index else x)
        return x

    def tensor(self, index: int, gates: list[Array], z: Array) -> Array:
        name, spec = f"tensor.{index}", self.layer.spec.tensors[index]
        reduced = [a @ self.arrays[f"{name}.expert.{e}"] for e, a in enumerate(gates)]
        inner = self.times(z, f"{name}.input") + self.arrays.get(f"{name}.bias", 0.0)
        product = inner
        if spec.form == "cp":
            product = np.prod([inner, *reduced], axis=0)
        elif spec.form == "tr":
            product = np.eye(spec.ranks[0])
            for mode, flat in enumerate((*reduced, inner)):
                shape = (*z.shape[:-1], spec.ranks[mode], spec.ranks[mode + 1])
                product = product @ flat.reshape(shape)
            product = product.reshape(*z.shape[:-1], -1)
        else:
            core = self.times(inner, f"{name}.core")
            product = core.reshape(*z.shape[:-1], *spec.ranks[:-2], spec.ranks[-1])
            for vector in reduced:
                product = np.einsum("bmr,bmr...->bm...", vector, product)
        return self.times(product, f"{name}.output")


def int8(layer: MuMoE, x: Array, form: QuantFormat, grid: WeightQuantization) -> ComputeTypes:
    """The arithmetic with the ranges that the layer has on inputs x."""
    exact = Factors(layer)
    exact(x)

    def scale(values: Array) -> Scale:
        low, high = float(values.min()), float(values.max())
        seen = Range(low, high, low, high, values.size)
        return seen.symmetric() if form == "qdq" else seen.affine()

    scales = {key: scale(values) for key, values in exact.seen.items()}
    return ComputeTypes(quantized=QuantizedProducts(form, grid, scales))


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
@pytest.mark.parametrize(("form", "grid"), FORMS)
def test_every_form_rounds_as_written_down(
    spec: MuMoESpec, form: QuantFormat, grid: WeightQuantization
) -> None:
    layer = random_layer(spec)
    x = np.random.default_rng(1).standard_normal((3, 5, spec.dim))
    compute = int8(layer, x, form, grid)
    wanted = Factors(layer, compute.quantized)(x.astype(np.float32).astype(np.float64))
    y = run(graph(layer, compute=compute), x)
    off = np.abs(y - wanted)
    # A number half-way between two integers may go either way in float32: one step, rarely.
    assert np.median(off) <= 5e-6 * np.abs(wanted).max()
    assert off.max() <= 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
@pytest.mark.parametrize("keep", [None, 2])
def test_int8_is_close_to_the_whole_tensor(spec: MuMoESpec, keep: int | None) -> None:
    layer = random_layer(spec)
    layer.keep = keep
    x = np.random.default_rng(1).standard_normal((3, 40, spec.dim))
    exact = formula(layer, x, keep)
    assert np.abs(Factors(layer)(x) - formula(layer, x)).max() <= 1e-6 * np.abs(exact).max()
    for form, grid in FORMS:
        compute = int8(layer, x, form, grid)
        y = run(graph(layer, keep, compute=compute), x)
        assert 1e-5 < np.abs(y - exact).max() / np.abs(exact).max() < 0.05


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_large_factors_are_bytes_and_the_gate_is_not_rounded(spec: MuMoESpec) -> None:
    layer = random_layer(spec)
    x = np.random.default_rng(1).standard_normal((3, 5, spec.dim))
    for form, grid in FORMS:
        compute = int8(layer, x, form, grid)
        model = graph(layer, compute=compute)
        arrays, single = arrays_of(layer, compute), arrays_of(layer)
        for name, array in single.items():
            if operand_of(name) is None:
                assert np.array_equal(arrays[name], array)
            else:
                assert arrays[name].dtype.itemsize == 1
        used = {
            value.name
            for node in model.graph
            for value in node.inputs
            if value is not None and value.is_initializer()
        }
        assert {f"layer/{name}" for name in arrays} <= used
        rounding = {"QuantizeLinear", "MatMulInteger", "MatMulIntegerToFloat", "DequantizeLinear"}
        rounded_nodes = [n.name for n in model.graph if n.op_type in rounding]
        assert rounded_nodes
        assert all(str(name).startswith("layer/tensor.") for name in rounded_nodes)
        gates = [n for n in model.graph if str(n.name).startswith(("layer/gate", "layer/coeff"))]
        plain = [n for n in graph(layer).graph if str(n.name).startswith(("layer/gate", "layer/c"))]
        assert [n.op_type for n in gates] == [n.op_type for n in plain]
        assert isinstance(model, ir.Model)
