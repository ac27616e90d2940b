"""A user's own network: built by a factory, its MoE layers found, replaced by ours and compared.

A layer is found by an adapter for its class (`adapters`), as one of moexport's own classes, or by
the names and shapes of its parameters, which are then those of a published layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.user_code import callable_named
from ...errors import CheckpointError, FamilyError, MoexportError, ParityError, UsageError
from ...graphs.layers.base import sharing_weights
from ..families.layer_only import PixelBackbone, TokenBackbone, VectorBackbone
from ..model import Model, Source, TensorSpec
from ..token_routed.own_router import Routed, check_experts, routing
from .adapters import (
    EXAMPLE,
    TOLERANCE,
    Adapter,
    Experts,
    adapter_name,
    adapters_for,
    check_described,
    describe,
    difference,
)
from .calls import Call, Recorded, recorded_forward
from .examples import INPUT_SHAPE, Example, differ, example_of, made_up
from .layers import FoundLayer, find_in_module
from .state_dict import Checkpoint, read_checkpoint

COMPILED = "_orig_mod"
"""What a module that `torch.compile` made calls the module that it is of."""


def load_factory(
    source: str,
    config: Mapping[str, Any],
    weights: Path | None,
    example: Example | None,
    adapters: Sequence[Adapter | str] = (),
) -> Model:
    """Returns the network that a factory builds, its MoE layers replaced by ours.

    `config` are the factory's arguments, and `input_shape` without the batch where the network has
    no `example_input` and no `example` [b, …] is given. Both networks run on that input, and on a
    made-up one where it holds no two different inputs; a difference is a ParityError. The user's
    own module is kept as `Model.original`.
    """
    arguments = {key: value for key, value in config.items() if key != INPUT_SHAPE}
    module, notes = _uncompiled(_built(source, callable_named(source, "a factory"), arguments))
    known = adapters_for(adapters)
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
    inputs, random = example_of(source, module, config.get(INPUT_SHAPE), example)
    found = find_in_module(module, known)
    passes, made = _passes(module, found, inputs, source)
    found, left = _called(found, passes, source)
    calls = {path: call for each in reversed(passes) for path, call in each.layers.items()}
    for place in found:
        _check_alone(place, module.get_submodule(place.path), calls[place.path], source)
        for each in passes:
            _check_adapter(place, each, source)
    twin, layers, replaced = swapped(module, found, calls)
    for each in passes:
        check_same(each, twin, found, source)
    array, result = passes[0].inputs.numpy(), passes[0].result.numpy()
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
        notes=(*notes, *random, *made, *replaced, *left),
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


def _uncompiled(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The network without `torch.compile`, and a note: what is compiled keeps its own layers."""
    paths = []
    while (first := next(_compiled(module), None)) is not None:
        path, inner = first
        if path:
            module.set_submodule(path, inner)
        else:
            module = inner
        paths.append(path or "the network")
    for path, sub in module.named_modules():
        if sub._compiled_call_impl is not None:  # by `sub.compile()`
            sub._compiled_call_impl = None
            paths.append(path or "the network")
    return module, (f"torch.compile was taken off {', '.join(paths)}",) if paths else ()


def _compiled(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The places of modules that `torch.compile` made, the outermost first, and what is in them."""
    for path, sub in module.named_modules(remove_duplicate=False):
        if type(sub).__name__ == "OptimizedModule":
            yield path, sub.get_submodule(COMPILED)


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
    """The tensors with as many of the removed prefixes put back as the network's own keys have.

    Those of a layer that was compiled in training are those of the layer.
    """
    tensors = {key.replace(f".{COMPILED}.", "."): t for key, t in checkpoint.tensors.items()}
    for start in range(len(checkpoint.prefixes) + 1):
        prefix = "".join(checkpoint.prefixes[start:])
        if all(key.startswith(prefix) for key in expected):
            return {prefix + key: tensor for key, tensor in tensors.items()}
    return tensors


def _passes(
    module: nn.Module, found: Sequence[FoundLayer], inputs: Tensor, source: str
) -> tuple[list[Recorded], tuple[str, ...]]:
    """The passes that are compared, over two different inputs at least, and a note if made up.

    A network that cannot run on what is made up, or gives no numbers for it, is compared on its
    example alone.
    """
    alone = recorded_forward(module, found, inputs, source)
    if differ(inputs):
        return [alone], ()
    begins = "the example holds no two different inputs: the replaced layers were checked on"
    for further in made_up(inputs):
        # A network may run on batches of the example's size alone.
        for batch, before in ((torch.cat([inputs, further]), ()), (further, (alone,))):
            try:
                more = recorded_forward(module, found, batch, source)
            except MoexportError:
                continue
            if more.finite:
                return [*before, more], (f"{begins} made-up ones, too",)
    why = "as the network cannot run on made-up ones; --data with real inputs checks more"
    return [alone], (f"{begins} it alone, {why}",)


def _called(
    found: Sequence[FoundLayer], passes: Sequence[Recorded], source: str
) -> tuple[tuple[FoundLayer, ...], tuple[str, ...]]:
    """The layers that the network calls, in the order in which it does, and notes on the others."""
    places = {place.path: place for place in found}
    called = dict.fromkeys(path for each in passes for path in each.layers)
    left = [place.at for path, place in places.items() if path not in called]
    if not called:
        raise FamilyError(
            f"{source}: the network calls none of the layers that moexport found in it on an input "
            f"of shape {list(passes[0].inputs.shape)}: {', '.join(left)}",
            hint="a layer is called as y = layer(x); is another branch taken with real inputs "
            "(--data), or by another argument (--set)?",
        )
    notes = tuple(f"{each} is not called: left as it is" for each in left)
    return tuple(places[path] for path in called), notes


TRIED_ALONE = 4


def _check_alone(place: FoundLayer, layer: nn.Module, call: Call, source: str) -> None:
    """Raises ParityError where what a layer gives for an input depends on the others of its batch.

    Ours never does. What a user's router does is part of the graph, and compared with that.
    """
    if place.routed is not None:
        return
    x = call.x if differ(call.x) else torch.cat([call.x, *islice(made_up(call.x), 1)])
    together = _given(layer, x)
    if together is None or together.shape[:1] != x.shape[:1]:
        return
    rows = sorted({*torch.linspace(0, len(x) - 1, TRIED_ALONE).long().tolist()})
    alone = []
    for row in rows:
        # Twice, where the layer takes no batch of one.
        batches = (x[[row]], x[[row, row]])
        y = next((y for each in batches if (y := _given(layer, each)) is not None), None)
        if y is None or y[:1].numel() != together[:1].numel():
            return
        alone.append(y[:1].reshape(together[:1].shape))
    off = difference(together[rows], torch.cat(alone))
    if off <= TOLERANCE:
        return
    again = _given(layer, x)
    if again is None or difference(together, again) > TOLERANCE:
        raise ParityError(
            f"{source}: {place.at} gives another result each time that it is called",
            hint="noise belongs into training alone: if self.training",
        )
    raise ParityError(
        f"{source}: {place.at} gives for one input what depends on the others of its batch: off by "
        f"{off:.2g} of max|y| from what it gives for the input alone",
        hint="no softmax, sum, statistics or reshape of the layer may reach over its first axis: a "
        "batch would change every result",
    )


def _given(layer: nn.Module, x: Tensor) -> Tensor | None:
    """What a layer gives for x outside of its network; None where it gives no numbers there."""
    with torch.no_grad():
        try:
            y = layer(x.clone())
        except Exception:  # noqa: BLE001  a layer may need its network to run
            return None
    return y if isinstance(y, Tensor) and bool(y.isfinite().all()) else None


def _check_adapter(place: FoundLayer, recorded: Recorded, source: str) -> None:
    """Raises ParityError unless what an adapter says gives y for x, as the layer did."""
    call = recorded.layers.get(place.path)
    if place.described is None or call is None:
        return
    at = f"{source}: {place.at}" + (", which changes its input in place," if call.in_place else "")
    if place.routed is not None:
        _check_routed(place.routed, call, at)
        return
    x, y = call.x, call.y
    spec, backbone = place.make("").spec, _backbone(place.path, call)
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

    check_described(place.described, x, y, run, at)


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
            # A router may change in place what it is given.
            return routing(described.router, (call.x.clone(), *call.further), call.named, None)
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


def _backbone(path: str, call: Call) -> Callable[[nn.Module], nn.Module] | None:
    """What must stand around our layer in place of the user's.

    A change of layout; a name; or a module whose `forward` calls our layer as one, where it is that
    which the network calls.
    """
    if call.x.ndim == 4:
        return PixelBackbone
    if call.x.ndim == call.y.ndim == 2:
        return VectorBackbone
    return TokenBackbone if call.direct or not path else None


def swapped(
    module: nn.Module, found: Sequence[FoundLayer], calls: Mapping[str, Call]
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
        call = calls[path]
        if place.routed is not None:
            name = f"{path}.experts".removeprefix(".")
            router = _with_router(place, module.get_submodule(path), call, name)
            twin = _placed(twin, place, router)
            names.append(name)
            notes.append(f"{path or 'the network'} replaced as {place.title}")
            continue
        backbone = _backbone(path, call)
        name = f"{path}.layer".removeprefix(".") if backbone else path
        try:
            ours: nn.Module = place.make(name)
        except CheckpointError as error:
            raise FamilyError(
                f"{path or 'the network'} resembles {place.title}: {error.message}",
                hint=f"its parameters are not those of the published code: "
                f"{EXAMPLE.format(name=place.class_name)}",
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


def check_same(own: Recorded, twin: nn.Module, found: Sequence[FoundLayer], source: str) -> None:
    """Raises ParityError unless the twin gives what the user's network gave in a pass.

    It names the first layer that differs. `found` are the layers that were replaced.
    """
    ours = recorded_forward(
        twin,
        found,
        own.inputs,
        f"{source}, its MoE layers replaced",
        hint="the network may take nothing of such a layer but what it returns: y = layer(x)",
    )
    called = [place for place in found if place.path in own.layers]
    for place in called:
        if place.path not in ours.layers:
            raise FamilyError(
                f"{source}: the network does not call what takes the place of {place.at}",
                hint="its forward may look for layers of that class, or be a function that holds "
                "the network itself: make it a method that calls the layer by its name",
            )
    wrong = [
        (place, miss)
        for place in called
        if (miss := _miss(own.layers[place.path].y, ours.layers[place.path].y)) is not None
    ]
    result = _miss(own.result, ours.result)
    if not wrong and result is None:
        return
    changing = [place.at for place in called if own.layers[place.path].in_place]
    if changing:
        raise ParityError(
            f"{source}: {changing[0]} changes its input in place, and the network then uses that",
            hint="x = x + … where the layer has x += … or x.add_(…)",
        )
    if not wrong:
        raise ParityError(
            f"{source}: every MoE layer agrees, but the result does not: {result}",
            hint="is the network in eval mode deterministic?",
        )
    place, miss = wrong[0]
    if place.adapter is not None:
        raise ParityError(
            f"{source}: {place.at} computes something else in the network than {place.title}: "
            f"{miss}",
            hint="does the network add hooks to it, or call it several times in different ways?",
        )
    raise ParityError(
        f"{source}: {place.at} computes something else than the published layer that its "
        f"parameters resemble: {miss}",
        hint="its forward differs (dispatch and combine swapped, another normalisation or "
        f"activation, …): {EXAMPLE.format(name=place.class_name)}",
    )


def _miss(expected: Tensor, actual: Tensor) -> str | None:
    """How two tensors differ; None where they agree within TOLERANCE of the larger's maximum."""
    if expected.shape != actual.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    if difference(expected, actual) <= TOLERANCE:
        return None
    error, largest = float((expected - actual).abs().max()), float(expected.abs().max())
    return f"off by {error:.2e} where max|y| is {largest:.2e}"
