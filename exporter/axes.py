"""The dynamic axes of a graph's input: the sizes that they may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError

TRACED_BATCH = 2
"""What a model is traced with: a batch of 1 would let the tracer take the axis for a constant."""


@dataclass(frozen=True, slots=True)
class AxisRange:
    """Sizes of a dynamic axis: smallest, the one to be fast at, largest. Fixed where all agree."""

    min: int
    opt: int
    max: int

    @property
    def fixed(self) -> bool:
        """Whether the axis is a constant of the graph."""
        return self.min == self.max

    def __str__(self) -> str:
        return str(self.opt) if self.fixed else f"{self.min}:{self.opt}:{self.max}"


DEFAULT_BATCH = AxisRange(1, 1, 32)

DEFAULT_TOKENS = AxisRange(1, 196, 1024)


def parse_range(text: str, option: str) -> AxisRange:
    """Returns sizes from `MIN:OPT:MAX` or one fixed size; `UsageError` names the option."""
    try:
        sizes = [int(part) for part in text.split(":")]
    except ValueError:
        sizes = []
    if len(sizes) == 1:
        sizes *= 3
    if len(sizes) != len(("min", "opt", "max")):
        raise UsageError(
            f"{option} {text}: expected MIN:OPT:MAX or one size",
            hint=f"{option} 1:8:32 for sizes 1 to 32, fastest at 8; {option} 8 for 8 alone",
        )
    low, opt, high = sizes
    if not 1 <= low <= opt <= high:
        raise UsageError(
            f"{option} {text}: needs 1 ≤ MIN ≤ OPT ≤ MAX",
            hint="sizes begin at 1"
            if min(sizes) < 1
            else f"the sizes in order are {':'.join(str(size) for size in sorted(sizes))}",
        )
    return AxisRange(low, opt, high)


def fits(sizes: Sequence[int], shape: Sequence[object]) -> bool:
    """Whether an array's sizes fit a shape, in which what is no integer is a dynamic axis."""
    return len(sizes) == len(shape) and all(
        not isinstance(wanted, int) or wanted == size
        for size, wanted in zip(sizes, shape, strict=True)
    )
