"""What a manifest says of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .profiles import Profile, check_k, choose


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine of a bundle.

    `precision` counts the matrix products and convolutions by the type they compute in, as read
    back from what was compiled; the file `layers` lists them. `device` is the GPU of an engine that
    is for that GPU alone. `key` stands for graph, weights, options, version and device: engines
    with the same key are the same. `peak_memory_bytes` is what the build took of the machine's
    memory.
    """

    file: str
    graph: str
    flavour: str
    version: str
    compute_capabilities: list[str]
    device: str | None
    precision: dict[str, int]
    profiles: list[dict[str, Any]]
    options: dict[str, Any]
    settings: dict[str, Any]
    layers: str
    key: str
    seconds: float
    peak_memory_bytes: int

    def as_json(self) -> dict[str, Any]:
        """The record as it stands in a manifest."""
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> EngineRecord:
        """Reads what `as_json` wrote; TypeError where something is missing."""
        known = EngineRecord.__slots__
        return EngineRecord(**{key: value for key, value in content.items() if key in known})

    def check_fits(self, shape: Sequence[int], k: int | None) -> None:
        """Raises, without the engine, what a run of inputs of this shape with this k would raise.

        That is `FeedError` for a shape and `UsageError` for a k that no profile contains.
        """
        check_k(self.ranges, k)
        choose(self.ranges, shape, k)

    @property
    def ranges(self) -> list[Profile]:
        """The profiles, to be asked what they contain."""
        return [Profile.from_json(each) for each in self.profiles]
