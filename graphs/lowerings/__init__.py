"""How the experts of a Soft MoE layer are computed in a target's ops: one module per way.

To add a lowering, write a module with a `LOWERING` record and name it in `registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...common.text import near_miss
from ...errors import LoweringError
from ..layers.mumoe import MuMoESpec
from . import conditional, dense, factorised, fused, gather, gathered, grouped, unfactorised
from .base import AnyLowering, Lowering, LoweringOf

_SOFT_MOE = (
    dense.LOWERING,
    gather.LOWERING,
    grouped.LOWERING,
    conditional.LOWERING,
    fused.LOWERING,
)

LOWERINGS: Mapping[str, Lowering] = MappingProxyType({record.name: record for record in _SOFT_MOE})
"""Those of Soft MoE layers."""

MUMOE_LOWERINGS: Mapping[str, LoweringOf[MuMoESpec]] = MappingProxyType(
    {
        record.name: record
        for record in (factorised.LOWERING, unfactorised.LOWERING, gathered.LOWERING)
    }
)
"""Those of muMoE layers."""

ALL_LOWERINGS: Mapping[str, AnyLowering] = MappingProxyType({**LOWERINGS, **MUMOE_LOWERINGS})


def lowerings_of(kind: str) -> Mapping[str, AnyLowering]:
    """Returns the lowerings that serve layers of a kind, by name."""
    return {name: record for name, record in ALL_LOWERINGS.items() if record.kind == kind}


def lowering(name: str) -> AnyLowering:
    """Returns the lowering of that name; `LoweringError` lists them for any other."""
    if name not in ALL_LOWERINGS:
        raise LoweringError(
            f"there is no lowering '{name}'",
            hint=near_miss(name, ("auto", *ALL_LOWERINGS)),
        )
    return ALL_LOWERINGS[name]
