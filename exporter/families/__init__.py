"""The families that moexport knows, and how one is chosen for a checkpoint.

Those of plugins are asked only for what none of the core's own is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...common.registry import Registry, left_out
from ...common.text import near_miss
from ...errors import FamilyError
from . import (
    fkodom,
    lucidrains,
    mnist,
    mumoe,
    mumoe_gpt2,
    mumoe_mixer,
    vit,
    vmoe,
    vmoe_vit,
)
from .base import Family, PublishedLayer, Tensors, find_layers, some, under

FAMILIES = Registry(
    "moexport.families",
    Family,
    (
        vit.FAMILY,
        mnist.FAMILY,
        lucidrains.FAMILY,
        vit.CONV_FAMILY,
        fkodom.FAMILY,
        vmoe.FAMILY,
        vmoe_vit.SOFT_FAMILY,
        mumoe.FAMILY,
        mumoe.HEAD_FAMILY,
        mumoe_mixer.FAMILY,
        mumoe_gpt2.FAMILY,
    ),
)

OTHER_BACKBONES = (
    "give the network as package.module:factory with --weights, and say what a MoE layer in words "
    "of its own is with @moexport.adapts (docs/own-layer.md)"
)


def all_names() -> list[str]:
    """Returns the names of all families, a plugin's after the one that it is listed after."""
    names = [family.name for family in FAMILIES.own]
    for family in FAMILIES:
        if family.name not in names:
            at = names.index(family.after) + 1 if family.after in names else len(names)
            names.insert(at, family.name)
    return names


def layouts() -> tuple[PublishedLayer[Any], ...]:
    """Returns the layouts of MoE layers that moexport knows; several families may share one."""
    return tuple(dict.fromkeys(FAMILIES[name].layer for name in all_names()))


def family_named(name: str) -> Family:
    """Returns the family of that name; raises FamilyError with the nearest one."""
    if name in FAMILIES:
        return FAMILIES[name]
    raise FamilyError(f"unknown family {name!r}", hint=near_miss(name, all_names()) + left_out())


def detect(tensors: Tensors) -> Family:
    """Returns the family whose names and shapes these tensors have.

    Raises FamilyError when none or several fit, saying what was seen.
    """
    fitting = fits(tensors, FAMILIES.own) or fits(tensors, FAMILIES)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = [family.name for family in fitting]
        raise FamilyError(
            f"the checkpoint fits several families: {', '.join(names)}",
            hint=f"say which one: --family {names[0]}",
        )
    for prefix in _prefixes(tensors):
        beneath = under(tensors, prefix)
        inside = fits(beneath, FAMILIES)
        if len(inside) == 1:
            others = len(tensors) - len(beneath)
            raise FamilyError(
                f"the keys under '{prefix}' are those of a {inside[0].name} model"
                + (f", beside {others} other{'s' * (others > 1)}" if others else ""),
                hint=f"save them alone: torch.save({{k.removeprefix('{prefix}'): v for k, v in "
                f"state_dict.items() if k.startswith('{prefix}')}}, 'model.pt')",
            )
    keys = some(list(tensors))
    raise FamilyError(
        f"no known family has these {len(tensors)} keys: {keys}{_layers_seen(tensors)}",
        hint=f"known families (--family): {', '.join(all_names())}; for any other network, "
        f"{OTHER_BACKBONES}{left_out()}",
    )


def fits(tensors: Tensors, families: Iterable[Family]) -> list[Family]:
    """Returns those of the families whose names and shapes these tensors have."""
    return [family for family in families if family.detect(tensors)]


def _prefixes(tensors: Tensors) -> list[str]:
    """What keys begin with, down to two names: what a training script may have put there."""
    parts = [key.split(".") for key in tensors]
    depths = [".".join(names[:depth]) + "." for depth in (1, 2) for names in parts]
    return list(dict.fromkeys(depths))


def _layers_seen(tensors: Tensors) -> str:
    """What to add when the layers are known and only the network around them is not."""
    for layer in layouts():
        prefixes = find_layers(tensors, layer)
        if prefixes:
            places = ", ".join(prefix.removesuffix(".") or "the top" for prefix in prefixes[:4])
            return (
                f" ({layer.title} layers as {layer.family} saves them, at {places}, in another "
                "network)"
            )
    return ""


__all__ = ["FAMILIES", "Family", "all_names", "detect", "family_named", "fits", "layouts"]
