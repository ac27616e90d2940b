"""How the experts of a MoE layer are computed in a target's ops: one module per way.

To add a lowering, write a module with a `LOWERING` record and list it here, with its kind's; the
kinds of plugins list their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...common.registry import Registry, left_out
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
from .base import AnyLowering, KindRecord

_SOFT_MOE = KindRecord(
    "soft-moe",
    (
        dense.LOWERING,
        gather.LOWERING,
        grouped.LOWERING,
        conditional.LOWERING,
        block_grouped.LOWERING,
        fused.LOWERING,
    ),
)

_MUMOE = KindRecord("mumoe", (factorised.LOWERING, unfactorised.LOWERING, gathered.LOWERING))

KINDS = Registry("moexport.kinds", KindRecord, (_SOFT_MOE, _MUMOE))
"""What works alike for two kinds has one name."""


def lowerings_of(kind: Kind) -> Mapping[str, AnyLowering]:
    """Returns the lowerings that serve layers of a kind, by name."""
    return {record.name: record for record in KINDS[kind].lowerings}


def all_names() -> tuple[str, ...]:
    """Returns the names of all lowerings, each once."""
    return tuple(dict.fromkeys(record.name for kind in KINDS for record in kind.lowerings))


def kinds_with(name: str) -> Iterator[Kind]:
    """Yields the kinds of layer that have a lowering of that name, the core's first."""
    for kind in KINDS:
        if any(record.name == name for record in kind.lowerings):
            yield kind.name


def check_name(name: str) -> None:
    """Raises `LoweringError` for a name that no lowering has, with those that there are."""
    if next(kinds_with(name), None) is None:
        raise LoweringError(
            f"there is no lowering '{name}'",
            hint=near_miss(name, ("auto", *all_names())) + left_out(),
        )
