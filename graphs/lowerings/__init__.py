"""How the experts of a MoE layer are computed in a target's ops: one module per way.

To add a lowering, write a module with a `LOWERING` record and list it here, with its kind's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...common.text import near_miss
from ...errors import LoweringError
from ..layers.base import Kind
from . import (
    block_grouped,
    conditional,
    dense,
    factorised,
    fused,
    gather,
    gathered,
    grouped,
    unfactorised,
)
from .base import AnyLowering
from .token_routed import block_grouped as routed_block_grouped
from .token_routed import conditional as routed_conditional
from .token_routed import dense as routed_dense
from .token_routed import fused as routed_fused
from .token_routed import grouped as routed_grouped
from .token_routed import slots as routed_slots

_SOFT_MOE = (
    dense.LOWERING,
    gather.LOWERING,
    grouped.LOWERING,
    conditional.LOWERING,
    block_grouped.LOWERING,
    fused.LOWERING,
)

_MUMOE = (factorised.LOWERING, unfactorised.LOWERING, gathered.LOWERING)

_EXPERTS = (
    routed_dense.LOWERING,
    routed_grouped.LOWERING,
    routed_conditional.LOWERING,
    routed_block_grouped.LOWERING,
    routed_fused.LOWERING,
    routed_slots.LOWERING,
)

ALL_LOWERINGS: Mapping[tuple[Kind, str], AnyLowering] = MappingProxyType(
    {(record.kind, record.name): record for record in (*_SOFT_MOE, *_MUMOE, *_EXPERTS)}
)
"""By kind of layer and name: what works alike for two kinds has one name."""

NAMES: tuple[str, ...] = tuple(dict.fromkeys(name for _, name in ALL_LOWERINGS))
"""The names of all lowerings, each once."""


def lowerings_of(kind: Kind) -> Mapping[str, AnyLowering]:
    """Returns the lowerings that serve layers of a kind, by name."""
    return {name: record for (own_kind, name), record in ALL_LOWERINGS.items() if own_kind == kind}


def check_name(name: str) -> None:
    """Raises `LoweringError` for a name that no lowering has, with those that there are."""
    if name not in NAMES:
        raise LoweringError(
            f"there is no lowering '{name}'",
            hint=near_miss(name, ("auto", *NAMES)),
        )
