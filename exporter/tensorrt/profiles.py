"""Optimisation profiles: the sizes of the inputs, and of k, that an engine is compiled for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import FeedError, UsageError
from ...graphs.names import K_INPUT
from ..bundle.manifest import TensorSpec
from ..inputs import AxisRange, check_given, parse_range

AXES = ("batch", "tokens", "height", "width", K_INPUT)

MAX_K = 3840
"""TensorRT's TopK takes no more (its importer's documentation)."""

MOST_ELEMENTS = (1 << 31) - 1
"""A tensor in TensorRT has no more (`INetworkDefinition::addInput`: "less than 2^31 elements").
TensorRT-RTX 1.7.1 compiles a profile of more without a word; how it runs is not known."""

COPIED_SHARE = 0.5
"""The part of a GPU's memory that copied weights may take in a profile whose k nobody named."""

AxisRanges = Mapping[str, AxisRange]
"""Ranges of some axes, as a profile or an export names them."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Smallest, fastest and largest shape of the data input, and the range of k where it is one."""

    input: str
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]
    k: AxisRange | None = None

    def contains(self, shape: Sequence[int], k: int | None) -> bool:
        """Whether inputs of this shape, with this k, can run in the profile."""
        fits = len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )
        return fits and (self.k is None or (k is not None and self.k.min <= k <= self.k.max))

    def as_json(self) -> dict[str, Any]:
        """The profile as it stands in a manifest."""
        ranges = [list(self.min), list(self.opt), list(self.max)]
        sizes = None if self.k is None else [self.k.min, self.k.opt, self.k.max]
        return {self.input: ranges} | ({} if sizes is None else {K_INPUT: sizes})

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Profile:
        """Reads what `as_json` wrote; ValueError where that is no profile."""
        (name,) = (key for key in record if key != K_INPUT)
        low, opt, high = (tuple(int(size) for size in shape) for shape in record[name])
        k = record.get(K_INPUT)
        sizes = [*zip(low, opt, high, strict=True), *([] if k is None else [k])]
        if not all(0 <= a <= b <= c for a, b, c in sizes):
            raise ValueError(f"{record[name]} is no range of shapes")
        return Profile(
            input=name, min=low, opt=opt, max=high, k=None if k is None else AxisRange(*k)
        )

    def __str__(self) -> str:
        axes = zip(self.min, self.opt, self.max, strict=True)
        sizes = "×".join(str(AxisRange(*axis)) for axis in axes)
        return f"{self.input} {sizes}" + ("" if self.k is None else f", k {self.k}")


def parse_profile(text: str) -> dict[str, AxisRange]:
    """Returns ranges by axis from `batch=1:8:32,k=1:4:16`; `UsageError` for anything else."""
    ranges: dict[str, AxisRange] = {}
    for part in text.split(","):
        axis, equals, sizes = part.strip().partition("=")
        if not equals or axis not in AXES or axis in ranges:
            raise UsageError(
                f"--profile {text}: expected AXIS=MIN:OPT:MAX, each axis once",
                hint=f"for example --profile batch=1:8:32,k=1:4:16; axes: {', '.join(AXES)}",
            )
        ranges[axis] = parse_range(sizes, f"--profile {axis}")
    return ranges


def profile(
    port: TensorSpec, wishes: AxisRanges, defaults: AxisRanges, experts: int | None
) -> Profile:
    """Returns the profile for a graph's data input, and for its k of at most `experts`.

    Raises `UsageError` for an axis that the graph does not have and for a size that it fixes.
    """
    names = [size for size in port.shape if isinstance(size, str)]
    for axis, wanted in wishes.items():
        if axis != K_INPUT and axis not in names:
            fixed = _fixed_size(port, axis)
            if fixed is not None and (wanted.min, wanted.max) == (fixed, fixed):
                continue
            said = f"fixed at {fixed}" if fixed is not None else "not an axis"
            raise UsageError(
                f"--profile {axis}={wanted}: {axis} is {said} of the graph's input '{port.name}'",
                hint=f"its dynamic axes are {', '.join(names) or 'none'}; export again for others",
            )
    ranges = {axis: _clipped(axis, wishes, defaults, port) for axis in names}
    shapes = [
        tuple(getattr(ranges[size], end) if isinstance(size, str) else size for size in port.shape)
        for end in ("min", "opt", "max")
    ]
    return Profile(
        input=port.name, min=shapes[0], opt=shapes[1], max=shapes[2], k=_k_range(wishes, experts)
    )


def _fixed_size(port: TensorSpec, axis: str) -> int | None:
    """The batch size where it is a constant; other axes have lost their names then."""
    first = port.shape[0]
    return first if axis == "batch" and isinstance(first, int) else None


def _clipped(axis: str, wishes: AxisRanges, defaults: AxisRanges, port: TensorSpec) -> AxisRange:
    """The range asked for, or the default as far as the model goes."""
    most = port.limits.get(axis)
    if axis in wishes:
        if most is not None and wishes[axis].max > most:
            raise UsageError(
                f"--profile {axis}={wishes[axis]}: the model takes at most {most} {axis}",
                hint=f"--profile {axis}=1:{most}:{most} covers all that it can take",
            )
        return wishes[axis]
    default = defaults[axis] if axis in defaults else _side(defaults["tokens"])
    if most is None:
        return default
    return AxisRange(min(default.min, most), min(default.opt, most), min(default.max, most))


def _side(pixels: AxisRange) -> AxisRange:
    """Height or width of a square image with that many pixels."""
    return AxisRange(*(max(1, math.isqrt(n)) for n in (pixels.min, pixels.opt, pixels.max)))


def _k_range(wishes: AxisRanges, experts: int | None) -> AxisRange | None:
    wanted = wishes.get(K_INPUT)
    if experts is None:
        if wanted is not None:
            raise UsageError(
                f"--profile k={wanted}: the graph's k is baked in",
                hint="export with --k input for an engine that takes k at run time",
            )
        return None
    most = min(experts, MAX_K)
    if wanted is None:
        return AxisRange(1, max(1, most // 4), most)
    if wanted.max > most:
        raise UsageError(
            f"--profile k={wanted}: k is at most {most}"
            + (" in TensorRT" if most < experts else ", the fewest experts of a layer"),
            hint=f"--profile k=1:{max(1, most // 4)}:{most} covers every k",
        )
    return wanted


def most_copies(matrix: int, nbytes: int = 1, memory: int | None = None) -> int:
    """Returns how many experts a run of `gather` may copy, which is the batch times k.

    `matrix` is how many elements the largest matrix of an expert has, `nbytes` what all that is
    copied of it takes, and `memory` the GPU's bytes, where the GPU is known.
    """
    most = MOST_ELEMENTS // matrix
    return most if memory is None else min(most, int(memory * COPIED_SHARE) // nbytes)


def capped(wanted: Profile, copies: int) -> Profile:
    """Returns the profile with no k of which its largest batch would make more copies.

    Raises `UsageError` where that leaves no k.
    """
    assert wanted.k is not None
    most = copies // wanted.max[0]
    if most < wanted.k.min:
        raise UsageError(
            f"--batch {wanted.max[0]}: `gather` copies k experts for each input, and {copies} is "
            "all that it can copy at once",
            hint="name a smaller batch (--profile batch=MIN:OPT:MAX), or export with --lowering "
            "dense, which copies nothing",
        )
    k = AxisRange(wanted.k.min, min(wanted.k.opt, most), min(wanted.k.max, most))
    return replace(wanted, k=k)


def check_k(profiles: Sequence[Profile], k: int | None) -> None:
    """Raises `UsageError` for a k that no profile of an engine contains, whatever the inputs."""
    check_given(k, takes_k=profiles[0].k is not None, what="engine")
    if k is not None and not any(p.k and p.k.min <= k <= p.k.max for p in profiles):
        raise _k_outside(profiles, k)


def choose(profiles: Sequence[Profile], shape: Sequence[int], k: int | None) -> int:
    """Returns the index of the profile for a run: of those that contain it, the nearest in size.

    Raises `FeedError` for a shape and `UsageError` for a k that none contains.
    """
    fitting = [i for i, p in enumerate(profiles) if p.contains(shape, k)]
    if fitting:
        return min(fitting, key=lambda i: _distance(profiles[i], shape, k))
    if k is not None and any(replace(p, k=None).contains(shape, None) for p in profiles):
        raise _k_outside(profiles, k)
    raise FeedError(
        f"inputs of shape {tuple(shape)} are outside the engine's profile ({_listed(profiles)})",
        hint="run smaller batches, or build the engine again with a --profile that contains them",
    )


def _k_outside(profiles: Sequence[Profile], k: int) -> UsageError:
    return UsageError(
        f"k = {k}: outside the engine's profile ({_listed(profiles)})",
        hint="choose a --k inside it, run a graph of the bundle that takes more (--graph dense), "
        "or build the engine again with --profile k=MIN:OPT:MAX,batch=MIN:OPT:MAX",
    )


def _listed(profiles: Sequence[Profile]) -> str:
    return "; ".join(str(profile) for profile in profiles)


def _distance(profile: Profile, shape: Sequence[int], k: int | None) -> float:
    """How far a run is from what a profile is fastest at, in factors of size."""
    sizes = list(zip(profile.opt, shape, strict=True))
    if profile.k is not None and k is not None:
        sizes.append((profile.k.opt, k))
    return sum(abs(math.log(actual / best)) for best, actual in sizes if best and actual)
