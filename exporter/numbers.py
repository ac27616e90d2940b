"""In which precision an export is asked for: the options, and what a target cannot take of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import UsageError
from ..graphs.precision.types import (
    EIGHT_BITS,
    EIGHT_BITS_UNSIGNED,
    PRECISIONS,
    SEVEN_BITS,
    FloatName,
    Grid,
    IntegerForm,
    Precision,
)
from ..graphs.targets import Target
from .quantization.retention import Retention

Scope = Literal["experts", "all"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
FLOATS: tuple[FloatName, ...] = get_args(FloatName)

TENSORRT: frozenset[Target] = frozenset({"tensorrt", "tensorrt-rtx"})
WEIGHT_BITS = (7, 8)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The options of `export` that say in what numbers the graph computes.

    `rest` is the float type around INT8 experts, None for the target's usual one; `scope` says what
    is quantised beside the experts; `io` is the type of the graph's float inputs and outputs.
    `weight_bits` are those of INT8 weights, None for the target's usual ones. The layers named in
    `floating` keep the rest's type; `min_retention` lets more of them do so
    (`retention.with_retention`), and `retention` tells what came of it.
    """

    precision: Precision = "fp32"
    rest: FloatName | None = None
    scope: Scope = "experts"
    io: FloatName = "fp32"
    weight_bits: int | None = None
    floating: frozenset[str] = frozenset()
    min_retention: float | None = None
    retention: Retention | None = None

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be meant."""
        _one_of("--precision", self.precision, PRECISIONS)
        _one_of("--quantize", self.scope, SCOPES)
        _one_of("--io-precision", self.io, FLOATS)
        if self.rest is not None:
            _one_of("--rest", self.rest, FLOATS)
        if self.weight_bits not in (None, *WEIGHT_BITS):
            raise UsageError(
                f"--weight-bits {self.weight_bits}: INT8 weights have 7 or 8 bits",
                hint="leave it out: the target's usual one is exact on every machine",
            )
        share = self.min_retention
        if share is not None and not 0 < share <= 1:
            raise UsageError(
                f"--min-retention {share:g}: a share above 0 and up to 1",
                hint="--min-retention 0.99 keeps 99% of the accuracy of FP32 at the same k",
            )
        asked = {
            "--quantize": self.scope != "experts",
            "--rest": self.rest is not None,
            "--weight-bits": self.weight_bits is not None,
            "--min-retention": share is not None,
        }
        for option, given in asked.items():
            if given and self.precision != "int8":
                raise UsageError(
                    f"{option} belongs to --precision int8, not to {self.precision}",
                    hint=f"add --precision int8, or leave {option} out",
                )

    def float_name(self, target: Target) -> FloatName:
        """The float type of everything that is not quantised."""
        if self.precision != "int8":
            return self.precision
        return self.rest or ("fp16" if target in TENSORRT else "fp32")

    def form(self, target: Target) -> IntegerForm:
        """How integer products are written for a target."""
        if target in TENSORRT:
            return "qdq"
        return "kernel" if target == "ort-cpu" else "standard"

    def grid(self, target: Target) -> Grid:
        """The integers of weights for a target."""
        if target in TENSORRT:
            return EIGHT_BITS
        return EIGHT_BITS_UNSIGNED if self.weight_bits == WEIGHT_BITS[1] else SEVEN_BITS

    def check(self, target: Target) -> None:
        """Raises `UsageError` with the reason where a target cannot take these numbers."""
        for option, problem, hint in self._problems(target):
            raise UsageError(f"{option} for --target {target}: {problem}", hint=hint)

    def notes(self, target: Target) -> tuple[str, ...]:
        """Returns what a user should know of this precision on a target."""
        if self.retention is not None:
            return self.retention.notes()
        if self.precision == "fp16" and target in ("onnx", "ort-cpu"):
            return (
                "ONNX Runtime computes FP16 in FP32 on a CPU: half the file, but not faster there",
            )
        if self.precision == "bf16" and target == "onnx":
            return ("ONNX Runtime's CPU provider has no BF16 kernels: `run` emulates them",)
        return ()

    def _problems(self, target: Target) -> Iterator[tuple[str, str, str]]:
        """Yields what a target cannot take: the option, the reason and what to do."""
        if self.precision == "bf16" and target == "ort-cpu":
            yield (
                "--precision bf16",
                "ONNX Runtime's CPU provider has no BF16 kernels",
                "int8 is what is fast there; bf16 is for tensorrt and tensorrt-rtx",
            )
        if self.precision == "int8" and target == "ort-cuda":
            yield (
                "--precision int8",
                "ONNX Runtime's CUDA provider computes quantised graphs in floats, slower than "
                "without",
                "use --precision fp16, or --target tensorrt",
            )
        if self.precision == "int8" and target not in TENSORRT:
            if self.rest not in (None, "fp32"):
                reason = "ONNX Runtime's integer products give FP32"
                yield f"--rest {self.rest}", reason, "leave --rest out"
            if self.io != "fp32":
                reason = "the graph around the integer products is FP32"
                yield f"--io-precision {self.io}", reason, "leave --io-precision out"
        if self.weight_bits == WEIGHT_BITS[0] and target in TENSORRT:
            reason = "its INT8 products are exact with all 8 bits"
            yield "--weight-bits 7", reason, "leave --weight-bits out"
        floats = self.float_name(target)
        if self.io not in ("fp32", floats):
            yield (
                f"--io-precision {self.io}",
                f"the graph computes in {floats}",
                "leave --io-precision out"
                if floats == "fp32"
                else f"use --io-precision fp32 or {floats}",
            )


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(
            f"{option} {value}: there is no such choice", hint=f"choose one of: {', '.join(known)}"
        )


SINGLE = Numbers()
"""FP32 throughout."""
