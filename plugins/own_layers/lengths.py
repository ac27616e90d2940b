"""Finds an axis of a user's network that can vary in length, such as its tokens or frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import UsageError, one_line
from ...exporter.inputs import by_name
from ...exporter.model import Model

TOKENS = "tokens"

SEQUENCE_RANKS = (2, 3)
"""Ranks of inputs that may vary in length: ids (b, m), tokens (b, m, d), frames (b, c, m)."""


def with_token_axis(model: Model, option: str) -> Model:
    """Returns a network whose inputs and outputs have the dynamic axis `tokens`.

    This is the first axis for which the network accepts another size and, in other inputs, the axis
    of the same size. If the network accepts only inputs shorter than its example, for example
    because it embeds positions, the example's length is the limit. Raises UsageError, which names
    `option`, if there is no such axis.
    """
    assert model.example is not None, "a factory's network has an example"
    arrays = by_name(model.example, model.inputs)
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    first = inputs[model.input.name]
    problem = "only inputs of 2 or 3 axes can vary in length"
    for axis in range(1, first.ndim) if first.ndim in SEQUENCE_RANKS else ():
        length = first.shape[axis]
        axes = {
            name: next((i for i in range(1, x.ndim) if x.shape[i] == length), None)
            for name, x in inputs.items()
        } | {model.input.name: axis}
        before = _outputs(model, inputs)
        assert not isinstance(before, str), "it has run before"
        for new in (2 * length, length // 2):
            after = _outputs(model, {n: _of_length(x, axes[n], new) for n, x in inputs.items()})
            if not isinstance(after, str):
                limits = {TOKENS: length} if new < length else {}
                return replace(
                    model,
                    inputs=tuple(
                        replace(
                            spec,
                            shape=_rename(spec.shape, {axes[spec.name]: TOKENS}),
                            limits=limits if spec is model.input else spec.limits,
                        )
                        for spec in model.inputs
                    ),
                    outputs=tuple(
                        replace(spec, shape=_rename(spec.shape, _varying(y, z, length, spec.name)))
                        for spec, y, z in zip(model.outputs, before, after, strict=True)
                    ),
                )
            problem = after
    raise UsageError(
        f"{option}: the network accepts no other length for its input '{model.input.name}' "
        f"({', '.join(map(str, model.input.shape))}): {problem}",
        hint="leave --tokens out: the graph then has the sizes of the example",
    )


def _of_length(x: Tensor, axis: int | None, length: int) -> Tensor:
    """Returns inputs cut, or repeated from the start, to a length."""
    if axis is None:
        return x
    return x.index_select(axis, torch.arange(length) % x.shape[axis])


def _outputs(model: Model, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...] | str:
    """Returns the network's outputs, or why it fails."""
    with torch.no_grad():
        try:
            returned = model.untouched(*(x.clone() for x in inputs.values()))
        except Exception as error:  # noqa: BLE001  the user's code may fail in any way
            return one_line(error)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    for y in outputs:
        if len(y) != len(next(iter(inputs.values()))):
            return "its outputs then have no batch axis"
    return outputs


def _rename(shape: tuple[int | str, ...], names: Mapping[int | None, str]) -> tuple[int | str, ...]:
    return tuple(names.get(axis, size) for axis, size in enumerate(shape))


def _varying(before: Tensor, after: Tensor, length: int, name: str) -> dict[int | None, str]:
    """Returns the names of an output's axes that vary with the input's length.

    An axis that is as long as the input is named `tokens`.
    """
    sizes = enumerate(zip(before.shape, after.shape, strict=True))
    return {
        axis: TOKENS if size == length else f"{name}_{axis}"
        for axis, (size, other) in sizes
        if size != other
    }
