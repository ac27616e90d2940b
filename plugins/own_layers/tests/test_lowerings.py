"""The layers of adapters, in every lowering: equal to float64, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import moexport
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from moexport.graphs.layers.base import MoELayer
from moexport.graphs.layers.stored import Layer
from moexport.graphs.lower import lower
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.lowerings.base import AnyLowering
from moexport.graphs.names import DOMAIN
from moexport.graphs.precision.types import FP32
from moexport.graphs.targets import Target
from moexport.plugins.own_layers.tests import naive
from moexport.plugins.token_routed.tests.experts_layers import InMemory
from torch import Tensor, nn
from torch.nn import functional as F

B, M, D, N, P, H, K = 3, 5, 6, 5, 2, 8, 2
EXACT = 2e-5  # of max|y|: float32 against float64
TARGET: Target = "ort-cpu"


class UpFirst(nn.Module):
    """SwiGLU with both maps in one, up before gate."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(D, 2 * H), nn.Linear(H, D)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


def pair(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    return nn.Linear(D, H, bias), nn.Linear(H, D, bias)


def three() -> tuple[nn.Linear, ...]:
    return nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, D)


def stacks(inner: int = H, biases: bool = True) -> dict[str, Any]:
    given = {"w1": torch.randn(N, D, inner) / 2, "w2": torch.randn(N, H, D) / 2}
    return given | ({"b1": torch.randn(N, inner), "b2": torch.randn(N, D)} if biases else {})


def listed(make: Callable[[], object], **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"experts": [make() for _ in range(N)], **options}


EXPERTS: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        name: listed(pair, activation=name)
        for name in ("gelu", "gelu-tanh", "relu", "silu", "relu2", "identity")
    },
    "quick gelu": listed(pair, activation="silu", alpha=1.702),
    "no biases": listed(lambda: pair(bias=False), activation="relu"),
    "swiglu": listed(three, activation="silu"),
    "geglu": listed(three, activation="gelu"),
    "geglu by tanh": listed(three, activation="gelu-tanh"),
    "reglu": listed(three, activation="relu"),
    "bilinear": listed(three, activation="identity"),
    "up before gate": listed(UpFirst),
    "gate concatenated": lambda: stacks(2 * H) | {"gate": "concatenated", "activation": "silu"},
    "gate interleaved": lambda: stacks(2 * H) | {"gate": "interleaved", "activation": "silu"},
    "one map": listed(lambda: nn.Linear(D, D)),
    "one map to another width": listed(lambda: nn.Linear(D, 9, bias=False)),
    "one map, relu": listed(lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU())),
    "one map, norm, silu": listed(
        lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.SiLU())
    ),
    "one map, stacked": lambda: {"w1": torch.randn(N, D, D), "out_activation": "gelu"},
    "norm between": listed(lambda: (nn.Linear(D, H), nn.LayerNorm(H), nn.Linear(H, D))),
    "norms after both": listed(
        lambda: (nn.Linear(D, H), nn.RMSNorm(H, eps=0.1), nn.Linear(H, D), nn.LayerNorm(D)),
        activation="relu",
    ),
    "norm after a gate": listed(lambda: (*three(), nn.RMSNorm(D, eps=0.1)), activation="silu"),
    "out activation": listed(pair, activation="relu", out_activation="silu"),
}
"""The forms of experts that descriptions accept."""

SOFT: dict[str, Callable[[], dict[str, Any]]] = {
    "temperature and bias": lambda: {"temperature": 0.7, "bias": torch.randn(N, P)},
    "layernorm, bias": lambda: {"norm": nn.LayerNorm(D, eps=1e-3), "bias": torch.randn(N * P)},
    "rmsnorm": lambda: {"norm": nn.RMSNorm(D, eps=1e-2)},
    "l2-plus, raw": lambda: {"norm": "l2-plus", "eps": 0.1, "slots_from": "raw"},
    "l2-rsqrt, gain": lambda: {"norm": "l2-rsqrt", "eps": 0.1, "gain": torch.rand(D) + 0.5},
    "layernorm, gain, shift, raw": lambda: {
        "norm": "layernorm",
        "gain": torch.rand(D) + 0.5,
        "shift": torch.randn(D),
        "slots_from": "raw",
    },
    "one slot": lambda: {"phi": torch.randn(D, N)},
}
"""Options of the router around them."""

KEPT = [K, pytest.param(N, marks=pytest.mark.slow)]

ROUTED = [
    *((form, {}) for form in EXPERTS),
    *(
        (form, {"weights_on": "input"})
        for form in ("gelu", "swiglu", "one map", "norms after both")
    ),
    *((form, {"limit": 0.5, "up_offset": 1.0}) for form in EXPERTS if form.startswith("gate ")),
]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def computed(
    layer: MoELayer, record: AnyLowering, k: int, inputs: Sequence[np.ndarray]
) -> np.ndarray:
    """The output of a graph of the layer alone."""
    spec = layer.spec
    values = [
        ir.Value(
            name=f"in{i}",
            shape=ir.Shape([None, *each.shape[1:]]),
            type=ir.TensorType(ir.DataType.from_numpy(each.dtype)),
        )
        for i, each in enumerate(inputs)
    ]
    y = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT))
    y.shape = ir.Shape([None, *inputs[0].shape[1:-1], spec.out])
    node = ir.node(spec.op_type, values, {"layer": spec.name}, domain=DOMAIN, outputs=[y])
    graph = ir.Graph(values, [y], nodes=[node], opset_imports={"": 20, DOMAIN: 1}, name="layer")
    module: Any = layer
    tensors = InMemory(module, FP32)
    stored = Layer(spec=spec, tensors=tensors, k=k, build=record.build, target=TARGET)
    made = lower(ir.Model(graph, ir_version=10), {spec.name: stored})
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    content = ir.serde.serialize_model(made.model).SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {v.name: each for v, each in zip(values, inputs, strict=True)})
    return np.asarray(found)


def assert_right_or_refused(
    layer: MoELayer, k: int, inputs: Sequence[Tensor], expected: Tensor
) -> None:
    """Every lowering of the layer's kind returns the expected output, or a reason why it cannot."""
    able = 0
    for record in lowerings_of(layer.spec.kind).values():
        why = record.problem(layer.spec, "fp32", TARGET)
        if why is not None:
            assert len(why.split()) > 4
            continue
        arrays = [each.numpy() for each in inputs]
        y = computed(layer, record, k, arrays)
        off = float(np.abs(y - expected.numpy()).max() / expected.abs().max())
        inexact = record.inexact(layer.spec, "fp32", TARGET)
        assert off < (EXACT if inexact is None else 2e-2), (record.name, off)
        able += 1
    assert able >= 3


@pytest.mark.parametrize("k", KEPT)
@pytest.mark.parametrize("options", SOFT)
@pytest.mark.parametrize("form", ["gelu", "swiglu"])
def test_a_soft_moe_with_each_router(form: str, options: str, k: int) -> None:
    check_soft_moe({"phi": torch.randn(D, N, P)} | EXPERTS[form]() | SOFT[options](), k)


@pytest.mark.parametrize("k", KEPT)
@pytest.mark.parametrize("form", EXPERTS)
def test_a_soft_moe_of_each_form_of_experts(form: str, k: int) -> None:
    check_soft_moe({"phi": torch.randn(D, N, P), "norm": "l2"} | EXPERTS[form](), k)


def check_soft_moe(arguments: dict[str, Any], k: int) -> None:
    description = moexport.SoftMoE(**arguments)
    layer, x = description.build("layer"), torch.randn(B, M, D)
    expected = naive.soft_moe(description, x.double(), k)
    assert_right_or_refused(layer, k, [x], expected)


@pytest.mark.parametrize("k", KEPT)
@pytest.mark.parametrize("form", EXPERTS)
def test_experts_that_are_given_their_slots(form: str, k: int) -> None:
    description = moexport.Experts(forward=lambda experts, x: x, **EXPERTS[form]())
    layer = description.build_for_slots("layer", P)
    slots, combine = torch.randn(B, N, P, D), torch.rand(B, M, N, P)
    expected = naive.Bank(description, k)(slots.double(), combine=combine.double())
    assert_right_or_refused(layer, k, [combine.flatten(2), slots.flatten(1, 2)], expected)


@pytest.mark.parametrize("k", KEPT)
@pytest.mark.parametrize(("form", "more"), ROUTED)
def test_experts_that_a_router_chooses(form: str, more: dict[str, Any], k: int) -> None:
    description = moexport.Experts(forward=lambda experts, x: x, **EXPERTS[form](), **more)
    layer, rows = description.build("layer", k), B * M
    x, weights = torch.randn(rows, D), torch.rand(rows, k)
    index = torch.stack([torch.randperm(N)[:k] for _ in range(rows)])
    expected = naive.Bank(description, None)(x.double(), index, weights.double())
    assert_right_or_refused(layer, k, [x, index, weights], expected)
