"""How far a graph may be from its PyTorch model, by precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..graphs.precision.types import Precision


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds of a parity check.

    Outputs agree where |difference| ≤ `atol` + `rtol` · max|y|. `routing` is the least share of
    inputs in which every layer must choose the same experts. A choice between scores that are
    closer than `tie`, relative to the k-th, is a tie: what comes before the layer is rounded, and
    may order them either way. A muMoE layer's coefficients, which sum to 1, are the same choice
    where none differs by more than `coefficient`; below FP32 only those count that one of both has
    dropped, and `routing` is of tokens.
    """

    atol: float
    rtol: float
    routing: float
    tie: float
    coefficient: float = 1e-3


def recorded(parity: Mapping[str, Any] | None) -> Tolerance:
    """Returns the bounds that a manifest's `parity` holds; without one, none may differ."""
    bounds = parity or {}
    exact = TOLERANCES["fp32"]
    return Tolerance(
        atol=bounds.get("atol", 0.0),
        rtol=bounds.get("rtol", 0.0),
        routing=bounds.get("routing", exact.routing),
        tie=bounds.get("tie", exact.tie),
        coefficient=bounds.get("coefficient", exact.coefficient),
    )


TOLERANCES: Mapping[Precision, Tolerance] = MappingProxyType(
    {
        "fp32": Tolerance(atol=1e-6, rtol=1e-4, routing=1.0, tie=1e-5),
        "fp16": Tolerance(atol=1e-6, rtol=1e-2, routing=0.98, tie=1e-3, coefficient=1e-2),
        "bf16": Tolerance(atol=1e-6, rtol=5e-2, routing=0.98, tie=8e-3, coefficient=5e-2),
        "int8": Tolerance(atol=1e-6, rtol=1e-1, routing=0.98, tie=1e-2, coefficient=5e-2),
    }
)
"""FP32: rounding in another order. FP16 keeps 11 bits and BF16 8, over a network's depth. INT8 has
about 1% of error in each layer. The ties are what such an error moves a score by."""
