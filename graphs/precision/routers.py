"""What chooses experts in the network around a MoE layer: it keeps FP32, whatever else does not.

A layer whose choice is made around it takes what was chosen as inputs of its node. The nodes that
lead to those inputs, and not to the layer's tokens, are its router. Of a Soft MoE layer that
is given C and its slots it is what the module around the layer computes for them.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ..layers.soft_moe import SoftMoESpec
from ..names import DOMAIN


def router_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Returns the nodes of a traced graph that choose experts for layers they are not part of."""
    nodes: set[ir.Node] = set()
    for node in graph:
        if node.domain == DOMAIN and len(node.inputs) > 1:
            first, *routed = node.inputs
            if node.op_type == SoftMoESpec.op_type:
                nodes |= _within(node, _leading_to(node.inputs))
            else:
                nodes |= _leading_to(routed, beside=_leading_to([first]))
    return nodes


def _within(layer: ir.Node, nodes: set[ir.Node]) -> set[ir.Node]:
    """Those of the nodes that the module around a layer made."""
    around, _, _ = layer.attributes.get_string("layer").rpartition(".")
    scopes = (f"{around}/", f"{around}.") if around else ("",)
    return {node for node in nodes if (node.name or "").startswith(scopes)}


def _leading_to(
    values: Iterable[ir.Value | None], beside: set[ir.Node] | None = None
) -> set[ir.Node]:
    """The nodes that values depend on, but for those `beside` and what these depend on."""
    beside, nodes = beside or set(), set[ir.Node]()
    waiting = [value for value in values if value is not None]
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in nodes and node not in beside:
            nodes.add(node)
            waiting += [value for value in node.inputs if value is not None]
    return nodes
