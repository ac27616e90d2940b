"""Sizes of dynamic axes: requested, traced and compared. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError

BATCH = "batch"
TRACED_BATCH = 2
"""The batch size of the trace: at 1 the tracer could specialise the axis."""

TRACED_SIZES = {
    "tokens": 7,
    "past": 5,
    "encoder_tokens": 11,
    "decoder_tokens": 4,
    "height": 3,
    "width": 5,
}

PARITY_BATCHES = (1, TRACED_BATCH, TRACED_BATCH + 1)
"""The batch sizes at which a graph with a dynamic batch is compared. If the trace baked in a batch
size, two of the three fail."""


@dataclass(frozen=True, slots=True)
class AxisRange:
    """Sizes of a dynamic axis: smallest, optimal, largest. The axis is fixed if all are equal."""

    min: int
    opt: int
    max: int

    @property
    def fixed(self) -> bool:
        return self.min == self.max

    def nearest(self, size: int) -> int:
        """Returns the size in the range that is closest to `size`."""
        return max(self.min, min(size, self.max))

    def comparison_size(self, unit: int = 1) -> int:
        """Returns the batch size at which outputs are compared: if possible, not the traced one.

        It is a multiple of the smallest batch, so that the last batch is not smaller.
        """
        smallest = unit if unit > 1 else self.min
        return min(-(-PARITY_BATCHES[-1] * unit // smallest) * smallest, self.largest(unit))

    def largest(self, unit: int = 1) -> int:
        """Returns the largest size that is a multiple of the smallest batch."""
        smallest = unit if unit > 1 else self.min
        return max(self.max // smallest, 1) * smallest

    def probe_sizes(self, unit: int = 1, more: Iterable[int] = ()) -> tuple[int, ...]:
        """Returns the sizes at which a graph is compared, multiples of `unit`.

        They are the smallest, optimal and largest size, and one just above a power of two, which
        leaves blocked kernels a remainder. Sizes in `more` are added if they are in the range.
        """
        above = (1 << (self.max - 1).bit_length() - 1) + 1 if self.max > 2 else self.max
        sizes = {self.min, self.opt, -(-above // unit) * unit, self.max, *more}
        return tuple(sorted(n for n in sizes if self.min <= n <= self.max and n % unit == 0))

    def __str__(self) -> str:
        return str(self.opt) if self.fixed else f"{self.min}:{self.opt}:{self.max}"


Sizes = AxisRange | tuple[int, int, int] | str | int
"""Sizes as users write them: in Python (1, 8, 32), in a shell `1:8:32`, or one size."""

DEFAULT_BATCH = AxisRange(1, 1, 32)

DEFAULT_TOKENS = AxisRange(1, 196, 1024)


def parse_range(text: Sizes, option: str) -> AxisRange:
    """Returns sizes from `MIN:OPT:MAX`, three numbers or one; a `UsageError` names the option."""
    if isinstance(text, AxisRange):
        return text
    if isinstance(text, list | tuple):
        text = ":".join(map(str, text))
    try:
        sizes = [int(part) for part in str(text).split(":")]
    except ValueError:
        sizes = []
    if len(sizes) == 1:
        sizes *= 3
    if len(sizes) != len(("min", "opt", "max")):
        raise UsageError(
            f"{option} {text}: expected MIN:OPT:MAX or one size",
            hint=f"{option} 1:8:32 for sizes 1 to 32, fastest at 8; {option} 8 for size 8 only",
        )
    low, opt, high = sizes
    if not 1 <= low <= opt <= high:
        raise UsageError(
            f"{option} {text}: needs 1 ≤ MIN ≤ OPT ≤ MAX",
            hint="sizes start at 1"
            if min(sizes) < 1
            else f"the sizes in order are {':'.join(str(size) for size in sorted(sizes))}",
        )
    return AxisRange(low, opt, high)


def fits(sizes: Sequence[int], shape: Sequence[object]) -> bool:
    """Returns whether an array's sizes fit a shape; entries that are not integers are dynamic."""
    return len(sizes) == len(shape) and all(
        not isinstance(expected, int) or expected == size
        for size, expected in zip(sizes, shape, strict=True)
    )
