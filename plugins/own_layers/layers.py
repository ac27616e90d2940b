"""Finds the MoE layers of a user's network.

They have an adapter for their class (`adapters`), are of moexport's own classes, or have parameters
with the names and shapes of a published layer.
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
class LayerPlace:
    """A MoE layer in a user's network: its place, its names, and what replaces it.

    `class_name` is that of the user's class, and `make` returns our layer with a name. `adapter`
    made the `description`, which is used only if it computes the same as the layer. `aliases`
    are further names of the same module in the network.
    """

    path: str
    title: str
    class_name: str
    make: Callable[[str], MoELayer]
    aliases: tuple[str, ...] = ()
    adapter: Adapter | None = None
    description: Description | None = None

    @property
    def at(self) -> str:
        """Its place in messages."""
        return f"the layer {self.path or '(the network itself)'}"

    @property
    def own_code(self) -> Code | None:
        return None if self.description is None else self.description.code


def find_in_module(module: nn.Module, adapters: Mapping[type, Adapter]) -> tuple[LayerPlace, ...]:
    """Returns the MoE layers of a network.

    Raises FamilyError if there is none, and UsageError for an adapter of `adapters` whose class
    does not occur, or whose description is invalid.
    """
    tensors = module.state_dict()
    paths: dict[int, list[str]] = {}
    for path, sub in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(sub), []).append(path)
    places: dict[str, LayerPlace] = {}
    for layout in layouts():
        for prefix in find_layers(tensors, layout):
            path = prefix.removesuffix(".")
            places[path] = LayerPlace(
                path=path,
                title=f"a {layout.family} layer",
                class_name=type(module.get_submodule(path)).__name__,
                make=partial(layout.make, prefix, tensors),
            )
    for path, own in moe_layers(module).items():
        places[path] = LayerPlace(
            path=path,
            title=kind_text(own.spec.kind),
            class_name=type(own).__name__,
            make=partial(_renamed, own),
        )
    adapted = _adapted(module, adapters)
    inside = tuple(f"{path}." if path else "" for path in adapted)
    places = {path: place for path, place in places.items() if not path.startswith(inside)}
    places |= adapted
    if not places:
        names = ", ".join(list(tensors)[:6])
        raise FamilyError(
            f"{type(module).__name__} has no Soft MoE or muMoE layer that moexport "
            f"knows (its parameters: {names}, …)",
            hint=f"{_adapt(module)}; layers known by the names and "
            f"shapes of their parameters: {', '.join(all_names())}; the layer must be a module of "
            "its own",
        )
    return tuple(
        replace(places[first], aliases=tuple(others))
        for first, *others in paths.values()
        if first in places
    )


def _adapted(module: nn.Module, adapters: Mapping[type, Adapter]) -> dict[str, LayerPlace]:
    """The layers that an adapter describes, the outermost if they are nested."""
    places: dict[str, LayerPlace] = {}
    unused = dict(adapters)
    for path, sub in module.named_modules():
        if any(path.startswith(f"{outer}." if outer else "") for outer in places):
            continue
        adapter = adapter_of(sub, adapters)
        if adapter is None:
            continue
        unused = {cls: other for cls, other in unused.items() if other is not adapter}
        description = describe(adapter, sub, f"the layer {path or '(the network itself)'}")
        places[path] = LayerPlace(
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
            hint=f"classes in it: {own or 'only those of torch.nn'}",
        )
    return places


def _own_classes(module: nn.Module) -> list[type[nn.Module]]:
    """The classes in a network that are not PyTorch's, each once."""
    classes = (type(sub) for sub in module.modules())
    return list(dict.fromkeys(c for c in classes if not c.__module__.startswith("torch.")))


def _adapt(module: nn.Module) -> str:
    """A hint to describe the user's layer: the first whose class name contains MoE, or any."""
    inner = list(dict.fromkeys(c for child in module.children() for c in _own_classes(child)))
    likely = next((c for c in inner if "moe" in c.__name__.lower()), (*inner, None)[0])
    if likely is None:
        return EXAMPLE.format(name="MyLayer")
    source = f"{likely.__module__}:{likely.__name__}"
    return f"`moexport adapt {source}` writes a first adapter, or {EXAMPLE}".format(
        name=likely.__name__
    )


def _renamed(layer: MoELayer, name: str) -> MoELayer:
    """A layer of moexport's own classes with its weights, under the name of its place."""
    twin = sharing_weights(layer)
    assert isinstance(twin, MoELayer)
    # Specs are dataclasses, but their protocol does not include that.
    twin.spec = replace(layer.spec, name=name)  # type: ignore[type-var]
    return twin
