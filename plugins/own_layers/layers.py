"""Finds the MoE layers of a user's network.

A module is a MoE layer if its class has an adapter (`adapters`) or is one of moexport's own, or if
its parameters have the names and shapes of a published layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ...errors import FamilyError, UsageError
from ...exporter.families import all_names, layouts
from ...exporter.families.base import find_layers
from ...graphs.layers.base import MoELayer, kind_text, moe_layers, sharing_weights
from ..token_routed.own_forward import Code
from .adapters import EXAMPLE, adapter_name, adapter_of, describe
from .descriptions import Description
from .request import Adapter


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """A MoE layer in a user's network: its path, its title in messages, and what replaces it.

    `class_name` is the name of the user's class, and `make` builds our layer under a given name.
    `adapter` returned `description`, which must compute what the layer computes. `aliases` are
    other paths of the same module in the network.
    """

    path: str
    title: str
    class_name: str
    make: Callable[[str], MoELayer]
    aliases: tuple[str, ...] = ()
    adapter: Adapter | None = None
    description: Description | None = None

    @property
    def label(self) -> str:
        """The layer's name in messages."""
        return f"the layer {self.path or '(the network itself)'}"

    @property
    def own_code(self) -> Code | None:
        return None if self.description is None else self.description.code


def find_in_module(module: nn.Module, adapters: Mapping[type, Adapter]) -> tuple[FoundLayer, ...]:
    """Returns the MoE layers of a network.

    Raises FamilyError if there are none, and UsageError if an adapter's class does not occur in
    the network or an adapter's description is invalid.
    """
    tensors = module.state_dict()
    paths: dict[int, list[str]] = {}
    for path, sub in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(sub), []).append(path)
    layers: dict[str, FoundLayer] = {}
    for layout in layouts():
        for prefix in find_layers(tensors, layout):
            path = prefix.removesuffix(".")
            layers[path] = FoundLayer(
                path=path,
                title=f"a {layout.family} layer",
                class_name=type(module.get_submodule(path)).__name__,
                make=partial(layout.make, prefix, tensors),
            )
    for path, own in moe_layers(module).items():
        layers[path] = FoundLayer(
            path=path,
            title=kind_text(own.spec.kind),
            class_name=type(own).__name__,
            make=partial(_with_name, own),
        )
    adapted = _find_adapted(module, adapters)
    inside = tuple(f"{path}." if path else "" for path in adapted)
    layers = {path: found for path, found in layers.items() if not path.startswith(inside)}
    layers |= adapted
    if not layers:
        names = ", ".join(list(tensors)[:6])
        raise FamilyError(
            f"{type(module).__name__} has no Soft MoE or muMoE layer that moexport "
            f"recognises (its parameters: {names}, …)",
            hint=f"{_adapter_hint(module)}; layers recognised by the names and "
            f"shapes of their parameters: {', '.join(all_names())}; the layer must be a separate "
            "module",
        )
    return tuple(
        replace(layers[first], aliases=tuple(others))
        for first, *others in paths.values()
        if first in layers
    )


def _find_adapted(module: nn.Module, adapters: Mapping[type, Adapter]) -> dict[str, FoundLayer]:
    """Returns the layers that have an adapter; of nested ones, only the outermost."""
    layers: dict[str, FoundLayer] = {}
    unused = dict(adapters)
    for path, sub in module.named_modules():
        if any(path.startswith(f"{outer}." if outer else "") for outer in layers):
            continue
        adapter = adapter_of(sub, adapters)
        if adapter is None:
            continue
        unused = {cls: entry for cls, entry in unused.items() if entry is not adapter}
        description = describe(adapter, sub, f"the layer {path or '(the network itself)'}")
        layers[path] = FoundLayer(
            path=path,
            title=f"described by the adapter {adapter_name(adapter)}",
            class_name=type(sub).__name__,
            make=description.build,
            adapter=adapter,
            description=description,
        )
    if unused:
        cls, adapter = next(iter(unused.items()))
        own = ", ".join(cls.__name__ for cls in _own_classes(module))
        raise UsageError(
            f"the adapter {adapter_name(adapter)} is for {cls.__name__}, but "
            f"{type(module).__name__} has no such layer",
            hint=f"classes in the network: {own or 'only those of torch.nn'}",
        )
    return layers


def _own_classes(module: nn.Module) -> list[type[nn.Module]]:
    """Returns the distinct classes of a network's modules that are not PyTorch's."""
    classes = (type(sub) for sub in module.modules())
    return list(dict.fromkeys(c for c in classes if not c.__module__.startswith("torch.")))


def _adapter_hint(module: nn.Module) -> str:
    """Returns a hint to write an adapter, if possible for a class whose name contains MoE."""
    inner = list(dict.fromkeys(c for child in module.children() for c in _own_classes(child)))
    likely = next((c for c in inner if "moe" in c.__name__.lower()), (*inner, None)[0])
    if likely is None:
        return EXAMPLE.format(name="MyLayer")
    source = f"{likely.__module__}:{likely.__name__}"
    return f"`moexport adapt {source}` writes a first adapter, or {EXAMPLE}".format(
        name=likely.__name__
    )


def _with_name(layer: MoELayer, name: str) -> MoELayer:
    """Returns a copy of one of our layers under this name, sharing its weights."""
    copy = sharing_weights(layer)
    assert isinstance(copy, MoELayer)
    # Specs are dataclasses, but their protocol does not say so.
    copy.spec = replace(layer.spec, name=name)  # type: ignore[type-var]
    return copy
