"""Shapes of inputs: advice on shapes that a model does not accept, and notes on suspicious sizes.

If a rebuilt network expects sizes that hardly any image has, something was probably read wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations

from ...graphs.sizes import fits

MAX_AXES = 5
"""For arrays of more axes, no permutation is searched for."""

COLOURS = (1, 3, 4)
"""The numbers of channels of image files."""

INSPECT = "`moexport inspect` shows the inputs that a model accepts"


def shape_hint(sizes: Sequence[int], shape: Sequence[object]) -> str:
    """Returns how to turn an array of these sizes into `shape`, whose named axes may vary."""
    order = _order(sizes, shape)
    if order is not None:
        return f"the axes are in another order: x = x.transpose{order}"
    if fits((1, *sizes), shape):
        return "the batch axis is missing: x = x[None]"
    if fits((1, 1, *sizes), shape):
        return "the batch and channel axes are missing: x = x[None, None]"
    for axis in range(1, len(shape)):
        if shape[axis] == 1 and fits((*sizes[:axis], 1, *sizes[axis:]), shape):
            index = ", ".join([":"] * axis + ["None"])
            return f"an axis of size 1 is missing: x = x[{index}]"
    wanted = [size for size in shape[1:] if isinstance(size, int)]
    if len(wanted) == len(shape) - 1 and len(sizes) == 2 and sizes[1] == math.prod(wanted):
        return f"its rows are flat: {_reshape_hint(wanted)}"
    return _image_hint(sizes, shape) or INSPECT


def _reshape_hint(wanted: Sequence[int]) -> str:
    """Returns how to reshape flat rows; for images this depends on the order of the channels."""
    rows = f"x = x.reshape({', '.join(map(str, (-1, *wanted)))})"
    if len(wanted) != 3 or wanted[0] == 1:
        return rows
    channels, height, width = wanted
    last = f"x = x.reshape(-1, {height}, {width}, {channels}).transpose(0, 3, 1, 2)"
    return f"{rows} if a row is one channel after the other, {last} if it is pixel after pixel"


def _image_hint(sizes: Sequence[int], shape: Sequence[object]) -> str:
    """Returns advice for images that have another size, or channels on another axis."""
    if len(sizes) != 4 or len(shape) != 4 or not all(isinstance(n, int) for n in shape[1:]):
        return ""
    first = shape[1] in COLOURS
    last = shape[3] in COLOURS and not first
    if not (first or last):
        return ""
    if first and sizes[1] != shape[1] and sizes[3] == shape[1]:
        return (
            f"the channels are last: x = x.transpose(0, 3, 1, 2), and resize the images to "
            f"{shape[2]} x {shape[3]}"
        )
    if last and sizes[3] != shape[3] and sizes[1] == shape[3]:
        return (
            f"the channels are first: x = x.transpose(0, 2, 3, 1), and resize the images to "
            f"{shape[1]} x {shape[2]}"
        )
    channels, height, width = (1, 2, 3) if first else (3, 1, 2)
    if sizes[channels] == shape[channels]:
        return f"resize the images to {shape[height]} x {shape[width]}, as in training"
    return f"the model accepts images with {shape[channels]} channels; {INSPECT}"


def _order(sizes: Sequence[int], shape: Sequence[object]) -> tuple[int, ...] | None:
    """Returns an order of axes in which an array fits; moves of one axis are tried first."""
    if len(sizes) != len(shape) or not 2 < len(sizes) <= MAX_AXES:
        return None
    orders = _orders(len(sizes))
    return next((order for order in orders if fits([sizes[n] for n in order], shape)), None)


def _orders(axes: int) -> Iterator[tuple[int, ...]]:
    rest = list(range(1, axes))
    for source in reversed(rest):
        for target in range(len(rest)):
            moved = [axis for axis in rest if axis != source]
            moved.insert(target, source)
            yield (0, *moved)
    for order in permutations(rest):
        yield (0, *order)
    for order in permutations(range(axes)):  # the batch last, as in MATLAB's files
        yield order


MAX_CHANNELS = 4
"""Grey, colour, and colour with a fourth channel; satellite images and latents have more."""

FEWEST_PIXELS, LONGEST_SIDE, LONGEST_RATIO = 16, 4096, 8


def odd_sizes(shape: Sequence[object]) -> Iterator[str]:
    """Yields sentences on suspicious shapes of inputs that are images."""
    sizes = [size for size in shape[1:] if isinstance(size, int)]
    if len(shape) != 4 or len(sizes) != 3:
        return
    first, middle, last = sizes
    channels_last = first == middle != last or (last <= MAX_CHANNELS < first and middle != last)
    channels, height, width = (last, first, middle) if channels_last else (first, middle, last)
    if channels > MAX_CHANNELS:
        yield (
            f"looks odd: the network expects images of {channels} channels{_as_patch(channels)}; "
            "check the shape of the first layer, or --set patch_size, channels"
        )
    if height * width <= FEWEST_PIXELS or max(height, width) > LONGEST_SIDE:
        yield f"looks odd: the network expects images of {height} x {width} pixels"
    elif max(height, width) > LONGEST_RATIO * min(height, width):
        yield (
            f"looks odd: the network expects images of {height} x {width} pixels; set height and "
            "width: --set img_size=224,192"
        )


def _as_patch(channels: int) -> str:
    """Returns a remark on the patch with this many numbers, if there is one."""
    for colours in (3, 1, 4):
        side = math.isqrt(channels // colours)
        if side > 1 and side * side * colours == channels:
            return (
                f", the size of a patch of {side} x {side} pixels with {colours} "
                f"channel{'s' if colours > 1 else ''}"
            )
    return ""
