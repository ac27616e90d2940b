"""Names in graphs that other code looks up, and what each means; importing them loads nothing.

A node and its first value are called `LAYER/what` (`blocks.6.mlp/router/logits`). Below that, only
the names of this module may be searched for: a lowering is free in all others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

DOMAIN = "ai.moexport"
"""Of the nodes that stand for MoE layers in a traced graph."""

MICROSOFT = "com.microsoft"
"""Of ONNX Runtime's own ops."""

K_INPUT = "k"
"""The graph input that holds k, int64 [1], where k is chosen per run."""

PAST, PRESENT = "past_key_values", "present"
"""What the names of a cache's inputs and outputs begin with."""

STEER_INPUT = "steer"
"""The graph input [b, s] that holds the strength of each steering, if given per run; and in
a layer what is added to its tokens."""

STEER_CENTRES = "steer.centres"
"""The cluster centres [s, d] of a layer's steerings whose strengths are given per run."""

SELECTED = "selected"
"""The value of a Soft MoE layer that holds the chosen experts, int64 [b, k]."""

OUTPUT = "output"
"""The value of a Soft MoE layer that holds what it returns, [b, m, o]."""

CONSTANTS = "constants"
"""The weight of a Soft MoE layer that holds what the slots of dropped experts give, [d·p, o] for d
of them."""

INPUT = "input"
"""What a linear layer of the backbone multiplies, in a table of ranges."""

_PART_SCOPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "router": ("router", "gate", SELECTED, "input"),
        "dispatch": ("dispatch",),
        "combine": ("combine", OUTPUT),
    }
)
"""How the nodes of a layer's parts begin, below the layer; all others are its experts'."""

PARTS = ("router", "dispatch", "experts", "combine")
"""The parts of a layer, in the order in which they run."""


def coefficients(level: int) -> str:
    """Returns the value of a muMoE layer that holds a level's kept coefficients, [b, m, n]."""
    return "coefficients" if level == 0 else f"coefficients_{level + 1}"


_COEFFICIENTS = re.compile(r"(all_)?coefficients(_.*)?")
"""What a muMoE layer's gate calls its nodes beside `gate`: before and after the k largest, cast."""


def in_layer(layer: str, name: str) -> str:
    """Returns the name in a whole graph of what a layer calls `name`."""
    return f"{layer}/{name}"


def part_of(node: str, layer: str) -> str | None:
    """Returns which of `PARTS` a node belongs to, or None for one of another layer."""
    scope = in_layer(layer, "")
    if not node.startswith(scope):
        return None
    what = node.removeprefix(scope).split("/")[0].split(".")[0]
    if _COEFFICIENTS.fullmatch(what):
        return "router"
    return next((part for part, words in _PART_SCOPES.items() if what in words), "experts")


EXPERT_INPUT = "experts.input"
"""The rows that the selection sends to experts, [r, d]."""

EXPERT_HIDDEN = "experts.hidden"
"""The same rows between an expert's matrices, after the activation, [r, h]."""

EXPERT_PRODUCTS = "experts.products"
"""Before the activation: nothing that is quantised, but a 16-bit float must hold it."""

EXPERT_OUTPUTS = "experts.outputs"
"""After the second matrix: as above."""

_OPERANDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "experts": {"w1": "input", "w2": "hidden"},
        "tensor": {"input": "input", "core": "reduced", "output": "product"},
    }
)
"""By the first and the last part of the name of a weight, what its operand is called there."""


def operand_of(weight: str) -> str | None:
    """Returns the tensor that a layer's weight is multiplied with as integers, None for others.

    `experts.input` of `experts.w1`; of a muMoE layer `tensor.0.product` of `tensor.0.output`.
    """
    group, _, part = weight.rpartition(".")
    operand = _OPERANDS.get(group.partition(".")[0], {}).get(part)
    return None if operand is None else f"{group}.{operand}"


def is_ranged(tensor: str) -> bool:
    """Whether a layer's tensor meets a matrix, so that it may be quantised and needs a range."""
    return any(tensor.rpartition(".")[2] in of.values() for of in _OPERANDS.values())


def range_key(layer: str, tensor: str) -> str:
    """Returns the name of a tensor in a table of ranges.

    Of a Soft MoE layer: `LAYER/experts.input` and `LAYER/experts.hidden`, over the rows that the
    selection sends to experts. Of a muMoE layer's tensor t: `LAYER/tensor.{t}.input`,
    `LAYER/tensor.{t}.product`, what meets the output factor, and `LAYER/tensor.{t}.reduced`, what
    meets Tucker's core. Of a linear layer of the backbone: `NODE/input` with the node's name in the
    traced graph (`blocks.0.attn.qkv/MatMul/input`). No name depends on a lowering.
    """
    return in_layer(layer, tensor)
