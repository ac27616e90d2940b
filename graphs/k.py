"""k, the number of experts to compute: as the user gives it, as parsed, and for each layer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from ..errors import UsageError

if TYPE_CHECKING:
    from .layers.base import MoESpec

K = int | float | str | Fraction | Sequence[int]
"""k as the user gives it: a number, a share, `n`, `n/4`, `input`, or a number per layer."""

KOption = int | Fraction | Literal["n", "input"] | tuple[int, ...]
"""k as `parse_k` returns it: a number, a share, all experts, a graph input, or a number per layer.

If a router chose a few experts in training, `n` and shares refer to the number of experts that the
model was trained to compute, not to the number that it has.
"""


def parse_k(k: K) -> KOption:
    """Returns k from `4`, `0.25`, `n/4`, `n`, `trained`, `input`, `4,4,8` or numbers.

    Raises `UsageError` for anything else, and for `1.0`, which may mean one expert or all of them.
    """
    if isinstance(k, float) and math.isfinite(k) and not k.is_integer():
        k = str(Fraction(k).limit_denominator(1 << 20))
    elif isinstance(k, Fraction) and k == 1:
        k = 1.0
    elif isinstance(k, Sequence) and not isinstance(k, str | bytes):
        k = ",".join(map(str, k))
    text = str(k)  # also converts numpy's integers; invalid text is refused below
    value = text.strip()
    if value == "trained":
        return "n"
    if value in ("n", "input"):
        return value  # type: ignore[return-value]  # the two literals
    try:
        if "," in value:
            return tuple(_positive(part) for part in value.split(","))
        if "." in value or "/" in value:
            share = Fraction(f"1{value[1:]}" if value.startswith("n/") else value)
            if share == 1 and "/" not in value:
                raise UsageError(
                    f"--k {text} is ambiguous: one expert, or all of them?",
                    hint="--k 1 computes one expert, --k n all experts",
                )
            if not 0 < share <= 1:
                is_integer = share > 1 and share.denominator == 1
                raise UsageError(
                    f"--k {text}: a share must be above 0 and at most 1",
                    hint=f"--k {share} computes {share} experts"
                    if is_integer
                    else "--k 0.25 keeps a quarter of the experts",
                )
            return share
        return _positive(value)
    except (ValueError, ZeroDivisionError):
        raise UsageError(
            f"--k {text}: not a number of experts",
            hint=_suggestion(value)
            + "use a number (4), a share (0.25 or n/4), n, input, or a number per layer (4,4,8)",
        ) from None


def _suggestion(text: str) -> str:
    """Returns a question that suggests a k for invalid text, or an empty string."""
    words = {"all": "n", "max": "n", "full": "n", "half": "n/2", "quarter": "n/4", "n": "n"}
    words |= dict.fromkeys(("dynamic", "runtime", "variable", "input"), "input")
    intended = words.get(text.lower())
    if re.fullmatch(r"\d+(\.\d+)?%", text):
        intended = f"{float(text[:-1]) / 100:g}"
    return f"did you mean {intended}? " if intended else ""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise UsageError(
            f"--k {text}: at least one expert must be kept", hint="use 1 ≤ k ≤ n, or n for all"
        )
    return value


def resolve_k(k: KOption, specs: Mapping[str, MoESpec]) -> dict[str, int | None]:
    """Returns each layer's k, None if it is a graph input.

    Raises `UsageError` for a k above n and for a list of the wrong length.
    """
    names = list(specs)
    if k == "input":
        return dict.fromkeys(names)
    values: Sequence[int | Fraction | str] = k if isinstance(k, tuple) else [k] * len(names)
    if len(values) != len(names):
        raise UsageError(
            f"--k {','.join(map(str, values))}: {len(values)} values for {len(names)} MoE layers",
            hint=f"give one k for all layers, or one for each of: {', '.join(names)}",
        )
    return {name: _layer_k(value, specs[name]) for name, value in zip(names, values, strict=True)}


def share_of(share: Fraction, experts: int) -> int:
    """Returns a share of a number of experts, rounded (halves to even), but at least one."""
    return max(1, round(share * experts))


def _layer_k(value: int | Fraction | str, spec: MoESpec) -> int:
    n = spec.experts
    if value == "n":
        return spec.trained_k
    if isinstance(value, Fraction):
        return share_of(value, spec.trained_k)
    assert isinstance(value, int)
    if not 1 <= value <= n:
        raise UsageError(
            f"--k {value}: layer {spec.name} has {n} experts", hint=f"use 1 ≤ k ≤ {n}, or n for all"
        )
    return value
