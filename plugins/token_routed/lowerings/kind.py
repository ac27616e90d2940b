"""Token-routed experts as a kind of layer, registered with the core."""

from __future__ import annotations

from ....common.registry import LazyRecords
from ....graphs.kinds import KindRecord

API = 1

EXPERTS = KindRecord(
    "experts",
    LazyRecords(
        __package__,
        {
            "dense": "dense:LOWERING",
            "grouped": "grouped:LOWERING",
            "conditional": "conditional:LOWERING",
            "block-grouped": "block_grouped:LOWERING",
            "fused": "fused:LOWERING",
            "slots": "slots:LOWERING",
        },
    ),
)
