"""Networks of the user's own code, named `package.module:factory`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...common.user_code import attribute_of, module_of
from ...errors import CheckpointError, UsageError
from ..model import Model, Source, TensorSpec
from .state_dict import Checkpoint, read_checkpoint
from .user_network import check_same, find_in_module, pass_through, swapped

INPUT_SHAPE = "input_shape"
EXAMPLE = "example_input"
EXAMPLE_BATCH = 2


def load_factory(
    source: str, config: Mapping[str, Any], weights: Path | None, example: np.ndarray | None
) -> Model:
    """Returns the network that a factory builds, its Soft MoE layers replaced by ours.

    `config` are the factory's arguments, and `input_shape` without the batch where the network has
    no `example_input` and no `example` [b, …] is given. Both networks run on that input; a
    difference is a ParityError. The user's own module is kept as `Model.original`.
    """
    arguments = {key: value for key, value in config.items() if key != INPUT_SHAPE}
    module = _built(source, _find(source), arguments)
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
    found = find_in_module(module)
    own = pass_through(module, found, inputs, source)
    # In the order in which they are called.
    found = tuple(sorted(found, key=lambda layer: own.order.index(layer.path)))
    twin, layers, replaced = swapped(module, found, own.ranks)
    ours = pass_through(twin, found, inputs, source)
    check_same(own, ours, source)
    array = inputs.numpy()
    result = own.result.numpy()
    return Model(
        module=twin,
        family="factory",
        config=dict(config),
        source=Source(source, files, None if weights is None else str(weights), mapped),
        input=TensorSpec("input", array.dtype.name, ("batch", *array.shape[1:])),
        output=TensorSpec("output", result.dtype.name, ("batch", *result.shape[1:])),
        notes=(*notes, *note, *replaced),
        original=module,
        example=array,
        order=layers,
    )


def _find(source: str) -> Callable[..., object]:
    """The callable that `package.module:factory` names; the current directory is importable."""
    name, _, attribute = source.partition(":")
    try:
        module = module_of(source)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{source}: no module named {error.name}",
                hint="run from the folder that holds it, or install its package",
            ) from error
        raise UsageError(
            f"{source}: importing {name} failed: {error}", hint="install what it needs"
        ) from error
    except Exception as error:  # the user's code may fail in any way
        raise UsageError(
            f"{source}: importing {name} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        found = attribute_of(module, source)
    except AttributeError as error:
        raise UsageError(f"{source}: {name} has no {attribute}") from error
    if not callable(found):
        raise UsageError(f"{source}: {attribute} is a {type(found).__name__}, not callable")
    factory: Callable[..., object] = found
    return factory


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
    if missing or extra or wrong:
        problems = [f"missing {', '.join(missing[:6])}"] if missing else []
        problems += [f"unexpected {', '.join(extra[:6])}"] if extra else []
        raise CheckpointError(
            f"{checkpoint.files[0]}: not the weights of {source}: "
            f"{'; '.join(problems + wrong[:6])}",
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
    source: str, module: nn.Module, shape: object, given: np.ndarray | None
) -> tuple[Tensor, tuple[str, ...]]:
    """The input [b, …] on which both networks run, and a note where it is random."""
    if given is not None:
        array = given.astype(np.float32) if given.dtype.kind == "f" else given
        return torch.from_numpy(np.ascontiguousarray(array)), ()
    own = getattr(module, EXAMPLE, None)
    if own is not None:
        value = own() if callable(own) else own
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, Tensor):
            raise UsageError(
                f"{source}: {EXAMPLE} is a {type(value).__name__}, not a tensor or an array"
            )
        return value.detach(), ()
    sizes = [shape] if isinstance(shape, int) else shape
    if not isinstance(sizes, list | tuple) or not all(isinstance(s, int) and s > 0 for s in sizes):
        given_text = "" if shape is None else f" ({INPUT_SHAPE}={shape!r} is no list of sizes)"
        raise UsageError(
            f"{source}: no input to check the replaced layers with{given_text}",
            hint=f"--set {INPUT_SHAPE}=3,224,224 (without the batch), --data with real inputs, or "
            f"an attribute {EXAMPLE} on the network",
        )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLE_BATCH, *sizes, generator=generator)
    return inputs, (f"the replaced layers were checked on random inputs of shape {list(sizes)}",)
