"""Optimisation profiles: the sizes of inputs, and values of k, for which an engine is compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import FeedError, UsageError
from ...graphs.names import K_INPUT
from ...graphs.sizes import AxisRange, parse_range
from ..bundle.manifest import TensorSpec
from ..inputs import check_k_given

AXES = ("batch", "tokens", "height", "width", K_INPUT)

MAX_K = 3840
"""The largest k of TensorRT's TopK, from its importer's documentation."""

MAX_ELEMENTS = (1 << 31) - 1
"""The largest tensor in TensorRT (`INetworkDefinition::addInput`: "less than 2^31 elements").
TensorRT-RTX 1.7.1 silently compiles a larger profile; whether it runs correctly is unknown."""

COPIED_SHARE = 0.5
"""The share of a GPU's memory that copied weights may use if a profile has no explicit k."""

AxisRanges = Mapping[str, AxisRange]
"""The ranges of some axes, as in a profile or an export."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Smallest, optimal and largest shape of the data input; the range of k if k is an input."""

    input: str
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]
    k: AxisRange | None = None

    def contains(self, shape: Sequence[int], k: int | None) -> bool:
        fits = len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )
        return fits and (self.k is None or (k is not None and self.k.min <= k <= self.k.max))

    def as_json(self) -> dict[str, Any]:
        ranges = [list(self.min), list(self.opt), list(self.max)]
        sizes = None if self.k is None else [self.k.min, self.k.opt, self.k.max]
        return {self.input: ranges} | ({} if sizes is None else {K_INPUT: sizes})

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Profile:
        """Reads the result of `as_json`; ValueError if it is invalid."""
        (name,) = (key for key in record if key != K_INPUT)
        low, opt, high = (tuple(int(size) for size in shape) for shape in record[name])
        k = record.get(K_INPUT)
        sizes = [*zip(low, opt, high, strict=True), *([] if k is None else [k])]
        if not all(0 <= a <= b <= c for a, b, c in sizes):
            raise ValueError(f"{record[name]} is not a range of shapes")
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
                f"--profile {text}: expected AXIS=MIN:OPT:MAX, with each axis only once",
                hint=f"for example --profile batch=1:8:32,k=1:4:16; axes: {', '.join(AXES)}",
            )
        ranges[axis] = parse_range(sizes, f"--profile {axis}")
    return ranges


def profile(
    spec: TensorSpec, requested: AxisRanges, defaults: AxisRanges, experts: int | None
) -> Profile:
    """Returns the profile for a graph's data input, and for its k, which is at most `experts`.

    Raises `UsageError` for an axis that the graph lacks, or whose size is fixed.
    """
    names = [size for size in spec.shape if isinstance(size, str)]
    for axis, wanted in requested.items():
        if axis != K_INPUT and axis not in names:
            # Among fixed axes, only the batch can be named.
            first = spec.shape[0]
            fixed = first if axis == "batch" and isinstance(first, int) else None
            if fixed is not None and (wanted.min, wanted.max) == (fixed, fixed):
                continue
            state = f"fixed at {fixed} in" if fixed is not None else "not an axis of"
            raise UsageError(
                f"--profile {axis}={wanted}: {axis} is {state} the graph's input '{spec.name}'",
                hint=f"its dynamic axes are {', '.join(names) or 'none'}; export again for others",
            )
    ranges = {axis: _clipped(axis, requested, defaults, spec) for axis in names}
    shapes = [
        tuple(getattr(ranges[size], end) if isinstance(size, str) else size for size in spec.shape)
        for end in ("min", "opt", "max")
    ]
    return Profile(
        input=spec.name, min=shapes[0], opt=shapes[1], max=shapes[2], k=_k_range(requested, experts)
    )


def _clipped(axis: str, requested: AxisRanges, defaults: AxisRanges, spec: TensorSpec) -> AxisRange:
    """Returns the requested range, or the default within the model's limits."""
    limit = spec.limits.get(axis)
    if axis in requested:
        if limit is not None and requested[axis].max > limit:
            raise UsageError(
                f"--profile {axis}={requested[axis]}: {axis} is at most {limit} in this model",
                hint=f"--profile {axis}=1:{limit}:{limit} covers all sizes that the model accepts",
            )
        return requested[axis]
    default = defaults.get(axis)
    if default is None:  # the height or width of a square image with as many pixels as tokens
        pixels = defaults["tokens"]
        default = AxisRange(*(max(1, math.isqrt(n)) for n in (pixels.min, pixels.opt, pixels.max)))
    if limit is None:
        return default
    return AxisRange(min(default.min, limit), min(default.opt, limit), min(default.max, limit))


def _k_range(requested: AxisRanges, experts: int | None) -> AxisRange | None:
    wanted = requested.get(K_INPUT)
    if experts is None:
        if wanted is not None:
            raise UsageError(
                f"--profile k={wanted}: the graph's k is baked in",
                hint="export with --k input if k should be an input of the engine",
            )
        return None
    limit = min(experts, MAX_K)
    if wanted is None:
        return AxisRange(1, max(1, limit // 4), limit)
    if wanted.max > limit:
        raise UsageError(
            f"--profile k={wanted}: k is at most {limit}"
            + (" in TensorRT" if limit < experts else ", the fewest experts in a layer"),
            hint=f"--profile k=1:{max(1, limit // 4)}:{limit} covers every k",
        )
    return wanted


def max_copies(matrix: int, nbytes: int = 1, memory: int | None = None) -> int:
    """Returns how many experts (the batch size times k) a run of `gather` may copy.

    `matrix` is the number of elements in an expert's largest matrix, `nbytes` the size of a copy of
    an expert, and `memory` that of the GPU's memory, if known.
    """
    limit = MAX_ELEMENTS // matrix
    return limit if memory is None else min(limit, int(memory * COPIED_SHARE) // nbytes)


def cap_k(wanted: Profile, copies: int) -> Profile:
    """Lowers a profile's k so that its largest batch needs at most `copies` copies of experts.

    Raises `UsageError` if even the smallest k needs more.
    """
    assert wanted.k is not None
    limit = copies // wanted.max[0]
    if limit < wanted.k.min:
        raise UsageError(
            f"--batch {wanted.max[0]}: `gather` copies k experts for each input, but "
            f"at most {copies} at once",
            hint="give a smaller batch (--profile batch=MIN:OPT:MAX), or export with --lowering "
            "dense, which copies no experts",
        )
    k = AxisRange(wanted.k.min, min(wanted.k.opt, limit), min(wanted.k.max, limit))
    return replace(wanted, k=k)


def check_k(profiles: Sequence[Profile], k: int | None) -> None:
    """Raises `UsageError` for a k that no profile of an engine contains, whatever the inputs."""
    check_k_given(k, takes_k=profiles[0].k is not None, what="engine")
    if k is not None and not any(p.k and p.k.min <= k <= p.k.max for p in profiles):
        raise _k_outside(profiles, k)


def choose(profiles: Sequence[Profile], shape: Sequence[int], k: int | None) -> int:
    """Returns the index of the profile for a run: the closest in size of those that contain it.

    Raises `FeedError` for a shape and `UsageError` for a k that no profile contains.
    """
    fitting = [i for i, p in enumerate(profiles) if p.contains(shape, k)]
    if fitting:

        def distance(index: int) -> float:
            """Returns the distance from a profile's optimum, in factors of size."""
            optimum = profiles[index]
            sizes = list(zip(optimum.opt, shape, strict=True))
            if optimum.k is not None and k is not None:
                sizes.append((optimum.k.opt, k))
            return sum(abs(math.log(actual / best)) for best, actual in sizes if best and actual)

        return min(fitting, key=distance)
    if k is not None and any(replace(p, k=None).contains(shape, None) for p in profiles):
        raise _k_outside(profiles, k)
    raise FeedError(
        f"inputs of shape {tuple(shape)} are outside the engine's profile ({_listed(profiles)})",
        hint="run smaller batches, or build the engine again with a --profile that contains them",
    )


def _k_outside(profiles: Sequence[Profile], k: int) -> UsageError:
    return UsageError(
        f"k = {k}: outside the engine's profile ({_listed(profiles)})",
        hint="choose a --k inside it, run a graph of the bundle with a larger k (--graph dense), "
        "or build the engine again with --profile k=MIN:OPT:MAX,batch=MIN:OPT:MAX",
    )


def _listed(profiles: Sequence[Profile]) -> str:
    return "; ".join(str(profile) for profile in profiles)
