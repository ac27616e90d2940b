"""The known families, and the choice of one for a checkpoint.

Their names can be listed without importing them, which would load PyTorch. Plugins' families are
tried only if none of the core's fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...common.registry import LazyRecords, Registry, left_out
from ...common.text import near_miss
from ...errors import FamilyError

if TYPE_CHECKING:
    from .base import Family, PublishedLayer, Tensors

_OWN = {
    "soft-moe-vit": "vit:FAMILY",
    "soft-moe-mnist": "mnist:FAMILY",
    "soft-moe-pytorch": "lucidrains:FAMILY",
    "soft-moe-conv": "vit:CONV_FAMILY",
    "soft-moe-fkodom": "fkodom:FAMILY",
    "soft-moe-vmoe": "vmoe:FAMILY",
    "soft-moe-vmoe-vit": "vmoe_vit:SOFT_FAMILY",
    "mumoe": "mumoe:FAMILY",
    "mumoe-clip": "mumoe:HEAD_FAMILY",
    "mumoe-mixer": "mumoe_mixer:FAMILY",
    "mumoe-gpt2": "mumoe_gpt2:FAMILY",
}

FAMILIES: Registry[Family] = Registry(
    "moexport.families", f"{__name__}.base:Family", LazyRecords(__name__, _OWN)
)

OTHER_BACKBONES = (
    "give the network as package.module:factory with --weights, and declare its MoE layers "
    "with @moexport.adapts (docs/families.md#your-own-network)"
)


def all_names() -> list[str]:
    """Returns the names of all families; a plugin's follows the one that its `after` names."""
    names = [family.name for family in FAMILIES.own]
    for family in FAMILIES:
        if family.name not in names:
            index = names.index(family.after) + 1 if family.after in names else len(names)
            names.insert(index, family.name)
    return names


def layouts() -> tuple[PublishedLayer[Any], ...]:
    """Returns the known layouts of MoE layers; several families may share one."""
    return tuple(dict.fromkeys(FAMILIES[name].layer for name in all_names()))


def check_family(name: str, listed: Sequence[str] = ()) -> None:
    """Raises `FamilyError`, with the nearest name, for a name that no family has.

    `listed` has the known names in the order in which the error lists them.
    """
    names = listed or FAMILIES.names
    if name not in names:
        raise FamilyError(f"unknown family {name!r}", hint=near_miss(name, names) + left_out())


def family_named(name: str) -> Family:
    """Returns the family of this name; if there is none, FamilyError suggests the nearest name."""
    if name not in FAMILIES:
        check_family(name, all_names())
    return FAMILIES[name]


def detect(tensors: Tensors) -> Family:
    """Returns the family that fits the names and shapes of these tensors.

    Raises a FamilyError that describes the tensors if none or several fit.
    """
    from .base import first_keys, under

    fitting = fits(tensors, FAMILIES.own) or fits(tensors, FAMILIES)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = [family.name for family in fitting]
        raise FamilyError(
            f"the checkpoint fits several families: {', '.join(names)}",
            hint=f"name the correct one: --family {' or --family '.join(names)}",
        )
    # Prefixes that a training script may add: the first one or two names of the keys.
    parts = [key.split(".") for key in tensors]
    depths = [".".join(names[:depth]) + "." for depth in (1, 2) for names in parts]
    for prefix in dict.fromkeys(depths):
        nested = under(tensors, prefix)
        fitting = fits(nested, FAMILIES)
        if len(fitting) == 1:
            others = len(tensors) - len(nested)
            raise FamilyError(
                f"the keys under '{prefix}' are those of a {fitting[0].name} model"
                + (f", next to {others} other{'s' * (others > 1)}" if others else ""),
                hint=f"save only these: torch.save({{k.removeprefix('{prefix}'): v for k, v in "
                f"state_dict.items() if k.startswith('{prefix}')}}, 'model.pt')",
            )
    keys = first_keys(list(tensors))
    raise FamilyError(
        f"no known family has these {len(tensors)} keys: {keys}{_known_layers(tensors)}",
        hint=f"known families (--family): {', '.join(all_names())}; for any other network, "
        f"{OTHER_BACKBONES}{left_out()}",
    )


def fits(tensors: Tensors, families: Iterable[Family]) -> list[Family]:
    """Returns the families that fit the names and shapes of these tensors."""
    return [family for family in families if _detects(family, tensors)]


def _detects(family: Family, tensors: Tensors) -> bool:
    try:
        return family.detect(tensors)
    except Exception as error:
        raise FamilyError(
            f"family '{family.name}' cannot check a checkpoint: {type(error).__name__}: {error}",
            hint="name another with --family, or disable plugins: MOEXPORT_PLUGINS=off",
        ) from error


def _known_layers(tensors: Tensors) -> str:
    """Returns a remark about known layers in an unknown network, or an empty string."""
    from .base import find_layers

    for layer in layouts():
        prefixes = find_layers(tensors, layer)
        if prefixes:
            paths = ", ".join(prefix.removesuffix(".") or "the top" for prefix in prefixes[:4])
            return f" (there are {layer.title} layers as in {layer.family} at {paths})"
    return ""
