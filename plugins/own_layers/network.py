"""Loads a user's network: a factory builds it, its MoE layers are found, replaced and compared.

A layer is found by an adapter for its class (`adapters`), as one of moexport's own classes, or by
the names and shapes of its parameters, which are then those of a published layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...common.files import Reading
from ...data.user_code import module_made, names_code
from ...errors import CheckpointError, FamilyError, MoexportError, UsageError
from ...exporter.checkpoints.state_dict import Checkpoint, check_finite, read_checkpoint
from ...exporter.inputs import Example
from ...exporter.model import IN_MEMORY, Model, Source, TensorSpec
from ...graphs.layers.base import MoELayer, sharing_weights
from ..token_routed.own_forward import OwnForward, RouterHost
from .adapters import EXAMPLE, adapter_name, adapters_for, describe
from .calls import ForwardPass, LayerCall, changed_buffers, forward_pass, shapes_of
from .comparison import (
    check_adapter,
    check_alone,
    check_same,
    needs_surroundings,
    random_result,
    result_of_code,
    surroundings,
)
from .descriptions import ExpertsDescription
from .examples import INPUT_SHAPE, all_random_like, differ, example_of
from .layers import LayerPlace, find_in_module
from .lengths import with_token_axis
from .mismatch import CLOSE, difference
from .placeholder import MovedWeight
from .ports import INPUT, Arguments, ported, takes
from .request import Adapter, NetworkOptions

ARGUMENTS = "--config and --set are passed to the factory as its arguments"

FAMILY = "factory"

CALLS_TRIED = 2
"""The number of further calls of a network that changes its buffers."""

COMPILED = "_orig_mod"
"""The attribute with the original module in a module made by `torch.compile`."""


class FactoryHost(RouterHost):
    """The host of factories' networks."""

    own_code = True

    def with_token_axis(self, model: Model, option: str) -> Model:
        return with_token_axis(model, option)


def load_factory(
    source: str,
    config: Mapping[str, Any],
    weights: Path | None,
    example: Example | None,
    adapters: Sequence[Adapter | str],
) -> Model:
    """Returns the network that a factory builds, its MoE layers replaced by ours.

    `config` has the factory's arguments, and `input_shape` without the batch if the network has no
    `example_input` and no `example` [b, …] is given. Both networks run on that input, and on a
    random one if it has no two different inputs; a difference is a ParityError. `Model.original` is
    the user's own module.
    """
    arguments = {key: value for key, value in config.items() if key != INPUT_SHAPE}
    module = module_made(source, "a factory", arguments, ARGUMENTS)
    return _model_of(module, source, config, weights, example, adapters)


def load_module(
    module: nn.Module,
    config: Mapping[str, Any],
    weights: Path | None,
    example: object,
    adapters: Sequence[Adapter | str],
) -> Model:
    """Returns a network in memory as `load_factory` does for a factory's; it is not changed.

    The model shares its weights if they are in float32 on the CPU. `example` is the network's
    arguments, like an `example_input`, or a file of inputs.
    """
    source = f"{type(getattr(module, COMPILED, module)).__name__}{IN_MEMORY}"
    wrong = sorted(config.keys() - {INPUT_SHAPE})
    if wrong:
        raise UsageError(
            f"--set {wrong[0]}: {source} exists already, so it takes no arguments",
            hint=f"leave it out; only {INPUT_SHAPE} can be set, the shape of the input to check it "
            "with",
        )
    copied = own_copy(module, source)
    given: Any = example
    is_data = isinstance(example, str | Path | None)
    # A table of data has other names than the network's arguments.
    if not is_data and (not isinstance(example, Mapping) or takes(copied, example)):
        copied.example_input, given = given, None
    try:
        return _model_of(copied, source, config, weights, given, adapters, held=copied)
    except FamilyError as error:
        if not any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__):
            raise
        hint = 'call model.save_pretrained("folder") and pass the folder, or write an adapter'
        raise FamilyError(error.message, hint=hint) from error


def _model_of(
    module: nn.Module,
    source: str,
    config: Mapping[str, Any],
    weights: Path | None,
    example: Example | None,
    adapters: Sequence[Adapter | str],
    held: nn.Module | None = None,
) -> Model:
    """The network as a model, its MoE layers replaced by ours; `held` if it is in memory."""
    module, notes = _uncompiled(module)
    known = adapters_for(adapters)
    files: tuple[Path, ...] = ()
    mapped: tuple[Path, ...] = ()
    if weights is not None:
        checkpoint = read_checkpoint(weights)
        notes += checkpoint.notes
        _fill(module, checkpoint, source)
        files, mapped = checkpoint.files, checkpoint.mapped
    else:
        if held is None:
            notes += (f"no --weights: the network keeps the weights from {source}",)
        own = {key: p for key, p in module.named_parameters() if not is_lazy(p)}
        check_finite(source, own, Reading())
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters()):
        notes += ("converted the network to float32",)
    module = module.float().eval().requires_grad_(False)
    form, inputs, random = example_of(source, module, config.get(INPUT_SHAPE), example)
    module = ported(module, form, [*inputs])
    places = find_in_module(module, known)
    passes, checked = _passes(module, places, inputs, source)
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
        module, twin = (ported(each, Arguments(), [*inputs], flat=True) for each in (module, twin))
    arrays = {name: tensor.numpy() for name, tensor in passes[0].inputs.items()}
    used = {adapter_name(layer.adapter): None for layer in places if layer.adapter is not None}
    further: tuple[NetworkOptions, ...] = ()  # with which another process loads it again
    if weights is not None or used:
        path = None if weights is None else str(weights)
        further = (NetworkOptions(weights=path, adapter=tuple(used)),)
    return Model(
        module=twin,
        family=FAMILY,
        config=dict(config),
        source=Source(
            path=source,
            files=files,
            mapped=mapped,
            further=further,
            # Code of a notebook or of this script cannot be imported by another process.
            importable=held is None
            and all(names_code(name) and not name.startswith("__main__:") for name in used),
            host=FactoryHost(),
            in_memory=held,
        ),
        inputs=_ports(passes[0].inputs),
        outputs=_ports(passes[0].outputs),
        notes=(*notes, *random, *checked, *replaced, *left),
        original=module,
        example=arrays if len(arrays) > 1 or not form.plain else arrays[INPUT],
        order=layers,
    )


def own_copy(module: nn.Module, source: str) -> nn.Module:
    """Returns a copy of a network on the CPU, so that the user's is not changed.

    Weights in float32 on the CPU are shared. Raises UsageError for a network without values, or
    that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, p in module.named_parameters():
        if is_lazy(p) or p.is_meta:
            raise UsageError(
                f"{source}: its parameter {name} has no values yet",
                hint="call the network once, or load its weights, before you pass it",
            )
        memo[id(p)] = nn.Parameter(_on_cpu(p), requires_grad=False)
    for _, buffer in module.named_buffers():
        memo[id(buffer)] = _on_cpu(buffer).clone()  # a forward may change it
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise UsageError(
            f"{source}: the network cannot be copied: {error}",
            hint="keep what cannot be copied (locks, files, results) out of its attributes, or "
            "name its factory: package.module:factory",
        ) from error


def _on_cpu(tensor: Tensor) -> Tensor:
    given = tensor.detach().cpu()
    return given.float() if given.is_floating_point() else given


def _ports(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, str(x.dtype).removeprefix("torch."), ("batch", *x.shape[1:]))
        for name, x in tensors.items()
    )


def _uncompiled(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The network without `torch.compile`, and a note: compiled code keeps its own layers."""
    paths = []
    for path, sub in reversed([*module.named_modules(remove_duplicate=False)]):  # inner ones first
        if type(sub).__name__ == "OptimizedModule":
            original = sub.get_submodule(COMPILED)
            if path:
                module.set_submodule(path, original)
            else:
                module = original
        elif sub._compiled_call_impl is not None:  # by `sub.compile()`
            sub._compiled_call_impl = None
        else:
            continue
        paths.append(path.replace(f"{COMPILED}.", "").removesuffix(COMPILED) or "the network")
    if not paths:
        return module, ()
    return module, (f"torch.compile was removed from {', '.join(reversed(paths))}",)


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
            f"{checkpoint.files[0]} does not fit {source}: {'; '.join(problems)}",
            hint="check that the factory's arguments (--set) match the checkpoint",
        )
    for key, tensor in tensors.items():
        if expected[key].is_floating_point() and not tensor.is_floating_point():
            raise CheckpointError(
                f"{checkpoint.files[0]}: {key} contains integers "
                f"({str(tensor.dtype).removeprefix('torch.')}), but {source} has floats there",
                hint="save it as float32, multiplied by its scales",
            )
    module.load_state_dict(tensors, assign=True)


def _named_as(expected: Mapping[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors with prefixes put back as the network's own keys have them.

    The keys of a layer that was compiled in training are those of the layer.
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
    """The passes to compare, over at least two different inputs, and a note if some are random.

    A network that fails on random inputs, or returns NaN for them, is compared on its example only.
    """
    alone, notes = _first_pass(module, places, inputs, source)
    if differ(*inputs.values()):
        return [alone], notes
    begins = "the example has no two different inputs: the replaced layers were"
    for values in all_random_like([*inputs.values()]):
        further = dict(zip(inputs, values, strict=True))
        both = {name: torch.cat([x, further[name]]) for name, x in inputs.items()}
        # A network may accept only batches of the example's size.
        for batch, before in ((both, ()), (further, (alone,))):
            try:
                more = forward_pass(module, places, batch, source)
            except MoexportError:
                continue
            if more.finite:
                return [*before, more], (*notes, f"{begins} also checked on random ones")
    why = "because the network cannot run on random ones; --data with real inputs checks more"
    return [alone], (*notes, f"{begins} checked on it alone, {why}")


def _first_pass(
    module: nn.Module, places: Sequence[LayerPlace], inputs: Mapping[str, Tensor], source: str
) -> tuple[ForwardPass, tuple[str, ...]]:
    """Returns the first pass, and a note on buffers that it changes, which are reset.

    A graph keeps nothing between calls. Raises FamilyError if a changed buffer affects the next
    result, and if results are random.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    first = forward_pass(module, places, inputs, source)
    changed = changed_buffers(module, before)
    buffers = ", ".join(changed)
    called = [place for place in places if place.path in first.layers]
    for _ in range(CALLS_TRIED if changed else int(first.finite)):  # NaN is reported elsewhere
        again = forward_pass(module, places, inputs, source)
        calls = [(place, first.layers[place.path], again.layers[place.path]) for place in called]
        random = [p.at for p, a, b in calls if _same(a.x, b.x) and not _same(a.y, b.y)]
        if not random and all(_same(y, again.outputs[n]) for n, y in first.outputs.items()):
            continue
        if changed:
            raise FamilyError(
                f"{source}: the network changes {buffers} when it is called, even in eval mode, "
                "and its next result depends on that",
                hint="a graph keeps nothing between calls: change buffers in training only (if "
                "self.training)",
            )
        if random:
            raise random_result(f"{source}: {random[0]}")
        raise FamilyError(
            f"{source}: the network gives a different result each time it is called, even in eval "
            "mode",
            hint="add noise in training only: if self.training",
        )
    if not changed:
        return first, ()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in before and before[name].shape == buffer.shape:
                buffer.copy_(before[name])
    return first, (f"the network changes {buffers} when it is called; the graph does not",)


def _same(a: Tensor, b: Tensor) -> bool:
    return difference(a.double(), b.double()) <= CLOSE


def _called(
    places: Sequence[LayerPlace], passes: Sequence[ForwardPass], source: str
) -> tuple[tuple[LayerPlace, ...], tuple[str, ...]]:
    """The layers that the network calls, in their order, and notes on the others."""
    by_path = {place.path: place for place in places}
    called = dict.fromkeys(path for pass_ in passes for path in pass_.layers)
    left = [place.at for path, place in by_path.items() if path not in called]
    if not called:
        raise FamilyError(
            f"{source}: the network calls none of the layers that moexport found in it on "
            f"{shapes_of(passes[0].inputs)}: {', '.join(left)}",
            hint="a layer is called as y = layer(x); if another branch calls it, select that with "
            "real inputs (--data) or another argument (--set)",
        )
    notes = tuple(f"{path} is not called: left as it is" for path in left)
    return tuple(by_path[path] for path in called), notes


def _with_code(place: LayerPlace, layer: nn.Module, call: LayerCall, name: str) -> OwnForward:
    """Our layer with the user's code around it, which reads a copy of the user's layer.

    The copy shares the parameters, except those of the experts, which our layer has.
    """
    assert place.adapter is not None
    host, returned = sharing_weights(layer), call.structure
    description = describe(place.adapter, host, place.at)
    code = description.code
    assert code is not None
    _, tried = result_of_code(description, call, place.at)
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
                names = (place.path, path, parameter_name)
                delattr(module, parameter_name)
                moved = MovedWeight(".".join(filter(None, names)), parameter)
                setattr(module, parameter_name, moved)
    return OwnForward(
        experts, code, host, all_weights=tried.all_weights, even=tried.even, returned=returned
    )


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The memory addresses where a tensor's values begin and end."""
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
        for each in (path, *place.aliases):
            if each:
                twin.set_submodule(each, ours.eval())
            else:
                twin = ours.eval()
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
