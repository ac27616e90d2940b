"""Names in graphs that other code looks up, with their meanings; imports nothing heavy.

A node and its first output are called `LAYER/name` (`blocks.6.mlp/router/logits`). Code may only
search for the names in this module: lowerings choose the others freely.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from types import MappingProxyType

DOMAIN = "ai.moexport"
"""The domain of the nodes that represent MoE layers in a traced graph."""

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own ops."""

HIDDEN, COMPUTED_BY = "hidden", "computed_by"
"""Keys of `meta`, which is not saved. `HIDDEN`, on a node that replaces several: the names of the
nodes whose results it computes internally. `COMPUTED_BY`, on a value: the name of the node that
computed it originally. A table of ranges uses these names."""

K_INPUT = "k"
"""The graph input with k, int64 [1], if k is chosen per run."""

PAST, PRESENT = "past_key_values", "present"
"""Prefixes of the names of a cache's inputs and outputs."""

STEER_INPUT = "steer"
"""The graph input [b, s] with the strengths of steerings at run time; within a layer, the vector
that is added to its tokens."""

STEER_CENTRES = "steer.centres"
"""The cluster centres [s, d] of a layer's steerings at run time."""

SELECTED = "selected"
"""The value of a Soft MoE layer with the chosen experts, int64 [b, k]."""

OUTPUT = "output"
"""The value with the output of a Soft MoE layer, [b, m, o]."""

CONSTANTS = "constants"
"""The weight of a Soft MoE layer with the outputs of the d dropped experts' slots, [d·p, o]."""

COMBINE, DISPATCH, COLUMN_SUMS = "C", "D", "column_sums"
"""Scores of a Soft MoE layer: C and D, float32 [b, m, n, p], and the sums of C's columns by expert,
[b, n], from which Algorithm 1 chooses."""

GATES = "gates"
"""Scores of a token-routed layer: the weights of the chosen experts, float32 [b, m, k], in
their order."""

_SCORE = re.compile(rf"{COMBINE}|{DISPATCH}|{COLUMN_SUMS}|{GATES}|all_coefficients(_\d+)?")
"""The last alternative is for muMoE layers, [b, m, n]: a level's coefficients before the choice of
the k largest."""

INPUT = "input"
"""The input of a linear layer of the backbone, in a table of ranges."""

_PART_SCOPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "router": ("router", "gate", SELECTED, "input", COMBINE, DISPATCH, COLUMN_SUMS, GATES),
        "dispatch": ("dispatch",),
        "combine": ("combine", OUTPUT),
    }
)
"""Prefixes of the nodes of each part, after the layer's name; all others belong to the experts."""

PARTS = ("router", "dispatch", "experts", "combine")
"""The parts of a layer in execution order."""


def coefficients(level: int) -> str:
    """Returns the name of the value with a muMoE level's kept coefficients, [b, m, n]."""
    return "coefficients" if level == 0 else f"coefficients_{level + 1}"


_COEFFICIENTS = re.compile(r"(all_)?coefficients(_.*)?")
"""Nodes of a muMoE layer's gate outside `gate/`: coefficients before and after TopK, and casts."""


def in_layer(layer: str, name: str) -> str:
    """Returns the full name in a graph of a layer's `name`."""
    return f"{layer}/{name}"


def part_of(node: str, layer: str) -> str | None:
    """Returns the part (`PARTS`) that a node belongs to, or None for a node outside the layer."""
    scope = in_layer(layer, "")
    if not node.startswith(scope):
        return None
    scope_name = node.removeprefix(scope).split("/")[0].split(".")[0]
    if _COEFFICIENTS.fullmatch(scope_name):
        return "router"
    return next((part for part, words in _PART_SCOPES.items() if scope_name in words), "experts")


EXPERT_INPUT = "experts.input"
"""The rows that the selection sends to experts, [r, d]."""

EXPERT_HIDDEN = "experts.hidden"
"""The experts' hidden rows, between their two matrices, after the activation, [r, h]."""

EXPERT_PRODUCTS = "experts.products"
"""The hidden rows before the activation: not quantised, but 16-bit floats must represent them."""

EXPERT_OUTPUTS = "experts.outputs"
"""The rows after the second matrix: like `EXPERT_PRODUCTS`, only observed for 16-bit floats."""

_OPERANDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "experts": {"w1": "input", "w2": "hidden"},
        "tensor": {"input": "input", "core": "reduced", "output": "product"},
    }
)
"""The name of a weight's operand, by the first and the last part of the weight's name."""


def operand_of(weight: str) -> str | None:
    """Returns the tensor that an integer product multiplies with a layer's weight, or None.

    `experts.input` for `experts.w1`; in a muMoE layer `tensor.0.product` for `tensor.0.output`.
    """
    group, _, part = weight.rpartition(".")
    operand = _OPERANDS.get(group.partition(".")[0], {}).get(part)
    return None if operand is None else f"{group}.{operand}"


def is_ranged(tensor: str) -> bool:
    """Returns whether a layer's tensor enters a matrix product: quantising it needs a range."""
    return any(tensor.rpartition(".")[2] in operands.values() for operands in _OPERANDS.values())


def range_key(layer: str, tensor: str) -> str:
    """Returns the name of a tensor in a table of ranges.

    In a Soft MoE layer: `LAYER/experts.input` and `LAYER/experts.hidden`, for the rows that the
    selection sends to experts. For tensor t of a muMoE layer: `LAYER/tensor.{t}.input`,
    `LAYER/tensor.{t}.product`, which the output factor multiplies, and `LAYER/tensor.{t}.reduced`,
    which Tucker's core multiplies. For a linear layer of the backbone: `NODE/input` with the node's
    name in the traced graph (`blocks.0.attn.qkv/MatMul/input`). No name depends on a lowering.
    """
    return in_layer(layer, tensor)


def is_score(output: str, layers: Container[str]) -> bool:
    """Returns whether an output of a graph is a score of one of the layers."""
    layer, _, name = output.rpartition("/")
    return layer in layers and _SCORE.fullmatch(name) is not None


def is_cached(name: str) -> bool:
    """Returns whether the name is that of an input or output with cached keys or values."""
    return name.startswith((f"{PAST}.", f"{PRESENT}."))
