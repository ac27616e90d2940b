"""A traced graph keeps the names of modules and the numbers of the network."""

from __future__ import annotations

import moexport
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from moexport.exporter.trace import optimise, trace
from moexport.graphs.precision.backbone import backbone_linears
from moexport.tests.recorded import read_case
from torch import Tensor, nn


@pytest.mark.slow
def test_linear_layers_are_named_after_their_modules_and_stay_so_when_the_batch_is_fixed() -> None:
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    dynamic, fixed = trace(model), trace(model, fixed={"batch": 2})
    names = [linear.key for linear in backbone_linears(dynamic.graph)]
    assert "blocks.0.attn.qkv/MatMul/input" in names
    assert "blocks.1.mlp.fc2/MatMul/input" in names
    assert "head/Gemm/input" in names
    assert names == [linear.key for linear in backbone_linears(fixed.graph)]


def test_no_two_nodes_share_a_name() -> None:
    case = read_case("mumoe_gpt2_cp")
    model = moexport.load(case.weights, config=case.config)
    names = [node.name for node in trace(model).graph]
    assert len(set(names)) == len(names)


class Norms(nn.Module):
    """Adds small numbers before it divides, and scales by numbers near one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.000004))
        self.small = nn.Parameter(torch.tensor(2e-9))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        total = x.sum(-1, keepdim=True)
        return x / (total + 1e-9), x / (total + self.small), x * self.scale, x / 0.999996 - 1e-9


def test_numbers_near_zero_and_one_stay_in_the_graph() -> None:
    x = torch.tensor([[0.0, 0.0, 0.0], [0.5, 1.5, 2.0]])
    network = Norms().eval()
    program = torch.onnx.export(network, (x,), dynamo=True, optimize=False, verbose=False)
    assert program is not None
    optimise(program.model, program.exported_program)
    assert [value.name for value in program.model.graph.inputs] == ["x"]
    session = onnxruntime.InferenceSession(ir.to_proto(program.model).SerializeToString())
    with torch.no_grad():
        expected = network.double()(x.double())
    for ours, theirs in zip(session.run(None, {"x": x.numpy()}), expected, strict=True):
        # Without them the first two are NaN, and the others are 4e-6 away.
        np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=2e-10)
