"""Token-routed experts as a kind of layer, registered with the core."""

from __future__ import annotations

from ....graphs.lowerings.base import KindRecord
from . import block_grouped, conditional, dense, fused, grouped, slots

API = 1

EXPERTS = KindRecord(
    "experts",
    (
        dense.LOWERING,
        grouped.LOWERING,
        conditional.LOWERING,
        block_grouped.LOWERING,
        fused.LOWERING,
        slots.LOWERING,
    ),
)
