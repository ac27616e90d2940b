"""What is asked of a first adapter. Importing this loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....common.option import Request, option
from ....exporter.requests import SIZES


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptRequest(Request):
    """How a layer is made that an adapter is written for."""

    sets: Sequence[str] = option(
        (),
        "An argument of the layer: --set dim=64. input_shape=12,64 is what it is tried on.",
        unset="none",
        flag="--set",
        metavar="KEY=VALUE",
    )
    batch: str | int | None = option(
        None,
        "The batch sizes that the layer is tried with, each of the three.",
        unset="3, and 1 and 8 if the layer takes them",
        metavar=SIZES,
    )
    tokens: str | int | None = option(
        None,
        "The same for the number of tokens, without input_shape.",
        unset="7, and 16 if the layer takes them",
        metavar=SIZES,
    )
