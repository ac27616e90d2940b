"""Nodes of a traced graph carry the names of their modules, whatever axes are fixed."""

from __future__ import annotations

import moexport
import pytest
from moexport.exporter.trace import trace
from moexport.graphs.precision.backbone import backbone_linears
from moexport.tests.recorded import read_case


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
