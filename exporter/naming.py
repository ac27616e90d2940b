"""Names the nodes of a traced graph after the modules that they come from.

PyTorch numbers them as they come (`node_MatMul_41`), and the numbers move when an axis becomes
fixed or the exporter changes. `blocks.0.attn.qkv/MatMul` stays, so that a table of ranges can name
it, and a profile of an engine can be read.
"""

from __future__ import annotations

import ast

import onnx_ir as ir

_SCOPES = "pkg.torch.onnx.name_scopes"


def name_nodes(graph: ir.Graph) -> None:
    """Renames every node `MODULE/OP`, with a number from the second of a kind on, in place."""
    taken: set[str] = set()
    for node in graph:
        module = _module(node)
        base = f"{module}/{node.op_type}" if module else node.op_type
        name, count = base, 2
        while name in taken:
            name, count = f"{base}.{count}", count + 1
        taken.add(name)
        node.name = name


def _module(node: ir.Node) -> str:
    """The path of the module that called the op, empty where the tracer does not tell."""
    recorded = node.metadata_props.get(_SCOPES)
    if recorded is None:
        return ""
    *modules, _ = ast.literal_eval(recorded)  # the last scope is the op itself
    return str(modules[-1]) if modules else ""
