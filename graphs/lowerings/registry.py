"""The lowerings by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...errors import LoweringError
from . import conditional, dense, factorised, fused, gather, grouped
from .base import AnyLowering

_ALL: tuple[AnyLowering, ...] = (
    dense.LOWERING,
    gather.LOWERING,
    grouped.LOWERING,
    conditional.LOWERING,
    fused.LOWERING,
    factorised.LOWERING,
)

LOWERINGS: Mapping[str, AnyLowering] = MappingProxyType({record.name: record for record in _ALL})


def lowering(name: str) -> AnyLowering:
    """Returns the lowering of that name; `LoweringError` lists them for any other."""
    if name not in LOWERINGS:
        raise LoweringError(
            f"there is no lowering '{name}'",
            hint=f"choose one of: auto, {', '.join(LOWERINGS)}",
        )
    return LOWERINGS[name]
