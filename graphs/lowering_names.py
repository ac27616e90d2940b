"""The names of lowerings, without loading the lowerings, which would load PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.registry import Registry, left_out, names_in
from ..common.text import near_miss
from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class LoweringNames:
    """The names of the lowerings that a kind of layer lists."""

    name: str
    lowerings: tuple[str, ...]


NAMES = Registry(
    "moexport.lowering_names",
    LoweringNames,
    (
        LoweringNames(
            "soft-moe", ("dense", "gather", "grouped", "conditional", "block-grouped", "fused")
        ),
        LoweringNames("mumoe", ("factorised", "unfactorised", "gathered")),
    ),
)


def check_lowering(name: str) -> None:
    """Raises `UsageError` for a name that no lowering has.

    The lowerings are loaded only if a plugin's kind does not list their names.
    """
    if any(name in kind.lowerings for kind in NAMES.own):
        return
    listed = (each for kind in NAMES for each in kind.lowerings)
    names = tuple(dict.fromkeys((*listed, *names_in("moexport.lowerings"))))
    if name not in names and not {*NAMES.names}.issuperset(names_in("moexport.kinds")):
        from .lowerings import all_names

        names = all_names()
    if name not in names:
        raise UsageError(
            f"--lowering {name}: there is no lowering '{name}'",
            hint=near_miss(name, ("auto", *names)) + left_out(),
        )
