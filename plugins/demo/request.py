"""The options of the demo; this module imports no large library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...common.option import Request, option

Trained = Literal["soft-moe", "mumoe", "experts"]
"""The kinds of MoE layers that the demo can train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest(Request):
    """The options of the demo."""

    family: Trained = option("soft-moe", "The kind of networks to train.")
    force: bool = option(False, "Replace an earlier demo.")
