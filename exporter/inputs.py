"""Inputs: what a graph or model takes, and what it is calibrated on and compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..calibration.feeds import Feed, batches, limited, rebatched, samples
from ..errors import FeedError, UsageError
from .axes import DEFAULT_TOKENS, fits

if TYPE_CHECKING:
    from .bundle.manifest import PortRecord
    from .model import Model, TensorSpec
    from .options import ExportOptions

SAMPLES = 8
MAX_BYTES = 64 << 20
SEED = 0

SIZES = {"tokens": 19, "height": 4, "width": 6}
"""Random inputs take these where an axis is dynamic; none is a size that was traced."""

_TOKEN_AXES = frozenset({"tokens", "height", "width"})
"""Axes of which `--tokens` says something: of an image it is the number of pixels."""


def fixed_axes(spec: TensorSpec, options: ExportOptions) -> dict[str, int]:
    """Returns the named axes that the options make constants of the graph, with their sizes.

    Raises UsageError for a size that the model does not take, and for one of no axis that it has.
    """
    if options.tokens != DEFAULT_TOKENS and not _TOKEN_AXES.intersection(spec.dynamic_axes):
        raise UsageError(
            f"--tokens {options.tokens}: the model has no token axis: its input '{spec.name}' is "
            f"({', '.join(map(str, spec.shape))})",
            hint="leave --tokens out",
        )
    limits = dict(spec.limits)
    for axis, asked in (("batch", options.batch), ("tokens", options.tokens)):
        # The default range is no wish: a model with fewer positions narrows it.
        default = axis == "tokens" and asked == DEFAULT_TOKENS
        if asked.max > limits.get(axis, asked.max) and not default:
            raise UsageError(
                f"--{axis} {asked}: the model takes at most {limits[axis]}",
                hint=f"--{axis} 1:{limits[axis]}:{limits[axis]} covers all that it can take",
            )
    # A token count says nothing of an image's height and width: those stay dynamic.
    ranges = {"batch": options.batch, "tokens": options.tokens}
    return {
        axis: ranges[axis].opt
        for axis in spec.dynamic_axes
        if axis in ranges and ranges[axis].fixed
    }


def parity_batches(
    model: Model, fixed: Mapping[str, int], data: Feed | None, count: int
) -> Iterator[np.ndarray]:
    """Returns inputs to compare with, `SAMPLES` at a time, or whole batches where that is fixed.

    They are up to `count` of `data`, else the model's own example, or come from a random generator
    that begins the same every time; `fixed` is `ExportJob.fixed`. What comes first is read by the
    call, which raises `FeedError` when it does not fit.
    """
    batch = fixed.get("batch")
    if data is not None:
        return _feed_batches(model, data, count, fixed)
    if model.example is not None and batch is None:
        return iter([model.example.astype(model.input.dtype)])
    return iter([random_inputs(model, batch or SAMPLES, {**SIZES, **fixed})])


def _feed_batches(
    model: Model, data: Feed, count: int, fixed: Mapping[str, int]
) -> Iterator[np.ndarray]:
    """The batches of a feed; of a fixed batch only whole ones, since a graph takes no others."""
    batch = fixed.get("batch", 1)
    size = batch * max(1, SAMPLES // batch)
    taken = limited(batches(data, model.input.name), max(count, batch))
    parts = rebatched((with_axes(x, model.input) for x in taken), size)
    first = next(parts, None)
    if first is None:
        raise FeedError(
            "the feed holds no inputs", hint=f"give at least one array for '{model.input.name}'"
        )
    first = fitted(first, model.input, fixed)

    def rest() -> Iterator[np.ndarray]:
        yield first[: len(first) // batch * batch]
        for x in parts:
            whole = x[: len(x) // batch * batch]
            if len(whole):
                yield fitted(whole, model.input, fixed)

    return rest()


def feed_inputs(
    model: Model, data: Feed, count: int, fixed: Mapping[str, int] | None = None
) -> np.ndarray:
    """Returns up to `count` inputs of a feed; `FeedError` where they do not fit the model."""
    return fitted(samples(data, model.input.name, count), model.input, fixed)


def feed_batches(model: Model, data: Feed) -> Iterator[np.ndarray]:
    """Yields all inputs of a feed as the model takes them; `FeedError` where they do not fit."""
    for batch in batches(data, model.input.name):
        yield fitted(batch, model.input)


def fitted(x: np.ndarray, spec: TensorSpec, fixed: Mapping[str, int] | None = None) -> np.ndarray:
    """Returns inputs with all axes and the dtype of the model's; `FeedError` where they cannot."""
    x, sizes = with_axes(x, spec), fixed or {}
    # Any number of inputs: batches are made of them.
    wanted = [sizes.get(str(size), size) for size in spec.shape[1:]]
    check_array(x, replace(spec, shape=("batch", *wanted)), "--data: ", feed=True)
    if len(x) < sizes.get("batch", 0):
        raise FeedError(
            f"--data: --batch {sizes['batch']} needs that many inputs, the feed gives {len(x)}"
        )
    return x.astype(spec.dtype, copy=False)


def random_inputs(model: Model, count: int, sizes: Mapping[str, int] = SIZES) -> np.ndarray:
    """Returns standard normal inputs [count, …], fewer where `count` would take too much memory.

    Integer inputs are drawn evenly from the values that the model takes.
    """
    limits = dict(model.input.limits)
    fitted = {axis: min(size, limits.get(axis, size)) for axis, size in sizes.items()}
    shape = model.input.concrete({**fitted, "batch": count})
    each = 4 * int(np.prod(shape[1:], dtype=np.int64))
    fitting = count if "batch" in sizes else max(1, min(count, MAX_BYTES // each))
    random = np.random.default_rng(SEED)
    if model.input.below is not None:
        return random.integers(0, model.input.below, (fitting, *shape[1:]))
    return random.standard_normal((fitting, *shape[1:])).astype(model.input.dtype)


def with_axes(x: np.ndarray, spec: TensorSpec | PortRecord) -> np.ndarray:
    """Returns x with the axis of size 1 that its shape may leave out."""
    if spec.implied is None or x.ndim != len(spec.shape) - 1:
        return x
    return np.expand_dims(x, spec.shape.index(spec.implied))


def check_array(
    x: np.ndarray, port: TensorSpec | PortRecord, where: str = "", *, feed: bool = False
) -> None:
    """Raises `FeedError` for an array that an input of a graph or model cannot take.

    What is no integer in the shape of `port` is a dynamic axis. Whole numbers are cast to whole
    numbers and floats to floats, so widths need not agree. Of a `feed` whole numbers serve as
    floats, too, and NaN or Inf is refused. `where` says whose array it is.
    """
    what, whole = f"{where}input '{port.name}'", port.dtype.startswith("int")
    kinds = "iu" if whole else "fbiu" if feed else "f"
    if not fits(x.shape, port.shape) or x.dtype.kind not in kinds:
        raise FeedError(
            f"{what} takes {port.dtype} {_shape(port.shape)}, not {x.dtype.name} {_shape(x.shape)}",
            hint="reshape or cast the array; `moexport inspect` shows what a model takes",
        )
    if isinstance(x, np.ma.MaskedArray):  # a graph has no masks: what is hidden would count
        raise FeedError(
            f"{what} is a masked array", hint="say what its hidden values are: x.filled(0)"
        )
    # Some kernels of ONNX Runtime divide by it, which ends the process.
    if 0 in (x.shape[1:] if feed else x.shape):
        at = x.shape.index(0)
        hint = f"its axis {port.shape[at]} is 1 at least" if at else "give at least one input"
        hint = f"leave such inputs out of the feed: {hint}" if feed and at else hint
        raise FeedError(f"{what} is empty: {_shape(x.shape)}", hint=hint)
    for axis, most in dict(port.limits).items():
        size = x.shape[port.shape.index(axis)] if axis in port.shape else 0
        if size > most:
            raise FeedError(
                f"{what}: {size} {axis}, but the model takes at most {most}",
                hint=f"cut the inputs to {most} {axis}",
            )
    if port.below is not None and whole and x.size:
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= port.below:
            raise FeedError(
                f"{what} holds {low if low < 0 else high}, but the model takes values from 0 to "
                f"{port.below - 1}",
                hint="token ids are those of the tokenizer that the model was trained with",
            )
    if feed and x.dtype.kind == "f" and not np.isfinite(x).all():
        raise FeedError(f"{what} holds NaN or Inf", hint="leave such inputs out")


def _shape(sizes: Sequence[object]) -> str:
    return "(" + ", ".join(str(size) for size in sizes) + ")"
