"""The inputs on which a user's own network is compared with ours: its example, and made-up ones.

One input proves little: zeros hide every factor, and one input alone is never mixed with others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ...calibration.feeds import samples
from ...common.user_code import user_code
from ...errors import UsageError

INPUT_SHAPE = "input_shape"

EXAMPLE_INPUT = "example_input"

RANDOM_INPUTS = 2

FEED_INPUTS = 8

DRAWS = 8
"""How often values are drawn again where they are those of the example itself."""

Example = np.ndarray | str | Path
"""Inputs [b, …], or where they are (`calibration.feeds`): the first few of them are taken."""


def example_of(
    source: str, module: nn.Module, shape: object, example: Example | None
) -> tuple[Tensor, tuple[str, ...]]:
    """Returns the inputs [b, …] on which both networks run, and a note where they are random."""
    if example is not None:
        if not isinstance(example, np.ndarray):
            example = samples(example, "input", FEED_INPUTS)
        return _inputs(source, "the example", example), ()
    own = getattr(module, EXAMPLE_INPUT, None)
    if own is not None:
        hint = "it takes nothing and returns inputs [b, …]; --data gives others"
        with user_code(f"{source}: {EXAMPLE_INPUT}() failed", hint):
            value = own() if callable(own) else own
        return _inputs(source, EXAMPLE_INPUT, value), ()
    sizes = [shape] if isinstance(shape, int) else shape
    if not isinstance(sizes, list | tuple) or not all(isinstance(s, int) and s > 0 for s in sizes):
        said = "" if shape is None else f" ({INPUT_SHAPE}={shape!r} is no list of sizes)"
        raise UsageError(
            f"{source}: no input to check the replaced layers with{said}",
            hint=f"--set {INPUT_SHAPE}=3,224,224 (without the batch), --data with real inputs, or "
            f"an attribute {EXAMPLE_INPUT} on the network",
        )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(RANDOM_INPUTS, *sizes, generator=generator)
    return inputs, (f"the replaced layers were checked on random inputs of shape {list(sizes)}",)


def _inputs(source: str, what: str, value: object) -> Tensor:
    """Inputs [b, …] of a user's as a tensor; floats in float32, as the network is converted."""
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(np.ascontiguousarray(value))
        except TypeError as error:
            raise UsageError(
                f"{source}: {what}: {error}", hint="give an array of numbers"
            ) from error
    if not isinstance(value, Tensor):
        raise UsageError(f"{source}: {what} is a {type(value).__name__}, not a tensor or an array")
    if value.ndim == 0 or value.numel() == 0:
        raise UsageError(
            f"{source}: {what} has the shape {list(value.shape)}, which holds no input",
            hint="give inputs [b, …], one at least",
        )
    return value.detach().float() if value.is_floating_point() else value.detach()


def differ(inputs: Tensor) -> bool:
    """Whether there are two different inputs among these [b, …]."""
    return bool((inputs != inputs[:1]).any())


def made_up(inputs: Tensor) -> Iterator[Tensor]:
    """Yields further inputs of the kind of these, which are all equal: the likeliest ones first.

    Floats are random at their mean and scale, 1 where they are constant; then, as other kinds are,
    drawn from their values. A constant integer is drawn from it and one more, or one less. Each is
    of their shape, and differs from them.
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
        for _ in range(DRAWS):
            drawn = choice[torch.randint(len(choice), inputs.shape, generator=generator)]
            if differ(torch.cat([inputs, drawn])):
                yield drawn
                break


def _choices(values: Tensor) -> list[Tensor]:
    """What may be drawn from, by the values of an example: two different ones in each."""
    if differ(values):
        return [values]
    if values.dtype == torch.bool:
        return [torch.tensor([False, True])]
    if values.is_floating_point():
        return []
    value, limits = int(values[0]), torch.iinfo(values.dtype)
    near = [other for other in (value + 1, value - 1) if limits.min <= other <= limits.max]
    return [torch.tensor([value, other], dtype=values.dtype) for other in near]
