"""The names of families, without loading them: that would load PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.registry import left_out, names_in
from ...common.text import near_miss
from ...errors import FamilyError

OWN = (
    "soft-moe-vit",
    "soft-moe-mnist",
    "soft-moe-pytorch",
    "soft-moe-conv",
    "soft-moe-fkodom",
    "soft-moe-vmoe",
    "soft-moe-vmoe-vit",
    "mumoe",
    "mumoe-clip",
    "mumoe-mixer",
    "mumoe-gpt2",
)
"""Those of the core."""


def check_family(name: str, listed: Sequence[str] = ()) -> None:
    """Raises `FamilyError` for a name that no family has, with the nearest one.

    `listed` are the names in the order in which they are shown, if that is known.
    """
    names = listed or (*OWN, *names_in("moexport.families"))
    if name not in names:
        raise FamilyError(f"unknown family {name!r}", hint=near_miss(name, names) + left_out())
