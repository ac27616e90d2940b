"""The options of `adapt`. Importing this loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....common.option import Request, option
from ....common.text import parse_seconds
from ....graphs.sizes import Sizes, parse_range

SECONDS = 60.0
"""The default limit of CPU time for a search."""


@dataclass(frozen=True, slots=True)
class TriedSizes:
    """The batch sizes and numbers of tokens to try a layer with; the first are used everywhere.

    `required_…`: the user gave the sizes, so the layer must accept all of them.
    """

    batches: tuple[int, ...] = (3, 1, 8)
    tokens: tuple[int, ...] = (7, 16)
    required_batches: bool = False
    required_tokens: bool = False


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
        "The numbers of tokens to try the layer with, unless input_shape is set.",
        unset="7, and 16 if the layer accepts it",
    )
    time: str | float | None = option(
        None, "The CPU time that the search may take, for example 10min.", unset="60s"
    )

    def __post_init__(self) -> None:
        """Raises `UsageError` for an invalid value."""
        _ = self.sizes, self.seconds

    @property
    def sizes(self) -> TriedSizes:
        sizes = TriedSizes()
        if self.batch is not None:
            batch = parse_range(self.batch, "--batch")
            batches = (batch.opt, batch.min, batch.max)
            sizes = replace(sizes, batches=batches, required_batches=True)
        if self.tokens is not None:
            tokens = parse_range(self.tokens, "--tokens")
            lengths = (tokens.opt, tokens.min, tokens.max)
            sizes = replace(sizes, tokens=lengths, required_tokens=True)
        return sizes

    @property
    def seconds(self) -> float:
        return SECONDS if self.time is None else parse_seconds(self.time, "--time", "s")
