"""The known families, and the choice of one for a checkpoint.

Families of plugins are tried only if none of the core's fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...common.registry import Registry, left_out
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
    "give the network as package.module:factory with --weights, and declare its MoE layers "
    "with @moexport.adapts (docs/families.md#your-own-network)"
)


def all_names() -> list[str]:
    """Returns the names of all families; a plugin's follows the one that it names."""
    names = [family.name for family in FAMILIES.own]
    for family in FAMILIES:
        if family.name not in names:
            at = names.index(family.after) + 1 if family.after in names else len(names)
            names.insert(at, family.name)
    return names


def layouts() -> tuple[PublishedLayer[Any], ...]:
    """Returns the known layouts of MoE layers; several families may share one."""
    return tuple(dict.fromkeys(FAMILIES[name].layer for name in all_names()))


def family_named(name: str) -> Family:
    """Returns the family of that name; raises FamilyError with the nearest one."""
    from ..checkpoints.family_names import check_family  # loaded only if one is named

    if name not in FAMILIES:
        check_family(name, all_names())
    return FAMILIES[name]


def detect(tensors: Tensors) -> Family:
    """Returns the family that fits the names and shapes of these tensors.

    Raises FamilyError, describing the tensors, if none or several fit.
    """
    fitting = fits(tensors, FAMILIES.own) or fits(tensors, FAMILIES)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = [family.name for family in fitting]
        raise FamilyError(
            f"the checkpoint fits several families: {', '.join(names)}",
            hint=f"name the correct one: --family {names[0]}",
        )
    for prefix in _prefixes(tensors):
        beneath = under(tensors, prefix)
        inside = fits(beneath, FAMILIES)
        if len(inside) == 1:
            others = len(tensors) - len(beneath)
            raise FamilyError(
                f"the keys under '{prefix}' are those of a {inside[0].name} model"
                + (f", next to {others} other{'s' * (others > 1)}" if others else ""),
                hint=f"save them alone: torch.save({{k.removeprefix('{prefix}'): v for k, v in "
                f"state_dict.items() if k.startswith('{prefix}')}}, 'model.pt')",
            )
    keys = some(list(tensors))
    raise FamilyError(
        f"no known family has these {len(tensors)} keys: {keys}{_known_layers(tensors)}",
        hint=f"known families (--family): {', '.join(all_names())}; for any other network, "
        f"{OTHER_BACKBONES}{left_out()}",
    )


def fits(tensors: Tensors, families: Iterable[Family]) -> list[Family]:
    """Returns those of the families that fit the names and shapes of these tensors."""
    return [family for family in families if family.detect(tensors)]


def _prefixes(tensors: Tensors) -> list[str]:
    """Possible prefixes by a training script: the first one or two names of the keys."""
    parts = [key.split(".") for key in tensors]
    depths = [".".join(names[:depth]) + "." for depth in (1, 2) for names in parts]
    return list(dict.fromkeys(depths))


def _known_layers(tensors: Tensors) -> str:
    """A remark for known layers in an unknown network."""
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
