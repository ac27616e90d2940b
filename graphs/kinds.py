"""A kind of layer and its lowerings, whose names are known without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.registry import Records, by_name


@dataclass(frozen=True, slots=True)
class KindRecord:
    """One kind of layer: the name in its spec, and its lowerings in listed order.

    With `LazyRecords` their names are known without importing them, which would load PyTorch.
    """

    name: str
    listed: Records[Any]

    @property
    def by_name(self) -> Mapping[str, Any]:
        return by_name(self.listed)

    @property
    def lowerings(self) -> tuple[Any, ...]:
        return tuple(self.by_name.values())
