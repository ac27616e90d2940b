"""Finds the nodes outside MoE layers that always stay in FP32: routers and angles.

If experts are chosen outside their layer, the choice is an input of the layer's node. The nodes
that lead to that input, but not to the layer's tokens, are the router. If a Soft MoE layer has C
and its slots as inputs, the router is the part of the surrounding module that computes them.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ..layers.soft_moe import SoftMoESpec
from ..names import DOMAIN


def router_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Returns the nodes of a traced graph that choose experts outside the MoE layers."""
    nodes: set[ir.Node] = set()
    for node in graph:
        if node.domain == DOMAIN and len(node.inputs) > 1:
            first, *routed = node.inputs
            if node.op_type == SoftMoESpec.op_type:
                nodes |= _within(node, _leading_to(node.inputs))
            else:
                nodes |= _leading_to(routed, excluded=_leading_to([first]))
    return nodes


def angle_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Returns the nodes that compute the angles of rotary embeddings, and their cosines.

    A position times a frequency is an angle of many turns: in 16 bits its fraction of a turn is
    lost. The nodes are recognised by their inputs, positions and a frequency per column; a cosine
    of a value that depends on weights has another purpose.
    """
    nodes: set[ir.Node] = set()
    for node in graph:
        if node.domain or node.op_type not in ("Cos", "Sin"):
            continue
        before = _leading_to(node.inputs)
        read = {value for source in before for value in source.inputs if value is not None}
        if not any(_is_matrix(value) or _is_float_input(value) for value in read):
            nodes |= before | {node}
    return nodes


def _is_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or not tensor.dtype.is_floating_point():
        return False
    return sum(size != 1 for size in tensor.shape.numpy()) > 1


def _is_float_input(value: ir.Value) -> bool:
    return value.is_graph_input() and value.dtype is not None and value.dtype.is_floating_point()


def _within(layer: ir.Node, nodes: set[ir.Node]) -> set[ir.Node]:
    """Returns the nodes that belong to the module around a layer."""
    module, _, _ = layer.attributes.get_string("layer").rpartition(".")
    scopes = (f"{module}/", f"{module}.") if module else ("",)
    return {node for node in nodes if (node.name or "").startswith(scopes)}


def _leading_to(
    values: Iterable[ir.Value | None], excluded: set[ir.Node] | None = None
) -> set[ir.Node]:
    """Returns the nodes that values depend on, except for those that `excluded` depends on."""
    excluded, nodes = excluded or set(), set[ir.Node]()
    waiting = [value for value in values if value is not None]
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in nodes and node not in excluded:
            nodes.add(node)
            waiting += [value for value in node.inputs if value is not None]
    return nodes
