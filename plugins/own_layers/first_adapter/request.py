"""The options of `adapt`. Importing this loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....common.option import Request, option
from ....common.text import parse_seconds
from ....graphs.sizes import Sizes, parse_range


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptRequest(Request):
    """How to make the layer and how to search for its adapter."""

    sets: Sequence[str] = option(
        (),
        "An argument of the layer: --set dim=64. input_shape=12,64 sets the trial input's shape.",
        unset="none",
        flag="--set",
    )
    config: Mapping[str, Any] | None = option(
        None, "The arguments of the layer, by their names.", unset="none", in_shell=False
    )
    batch: Sizes | None = option(
        None,
        "The batch sizes to try the layer with.",
        unset="3, and 1 and 8 if the layer accepts them",
    )
    tokens: Sizes | None = option(
        None,
        "The numbers of tokens to try the layer with, without input_shape.",
        unset="7, and 16 if the layer accepts it",
    )
    time: str | float | None = option(
        None, "The CPU time that the search may take, for example 10min.", unset="60s"
    )

    def __post_init__(self) -> None:
        """Raises `UsageError` for an invalid value."""
        for sizes, spelling in ((self.batch, "--batch"), (self.tokens, "--tokens")):
            if sizes is not None:
                parse_range(sizes, spelling)
        _ = self.seconds

    @property
    def seconds(self) -> float | None:
        """The time that the search may take."""
        return None if self.time is None else parse_seconds(self.time, "--time", "s")
