"""Lowerings: ways to compute the experts of a MoE layer in a target's ops, one per module.

To add a lowering, write a module with a `LOWERING` record and list it here under its kind; kinds of
plugins list their own. Names are known without importing the modules, which loads PyTorch. A plugin
may add a lowering to an existing kind, which is used only if it is requested by name: `auto` and
`tune` choose among the lowerings that the kind lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...common.registry import LazyRecords, Registry, left_out
from ...common.text import near_miss
from ...errors import LoweringError, PluginError
from ..kinds import KindRecord

if TYPE_CHECKING:
    from ..layers.base import Kind
    from .base import AnyLowering, FurtherLowering

_SOFT_MOE = {
    "dense": "dense:LOWERING",
    "gather": "gather:LOWERING",
    "grouped": "grouped:LOWERING",
    "conditional": "conditional:LOWERING",
    "block-grouped": "block_grouped:LOWERING",
    "fused": "fused:LOWERING",
}

_MUMOE = {
    "factorised": "factorised:LOWERING",
    "unfactorised": "unfactorised:LOWERING",
    "gathered": "gathered:LOWERING",
}

KINDS = Registry(
    "moexport.kinds",
    KindRecord,
    (
        KindRecord("soft-moe", LazyRecords(__name__, _SOFT_MOE)),
        KindRecord("mumoe", LazyRecords(__name__, _MUMOE)),
    ),
)
"""Lowerings of different kinds that work in the same way share a name."""

FURTHER: Registry[FurtherLowering] = Registry(
    "moexport.lowerings", f"{__name__}.base:FurtherLowering"
)
"""Lowerings that plugins add to existing kinds."""


def lowerings_of(kind: Kind) -> Mapping[str, AnyLowering]:
    """Returns the lowerings that a kind lists, by name."""
    return KINDS[kind].by_name


def lowering_of(kind: Kind, name: str) -> AnyLowering | None:
    """Returns a lowering of a kind by name, including those of plugins, or None.

    Raises `PluginError` if the lowering of a plugin has the name of one that the kind lists.
    """
    listed = lowerings_of(kind).get(name)
    if name not in FURTHER or FURTHER[name].kind != kind:
        return listed
    if listed is not None:
        raise PluginError(
            f"the lowering '{name}' of {kind} layers comes from {_source(KINDS, kind)} and from "
            f"{_source(FURTHER, name)}",
            hint="uninstall one of them, or choose another lowering",
        )
    return FURTHER[name].lowering


def _source(registry: Registry[Any], name: str) -> str:
    entry = registry.foreign(name)
    return "moexport itself" if entry is None else entry.distribution


def all_names() -> tuple[str, ...]:
    """Returns the names of all lowerings, without duplicates."""
    listed = (name for kind in KINDS for name in kind.by_name)
    return tuple(dict.fromkeys((*listed, *FURTHER.names)))


def kinds_with(name: str) -> Iterator[Kind]:
    """Yields the kinds of layer that have a lowering of that name, the core's first."""
    for kind in KINDS:
        if name in kind.by_name:
            yield kind.name
    if name in FURTHER:
        yield FURTHER[name].kind


def check_name(name: str) -> None:
    """Raises `LoweringError` for an unknown name; the error lists the known names."""
    if name not in FURTHER and next(kinds_with(name), None) is None:
        raise LoweringError(
            f"there is no lowering '{name}'",
            hint=near_miss(name, ("auto", *all_names())) + left_out(),
        )
