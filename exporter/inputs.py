"""Checks and completes inputs, and makes those on which graphs are compared with PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..data.batches import Feed, Fields, limited, rebatched, row_count, rows_between
from ..data.batches import Inputs as Inputs  # noqa: PLC0414
from ..errors import FeedError, UsageError
from ..graphs.sizes import BATCH, AxisRange, fits

if TYPE_CHECKING:
    from .bundle.manifest import TensorSpec
    from .model import Model

Example = Inputs | str | Path
"""Inputs [b, …] of a user's own network, or their path: only the first few are used."""


class HasPorts(Protocol):
    """Anything with inputs and outputs: a model, or a bundle."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def input(self) -> TensorSpec: ...


def repeated_indices(count: int, size: int, group_size: int = 1) -> np.ndarray:
    """Returns `size` indices into `count` inputs: all in order, then repeatedly from other starts.

    The starts follow the Thue–Morse sequence: if inputs were repeated at a constant distance, a
    graph that computes an earlier block instead of a later one would pass. Groups of `group_size`
    inputs, which are computed together, are not split.
    """
    groups = max(1, count // group_size)
    rows = quotient = np.arange(-(-size // group_size))
    while groups > 1 and quotient.any():
        quotient = quotient // groups
        rows = rows + quotient
    starts = rows % groups * group_size
    indices: np.ndarray = (starts[:, None] + np.arange(group_size)).ravel()[:size]
    return indices


SAMPLES = 8
MAX_BYTES = 64 << 20
SEED = 0

SIZES = {
    "tokens": 19,
    "past": 11,
    "encoder_tokens": 9,
    "decoder_tokens": 8,
    "height": 4,
    "width": 6,
}
"""The sizes of dynamic axes in random inputs; none is a size used for tracing."""

INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
"""The integer types that an input may have, besides float32 and bool."""


def by_name(inputs: Inputs, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Returns inputs by name; a single array is the first of the model's inputs."""
    return dict(inputs) if isinstance(inputs, Mapping) else {specs[0].name: inputs}


def tensor_of(x: Any) -> Any | None:
    """Returns x as a PyTorch tensor, via DLPack without a copy; None if impossible.

    NumPy arrays are not converted.
    """
    if isinstance(x, np.ndarray):
        return None
    try:
        import torch  # not needed for NumPy arrays

        tensor = x if isinstance(x, torch.Tensor) else torch.utils.dlpack.from_dlpack(x)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, BufferError):
        return None
    return tensor.detach()


def completed(
    inputs: Inputs, specs: Sequence[TensorSpec], where: str = ""
) -> dict[str, np.ndarray]:
    """Returns an array for every input of a model or graph, in the order of its inputs.

    A single array is the first input, and missing inputs get their defaults. Raises `FeedError` for
    an unknown name, and for a missing input that has no default.
    """
    arrays = by_name(inputs, specs)
    known = {spec.name for spec in specs}
    for name in arrays.keys() - known:
        raise FeedError(
            f"{where}the model has no input '{name}'", hint=f"it has {', '.join(sorted(known))}"
        )
    sizes = _sizes(arrays, specs)
    for spec in specs:
        if spec.name not in arrays:
            arrays[spec.name] = _default(spec, sizes, arrays, where)
        elif spec.default == "zeros":
            arrays[spec.name] = _strengths(arrays[spec.name], spec, sizes, where)
    _check_sums(specs, sizes, where)
    return {spec.name: arrays[spec.name] for spec in specs}


def _check_sums(specs: Sequence[TensorSpec], sizes: Mapping[str, int], where: str) -> None:
    """Raises `FeedError` if a sum of axes, such as `past + tokens`, exceeds its limit."""
    for axis, limit in (pair for spec in specs for pair in spec.limits.items()):
        past, plus, new = axis.partition(" + ")
        if not plus or past not in sizes or not (new in sizes or new.isdecimal()):
            continue
        added = int(new) if new.isdecimal() else sizes[new]  # the size may be a constant
        if sizes[past] + added > limit:
            raise FeedError(
                f"{where}the cache has {sizes[past]} tokens and {added} more are given, but the "
                f"model has only {limit} positions",
                hint="start again without a cache, with the last tokens as a new prompt",
            )


def _strengths(
    strengths: np.ndarray, spec: TensorSpec, sizes: Mapping[str, int], where: str
) -> np.ndarray:
    """Returns the strengths as [b, s]; strengths [s] apply to every input."""
    array = np.asarray(strengths)
    if array.dtype.kind in "fiu" and not np.isfinite(array).all():
        raise FeedError(
            f"{where}input '{spec.name}' contains a strength that is not finite",
            hint="0 leaves an expert out of the steering",
        )
    if array.ndim != 1:
        return array
    batch = spec.shape[0]
    rows = sizes.get(batch, 1) if isinstance(batch, str) else batch
    return np.broadcast_to(array, (rows, len(array)))


def _sizes(arrays: Mapping[str, np.ndarray], specs: Sequence[TensorSpec]) -> dict[str, int]:
    """Returns the sizes of the named axes that arrays determine; a missing past has length 0."""
    sizes = {"past": 0}
    for spec in specs:
        array = arrays.get(spec.name)
        if array is not None and array.ndim == len(spec.shape):
            sizes |= {
                a: n for a, n in zip(spec.shape, array.shape, strict=True) if isinstance(a, str)
            }
    return sizes


def _default(
    spec: TensorSpec, sizes: Mapping[str, int], arrays: Mapping[str, np.ndarray], where: str
) -> np.ndarray:
    try:
        shape = spec.concrete(sizes)
    except KeyError:
        shape = None
    if spec.default is None or shape is None:
        raise FeedError(
            f"{where}the input '{spec.name}' is missing",
            hint="give arrays by name, as `moexport inspect` lists them",
        )
    if spec.default == "ones":
        return np.ones(shape, dtype=spec.dtype)
    if spec.default in ("empty", "zeros"):
        return np.zeros(shape, dtype=spec.dtype)
    mask = next((a for name, a in arrays.items() if name.endswith("mask")), None)
    if mask is None:
        first = sizes.get("past", 0)
        return np.broadcast_to(np.arange(first, first + shape[-1]), shape).astype(spec.dtype)
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -shape[-1] :]
    return np.asarray(positions, dtype=spec.dtype)


def parity_batches(
    model: Model,
    fixed: Mapping[str, int],
    data: Feed | None,
    count: int,
    *,
    ranges: Mapping[str, AxisRange],
    tiny: bool,
) -> Iterator[Fields]:
    """Returns inputs for the comparison, `SAMPLES` at a time, or in batches of a fixed size.

    These are up to `count` inputs of `data` if given; otherwise the model's own example, or random
    inputs with a constant seed and a token count within `ranges`. `fixed` is `ExportJob.fixed`.
    Batch sizes are multiples of the smallest one. With `tiny`, inputs of Soft MoE have tokens that
    are almost zero (`_with_tiny_tokens`). Raises `FeedError` if the first batch does not fit.
    """
    least = ranges[BATCH].min if BATCH in ranges else 1
    smallest = fixed.get(BATCH) or max(model.batch_of, least)
    if data is not None:
        return _feed_batches(model, data, count, fixed, smallest)
    rows = fixed.get(BATCH, -(-SAMPLES // smallest) * smallest)
    within = {axis: sizes.nearest(SIZES[axis]) for axis, sizes in ranges.items() if axis in SIZES}
    arrays = random_arrays(model, rows, {**SIZES, **within, **fixed})
    if model.example is not None and BATCH not in fixed:
        given = by_name(model.example, model.inputs)
        example = {spec.name: given[spec.name].astype(spec.dtype) for spec in model.inputs}
        if "tokens" in ranges:
            tokens = example[model.input.name].shape[model.input.shape.index("tokens")]
            nearest = ranges["tokens"].nearest(tokens)
            if nearest != tokens:
                example = with_tokens(model, example, row_count(example), nearest, random=False)
        varies = len(model.input.dynamic_axes) > 1  # then random lengths are compared, too
        example = _repeated(example, smallest)
        return iter([example, arrays] if varies else [example])
    return iter([_with_tiny_tokens(arrays, model) if tiny else arrays])


TINY = 2.0**-20
"""Far below an epsilon of 1e-5, and far above one of 1e-12; a power of 2, so scaling is exact."""


def _with_tiny_tokens(arrays: Fields, model: Model) -> Fields:
    """Returns inputs; for Soft MoE, the last one ends in tiny tokens or tiny rows of an image.

    Only with such tokens does the epsilon of a router or norm make a difference. Other models get
    none: a router that reads each token separately would give all experts the same score.
    """
    name = model.input.name
    x = arrays[name]
    soft = all(layer.spec.chooses_sets for layer in model.layers.values())
    if not soft or x.dtype.kind != "f" or x.ndim < len("bmd") or x.shape[-2] < 2:
        return arrays
    x = x.copy()
    x[-1, ..., x.shape[-2] // 2 :, :] *= x.dtype.type(TINY)
    return {**arrays, name: x}


def _repeated(arrays: Fields, smallest: int) -> Fields:
    """Returns the inputs, repeated if there are fewer than the smallest batch needs."""
    rows = np.arange(max(smallest, row_count(arrays))) % row_count(arrays)
    return {name: array[rows] for name, array in arrays.items()}


def with_tokens(
    model: Model, inputs: Fields, rows: int, tokens: int, *, random: bool
) -> dict[str, np.ndarray]:
    """Returns inputs with a given number of rows and tokens: `random` ones, or those of `inputs`.

    Tokens of `inputs` are repeated in the order of `repeated_indices`, and floats are scaled
    slightly, so that no two are equal. Masks and positions follow from the tokens.
    """
    limits = model.limits
    sizes = {**SIZES, "tokens": tokens}
    if f"{PAST_AXIS} + tokens" in limits:
        sizes[PAST_AXIS] = min(SIZES[PAST_AXIS], limits[f"{PAST_AXIS} + tokens"] - tokens)
    if random:
        return random_arrays(model, rows, sizes)
    arrays: dict[str, np.ndarray] = {}
    generator = np.random.default_rng(SEED)
    for spec in model.inputs:
        if spec.default in ("ones", "positions") or spec.name not in inputs:
            continue
        array = inputs[spec.name]
        array = array[np.arange(rows) % len(array)]
        for i, axis in enumerate(spec.shape):
            if axis == "tokens":
                array = np.take(array, repeated_indices(array.shape[i], tokens), axis=i)
                if array.dtype.kind == "f":
                    array = array * generator.uniform(0.9, 1.1, array.shape).astype(array.dtype)
            elif axis == PAST_AXIS:
                array = np.take(array, np.arange(min(array.shape[i], sizes[PAST_AXIS])), axis=i)
        arrays[spec.name] = array
    return completed(arrays, model.inputs)


def _feed_batches(
    model: Model, data: Feed, count: int, fixed: Mapping[str, int], batch: int
) -> Iterator[Fields]:
    """Returns the batches of a feed; if their size is fixed or has a minimum, only whole ones."""
    from ..data.feeds import named_batches  # loaded if there are data

    size = batch * max(1, SAMPLES // batch)
    specs = {spec.name: spec for spec in model.inputs}
    taken = limited(named_batches(data, [*specs]), max(count, batch))
    complete = ({name: with_axes(x, specs[name]) for name, x in part.items()} for part in taken)
    parts = rebatched(complete, size)
    first = next(parts, None)
    if first is None:
        raise FeedError(
            "the feed contains no inputs", hint=f"give at least one array for '{model.input.name}'"
        )
    first = fitted_arrays(first, model, fixed)
    if row_count(first) >= model.batch_of and BATCH not in fixed:
        first = _repeated(first, batch)
    if row_count(first) < batch:
        raise FeedError(
            f"--data: the model computes {batch} inputs together, but the feed has "
            f"{row_count(first)}"
        )

    def batches() -> Iterator[Fields]:
        yield rows_between(first, 0, row_count(first) // batch * batch)
        for x in parts:
            filled = rows_between(x, 0, row_count(x) // batch * batch)
            if row_count(filled):
                yield fitted_arrays(filled, model, fixed)

    return batches()


def fitted_arrays(
    inputs: Inputs, model: HasPorts, fixed: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Returns an array for every input in the model's form; `FeedError` if that is impossible."""
    named = by_name(inputs, model.inputs)
    for spec in model.inputs:
        if spec.default == "zeros" and spec.name not in named:  # zeros would compare nothing
            count = len(named[model.input.name])
            random = np.random.default_rng(SEED)
            named[spec.name] = random.standard_normal((count, *spec.concrete({"batch": count})[1:]))
    arrays = completed(named, model.inputs, "--data: ")
    count = len(arrays[model.input.name])
    for name, array in arrays.items():
        if len(array) != count:
            raise FeedError(
                f"--data: '{name}' has {len(array)} inputs, but '{model.input.name}' has {count}"
            )
    return {spec.name: fitted(arrays[spec.name], spec, fixed) for spec in model.inputs}


def feed_inputs(model: Model, data: Feed, count: int) -> Fields:
    """Returns up to `count` inputs of a feed; `FeedError` if they do not fit the model."""
    from ..data.feeds import named_samples  # loaded if there are data

    names = [spec.name for spec in model.inputs]
    return fitted_arrays(named_samples(data, names, count), model)


def feed_batches(model: Model, data: Feed) -> Iterator[Fields]:
    """Yields all inputs of a feed in the model's form; `FeedError` if they do not fit."""
    from ..data.feeds import named_batches  # loaded if there are data

    for batch in named_batches(data, [spec.name for spec in model.inputs]):
        yield fitted_arrays(batch, model)


def fitted(x: np.ndarray, spec: TensorSpec, fixed: Mapping[str, int] | None = None) -> np.ndarray:
    """Returns inputs with the model's axes and dtype; `FeedError` if that is impossible."""
    x, sizes = with_axes(x, spec), fixed or {}
    # The number of inputs does not matter: they are batched later.
    shape = [sizes.get(str(size), size) for size in spec.shape[1:]]
    check_array(x, replace(spec, shape=("batch", *shape)), "--data: ", feed=True)
    if len(x) < sizes.get("batch", 0):
        raise FeedError(
            f"--data: --batch {sizes['batch']} needs that many inputs, but the feed has {len(x)}"
        )
    return x.astype(spec.dtype, copy=False)


def random_arrays(
    model: Model, count: int, sizes: Mapping[str, int] = SIZES
) -> dict[str, np.ndarray]:
    """Returns standard normal inputs [count, …], fewer if `count` would take too much memory.

    Integer inputs are drawn uniformly from the values that the model accepts or, if these are
    unknown, from its example; so are inputs other than the first (a time, a weight). A mask hides
    the end of every second input or, with a cache, its beginning.
    """
    limits = model.limits
    clipped = {axis: min(size, limits.get(axis, size)) for axis, size in sizes.items()}
    for (first, _, second), limit in ((axis.partition(" + "), m) for axis, m in limits.items()):
        if second:  # the sum has its own limit
            clipped[first] = min(clipped[first], limit // 2)
            clipped[second] = min(clipped[second], limit - clipped[first])
    shapes = {spec.name: spec.concrete({**clipped, "batch": count}) for spec in model.inputs}
    input_bytes = max(4 * int(np.prod(shape[1:], dtype=np.int64)) for shape in shapes.values())
    rows = count if "batch" in sizes else max(1, min(count, MAX_BYTES // input_bytes))
    random = np.random.default_rng(SEED)
    examples = {} if model.example is None else by_name(model.example, model.inputs)
    arrays: dict[str, np.ndarray] = {}
    for spec in model.inputs:
        shape = (rows, *shapes[spec.name][1:])
        if spec.below is not None:
            arrays[spec.name] = random.integers(0, spec.below, shape)
        elif spec.name in examples and (
            spec is not model.input or not spec.dtype.startswith("float")
        ):
            arrays[spec.name] = random.choice(examples[spec.name].ravel(), shape).astype(spec.dtype)
        elif spec.default == "ones":
            arrays[spec.name] = _mask_with_gaps(shape, cached=" + " in str(spec.shape[-1]))
        elif spec.default != "positions":
            arrays[spec.name] = random.standard_normal(shape).astype(spec.dtype)
    return completed(arrays, model.inputs)


def _mask_with_gaps(shape: tuple[int, ...], *, cached: bool) -> np.ndarray:
    """Returns a mask [b, m] that hides a few tokens of every second input, as for padding."""
    mask = np.ones(shape, dtype=np.int64)
    left_out = min(3, shape[1] - 1) if shape[1] > 1 else 0
    if left_out:
        mask[1::2, slice(0, left_out) if cached else slice(-left_out, None)] = 0
    return mask


def with_axes(x: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Returns x with the axis of size 1 that callers may omit."""
    if spec.implied is None or x.ndim != len(spec.shape) - 1:
        return x
    return np.expand_dims(x, spec.shape.index(spec.implied))


PAST_AXIS = "past"
"""The axis of a cache, whose size is the number of earlier tokens."""


def check_k_given(k: object, *, takes_k: bool, what: str) -> None:
    """Raises `UsageError` if k is not a number, is given but not an input, or is missing.

    `what` names what is run: a graph or an engine.
    """
    if k is not None and (isinstance(k, bool) or not isinstance(k, Real) or not math.isfinite(k)):
        raise UsageError(f"k = {k!r}: one whole number is expected", hint="for example k=2")
    if takes_k and not isinstance(k, int | np.integer) and k == 1:  # 1.0 means all in an export
        raise UsageError(
            f"k = {k!r} is ambiguous: one expert, or all of them?",
            hint="k=1 computes one expert; for all, give their number",
        )
    if takes_k and k is None:
        raise UsageError(f"k is an input of this {what}, but no k was given", hint="add --k K")
    if k is not None and not takes_k:
        raise UsageError(
            f"k = {k} was given, but the {what}'s k is baked in",
            hint="export with --k input to choose k for each run",
        )


def check_array(x: np.ndarray, spec: TensorSpec, where: str = "", *, feed: bool = False) -> None:
    """Raises `FeedError` for an array that does not fit an input of a graph or model.

    Axes of `spec` that are not integers are dynamic. Whole numbers are cast to whole numbers and
    floats to floats, so their widths may differ if the values fit. In a `feed`, whole numbers may
    also be used as floats, and NaN or Inf is refused. `where` names the array's source.
    """
    what, is_integer = f"{where}input '{spec.name}'", spec.dtype in INTEGERS
    kinds = "iu" if is_integer else "b" if spec.dtype == "bool" else "fbiu" if feed else "f"
    if not fits(x.shape, spec.shape) or x.dtype.kind not in kinds:
        from .checks.shapes import shape_hint  # needed for errors only

        raise FeedError(
            f"{what} needs {spec.dtype} {shape_text(spec.shape)}, not {x.dtype.name} "
            f"{shape_text(x.shape)}",
            hint=f"cast the array: x = x.astype('{spec.dtype}')"
            if fits(x.shape, spec.shape)
            else shape_hint(x.shape, spec.shape),
        )
    if isinstance(x, np.ma.MaskedArray):  # graphs have no masks: hidden values would be used
        raise FeedError(f"{what} is a masked array", hint="replace its hidden values: x.filled(0)")
    # Some kernels of ONNX Runtime divide by the size of an axis: a size of 0 ends the process. The
    # kernels for a cache allow an empty one.
    sizes = [1 if axis == PAST_AXIS else n for n, axis in zip(x.shape, spec.shape, strict=True)]
    if 0 in (sizes[1:] if feed else sizes):
        index = sizes.index(0)
        hint = f"{spec.shape[index]} must be at least 1" if index else "give at least one input"
        hint = f"leave such inputs out of the feed: {hint}" if feed and index else hint
        raise FeedError(f"{what} is empty: {shape_text(x.shape)}", hint=hint)
    for axis, limit in spec.limits.items():
        size = x.shape[spec.shape.index(axis)] if axis in spec.shape else 0
        if size > limit:
            raise FeedError(
                f"{what} has {size} {axis}, but the model accepts at most {limit}",
                hint=f"cut the inputs to {limit} {axis}",
            )
    if spec.groups_of is not None and not feed and len(x) % spec.groups_of:
        raise FeedError(
            f"{what} has {len(x)} inputs, but the model computes {spec.groups_of} together",
            hint=f"give a multiple of {spec.groups_of} inputs",
        )
    if spec.below is not None and is_integer and x.size:
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= spec.below:
            raise FeedError(
                f"{what} contains {low if low < 0 else high}, but the model accepts only 0 to "
                f"{spec.below - 1}",
                hint="use the tokenizer that the model was trained with",
            )
    if is_integer and x.size and not np.can_cast(x.dtype, spec.dtype):
        limits = np.iinfo(spec.dtype)
        wrong = next(
            (v for v in (int(x.min()), int(x.max())) if not limits.min <= v <= limits.max), None
        )
        if wrong is not None:
            raise FeedError(
                f"{what} contains {wrong}, but {spec.dtype} allows {limits.min} to {limits.max}",
                hint="cast the array to the type of the network's example",
            )
    if feed and x.dtype.kind == "f" and not np.isfinite(x).all():
        raise FeedError(f"{what} contains NaN or Inf", hint="leave such inputs out")


def shape_text(sizes: Sequence[object]) -> str:
    return "(" + ", ".join(str(size) for size in sizes) + ")"
