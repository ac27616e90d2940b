"""Adapters: a user's functions that say what their own layers are, and the proof that they are.

`@adapts(MySoftMoE)` or `--adapter package.module:adapt` names one. What it returns is compared with
the layer's own forward on inputs that the layer really saw; where they differ, the few options that
can be meant otherwise are tried, and the error names those that match.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from ...common.user_code import callable_named
from ...errors import MoexportError, ParityError, UsageError
from .own_layers import MuMoE, SoftMoE

Described = SoftMoE | MuMoE

Adapter = Callable[[Any], Described]

TOLERANCE = 1e-4
"""Largest difference from the user's own forward, as a fraction of max|y|, in float32."""

CLOSE = 1e-5
"""A layer that is further off than this may be another one: the other options are tried, too."""

TRIED_INPUTS = 8

PAGE = "docs/own-layer.md"

EXAMPLE = (
    "say what it is with an adapter: @moexport.adapts({name}) above def adapt(layer): return "
    "moexport.SoftMoE(phi=layer.phi, experts=[(e.fc1, e.fc2) for e in layer.experts], norm='l2'), "
    f"or --adapter package.module:adapt ({PAGE})"
)

A = TypeVar("A", bound=Adapter)

_registered: dict[type, Adapter] = {}


def adapts(*classes: type[nn.Module]) -> Callable[[A], A]:
    """Decorates a function that takes a layer of these classes and says what it computes.

    It returns a `moexport.SoftMoE` or a `moexport.MuMoE` and serves for subclasses, too, that have
    no adapter of their own. Raises UsageError for a class that has another adapter already.
    """
    for each in classes:
        if not _is_layer_class(each):
            raise UsageError(
                f"adapts({each!r}): not a class of layers",
                hint="@moexport.adapts(MyLayer), where MyLayer is an nn.Module class",
            )

    def register(adapter: A) -> A:
        for each in classes:
            _enter(_registered, each, adapter)
        return adapter

    return register


def adapter_name(adapter: Adapter) -> str:
    """Returns `package.module:function`."""
    where = getattr(adapter, "__module__", "?")
    return f"{where}:{getattr(adapter, '__qualname__', type(adapter).__qualname__)}"


def adapters_for(given: Sequence[Adapter | str]) -> dict[type, Adapter]:
    """Returns the classes of the adapters that a call gives, by name or as they are.

    The class is that of `adapts`, or else that of the first parameter's annotation. Raises
    UsageError where there is none, where two are for one class, and for a name that cannot be
    imported.
    """
    found: dict[type, Adapter] = {}
    for each in given:
        adapter: Adapter = callable_named(each, "an adapter") if isinstance(each, str) else each
        decorated = [cls for cls, known in _registered.items() if known is adapter]
        for cls in decorated or _annotated(adapter):
            _enter(found, cls, adapter)
    return found


def adapter_of(layer: nn.Module, given: Mapping[type, Adapter]) -> Adapter | None:
    """Returns the adapter of the nearest of a layer's classes; the call's own before decorated."""
    for cls in type(layer).__mro__:
        adapter = given.get(cls) or _registered.get(cls)
        if adapter is not None:
            return adapter
    return None


def describe(adapter: Adapter, layer: nn.Module, where: str) -> Described:
    """Returns what an adapter says of a layer, with its shapes checked; UsageError that names both.

    `where` is the layer's place in messages.
    """
    what = f"the adapter {adapter_name(adapter)}, {where}"
    try:
        with torch.no_grad():
            described = adapter(layer)
            if isinstance(described, Described):
                described.build("")
    except MoexportError as error:
        raise UsageError(f"{what}: {error.message}", hint=error.hint) from error
    except Exception as error:  # the user's code may fail in any way
        raise UsageError(
            f"{what}: {type(error).__name__}: {error}", hint="--verbose shows where it was raised"
        ) from error
    if not isinstance(described, Described):
        raise UsageError(
            f"{what}: returned a {type(described).__name__}",
            hint=f"an adapter returns a moexport.SoftMoE or a moexport.MuMoE ({PAGE})",
        )
    return described


def difference(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest difference as a fraction of max|expected|; NaN is infinite."""
    largest = float(expected.abs().max())
    error = float((expected - actual).abs().max())
    if error == 0:
        return 0.0
    share = error / largest if largest else inf
    return inf if isnan(share) else share


def check_described(
    described: Described, x: Tensor, y: Tensor, run: Callable[[nn.Module, Tensor], Tensor], at: str
) -> None:
    """Raises ParityError unless what was described gives y, where the user's layer gave it, for x.

    `run` calls a layer on x in the layout that the user's has. `at` begins the message.
    """
    with torch.no_grad():
        ours = run(described.build(""), x)
        if ours.shape != y.shape:
            raise ParityError(
                f"{at} gives {list(y.shape)} for {list(x.shape)}, and what its adapter says gives "
                f"{list(ours.shape)}",
                hint="are the experts' last weights those of another layer, or transposed?",
            )
        off = difference(y, ours)
        if off <= CLOSE:
            return
        tried = _tried(described, x[:TRIED_INPUTS], y[:TRIED_INPUTS], run)
    if off <= TOLERANCE and not _closer(tried):
        return
    raise _mismatch(at, off, tried)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Options that were changed, and how far off y then is, as it is and with x taken from it."""

    changed: dict[str, str]
    off: float
    off_without_x: float


def _tried(
    described: Described, x: Tensor, y: Tensor, run: Callable[[nn.Module, Tensor], Tensor]
) -> list[_Trial]:
    """Every combination of the options, the fewest changes first."""
    trials = []
    for changed, variant in described.variants():
        ours = run(variant.build(""), x)
        without_x = difference(y - x, ours) if x.shape == y.shape else inf
        trials.append(_Trial(changed, difference(y, ours), without_x))
    return sorted(trials, key=lambda trial: len(trial.changed))


def _closer(tried: Sequence[_Trial]) -> list[_Trial]:
    """Those that match, and far better than what was said."""
    said = next(trial.off for trial in tried if not trial.changed)
    return [trial for trial in tried if trial.off <= min(TOLERANCE, said / 10)]


def _mismatch(at: str, off: float, tried: Sequence[_Trial]) -> ParityError:
    """What to say of a layer that is not what its adapter says: which options match, or none."""
    begins = f"{at} computes something else than its adapter says: off by {_share(off)} of max|y|"
    closer = _closer(tried)
    if closer:
        limit = max(10 * min(trial.off for trial in closer), CLOSE)
        fitting = [trial.changed for trial in closer if trial.off <= limit]
        fewest = [_said(each) for each in fitting if len(each) == len(fitting[0])]
        return ParityError(
            f"{begins}; it matches with {' or with '.join(fewest[:3])}",
            hint="change the adapter so, if that is what the layer computes",
        )
    added = min(tried, key=lambda trial: trial.off_without_x)
    if added.off_without_x <= TOLERANCE:
        fitting = [trial.changed for trial in tried if trial.off_without_x <= TOLERANCE]
        return ParityError(
            f"{begins}; it matches with {_said(fitting[0])} once x is taken from y: the layer "
            "adds its input",
            hint="move that addition out of the layer: x + layer(x) in the module that calls it",
        )
    nearest = min(tried, key=lambda trial: trial.off)
    single: dict[tuple[tuple[str, str], ...], _Trial] = {}
    for trial in sorted(tried, key=lambda trial: trial.off):
        keys = trial.changed.keys() - {"eps"} or trial.changed.keys()
        if len(keys) == 1:  # with the eps that goes with it best
            single.setdefault(tuple((key, trial.changed[key]) for key in keys), trial)
    shown = [*single.values()] if nearest in single.values() else [*single.values(), nearest]
    listed = ", ".join(f"{_said(each.changed)}: {_share(each.off)}" for each in shown)
    return ParityError(
        f"{begins}; none of {len(tried)} combinations of options matches ({listed})",
        hint="phi is what the router multiplies with, normalised and scaled; slots average by a "
        "softmax over the tokens, the output adds the experts' by one over all slots; is a weight "
        f"transposed? ({PAGE})",
    )


def _said(changed: Mapping[str, str]) -> str:
    if not changed:
        return "the options as they are"
    return ", ".join(f"{key}={value}" for key, value in changed.items())


def _share(share: float) -> str:
    return f"{share:.2g}" if share >= 0.01 else f"{share:.0e}"


def _enter(table: dict[type, Adapter], cls: type, adapter: Adapter) -> None:
    """Enters an adapter for a class; a function defined again replaces itself."""
    known = table.get(cls, adapter)
    if known is not adapter and adapter_name(known) != adapter_name(adapter):
        raise UsageError(
            f"{cls.__name__} has two adapters: {adapter_name(known)} and {adapter_name(adapter)}",
            hint="leave one of them out; a subclass may have one of its own",
        )
    table[cls] = adapter


def _annotated(adapter: Adapter) -> tuple[type, ...]:
    """The classes in the annotation of an adapter's first parameter."""
    what = adapter_name(adapter)
    try:
        parameters = inspect.signature(adapter, eval_str=True).parameters.values()
    except (TypeError, ValueError, NameError) as error:
        raise UsageError(f"the adapter {what}: its parameters cannot be read: {error}") from error
    annotation = next((each.annotation for each in parameters), None)
    classes = get_args(annotation) or (annotation,)
    if not all(_is_layer_class(each) for each in classes):
        raise UsageError(
            f"the adapter {what} does not say which class of layers it is for",
            hint="@moexport.adapts(MyLayer) above it, or def adapt(layer: MyLayer)",
        )
    return classes


def _is_layer_class(given: object) -> bool:
    return isinstance(given, type) and issubclass(given, nn.Module) and given is not nn.Module
