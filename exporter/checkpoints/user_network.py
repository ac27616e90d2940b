"""A user's own network: built by a factory, its MoE layers found, replaced by ours and compared.

A layer is found by an adapter for its class (`adapters`), as one of moexport's own classes, or by
the names and shapes of its parameters, which are then those of a published layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...calibration.feeds import samples
from ...common.user_code import callable_named
from ...errors import CheckpointError, FamilyError, MoexportError, ParityError, UsageError
from ...graphs.layers.base import MoELayer, moe_layers, sharing_weights
from ..families import FAMILIES, LAYOUTS
from ..families.base import find_layers
from ..families.layer_only import PixelBackbone, TokenBackbone, VectorBackbone
from ..model import Model, Source, TensorSpec
from ..token_routed.own_router import Routed, check_experts, routing
from .adapters import (
    EXAMPLE,
    TOLERANCE,
    Adapter,
    Described,
    Experts,
    adapter_name,
    adapter_of,
    adapters_for,
    check_described,
    describe,
    difference,
)
from .state_dict import Checkpoint, read_checkpoint

INPUT_SHAPE = "input_shape"

EXAMPLE_INPUT = "example_input"

RANDOM_INPUTS = 2

FEED_INPUTS = 8

Example = np.ndarray | str | Path
"""Inputs [b, …], or where they are (`calibration.feeds`): the first few of them are taken."""


def load_factory(
    source: str,
    config: Mapping[str, Any],
    weights: Path | None,
    example: Example | None,
    adapters: Sequence[Adapter | str] = (),
) -> Model:
    """Returns the network that a factory builds, its MoE layers replaced by ours.

    `config` are the factory's arguments, and `input_shape` without the batch where the network has
    no `example_input` and no `example` [b, …] is given. Both networks run on that input; a
    difference is a ParityError. The user's own module is kept as `Model.original`.
    """
    arguments = {key: value for key, value in config.items() if key != INPUT_SHAPE}
    module = _built(source, callable_named(source, "a factory"), arguments)
    given = adapters_for(adapters)
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    mapped: tuple[Path, ...] = ()
    if weights is not None:
        checkpoint = read_checkpoint(weights)
        notes += checkpoint.notes
        _fill(module, checkpoint, source)
        files, mapped = checkpoint.files, checkpoint.mapped
    else:
        notes += (f"no --weights: the weights are those that {source} gave the network",)
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters()):
        notes += ("converted the network to float32",)
    module = module.float().eval().requires_grad_(False)
    inputs, note = _example(source, module, config.get(INPUT_SHAPE), example)
    found = find_in_module(module, given)
    own = recorded_forward(module, found, inputs, source)
    places = {layer.path: layer for layer in found}
    found = tuple(places[path] for path in own.layers)  # in the order in which they are called
    for place in found:
        _check_adapter(place, own.layers[place.path], source)
    twin, layers, replaced = swapped(module, found, own)
    check_same(own, recorded_forward(twin, found, inputs, source), module, source)
    array, result = inputs.numpy(), own.result.numpy()
    used = {adapter_name(layer.adapter): None for layer in found if layer.adapter is not None}
    return Model(
        module=twin,
        family="factory",
        config=dict(config),
        source=Source(
            source, files, None if weights is None else str(weights), mapped, adapters=tuple(used)
        ),
        inputs=(TensorSpec("input", array.dtype.name, ("batch", *array.shape[1:])),),
        outputs=(TensorSpec("output", result.dtype.name, ("batch", *result.shape[1:])),),
        notes=(*notes, *note, *replaced),
        original=module,
        example=array,
        order=layers,
    )


def _built(source: str, factory: Callable[..., object], arguments: dict[str, Any]) -> nn.Module:
    try:
        module = factory(**arguments)
    except Exception as error:  # the user's code may fail in any way
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise UsageError(
            f"{source}({listed}) failed: {type(error).__name__}: {error}",
            hint="--config and --set are passed to the factory as its arguments",
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"{source} returned a {type(module).__name__}, not a torch.nn.Module")
    return module


def _fill(module: nn.Module, checkpoint: Checkpoint, source: str) -> None:
    """Gives the network its weights without a copy; raises CheckpointError for other keys."""
    expected = module.state_dict()
    tensors = _named_as(expected, checkpoint)
    missing = [key for key in expected if key not in tensors]
    extra = [key for key in tensors if key not in expected]
    wrong = [
        f"{key} has shape {list(t.shape)}, expected {list(expected[key].shape)}"
        for key, t in tensors.items()
        if key in expected and t.shape != expected[key].shape
    ]
    problems = [f"missing {', '.join(missing[:6])}"] if missing else []
    problems += [f"unexpected {', '.join(extra[:6])}"] if extra else []
    problems += wrong[:6]
    if problems:
        raise CheckpointError(
            f"{checkpoint.files[0]}: not the weights of {source}: {'; '.join(problems)}",
            hint="do the factory's arguments (--set) match the checkpoint?",
        )
    module.load_state_dict(tensors, assign=True)


def _named_as(expected: Mapping[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors with as many of the removed prefixes put back as the network's own keys have."""
    for start in range(len(checkpoint.prefixes) + 1):
        prefix = "".join(checkpoint.prefixes[start:])
        if all(key.startswith(prefix) for key in expected):
            return {prefix + key: tensor for key, tensor in checkpoint.tensors.items()}
    return checkpoint.tensors


def _example(
    source: str, module: nn.Module, shape: object, given: Example | None
) -> tuple[Tensor, tuple[str, ...]]:
    """The input [b, …] on which both networks run, and a note where it is random."""
    if given is not None:
        array = given if isinstance(given, np.ndarray) else samples(given, "input", FEED_INPUTS)
        array = array.astype(np.float32) if array.dtype.kind == "f" else array
        return torch.from_numpy(np.ascontiguousarray(array)), ()
    own = getattr(module, EXAMPLE_INPUT, None)
    if own is not None:
        value = own() if callable(own) else own
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, Tensor):
            raise UsageError(
                f"{source}: {EXAMPLE_INPUT} is a {type(value).__name__}, not a tensor or an array"
            )
        return value.detach(), ()
    sizes = [shape] if isinstance(shape, int) else shape
    if not isinstance(sizes, list | tuple) or not all(isinstance(s, int) and s > 0 for s in sizes):
        given_text = "" if shape is None else f" ({INPUT_SHAPE}={shape!r} is no list of sizes)"
        raise UsageError(
            f"{source}: no input to check the replaced layers with{given_text}",
            hint=f"--set {INPUT_SHAPE}=3,224,224 (without the batch), --data with real inputs, or "
            f"an attribute {EXAMPLE_INPUT} on the network",
        )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(RANDOM_INPUTS, *sizes, generator=generator)
    return inputs, (f"the replaced layers were checked on random inputs of shape {list(sizes)}",)


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """A MoE layer in a user's network: where it is, what it is called, and what takes its place.

    `make` returns our layer under a name. `adapter` said what it is and is to be believed only
    where `described` computes what the layer does. `aliases` are further names under which the
    network holds the same module.
    """

    path: str
    title: str
    make: Callable[[str], MoELayer]
    aliases: tuple[str, ...] = ()
    adapter: Adapter | None = None
    described: Described | None = None

    @property
    def at(self) -> str:
        """Its place in messages."""
        return f"the layer {self.path or '(the network itself)'}"

    @property
    def routed(self) -> Experts | None:
        """What the adapter says of it, where that is experts that a router chooses."""
        return self.described if isinstance(self.described, Experts) else None


def find_in_module(
    module: nn.Module, adapters: Mapping[type, Adapter] | None = None
) -> tuple[FoundLayer, ...]:
    """Returns the MoE layers that a network holds.

    Raises FamilyError when it holds none, and UsageError for an adapter of `adapters` whose class
    does not occur, or that does not say what a layer is.
    """
    tensors = module.state_dict()
    paths: dict[int, list[str]] = {}
    for path, sub in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(sub), []).append(path)
    adapted = _adapted(module, adapters or {})
    found = {
        prefix.removesuffix("."): FoundLayer(
            prefix.removesuffix("."),
            f"a {layout.family} layer",
            partial(layout.make, prefix, tensors),
        )
        for layout in LAYOUTS
        for prefix in find_layers(tensors, layout)
    }
    for path, own in moe_layers(module).items():
        found[path] = FoundLayer(path, f"a {own.spec.kind} layer", partial(_renamed, own))
    inside = tuple(f"{path}." if path else "" for path in adapted)
    found = {path: each for path, each in found.items() if not path.startswith(inside)} | adapted
    places = tuple(
        replace(found[first], aliases=tuple(others))
        for first, *others in paths.values()
        if first in found
    )
    if not places:
        names = ", ".join(list(tensors)[:6])
        raise FamilyError(
            f"{type(module).__name__} holds no Soft MoE layer and no muMoE layer that moexport "
            f"knows (its parameters: {names}, …)",
            hint=f"{EXAMPLE.format(name=_likely_class(module))}; layers known by the names and "
            f"shapes of their parameters: {', '.join(FAMILIES)}; the layer must be a module of "
            "its own",
        )
    return places


def _adapted(module: nn.Module, adapters: Mapping[type, Adapter]) -> dict[str, FoundLayer]:
    """The layers that an adapter describes, the outermost where they lie in each other."""
    found: dict[str, FoundLayer] = {}
    unused = dict(adapters)
    for path, sub in module.named_modules():
        if any(path.startswith(f"{outer}." if outer else "") for outer in found):
            continue
        adapter = adapter_of(sub, adapters)
        if adapter is None:
            continue
        unused = {cls: each for cls, each in unused.items() if each is not adapter}
        described = describe(adapter, sub, f"the layer {path or '(the network itself)'}")
        title = f"what the adapter {adapter_name(adapter)} says"
        found[path] = FoundLayer(path, title, described.build, (), adapter, described)
    if unused:
        cls, adapter = next(iter(unused.items()))
        raise UsageError(
            f"the adapter {adapter_name(adapter)} is for {cls.__name__}, and "
            f"{type(module).__name__} holds no such layer",
            hint=f"classes in it: {', '.join(_own_classes(module)) or 'those of torch.nn alone'}",
        )
    return found


def _own_classes(module: nn.Module) -> list[str]:
    """The names of the classes in a network that are not PyTorch's, each once."""
    classes = (type(sub) for sub in module.modules())
    return list(dict.fromkeys(c.__name__ for c in classes if not c.__module__.startswith("torch.")))


def _likely_class(module: nn.Module) -> str:
    """The user's class to show in an example: one that is called a MoE, or any of the user's."""
    inner = [name for child in module.children() for name in _own_classes(child)]
    return next((name for name in inner if "moe" in name.lower()), (*inner, "MyLayer")[0])


def _renamed(layer: MoELayer, name: str) -> MoELayer:
    """A layer of moexport's own classes with the weights it has, under the name of its place."""
    twin = sharing_weights(layer)
    assert isinstance(twin, MoELayer)
    # Specs are dataclasses, which their protocol does not say.
    twin.spec = replace(layer.spec, name=name)  # type: ignore[type-var]
    return twin


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer: its tokens x, what else it was given, and what it returned."""

    x: Tensor
    y: Tensor
    further: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one forward pass showed: the call of each layer by its path, and the result."""

    layers: Mapping[str, Call]
    result: Tensor


def recorded_forward(
    module: nn.Module, found: tuple[FoundLayer, ...], inputs: Tensor, what: str
) -> Recorded:
    """Runs the network once on `inputs` and returns what its MoE layers did.

    Raises FamilyError when a layer is called with more than its tokens, or never, or when the
    result is not one tensor. A router's layer may be called with more, which its router is given.
    """
    seen: dict[str, Call] = {}
    routed = {place.path for place in found if place.routed is not None}

    def record(
        path: str, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object
    ) -> None:
        alone = (len(args) == 1 and not kwargs) or path in routed
        tokens = args[0] if args and alone else None
        if not isinstance(tokens, Tensor) or not isinstance(out, Tensor):
            raise FamilyError(
                f"{what}: {path or 'the layer'} is called with more than its tokens, or "
                "returns more than a tensor",
                hint="its forward must be y = layer(x) at inference",
            )
        seen[path] = Call(tokens.detach(), out.detach(), args[1:], dict(kwargs))

    with ExitStack() as hooks, torch.no_grad():
        for path in (layer.path for layer in found):
            sub = module.get_submodule(path)
            hooks.enter_context(sub.register_forward_hook(partial(record, path), with_kwargs=True))
        try:
            result = module(inputs)
        except MoexportError:
            raise
        except Exception as error:  # the user's code may fail in any way
            raise UsageError(
                f"{what}: its forward failed on an input of shape {list(inputs.shape)}: "
                f"{type(error).__name__}: {error}",
                hint="does the example, or --set input_shape=…, fit the network?",
            ) from error
    unused = [layer.path for layer in found if layer.path not in seen]
    if unused:
        raise FamilyError(
            f"{what}: the layer {unused[0] or '(the network itself)'} was not called as a module "
            f"on an input of shape {list(inputs.shape)}"
        )
    if not isinstance(result, Tensor):
        raise FamilyError(
            f"{what}: its forward returned a {type(result).__name__}, not one tensor",
            hint="give a factory whose forward returns the logits alone",
        )
    return Recorded(seen, result)


def _check_adapter(place: FoundLayer, call: Call, source: str) -> None:
    """Raises ParityError unless what an adapter says gives y for x, as the layer did."""
    if place.described is None:
        return
    if place.routed is not None:
        _check_routed(place.routed, call, f"{source}: {place.at}")
        return
    x, y = call.x, call.y
    spec, backbone = place.make("").spec, _backbone(place.path, x, y)
    ranks = (2, 3, 4) if spec.routes_tokens else (3, 4)
    if x.ndim not in ranks or x.shape[1 if backbone is PixelBackbone else -1] != spec.dim:
        raise UsageError(
            f"{source}: {place.at} is called on {list(x.shape)}, and what its adapter says takes "
            f"tokens (b, m, {spec.dim}) or pixels (b, {spec.dim}, height, width)",
            hint="phi is [d, n, p], a gate [d, n]: d is the width of a token",
        )

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = (backbone(layer) if backbone else layer)(x)
        return result

    check_described(place.described, x, y, run, f"{source}: {place.at}")


TRIED_TOKENS = 256
"""On which the other options are tried: each meets some experts only."""


def _check_routed(described: Experts, call: Call, at: str) -> None:
    """Raises ParityError unless the experts give y for x and what the router chose."""
    d, n = (spec := described.build("").spec).dim, spec.experts
    if call.x.ndim < 2 or call.x.shape[-1] != d:
        raise UsageError(
            f"{at} is called on {list(call.x.shape)}, and its experts take tokens (…, {d})",
            hint="a first map is an nn.Linear or [h, d], w1 is [n, d, h]: d is a token's width",
        )
    index, weights = _routing(described, call, at)
    try:
        check_experts(index, n)
    except UsageError as error:
        raise UsageError(f"{at}: {error.message}", hint=error.hint) from error
    index, weights = (each.reshape(-1, each.shape[-1]) for each in (index, weights))

    def run(layer: nn.Module, rows: Tensor) -> Tensor:
        result: Tensor = layer(rows, index[: len(rows)], weights[: len(rows)])
        return result

    if call.y.shape[:-1] != call.x.shape[:-1]:
        raise ParityError(
            f"{at} gives {list(call.y.shape)} for {list(call.x.shape)}",
            hint="experts give a row for each token; what is done with them after belongs into a "
            "module around",
        )
    x, y = (each.reshape(-1, each.shape[-1]) for each in (call.x, call.y))
    check_described(described, x, y, run, at, TRIED_TOKENS)


def _routing(described: Experts, call: Call, at: str) -> tuple[Tensor, Tensor]:
    """What the router gives for what the layer was called with; a UsageError names the layer."""
    try:
        with torch.no_grad():
            return routing(described.router, (call.x, *call.further), call.named, None)
    except MoexportError as error:
        raise UsageError(f"{at}: {error.message}", hint=error.hint) from error
    except Exception as error:  # the user's code may fail in any way
        raise UsageError(
            f"{at}: its router failed: {type(error).__name__}: {error}",
            hint="it is called with what the layer is called with; --verbose shows where it was "
            "raised",
        ) from error


def _with_router(place: FoundLayer, layer: nn.Module, call: Call, name: str) -> Routed:
    """Our experts with the user's router, whose code reads a copy of the user's layer.

    The copy shares the parameters, and holds none of the experts' own: those are ours already.
    """
    assert place.adapter is not None
    host = sharing_weights(layer)
    described = describe(place.adapter, host, place.at)
    assert isinstance(described, Experts)
    k = _routing(described, call, place.at)[0].shape[-1]
    experts = described.build(name, k)
    if described.router is None:
        return Routed(experts, None, None)
    ranges = [_bytes_of(each) for each in described.tensors()]
    for module in host.modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            first, last = _bytes_of(parameter)
            if any(first < end and start < last for start, end in ranges):
                setattr(module, parameter_name, None)
    return Routed(experts, described.router, host)


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's values begin and end in memory."""
    first = tensor.data_ptr()
    return first, first + tensor.numel() * tensor.element_size()


def _backbone(path: str, x: Tensor, y: Tensor) -> Callable[[nn.Module], nn.Module] | None:
    """What must stand around our layer in place of the user's: a change of layout, or a name."""
    if x.ndim == 4:
        return PixelBackbone
    if x.ndim == y.ndim == 2:
        return VectorBackbone
    return None if path else TokenBackbone


def swapped(
    module: nn.Module, found: tuple[FoundLayer, ...], own: Recorded
) -> tuple[nn.Module, tuple[str, ...], tuple[str, ...]]:
    """Returns a copy of the network with ours for its MoE layers, their paths, and notes.

    All tensors are shared with `module`. Raises FamilyError for a layer with parameters that the
    published code does not have.
    """
    try:
        twin = sharing_weights(module)
    except (TypeError, RuntimeError) as error:
        raise FamilyError(
            f"{type(module).__name__} cannot be copied, so its layers cannot be replaced: {error}",
            hint="keep what cannot be copied (locks, files, results) out of its attributes",
        ) from error
    names, notes = [], []
    for place in found:
        path = place.path
        call = own.layers[path]
        if place.routed is not None:
            name = f"{path}.experts".removeprefix(".")
            router = _with_router(place, module.get_submodule(path), call, name)
            twin = _placed(twin, place, router)
            names.append(name)
            notes.append(f"{path or 'the network'} replaced as {place.title}")
            continue
        backbone = _backbone(path, call.x, call.y)
        name = f"{path}.layer".removeprefix(".") if backbone else path
        try:
            ours: nn.Module = place.make(name)
        except CheckpointError as error:
            raise FamilyError(
                f"{path or 'the network'} resembles {place.title}: {error.message}",
                hint=f"its parameters are not those of the published code: "
                f"{EXAMPLE.format(name=type(module.get_submodule(path)).__name__)}",
            ) from error
        ours = backbone(ours) if backbone else ours
        twin = _placed(twin, place, ours)
        names.append(name)
        notes.append(f"{path or 'the network'} replaced as {place.title}")
    return twin, tuple(names), tuple(notes)


def _placed(network: nn.Module, place: FoundLayer, ours: nn.Module) -> nn.Module:
    """The network with ours at a layer's place, under each of its names."""
    for each in (place.path, *place.aliases):
        if each:
            network.set_submodule(each, ours.eval())
        else:
            network = ours.eval()
    return network


def check_same(own: Recorded, ours: Recorded, module: nn.Module, what: str) -> None:
    """Raises ParityError unless both passes gave the same, naming the first layer that differs.

    `module` is the user's network, which `own` is of.
    """
    for path, call in own.layers.items():
        miss = _miss(call.y, ours.layers[path].y)
        if miss is not None:
            raise ParityError(
                f"{what}: the layer {path or '(the network itself)'} computes something else than "
                f"the published layer that its parameters resemble: {miss}",
                hint="its forward differs (dispatch and combine swapped, another normalisation or "
                "activation, …): "
                f"{EXAMPLE.format(name=type(module.get_submodule(path)).__name__)}",
            )
    miss = _miss(own.result, ours.result)
    if miss is not None:
        raise ParityError(
            f"{what}: every MoE layer agrees, but the result does not: {miss}",
            hint="is the network in eval mode deterministic?",
        )


def _miss(expected: Tensor, actual: Tensor) -> str | None:
    """How two tensors differ; None where they agree within TOLERANCE of the larger's maximum."""
    if expected.shape != actual.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    if difference(expected, actual) <= TOLERANCE:
        return None
    error, largest = float((expected - actual).abs().max()), float(expected.abs().max())
    return f"off by {error:.2e} where max|y| is {largest:.2e}"
