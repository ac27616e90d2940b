"""Chooses the inputs on which a user's network is compared with the export.

These are its example and random inputs. One input proves little: zeros hide every factor, and a
single input cannot reveal that a layer mixes the inputs of its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ...data.feeds import named_samples
from ...data.user_code import user_code
from ...errors import FeedError, UsageError
from ...exporter.inputs import INTEGERS, Example, by_name, fitted
from ...exporter.model import TensorSpec
from .ports import EXAMPLE_FORMS, INPUT, SUPPORTED, Arguments, arguments_of, required_args

INPUT_SHAPE = "input_shape"

EXAMPLE_INPUT = "example_input"

RANDOM_INPUTS = 2

FEED_INPUTS = 8

MAX_DRAWS = 8
"""The largest number of attempts to draw values that differ from the example's."""


def example_of(
    source: str, module: nn.Module, shape: object, example: Example | None
) -> tuple[Arguments, dict[str, Tensor], tuple[str, ...]]:
    """Returns the network's arguments, the inputs in them, and a note if they are random.

    The network's own example determines the names and types of the inputs; the values are those of
    `example` if it is given. Raises UsageError for invalid inputs.
    """
    own = _own_example(source, module, needed=example is None)
    notes: tuple[str, ...] = ()
    if own is not None:
        form, found = arguments_of(source, module, own)
        label = EXAMPLE_INPUT if form.plain else f"the input '{{}}' of {EXAMPLE_INPUT}"
        inputs = {name: _as_tensor(source, label.format(name), x) for name, x in found.items()}
        if example is not None:
            inputs = _user_inputs(source, form, inputs, example)
    elif example is not None:  # with several parameters, each needs an array
        names = required_args(module)
        form = Arguments(tuple(names)) if len(names) > 1 else Arguments()
        inputs = _user_inputs(source, form, dict.fromkeys(form.args), example)
    else:
        form, inputs = Arguments(), {INPUT: _random_input(source, module, shape)}
        sizes = [*inputs[INPUT].shape[1:]]
        notes = (f"the replaced layers were checked on random inputs of shape {sizes}",)
    count = len(next(iter(inputs.values())))
    for name, tensor in inputs.items():
        if len(tensor) != count:
            raise UsageError(
                f"{source}: the input '{name}' has shape {list(tensor.shape)}, but "
                f"'{next(iter(inputs))}' has {count} inputs: the first axis of each is the batch",
                hint="repeat the value for each input, x.expand(b), or keep shared values as "
                "buffers of the network",
            )
    return form, inputs, notes


def _own_example(source: str, module: nn.Module, *, needed: bool) -> object:
    """Returns the network's own example; None without one, or if it fails and is not needed."""
    own = getattr(module, EXAMPLE_INPUT, None)
    if not callable(own):
        return own
    hint = "it must take no arguments and return inputs [b, …]; or pass inputs with --data"
    try:
        with user_code(f"{source}: {EXAMPLE_INPUT}() failed", hint):
            return own()
    except UsageError:
        if needed:
            raise
        return None


def _user_inputs(
    source: str, form: Arguments, types: Mapping[str, Tensor | None], example: Example
) -> dict[str, Tensor]:
    """Returns the user's inputs, with the types of the network's own example if it has one."""
    labelled = isinstance(example, Mapping) and not example.keys() <= types.keys()
    if isinstance(example, str | Path) or labelled:
        arrays = named_samples(example, [*types], FEED_INPUTS)
    else:
        arrays = by_name(example, [TensorSpec(next(iter(types)), "float32", ("batch",))])
    inputs = {}
    for name, known in types.items():
        if name not in arrays:
            raise FeedError(
                f"--data: the input '{name}' is missing",
                hint=f"pass an .npz with an array for each input of {source}: {', '.join(types)}",
            )
        array = arrays[name]
        if known is not None and array.dtype.kind in "fbiu":
            dtype = str(known.dtype).removeprefix("torch.")
            array = fitted(array, TensorSpec(name, dtype, ("batch", *array.shape[1:])))
        what = "the example" if form.plain else f"the example's input '{name}'"
        inputs[name] = _as_tensor(source, what, array)
    return inputs


def _random_input(source: str, module: nn.Module, shape: object) -> Tensor:
    sizes = [shape] if isinstance(shape, int) else shape
    if not isinstance(sizes, list | tuple) or not all(isinstance(s, int) and s > 0 for s in sizes):
        why = "" if shape is None else f" ({INPUT_SHAPE}={shape!r} is not a list of sizes)"
        raise UsageError(
            f"{source}: there is no input to check the replaced layers with{why}",
            hint=f"pass --set {INPUT_SHAPE}=3,224,224 (without the batch) or --data with real "
            f"inputs, or give the network an attribute {EXAMPLE_INPUT}",
        )
    needed = required_args(module)
    if len(needed) > 1:
        raise UsageError(
            f"{source}: its forward takes {', '.join(needed)}, but {INPUT_SHAPE} sets one input",
            hint="pass --data with an .npz of those arrays, or give the network an attribute "
            f"{EXAMPLE_INPUT}: {EXAMPLE_FORMS}",
        )
    generator = torch.Generator().manual_seed(0)
    return torch.randn(RANDOM_INPUTS, *sizes, generator=generator)


def _as_tensor(source: str, what: str, value: object) -> Tensor:
    """Returns a user's inputs [b, …] as a tensor, with floats in float32 like the network's."""
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(np.ascontiguousarray(value))
        except TypeError as error:
            raise UsageError(
                f"{source}: {what}: {error}", hint="give an array of numbers"
            ) from error
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{source}: {what} is a {type(value).__name__}, not a tensor or an array",
            hint="give a tensor (b, …); pass other values as arguments of the factory",
        )
    if value.ndim == 0 or value.numel() == 0:
        raise UsageError(
            f"{source}: {what} has the shape {list(value.shape)}, so it contains no batch",
            hint="give at least one input [b, …]",
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if not value.is_floating_point() and dtype not in (*INTEGERS, "bool"):
        raise UsageError(f"{source}: {what} is {dtype}", hint=f"supported types: {SUPPORTED}")
    return value.detach().float() if value.is_floating_point() else value.detach()


def differ(*inputs: Tensor) -> bool:
    """Whether any two of the inputs [b, …] differ."""
    return any(bool((each != each[:1]).any()) for each in inputs)


def all_random_like(inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yields `random_like` of all inputs at once; one without alternatives stays as it is."""
    choices = [[*random_like(each)] or [each] for each in inputs]
    for index in range(max(map(len, choices))):
        yield tuple(choice[min(index, len(choice) - 1)] for choice in choices)


def random_like(inputs: Tensor) -> Iterator[Tensor]:
    """Yields random inputs of the example's shape and type, the most plausible first.

    Floats come from a normal distribution with the example's mean and deviation (1 if constant);
    then, like other types, from the example's values. If the example is a constant integer, they
    come from it and the next larger or smaller one. All differ from the example.
    """
    values = inputs[inputs.isfinite()]
    if not len(values) or inputs.is_complex():
        return
    generator = torch.Generator().manual_seed(0)
    if inputs.is_floating_point():
        scale = float(values.double().std(correction=0)) or 1.0
        normal = torch.randn(inputs.shape, generator=generator, dtype=torch.float64)
        yield (values.double().mean() + scale * normal).to(inputs.dtype)
    for choice in _choices(values):
        for _ in range(MAX_DRAWS):
            drawn = choice[torch.randint(len(choice), inputs.shape, generator=generator)]
            if differ(torch.cat([inputs, drawn])):
                yield drawn
                break


def _choices(values: Tensor) -> list[Tensor]:
    """Returns sets of at least two different values to draw from, given an example's values."""
    if differ(values):
        return [values]
    if values.dtype == torch.bool:
        return [torch.tensor([False, True])]
    if values.is_floating_point():
        return []
    value, limits = int(values[0]), torch.iinfo(values.dtype)
    nearest = [n for n in (value + 1, value - 1) if limits.min <= n <= limits.max]
    return [torch.tensor([value, other], dtype=values.dtype) for other in nearest]
