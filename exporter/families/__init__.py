"""The families that moexport knows, and how one is chosen for a checkpoint."""

from __future__ import annotations

from typing import Any

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
    vmoe_routed,
    vmoe_vit,
)
from .base import Family, PublishedLayer, Tensors, find_layers, some, under

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        vit.FAMILY,
        mnist.FAMILY,
        lucidrains.FAMILY,
        vit.CONV_FAMILY,
        fkodom.FAMILY,
        vmoe.FAMILY,
        vmoe_vit.SOFT_FAMILY,
        vmoe_routed.FAMILY,
        mumoe.FAMILY,
        mumoe.HEAD_FAMILY,
        mumoe_mixer.FAMILY,
        mumoe_gpt2.FAMILY,
    )
}

LAYOUTS: tuple[PublishedLayer[Any], ...] = tuple(
    dict.fromkeys(family.layer for family in FAMILIES.values())
)
"""The layouts of MoE layers that moexport knows; several families may share one."""

OTHER_BACKBONES = (
    "give the network as package.module:factory with --weights, and say what a MoE layer in words "
    "of its own is with @moexport.adapts (docs/own-layer.md)"
)


def family_named(name: str) -> Family:
    """Returns the family of that name; raises FamilyError with the nearest one."""
    if name in FAMILIES:
        return FAMILIES[name]
    raise FamilyError(f"unknown family {name!r}", hint=near_miss(name, FAMILIES))


def detect(tensors: Tensors) -> Family:
    """Returns the family whose names and shapes these tensors have.

    Raises FamilyError when none or several fit, saying what was seen.
    """
    fitting = [family for family in FAMILIES.values() if family.detect(tensors)]
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
        inside = [family.name for family in FAMILIES.values() if family.detect(beneath)]
        if len(inside) == 1:
            others = len(tensors) - len(beneath)
            raise FamilyError(
                f"the keys under '{prefix}' are those of a {inside[0]} model"
                + (f", beside {others} other{'s' * (others > 1)}" if others else ""),
                hint=f"save them alone: torch.save({{k.removeprefix('{prefix}'): v for k, v in "
                f"state_dict.items() if k.startswith('{prefix}')}}, 'model.pt')",
            )
    keys = some(list(tensors))
    raise FamilyError(
        f"no known family has these {len(tensors)} keys: {keys}{_layers_seen(tensors)}",
        hint=f"known families (--family): {', '.join(FAMILIES)}; for any other network, "
        f"{OTHER_BACKBONES}",
    )


def _prefixes(tensors: Tensors) -> list[str]:
    """What keys begin with, down to two names: what a training script may have put there."""
    parts = [key.split(".") for key in tensors]
    depths = [".".join(names[:depth]) + "." for depth in (1, 2) for names in parts]
    return list(dict.fromkeys(depths))


def _layers_seen(tensors: Tensors) -> str:
    """What to add when the layers are known and only the network around them is not."""
    for layer in LAYOUTS:
        prefixes = find_layers(tensors, layer)
        if prefixes:
            places = ", ".join(prefix.removesuffix(".") or "the top" for prefix in prefixes[:4])
            return (
                f" ({layer.title} layers as {layer.family} saves them, at {places}, in another "
                "network)"
            )
    return ""


__all__ = ["FAMILIES", "LAYOUTS", "Family", "detect", "family_named"]
