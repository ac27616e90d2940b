"""Lowerings: ways to compute the experts of a MoE layer in a target's ops, one per module.

To add a lowering, write a module with a `LOWERING` record and list it here under its kind; kinds of
plugins list their own. A plugin may add a lowering to an existing kind, which is used if it is
named; `auto` and `tune` only choose among the lowerings that the kind lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...common.registry import Registry, left_out
from ...common.text import near_miss
from ...errors import LoweringError, PluginError
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
from .base import AnyLowering, FurtherLowering, KindRecord

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
"""Lowerings of different kinds that work in the same way share a name."""

FURTHER = Registry("moexport.lowerings", FurtherLowering)
"""Lowerings that plugins add to existing kinds."""


def lowerings_of(kind: Kind) -> Mapping[str, AnyLowering]:
    """Returns the lowerings that a kind lists, by name."""
    return {record.name: record for record in KINDS[kind].lowerings}


def lowering_of(kind: Kind, name: str) -> AnyLowering | None:
    """Returns a lowering of a kind by name, including further ones, or None.

    Raises `PluginError` if a further one has the name of one that the kind lists.
    """
    listed = lowerings_of(kind).get(name)
    if name not in FURTHER or FURTHER[name].kind != kind:
        return listed
    if listed is not None:
        raise PluginError(
            f"the lowering '{name}' of {kind} layers comes from {_source(KINDS, kind)} and from "
            f"{_source(FURTHER, name)}",
            hint="remove one of them, or name another lowering",
        )
    return FURTHER[name].lowering


def _source(registry: Registry[Any], name: str) -> str:
    entry = registry.foreign(name)
    return "moexport itself" if entry is None else entry.distribution


def all_names() -> tuple[str, ...]:
    """Returns the names of all lowerings, without duplicates."""
    listed = (record.name for kind in KINDS for record in kind.lowerings)
    return tuple(dict.fromkeys((*listed, *FURTHER.names)))


def kinds_with(name: str) -> Iterator[Kind]:
    """Yields the kinds of layer that have a lowering of that name, the core's first."""
    for kind in KINDS:
        if any(record.name == name for record in kind.lowerings):
            yield kind.name
    if name in FURTHER:
        yield FURTHER[name].kind


def check_name(name: str) -> None:
    """Raises `LoweringError` for an unknown name; the error lists the known names."""
    if next(kinds_with(name), None) is None:
        raise LoweringError(
            f"there is no lowering '{name}'",
            hint=near_miss(name, ("auto", *all_names())) + left_out(),
        )
