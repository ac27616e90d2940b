"""muMoE layers with random weights, their graphs, and their formulas in float64."""

# mypy: disable-error-code="no-any-return"
# numpy types an operation on mixed operands as Any.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from moexport.exporter.families.mumoe import tensor_names
from moexport.graphs.builder import Builder
from moexport.graphs.edits import Rewrite
from moexport.graphs.gating import MuMoELayer
from moexport.graphs.layers.mumoe import FactorisedSpec, Form, MuMoE, MuMoESpec, MuMoEWeights
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.precision.types import FP32, ComputeTypes
from moexport.graphs.precision.weights import convert_weights
from moexport.tests.exporter.families.reference import Array, gelu, layer_norm, softmax
from torch import nn

FORMS: tuple[Form, ...] = ("cp", "tr", "tucker", "full")
"""The forms of a tensor with experts."""


def tensor(form: Form, levels: tuple[int, ...], d: int, o: int, *, bias: bool) -> FactorisedSpec:
    different = tuple(range(3, 3 + len(levels) + 2))
    ranks = {"cp": (7,), "tr": different, "tucker": different, "full": (), "matrix": ()}
    return FactorisedSpec(form, levels, d, o, ranks[form], bias)


def mumoe_layers(model: nn.Module) -> dict[str, MuMoE]:
    """Returns the muMoE layers of a model by module path, in module order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MuMoE)}


def name_of(spec: MuMoESpec) -> str:
    """What pytest calls a layer: its form, its levels, its gate, and what else it has."""
    marks = {
        "block": len(spec.tensors) > 1,
        "no-bias": not spec.tensors[0].bias,
        "input-norm": spec.input_norm,
    }
    levels = "x".join(map(str, spec.levels))
    more = (mark for mark, holds in marks.items() if holds)
    return "-".join((spec.form, levels, spec.norm, spec.activation, *more))


def random_layer(spec: MuMoESpec, seed: int = 0) -> MuMoE:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    norm = spec.norm == "bn"
    return MuMoE(
        spec,
        MuMoEWeights(
            tuple(draw(spec.dim, n) for n in spec.levels),
            tuple(tuple(draw(*shape) / 3 for shape in t.shapes) for t in spec.tensors),
            tuple(draw(n) for n in spec.levels) if norm else (),
            tuple(draw(n).square() + 0.5 for n in spec.levels) if norm else (),
            draw(spec.dim) if spec.input_norm else None,
            draw(spec.dim) if spec.input_norm else None,
        ),
    )


def state_of(layer: MuMoE) -> dict[str, torch.Tensor]:
    """The layer's weights under the names of a checkpoint."""
    state = {f"projs.{level}": p.data for level, p in enumerate(layer.projections)}
    if layer.spec.norm == "bn":
        for level in range(len(layer.spec.levels)):
            mean, variance = layer.statistics(level)
            state[f"bn.{level}.running_mean"] = mean
            state[f"bn.{level}.running_var"] = variance
    for index, tensor in enumerate(layer.spec.tensors):
        key, names = ("MuMoE", "MuMoE2")[index], tensor_names(tensor)
        for name, factor in zip(names, layer.factors(index), strict=True):
            state[f"{key}.{name}"] = factor.data
    return state


@dataclass(frozen=True)
class InMemory:
    """A layer's weights as a lowering finds them (`graphs.parameters.LayerTensors`)."""

    arrays: dict[str, np.ndarray]

    def has(self, name: str) -> bool:
        return name in self.arrays

    def stacked(self, name: str, *, batched: bool = False) -> ir.TensorProtocol:
        array = self.arrays[name]
        return ir.tensor(array[None] if batched else array, name=name)

    def expert(self, name: str, index: int) -> ir.TensorProtocol:
        return ir.tensor(self.arrays[name][index], name=f"{name}/{index}")


def arrays_of(layer: MuMoE, compute: ComputeTypes = FP32) -> dict[str, np.ndarray]:
    """The layer's weights as they are stored, by name."""
    return {
        part.name: np.concatenate([a.reshape(-1) for a in part.parts]).reshape(part.shape)
        for part in convert_weights(layer.stored(), compute)
    }


def graph(
    layer: MuMoE,
    kept: int | None = None,
    lowering: str | None = None,
    compute: ComputeTypes = FP32,
    tokens: int | None = None,
) -> ir.Model:
    """The layer alone as a model from `x` [b, m, d] to `output`; m is `tokens`, or any."""
    spec = layer.spec
    record = lowerings_of("mumoe")[
        lowering or ("unfactorised" if spec.form == "full" else "factorised")
    ]
    x = ir.Value(
        name="x",
        shape=ir.Shape(["b", "m" if tokens is None else tokens, spec.dim]),
        type=ir.TensorType(ir.DataType.FLOAT),
    )
    b = Builder(spec.name)
    found = MuMoELayer(
        spec,
        InMemory(arrays_of(layer, compute)),
        spec.experts if kept is None else kept,
        record.build,
        tokens=tokens,
        compute=compute,
    )
    y = record.build(b, found, x)
    y.type = ir.TensorType(ir.DataType.FLOAT)
    inner = ir.Graph(
        [x],
        [y],
        nodes=b.nodes,
        initializers=list({v.name: v for v in b.initializers}.values()),
        opset_imports={"": 20, "com.microsoft": 1},
        name="layer",
    )
    return ir.Model(inner, ir_version=10)


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    # Its own fusion of Q/DQ saturates on CPUs without VNNI.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    (y,) = session.run(None, {"x": x.astype(np.float32)})
    return np.asarray(y)


def saved(model: ir.Model, folder: Path) -> Path:
    """Writes a model to a folder and returns its path."""
    ir.save(model, folder / "layer.onnx")
    return folder / "layer.onnx"


def simplex(z: Array, power: int) -> Array:
    """Entmax15 (power 2, of logits / 2) or sparsemax (power 1), by bisection on τ."""
    low, high = z.max(-1, keepdims=True) - 1, z.max(-1, keepdims=True)
    for _ in range(80):
        middle = (low + high) / 2
        above = (np.maximum(z - middle, 0) ** power).sum(-1, keepdims=True) >= 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.maximum(z - low, 0) ** power


def formula(
    layer: MuMoE,
    x: Array,
    keep: int | None = None,
    *,
    ablated: tuple[tuple[int, int], ...] = (),
    rewrites: tuple[Rewrite, ...] = (),
) -> Array:
    """The whole weight tensor is written out and contracted, in float64.

    `ablated` are (level, expert), whose weights are taken out; `rewrites` are added by Eq. 5.
    """
    spec = layer.spec
    gates = []
    for level, projection in enumerate(layer.projections):
        z = x @ projection.double().numpy()
        if spec.norm == "bn":
            mean, variance = (t.double().numpy() for t in layer.statistics(level))
            z = (z - mean) / np.sqrt(variance + 1e-5)
        else:
            z = layer_norm(z, np.ones(z.shape[-1]), np.zeros(z.shape[-1]), 1e-5)
        a = {
            "entmax15": lambda z: simplex(z / 2, 2),
            "sparsemax": lambda z: simplex(z, 1),
            "softmax": lambda z: softmax(z, -1),
        }[spec.activation](z)
        if keep is not None and keep < a.shape[-1]:
            a = np.where(a >= np.sort(a, -1)[..., -keep, None], a, 0)
        gates.append(a)
    if layer.gain is not None and layer.shift is not None:
        x = layer_norm(x, layer.gain.double().numpy(), layer.shift.double().numpy(), 1e-5)
    for index in range(len(layer.tensors)):
        if index:
            x = gelu(x)
        factors = [f.double().numpy() for f in layer.factors(index)]
        whole = full_tensor(spec.tensors[index], factors)
        for level, expert in ablated:
            whole[(slice(None),) * level + (expert,)] = 0
        if spec.tensors[index].bias:
            x = np.concatenate([x, np.ones_like(x[..., :1])], axis=-1)
        y = whole
        for count, vector in enumerate((*gates, x)):
            y = (
                np.einsum("bmi,i...->bm...", vector, y)
                if count == 0
                else np.einsum("bmi,bmi...->bm...", vector, y)
            )
        x = y
    for rewrite in rewrites:
        alike = np.ones(x.shape[:-1])
        for level, (gate, means) in enumerate(zip(gates, rewrite.coefficients, strict=True)):
            there = [(level, e) not in ablated for e in range(len(means))]
            alike *= np.sum(gate * np.array(means) * there, axis=-1)
        x = x + rewrite.strength * alike[..., None] * np.eye(spec.out)[rewrite.output]
    return x


def full_tensor(spec: FactorisedSpec, factors: list[Array]) -> Array:
    """The weight tensor [n_1, …, n_E, d, o]; [d, o] of merged experts."""
    if spec.form in ("full", "matrix"):
        return factors[0]
    if spec.form == "tucker":
        whole, *matrices = factors
        for axis, matrix in enumerate(matrices):
            whole = np.moveaxis(np.tensordot(matrix, whole, axes=(1, axis)), 0, axis)
        return whole
    if spec.form == "cp":
        letters = "abcdefg"[: len(factors)]
        return np.einsum(",".join(f"{c}r" for c in letters) + f"->{letters}", *factors)
    whole = factors[0]  # [r, n, r']
    for core in factors[1:]:
        whole = np.tensordot(whole, core, axes=(-1, 0))
    return np.einsum("r...r->...", whole)
