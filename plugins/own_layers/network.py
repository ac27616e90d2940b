"""Loads a user's network: finds its MoE layers, replaces them with ours, and compares them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...common.files import Reading
from ...data.user_code import build_network, names_code
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
    check_batch_independence,
    check_same,
    needs_wrapper,
    random_result_error,
    result_of_code,
    wrapper_for,
)
from .descriptions import ExpertsDescription
from .examples import INPUT_SHAPE, all_random_like, differ, example_of
from .layers import FoundLayer, find_in_module
from .lengths import with_token_axis
from .mismatch import CLOSE, difference
from .placeholder import MovedWeight
from .ports import INPUT, Arguments, accepts, with_tensor_interface
from .request import Adapter, NetworkOptions

ARGUMENTS = "--config and --set are passed to the factory as its arguments"

FAMILY = "factory"

REPEATED_CALLS = 2
"""How many times a network that changes its buffers is called again."""

COMPILED = "_orig_mod"
"""The attribute with the original module in a module made by `torch.compile`."""


class FactoryHost(RouterHost):
    """The host of networks that a user's factory builds."""

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
    """Returns the network that a factory builds, with its MoE layers replaced by ours.

    `config` contains the factory's arguments and, if neither the network's `example_input` nor
    `example` [b, …] provides inputs, `input_shape` (without the batch). Both networks run on these
    inputs, and on random ones if all are equal; ParityError reports a difference. `Model.original`
    is the user's own module.
    """
    arguments = {key: value for key, value in config.items() if key != INPUT_SHAPE}
    module = build_network(source, "a factory", arguments, ARGUMENTS)
    return _model_of(module, source, config, weights, example, adapters)


def load_module(
    module: nn.Module,
    config: Mapping[str, Any],
    weights: Path | None,
    example: object,
    adapters: Sequence[Adapter | str],
) -> Model:
    """Returns a network in memory like `load_factory`, without changing it.

    The model shares the network's weights if they are in float32 on the CPU. `example` is the
    network's arguments, like an `example_input`, or a file of inputs.
    """
    source = f"{type(getattr(module, COMPILED, module)).__name__}{IN_MEMORY}"
    extra = sorted(config.keys() - {INPUT_SHAPE})
    if extra:
        raise UsageError(
            f"--set {extra[0]}: {source} already exists, so it takes no arguments",
            hint=f"leave it out; you can set only {INPUT_SHAPE}, the shape of the input for the "
            "check",
        )
    copied = own_copy(module, source)
    given: Any = example
    is_data = isinstance(example, str | Path | None)
    # In a table of data, the names are not those of the network's arguments.
    if not is_data and (not isinstance(example, Mapping) or accepts(copied, example)):
        copied.example_input, given = given, None
    try:
        return _model_of(copied, source, config, weights, given, adapters, in_memory=copied)
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
    in_memory: nn.Module | None = None,
) -> Model:
    """Returns the network, with our MoE layers, as a model; `in_memory` if no factory built it."""
    module, notes = _uncompiled(module)
    by_class = adapters_for(adapters)
    files: tuple[Path, ...] = ()
    mapped: tuple[Path, ...] = ()
    if weights is not None:
        checkpoint = read_checkpoint(weights)
        notes += checkpoint.notes
        _load_weights(module, checkpoint, source)
        files, mapped = checkpoint.files, checkpoint.mapped
    else:
        if in_memory is None:
            notes += (f"no --weights: the network keeps the weights from {source}",)
        own = {key: p for key, p in module.named_parameters() if not is_lazy(p)}
        check_finite(source, own, Reading())
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters()):
        notes += ("converted the network to float32",)
    module = module.float().eval().requires_grad_(False)
    form, inputs, random = example_of(source, module, config.get(INPUT_SHAPE), example)
    module = with_tensor_interface(module, form, [*inputs])
    found_layers = find_in_module(module, by_class)
    passes, checked = _run_passes(module, found_layers, inputs, source)
    found_layers, uncalled = _called_layers(found_layers, passes, source)
    calls = {path: call for pass_ in reversed(passes) for path, call in pass_.layers.items()}
    for found in found_layers:
        check_batch_independence(found, module.get_submodule(found.path), calls[found.path], source)
        for pass_ in passes:
            check_adapter(found, module.get_submodule(found.path), pass_, source)
    converted, layers, replaced = replace_layers(module, found_layers, calls)
    for pass_ in passes:
        check_same(pass_, converted, found_layers, source)
    if not passes[0].single:
        module, converted = (
            with_tensor_interface(each, Arguments(), [*inputs], flat=True)
            for each in (module, converted)
        )
    arrays = {name: tensor.numpy() for name, tensor in passes[0].inputs.items()}
    adapted = [found.adapter for found in found_layers if found.adapter is not None]
    used = dict.fromkeys(map(adapter_name, adapted))
    options: tuple[NetworkOptions, ...] = ()  # so that another process can load it
    if weights is not None or used:
        path = None if weights is None else str(weights)
        options = (NetworkOptions(weights=path, adapter=tuple(used)),)
    return Model(
        module=converted,
        family=FAMILY,
        config=dict(config),
        source=Source(
            path=source,
            files=files,
            mapped=mapped,
            further=options,
            # Another process cannot import code of a notebook or of this script.
            importable=in_memory is None
            and all(names_code(name) and not name.startswith("__main__:") for name in used),
            host=FactoryHost(),
            in_memory=in_memory,
        ),
        inputs=_specs_of(passes[0].inputs),
        outputs=_specs_of(passes[0].outputs),
        notes=(*notes, *random, *checked, *replaced, *uncalled),
        original=module,
        example=arrays if len(arrays) > 1 or not form.plain else arrays[INPUT],
        order=layers,
    )


def own_copy(module: nn.Module, source: str) -> nn.Module:
    """Returns a copy of a network on the CPU, so that the user's is not changed.

    Weights in float32 on the CPU are shared. Raises UsageError for parameters without values and
    for a network that cannot be copied.
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
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.is_floating_point() else tensor


def _specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, str(x.dtype).removeprefix("torch."), ("batch", *x.shape[1:]))
        for name, x in tensors.items()
    )


def _uncompiled(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Returns a network without `torch.compile`, which would keep the user's layers, and a note."""
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


def _load_weights(module: nn.Module, checkpoint: Checkpoint, source: str) -> None:
    """Loads weights without copying them; raises CheckpointError if they do not fit the network."""
    expected = module.state_dict()
    tensors = _with_prefixes(expected, checkpoint)
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


def _with_prefixes(expected: Mapping[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the tensors with the prefixes that the keys of the network have.

    The mark of layers that were compiled in training is removed from the keys.
    """
    tensors = {key.replace(f".{COMPILED}.", "."): t for key, t in checkpoint.tensors.items()}
    for start in range(len(checkpoint.prefixes) + 1):
        prefix = "".join(checkpoint.prefixes[start:])
        if all(key.startswith(prefix) for key in expected):
            return {prefix + key: tensor for key, tensor in tensors.items()}
    return tensors


def _run_passes(
    module: nn.Module, found_layers: Sequence[FoundLayer], inputs: Mapping[str, Tensor], source: str
) -> tuple[list[ForwardPass], tuple[str, ...]]:
    """Returns the passes to compare, on at least two different inputs, and notes on the inputs.

    A network that fails on random inputs, or returns NaN for them, is compared on its example only.
    """
    first, notes = _first_pass(module, found_layers, inputs, source)
    if differ(*inputs.values()):
        return [first], notes
    start = "the example has no two different inputs, so the replaced layers were"
    for values in all_random_like([*inputs.values()]):
        random = dict(zip(inputs, values, strict=True))
        both = {name: torch.cat([x, random[name]]) for name, x in inputs.items()}
        # A network may accept only batches of the example's size.
        for batch, before in ((both, ()), (random, (first,))):
            try:
                more = forward_pass(module, found_layers, batch, source)
            except MoexportError:
                continue
            if more.finite:
                return [*before, more], (*notes, f"{start} also checked on random ones")
    why = "because the network fails on random inputs; --data with real inputs checks more"
    return [first], (*notes, f"{start} checked on the example alone, {why}")


def _first_pass(
    module: nn.Module, found_layers: Sequence[FoundLayer], inputs: Mapping[str, Tensor], source: str
) -> tuple[ForwardPass, tuple[str, ...]]:
    """Returns the first pass, and a note on the buffers that it changed, which are restored.

    Raises FamilyError if a changed buffer affects the next result, because a graph keeps nothing
    between calls. Random results also raise FamilyError, or ParityError if they are a layer's.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    first = forward_pass(module, found_layers, inputs, source)
    changed = changed_buffers(module, before)
    buffers = ", ".join(changed)
    called = [found for found in found_layers if found.path in first.layers]
    for _ in range(REPEATED_CALLS if changed else int(first.finite)):  # NaN is reported elsewhere
        repeated = forward_pass(module, found_layers, inputs, source)
        calls = [(found, first.layers[found.path], repeated.layers[found.path]) for found in called]
        random = [p.label for p, a, b in calls if _same(a.x, b.x) and not _same(a.y, b.y)]
        if not random and all(_same(y, repeated.outputs[n]) for n, y in first.outputs.items()):
            continue
        if changed:
            raise FamilyError(
                f"{source}: the network changes {buffers} when it is called, even in eval mode, "
                "and its next result depends on that",
                hint="a graph keeps nothing between calls: change buffers in training only (if "
                "self.training)",
            )
        if random:
            raise random_result_error(f"{source}: {random[0]}")
        raise FamilyError(
            f"{source}: the network returns a different result each time it is called, even in "
            "eval mode",
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


def _called_layers(
    found_layers: Sequence[FoundLayer], passes: Sequence[ForwardPass], source: str
) -> tuple[tuple[FoundLayer, ...], tuple[str, ...]]:
    """Returns the layers that the network calls, in order, and notes on the others."""
    by_path = {found.path: found for found in found_layers}
    called = dict.fromkeys(path for pass_ in passes for path in pass_.layers)
    uncalled = [found.label for path, found in by_path.items() if path not in called]
    if not called:
        raise FamilyError(
            f"{source}: the network calls none of the layers that moexport found in it on "
            f"{shapes_of(passes[0].inputs)}: {', '.join(uncalled)}",
            hint="a layer is called as y = layer(x); if another branch calls it, select that with "
            "real inputs (--data) or another argument (--set)",
        )
    notes = tuple(f"{label} is not called, so it was not replaced" for label in uncalled)
    return tuple(by_path[path] for path in called), notes


def _wrap_with_code(found: FoundLayer, layer: nn.Module, call: LayerCall, name: str) -> OwnForward:
    """Returns our layer within the user's code, which reads a copy of the user's layer.

    The copy shares all parameters except the experts', which our layer takes over.
    """
    assert found.adapter is not None
    host, returned = sharing_weights(layer), call.structure
    description = describe(found.adapter, host, found.label)
    code = description.code
    assert code is not None
    _, tried = result_of_code(description, call, found.label)
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
                names = (found.path, path, parameter_name)
                delattr(module, parameter_name)
                moved = MovedWeight(".".join(filter(None, names)), parameter)
                setattr(module, parameter_name, moved)
    return OwnForward(
        experts, code, host, all_weights=tried.all_weights, even=tried.even, returned=returned
    )


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Returns the memory addresses at which a tensor's values begin and end."""
    first = tensor.data_ptr()
    return first, first + tensor.numel() * tensor.element_size()


def replace_layers(
    module: nn.Module, found_layers: Sequence[FoundLayer], calls: Mapping[str, LayerCall]
) -> tuple[nn.Module, tuple[str, ...], tuple[str, ...]]:
    """Returns a copy of the network with our MoE layers, the paths of these, and notes.

    All tensors are shared with `module`. Raises FamilyError for a layer with parameters that the
    published code does not have.
    """
    try:
        converted = sharing_weights(module)
    except (TypeError, RuntimeError) as error:
        raise FamilyError(
            f"{type(module).__name__} cannot be copied, so its layers cannot be replaced: {error}",
            hint="keep what cannot be copied (locks, files, results) out of its attributes",
        ) from error
    names, notes = [], []
    for found in found_layers:
        path, call = found.path, calls[found.path]
        if found.own_code is not None:
            name = f"{path}.experts".removeprefix(".")
            ours: nn.Module = _wrap_with_code(found, module.get_submodule(path), call, name)
        elif needs_wrapper(found, call):
            name = f"{path}.layer".removeprefix(".")
            ours = wrapper_for(found.description, call)(_our_layer(found, name))
        else:
            name = path
            ours = _our_layer(found, name)
        for each in (path, *found.aliases):
            if each:
                converted.set_submodule(each, ours.eval())
            else:
                converted = ours.eval()
        names.append(name)
        notes.append(f"{path or 'the network'} replaced as {found.title}")
    return converted, tuple(names), tuple(notes)


def _our_layer(found: FoundLayer, name: str) -> nn.Module:
    try:
        return found.make(name)
    except CheckpointError as error:
        raise FamilyError(
            f"{found.path or 'the network'} resembles {found.title}: {error.message}",
            hint=f"its parameters are not those of the published code: "
            f"{EXAMPLE.format(name=found.class_name)}",
        ) from error
