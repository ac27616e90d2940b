"""The inputs of a parity check: real ones where there are any, else random ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..calibration.feeds import Feed, samples
from ..errors import FeedError
from .model import Model, TensorSpec
from .options import ExportOptions

SAMPLES = 8
MAX_BYTES = 64 << 20
SEED = 0

SIZES = {"tokens": 19, "height": 4, "width": 6}
"""Random inputs take these where an axis is dynamic; none is a size that was traced."""


def fixed_axes(spec: TensorSpec, options: ExportOptions) -> dict[str, int]:
    """Returns the named axes that the options make constants of the graph, with their sizes."""
    # A token count says nothing of an image's height and width: those stay dynamic.
    ranges = {"batch": options.batch, "tokens": options.tokens}
    return {
        axis: ranges[axis].opt
        for axis in spec.dynamic_axes
        if axis in ranges and ranges[axis].fixed
    }


def parity_inputs(model: Model, options: ExportOptions, data: Feed | None) -> np.ndarray:
    """Returns inputs [s, …] to compare with: as many as fit, exactly a batch where that is fixed.

    They come from `data`, from the model's own example, or from a random generator that begins the
    same every time. Raises `FeedError` when the feed does not fit the model.
    """
    fixed = fixed_axes(model.input, options)
    batch = fixed.get("batch")
    if data is not None:
        x = samples(data, model.input.name, batch or SAMPLES)
        _check(x, model.input, fixed)
        return x.astype(model.input.dtype)
    if model.example is not None and batch is None:
        return model.example.astype(model.input.dtype)
    return random_inputs(model, batch or SAMPLES, SIZES | fixed)


def random_inputs(model: Model, count: int, sizes: Mapping[str, int] = SIZES) -> np.ndarray:
    """Returns standard normal inputs [count, …], fewer where `count` would take too much memory."""
    shape = model.input.concrete({**sizes, "batch": count})
    each = 4 * int(np.prod(shape[1:], dtype=np.int64))
    fitting = count if "batch" in sizes else max(1, min(count, MAX_BYTES // each))
    random = np.random.default_rng(SEED)
    return random.standard_normal((fitting, *shape[1:])).astype(model.input.dtype)


def _check(x: np.ndarray, spec: TensorSpec, fixed: Mapping[str, int]) -> None:
    wanted = [fixed.get(size, size) if isinstance(size, str) else size for size in spec.shape]
    fits = x.ndim == len(wanted) and all(
        not isinstance(size, int) or size == actual
        for size, actual in zip(wanted[1:], x.shape[1:], strict=True)
    )
    if not fits:
        raise FeedError(
            f"--data: input '{spec.name}' takes ({', '.join(map(str, wanted))}), the feed gives "
            f"{x.shape}",
            hint="each array is a batch of inputs as the model takes them",
        )
    if "batch" in fixed and len(x) < fixed["batch"]:
        raise FeedError(
            f"--data: --batch {fixed['batch']} needs that many inputs, the feed gives {len(x)}"
        )
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise FeedError(f"--data: input '{spec.name}' holds NaN or Inf")
