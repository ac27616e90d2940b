"""A user's own network: built by a factory, its MoE layers found, replaced by ours and compared.

A layer is found by an adapter for its class (`adapters`), as one of moexport's own classes, or by
the names and shapes of its parameters, which are then those of a published layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...common.files import Reading
from ...common.user_code import module_made, names_code
from ...errors import CheckpointError, FamilyError, MoexportError
from ...exporter.checkpoints.state_dict import Checkpoint, check_finite, read_checkpoint
from ...exporter.inputs import Example
from ...exporter.model import Model, Source, TensorSpec
from ...graphs.layers.base import MoELayer, sharing_weights
from ..token_routed.own_forward import OwnForward, RouterHost
from .adapters import EXAMPLE, adapter_name, adapters_for, describe
from .calls import ForwardPass, LayerCall, changed_buffers, forward_pass, shapes_of
from .comparison import (
    check_adapter,
    check_alone,
    check_same,
    needs_surroundings,
    result_of_code,
    surroundings,
)
from .descriptions import ExpertsDescription
from .examples import INPUT_SHAPE, all_made_up, differ, example_of
from .layers import LayerPlace, find_in_module
from .lengths import with_token_axis
from .mismatch import CLOSE, difference
from .moved import move_out
from .ports import INPUT, ported, with_flat_outputs
from .request import Adapter, NetworkOptions

ARGUMENTS = "--config and --set are passed to the factory as its arguments"

FAMILY = "factory"

CALLS_TRIED = 2
"""How many calls follow the first one, of a network that changes what it holds."""

COMPILED = "_orig_mod"
"""What a module that `torch.compile` made calls the module that it is of."""


class FactoryHost(RouterHost):
    """The answers for the networks of factories."""

    own_code = True

    def with_token_axis(self, model: Model, option: str) -> Model:
        """Returns the network for inputs of any length (`lengths`)."""
        return with_token_axis(model, option)


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
    module, notes = _uncompiled(module_made(source, "a factory", arguments, ARGUMENTS))
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
        own = {key: p for key, p in module.named_parameters() if not is_lazy(p)}
        check_finite(source, own, Reading())
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters()):
        notes += ("converted the network to float32",)
    module = module.float().eval().requires_grad_(False)
    form, inputs, random = example_of(source, module, config.get(INPUT_SHAPE), example)
    module = ported(module, form, [*inputs])
    places = find_in_module(module, known)
    passes, made = _passes(module, places, inputs, source)
    places, left = _called(places, passes, source)
    calls = {path: call for pass_ in reversed(passes) for path, call in pass_.layers.items()}
    for place in places:
        check_alone(place, module.get_submodule(place.path), calls[place.path], source)
        for pass_ in passes:
            check_adapter(place, module.get_submodule(place.path), pass_, source)
    twin, layers, replaced = swapped(module, places, calls)
    for pass_ in passes:
        check_same(pass_, twin, places, source)
    if not passes[0].single:
        module, twin = (with_flat_outputs(network, [*inputs]) for network in (module, twin))
    arrays = {name: tensor.numpy() for name, tensor in passes[0].inputs.items()}
    used = {adapter_name(layer.adapter): None for layer in places if layer.adapter is not None}
    return Model(
        module=twin,
        family=FAMILY,
        config=dict(config),
        source=Source(
            path=source,
            files=files,
            mapped=mapped,
            further=_asked_again(weights, tuple(used)),
            importable=all(map(_importable, used)),
            host=FactoryHost(),
        ),
        inputs=_ports(passes[0].inputs),
        outputs=_ports(passes[0].outputs),
        notes=(*notes, *random, *made, *replaced, *left),
        original=module,
        example=arrays if len(arrays) > 1 or not form.plain else arrays[INPUT],
        order=layers,
    )


def _asked_again(weights: Path | None, adapters: tuple[str, ...]) -> tuple[NetworkOptions, ...]:
    """The options with which another process loads the network again; none where it needs none."""
    if weights is None and not adapters:
        return ()
    named = None if weights is None else str(weights)
    return (NetworkOptions(weights=named, adapter=adapters),)


def _importable(adapter: str) -> bool:
    """Whether another process finds an adapter: not that of a notebook, or of this script."""
    return names_code(adapter) and not adapter.startswith("__main__:")


def _ports(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, str(x.dtype).removeprefix("torch."), ("batch", *x.shape[1:]))
        for name, x in tensors.items()
    )


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
    for key, tensor in tensors.items():
        if expected[key].is_floating_point() and not tensor.is_floating_point():
            raise CheckpointError(
                f"{checkpoint.files[0]}: {key} holds integers "
                f"({str(tensor.dtype).removeprefix('torch.')}), and {source} has floats there",
                hint="save it as float32, multiplied by its scales",
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
    module: nn.Module, places: Sequence[LayerPlace], inputs: Mapping[str, Tensor], source: str
) -> tuple[list[ForwardPass], tuple[str, ...]]:
    """The passes that are compared, over two different inputs at least, and a note if made up.

    A network that cannot run on what is made up, or gives no numbers for it, is compared on its
    example alone.
    """
    alone, notes = _with_kept_buffers(module, places, inputs, source)
    if differ(*inputs.values()):
        return [alone], notes
    begins = "the example holds no two different inputs: the replaced layers were checked on"
    for made in all_made_up([*inputs.values()]):
        further = dict(zip(inputs, made, strict=True))
        both = {name: torch.cat([x, further[name]]) for name, x in inputs.items()}
        # A network may run on batches of the example's size alone.
        for batch, before in ((both, ()), (further, (alone,))):
            try:
                more = forward_pass(module, places, batch, source)
            except MoexportError:
                continue
            if more.finite:
                return [*before, more], (*notes, f"{begins} made-up ones, too")
    why = "as the network cannot run on made-up ones; --data with real inputs checks more"
    return [alone], (*notes, f"{begins} it alone, {why}")


def _with_kept_buffers(
    module: nn.Module, places: Sequence[LayerPlace], inputs: Mapping[str, Tensor], source: str
) -> tuple[ForwardPass, tuple[str, ...]]:
    """Returns the first pass, and a note on buffers that it changes, which are set back.

    A graph keeps nothing between calls. Raises FamilyError where what a call changes is in the
    result of the next one, and where results are random.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    first = forward_pass(module, places, inputs, source)
    changed = changed_buffers(module, before)
    listed = ", ".join(changed)
    for _ in range(CALLS_TRIED if changed else int(first.finite)):  # NaN is told elsewhere
        again = forward_pass(module, places, inputs, source)
        pairs = [(y, again.outputs[name]) for name, y in first.outputs.items()]
        layers = [(call.y, again.layers[path].y) for path, call in first.layers.items()]
        if all(_same(a, b) for a, b in (*pairs, *layers)):
            continue
        if not changed and not all(_same(a, b) for a, b in layers):
            break  # the comparison of the layers names the one that is random
        if not changed:
            raise FamilyError(
                f"{source}: the network gives another result each time that it is called, in eval "
                "mode, too",
                hint="noise belongs into training alone: if self.training",
            )
        raise FamilyError(
            f"{source}: the network changes {listed} when it is called, in eval mode, too, and "
            "its next result depends on that",
            hint="a graph keeps nothing between calls: change buffers in training alone (if "
            "self.training), or keep them as they are",
        )
    if not changed:
        return first, ()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in before and before[name].shape == buffer.shape:
                buffer.copy_(before[name])
    return first, (f"the network changes {listed} when it is called; the graph does not",)


def _same(a: Tensor, b: Tensor) -> bool:
    return difference(a.double(), b.double()) <= CLOSE


def _called(
    places: Sequence[LayerPlace], passes: Sequence[ForwardPass], source: str
) -> tuple[tuple[LayerPlace, ...], tuple[str, ...]]:
    """The layers that the network calls, in the order in which it does, and notes on the others."""
    by_path = {place.path: place for place in places}
    called = dict.fromkeys(path for pass_ in passes for path in pass_.layers)
    left = [place.at for path, place in by_path.items() if path not in called]
    if not called:
        raise FamilyError(
            f"{source}: the network calls none of the layers that moexport found in it on "
            f"{shapes_of(passes[0].inputs)}: {', '.join(left)}",
            hint="a layer is called as y = layer(x); is another branch taken with real inputs "
            "(--data), or by another argument (--set)?",
        )
    notes = tuple(f"{path} is not called: left as it is" for path in left)
    return tuple(by_path[path] for path in called), notes


def _with_code(place: LayerPlace, layer: nn.Module, call: LayerCall, name: str) -> OwnForward:
    """Our layer with the user's own code around it, which reads a copy of the user's layer.

    The copy shares the parameters, and holds none of the experts' own: those are ours already.
    """
    assert place.adapter is not None
    host, returned = sharing_weights(layer), call.structure
    description = describe(place.adapter, host, place.at)
    code = description.code
    assert code is not None
    _, _, tried = result_of_code(description, call, place.at)
    if not isinstance(description, ExpertsDescription):
        return OwnForward(description.build(name), code, host, returned=returned)
    assert tried is not None and isinstance(tried.layer, MoELayer)
    spec = tried.layer.spec
    if spec.chooses_sets:
        experts: MoELayer = description.build_for_slots(name, spec.slots)
    else:
        experts = description.build(name, spec.trained_k)
    if code.alone:
        return OwnForward(experts, code, None, returned=returned)
    ranges = [_bytes_of(tensor) for tensor in description.tensors()]
    for path, module in host.named_modules():
        for parameter_name, parameter in [*module.named_parameters(recurse=False)]:
            first, last = _bytes_of(parameter)
            if any(first < end and start < last for start, end in ranges):
                whole = ".".join(part for part in (place.path, path, parameter_name) if part)
                move_out(module, parameter_name, whole)
    return OwnForward(
        experts, code, host, all_weights=tried.all_weights, even=tried.even, returned=returned
    )


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's values begin and end in memory."""
    first = tensor.data_ptr()
    return first, first + tensor.numel() * tensor.element_size()


def swapped(
    module: nn.Module, places: Sequence[LayerPlace], calls: Mapping[str, LayerCall]
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
    for place in places:
        path, call = place.path, calls[place.path]
        if place.own_code is not None:
            name = f"{path}.experts".removeprefix(".")
            ours: nn.Module = _with_code(place, module.get_submodule(path), call, name)
        elif needs_surroundings(place, call):
            name = f"{path}.layer".removeprefix(".")
            ours = surroundings(place.description, call)(_ours(place, name))
        else:
            name = path
            ours = _ours(place, name)
        twin = _placed(twin, place, ours)
        names.append(name)
        notes.append(f"{path or 'the network'} replaced as {place.title}")
    return twin, tuple(names), tuple(notes)


def _ours(place: LayerPlace, name: str) -> nn.Module:
    try:
        return place.make(name)
    except CheckpointError as error:
        raise FamilyError(
            f"{place.path or 'the network'} resembles {place.title}: {error.message}",
            hint=f"its parameters are not those of the published code: "
            f"{EXAMPLE.format(name=place.class_name)}",
        ) from error


def _placed(network: nn.Module, place: LayerPlace, ours: nn.Module) -> nn.Module:
    """The network with ours at a layer's place, under each of its names."""
    for path in (place.path, *place.aliases):
        if path:
            network.set_submodule(path, ours.eval())
        else:
            network = ours.eval()
    return network
