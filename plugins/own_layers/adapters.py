"""Adapters: user functions that describe the user's own layers.

`@adapts(MySoftMoE)` registers one, and `--adapter package.module:adapt` names one. The description
that it returns (`descriptions`) is compared with what the layer computes (`comparison`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import torch
from torch import nn

from ...data.user_code import callable_named, user_code
from ...errors import MoexportError, UsageError
from .descriptions import Description
from .request import Adapter

PAGE = "docs/own-layer.md"

EXAMPLE = (
    "describe it with an adapter: write `def adapt(layer): return moexport.SoftMoE(phi=layer.phi, "
    "experts=[(e.fc1, e.fc2) for e in layer.experts], norm='l2')`, then decorate it with "
    f"@moexport.adapts({{name}}) or pass --adapter package.module:adapt ({PAGE})"
)

A = TypeVar("A", bound=Callable[[Any], Description])

_registered: dict[type, Adapter] = {}


def adapts(*classes: type[nn.Module]) -> Callable[[A], A]:
    """Decorates a function that describes layers of these classes.

    The function returns a `moexport.SoftMoE`, `MuMoE` or `Experts`, and also applies to subclasses
    without an adapter. Raises UsageError for a class that already has another adapter.
    """
    for class_ in classes:
        if not _is_layer_class(class_):
            raise UsageError(
                f"adapts({class_!r}): this is not a layer class",
                hint="@moexport.adapts(MyLayer), where MyLayer is an nn.Module class",
            )

    def register(adapter: A) -> A:
        for class_ in classes:
            _register(_registered, class_, adapter)
        return adapter

    return register


def adapter_name(adapter: Adapter) -> str:
    """Returns `package.module:function`."""
    where = getattr(adapter, "__module__", "?")
    return f"{where}:{getattr(adapter, '__qualname__', type(adapter).__qualname__)}"


def adapters_for(adapters: Sequence[Adapter | str]) -> dict[type, Adapter]:
    """Returns adapters, given as functions or by name, by the class that they describe.

    The class comes from `adapts` or else from the first parameter's annotation. Raises UsageError
    if there is no class, if one has two adapters, and for a name that cannot be imported.
    """
    classes: dict[type, Adapter] = {}
    for given in adapters:
        adapter: Adapter = callable_named(given, "an adapter") if isinstance(given, str) else given
        decorated = [cls for cls, entry in _registered.items() if entry is adapter]
        for cls in decorated or _annotated_classes(adapter):
            _register(classes, cls, adapter)
    return classes


def adapter_of(layer: nn.Module, adapters: Mapping[type, Adapter]) -> Adapter | None:
    """Returns the adapter of a layer's class or nearest base class; those in `adapters` win."""
    for cls in type(layer).__mro__:
        adapter = adapters.get(cls) or _registered.get(cls)
        if adapter is not None:
            return adapter
    return None


def describe(adapter: Adapter, layer: nn.Module, where: str) -> Description:
    """Returns an adapter's description of a layer after checking its shapes.

    `where` is the layer's name in messages. Every UsageError names the adapter and the layer.
    """
    what = f"the adapter {adapter_name(adapter)} for {where}"
    with torch.no_grad(), user_code(what, "--verbose shows where it was raised"):
        try:
            description = adapter(layer)
            if isinstance(description, Description):
                description.build("")
        except MoexportError as error:
            raise UsageError(f"{what}: {error.message}", hint=error.hint) from error
    if not isinstance(description, Description):
        raise UsageError(
            f"{what}: it returned a {type(description).__name__}",
            hint="an adapter returns a moexport.SoftMoE, a moexport.MuMoE or moexport.Experts "
            f"({PAGE})",
        )
    return description


def _register(table: dict[type, Adapter], cls: type, adapter: Adapter) -> None:
    """Adds a class's adapter to a table; a redefinition of the same function replaces it."""
    known = table.get(cls, adapter)
    if known is not adapter and adapter_name(known) != adapter_name(adapter):
        raise UsageError(
            f"{cls.__name__} has two adapters: {adapter_name(known)} and {adapter_name(adapter)}",
            hint="remove one of them; a subclass may have its own",
        )
    table[cls] = adapter


def _annotated_classes(adapter: Adapter) -> tuple[type, ...]:
    """Returns the classes in the annotation of an adapter's first parameter."""
    what = adapter_name(adapter)
    try:
        parameters = inspect.signature(adapter, eval_str=True).parameters.values()
    except (TypeError, ValueError, NameError) as error:
        raise UsageError(f"the adapter {what}: its parameters cannot be read: {error}") from error
    annotation = next((parameter.annotation for parameter in parameters), None)
    classes = get_args(annotation) or (annotation,)
    if not all(_is_layer_class(class_) for class_ in classes):
        raise UsageError(
            f"the adapter {what} does not name the layer class that it describes",
            hint="@moexport.adapts(MyLayer) above it, or def adapt(layer: MyLayer)",
        )
    return classes


def _is_layer_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and value is not nn.Module
