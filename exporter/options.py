"""What a user asks of an export, parsed and checked before any work is done."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from ..errors import LoweringError, UsageError
from ..graphs.lowerings import lowering
from ..graphs.targets import Target
from .edits import NO_EDITS, Edits
from .numbers import SINGLE, TENSORRT, Numbers
from .ranges import DEFAULT_BATCH, DEFAULT_TOKENS, AxisRange, parse_range
from .tolerance import TOLERANCES, Tolerance

__all__ = [
    "AUTO",
    "DEFAULT_BATCH",
    "DEFAULT_TOKENS",
    "TARGETS",
    "TUNE",
    "AxisRange",
    "ExportOptions",
    "Kept",
    "parse_k",
    "parse_lowerings",
    "parse_range",
]

AUTO = "auto"
TUNE = "tune"
CHOOSERS = (AUTO, TUNE)
"""What chooses among the lowerings: by prediction, or by measuring them here (`tune`)."""

TARGETS: tuple[Target, ...] = get_args(Target)

Kept = int | Fraction | Literal["n", "input"] | tuple[int, ...]
"""k as asked: a number, a share of n, all experts, a graph input, or a number per layer."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of `export`; `parse_*` make its fields from what is typed.

    `lowerings` names the graphs to write, `auto`, `tune` or a name each; the first is `model.onnx`.
    Parity holds where |difference| ≤ atol + rtol · max|y|; None stands for what the precision
    allows (`tolerance`). `numbers` says in what precision the graph computes.
    """

    k: Kept = "n"
    target: Target = "onnx"
    lowerings: tuple[str, ...] = (AUTO,)
    batch: AxisRange = DEFAULT_BATCH
    tokens: AxisRange = DEFAULT_TOKENS
    opset: int = 20
    renormalize: bool = False
    atol: float | None = None
    rtol: float | None = None
    verify: bool = True
    edits: Edits = NO_EDITS
    numbers: Numbers = SINGLE

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be meant."""
        if self.target not in TARGETS:
            raise UsageError(
                f"--target {self.target}: there is no such target",
                hint=f"choose one of: {', '.join(TARGETS)}",
            )
        if not MIN_OPSET <= self.opset <= MAX_OPSET:
            raise UsageError(
                f"--opset {self.opset}: opsets {MIN_OPSET} to {MAX_OPSET} are supported",
                hint="20 is the first with a whole Gelu; leave it unless a runtime needs another",
            )
        for name in self.lowerings:
            if name not in CHOOSERS:
                lowering(name)
        if len(set(self.lowerings)) < len(self.lowerings):
            raise UsageError(
                f"--lowering {','.join(self.lowerings)}: a name is repeated",
                hint="name each lowering once",
            )
        if TUNE in self.lowerings:
            self._check_tunable()
        if self.k == "input" and self.numbers.min_retention is not None:
            raise UsageError(
                "--min-retention with --k input: retention is that of one k, and this graph has "
                "many",
                hint="give the k that will be used, or leave --min-retention out",
            )
        if not all(0 <= bound < math.inf for bound in (self.atol or 0.0, self.rtol or 0.0)):
            raise UsageError(
                f"--atol {self.atol} --rtol {self.rtol}: bounds are finite and not negative",
                hint="--rtol 1e-4 allows a difference of 1e-4 of max|y|; --no-verify any",
            )

    def _check_tunable(self) -> None:
        """Raises `UsageError` where there is nothing in ONNX Runtime to be measured."""
        if self.target in TENSORRT:
            raise UsageError(
                f"--lowering tune for --target {self.target}: it times graphs in ONNX Runtime, and "
                "this target runs engines",
                hint="use auto, or name lowerings (--lowering gather,conditional) and compare "
                "their engines on the machine with the GPU: `moexport bench BUNDLE`",
            )
        if self.numbers.precision == "bf16" and self.target != "ort-cuda":
            raise UsageError(
                "--lowering tune: ONNX Runtime's CPU provider has no BF16 kernels to time",
                hint="use auto, or another --precision",
            )

    @property
    def tolerance(self) -> Tolerance:
        """The bounds of the parity check: those asked for, else those of the precision."""
        usual = TOLERANCES[self.numbers.precision]
        return replace(
            usual,
            atol=usual.atol if self.atol is None else self.atol,
            rtol=usual.rtol if self.rtol is None else self.rtol,
        )


MIN_OPSET = 20
MAX_OPSET = 23


def parse_k(text: str) -> Kept:
    """Returns k from `4`, `0.25`, `n/4`, `n`, `input` or `4,4,8`; `UsageError` for all else."""
    value = text.strip()
    if value in ("n", "input"):
        return value  # type: ignore[return-value]  # the two literals
    try:
        if "," in value:
            return tuple(_positive(part) for part in value.split(","))
        if "." in value or "/" in value:
            share = Fraction(f"1{value[1:]}" if value.startswith("n/") else value)
            if not 0 < share <= 1:
                raise UsageError(
                    f"--k {text}: a share of the experts lies above 0 and at most at 1",
                    hint="--k 0.25 keeps a quarter of the experts",
                )
            return share
        return _positive(value)
    except (ValueError, ZeroDivisionError):
        raise UsageError(
            f"--k {text}: not a number of experts",
            hint="use a number (4), a share (0.25 or n/4), n, input, or a number per layer (4,4,8)",
        ) from None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise UsageError(
            f"--k {text}: at least one expert must be kept", hint="use 1 ≤ k ≤ n, or n for all"
        )
    return value


def parse_lowerings(text: str) -> tuple[str, ...]:
    """Returns the names of a comma-separated list; `UsageError` for a name that is not one."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise UsageError("--lowering is empty", hint="--lowering auto lets the cost model choose")
    for name in names:
        if name in CHOOSERS:
            continue
        try:
            lowering(name)
        except LoweringError as error:
            raise UsageError(f"--lowering {name}: {error.message}", hint=error.hint) from None
    return names
