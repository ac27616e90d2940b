"""The options of the demo. Importing this loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...common.option import Request, option

Trained = Literal["soft-moe", "mumoe", "experts"]
"""Kinds of MoE layers that the demo trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest(Request):
    """The options of the demo."""

    family: Trained = option("soft-moe", "The kind of networks to train.")
    force: bool = option(False, "Replace an earlier demo.")
