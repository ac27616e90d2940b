"""Inputs of other lengths, if a user's network accepts them: frames, or tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import UsageError, one_line
from ...exporter.inputs import by_name
from ...exporter.model import Model

TOKENS = "tokens"

SEQUENCES = (2, 3)
"""Axes of an input that may be a length: ids (b, m), tokens (b, m, d), frames (b, c, m)."""


def with_token_axis(model: Model, option: str) -> Model:
    """Returns a network whose inputs and outputs have the dynamic axis `tokens`.

    It is the first axis for which the network accepts another size; in further inputs it is the
    axis of the same size. If the network accepts only shorter inputs than its example, as with an
    embedding for each position, the example's length is the limit. Raises UsageError, which names
    `option`, if there is no such axis.
    """
    assert model.example is not None, "a factory's network has an example"
    arrays = by_name(model.example, model.inputs)
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    first = inputs[model.input.name]
    problem = "no input has such an axis"
    for axis in range(1, first.ndim) if first.ndim in SEQUENCES else ():
        length = first.shape[axis]
        axes = {
            name: next((i for i in range(1, x.ndim) if x.shape[i] == length), None)
            for name, x in inputs.items()
        } | {model.input.name: axis}
        before = _outputs(model, inputs)
        assert not isinstance(before, str), "it ran when it was loaded"
        for other in (2 * length, length // 2):
            after = _outputs(model, {n: _of_length(x, axes[n], other) for n, x in inputs.items()})
            if not isinstance(after, str):
                limits = {TOKENS: length} if other < length else {}
                return replace(
                    model,
                    inputs=tuple(
                        replace(
                            spec,
                            shape=_named(spec.shape, {axes[spec.name]: TOKENS}),
                            limits=limits if spec is model.input else spec.limits,
                        )
                        for spec in model.inputs
                    ),
                    outputs=tuple(
                        replace(spec, shape=_named(spec.shape, _changed(y, z, length, spec.name)))
                        for spec, y, z in zip(model.outputs, before, after, strict=True)
                    ),
                )
            problem = after
    raise UsageError(
        f"{option}: the network accepts no other length of its input '{model.input.name}' "
        f"({', '.join(map(str, model.input.shape))}): {problem}",
        hint="leave --tokens out: the graph then has the sizes of the example",
    )


def _of_length(x: Tensor, axis: int | None, length: int) -> Tensor:
    """Inputs of another length: cut, or repeated from the start."""
    if axis is None:
        return x
    places = torch.arange(length) % x.shape[axis]
    return x.index_select(axis, places)


def _outputs(model: Model, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...] | str:
    """The network's outputs, or why it fails."""
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


def _named(shape: tuple[int | str, ...], names: Mapping[int | None, str]) -> tuple[int | str, ...]:
    return tuple(names.get(axis, size) for axis, size in enumerate(shape))


def _changed(before: Tensor, after: Tensor, length: int, name: str) -> dict[int | None, str]:
    """The axes of an output that vary with the length, by name.

    The name is `tokens` if the axis is as long as the input.
    """
    sizes = enumerate(zip(before.shape, after.shape, strict=True))
    return {
        axis: TOKENS if size == length else f"{name}_{axis}"
        for axis, (size, other) in sizes
        if size != other
    }
