"""What a user asks of an export, parsed and checked before any work is done."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from ..common.option import Mistake, record_in, refuse
from ..common.registry import left_out
from ..common.text import listed, near_miss
from ..errors import FeedError, LoweringError, UsageError
from ..graphs.lowerings import check_name
from ..graphs.precision.types import (
    EIGHT_BIT_FLOATS,
    EIGHT_BITS,
    EIGHT_BITS_UNSIGNED,
    PRECISIONS,
    SEVEN_BITS,
    WeightQuantization,
)
from ..graphs.targets import (
    CPU_PROVIDER,
    QDQ,
    TARGETS,
    FloatName,
    Method,
    Precision,
    QuantFormat,
    Scope,
    Target,
)
from .bundle.parity_record import TOLERANCES, Tolerance
from .edits import NO_EDITS, Edits
from .inputs import DEFAULT_BATCH, DEFAULT_TOKENS, AxisRange, parse_range
from .requests import ExportRequest

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..data.feeds import Feed
    from ..graphs.layers.base import MoESpec
    from .tensorrt.options import EngineOptions

T = TypeVar("T")

SCOPES: tuple[Scope, ...] = get_args(Scope)

FLOATS: tuple[FloatName, ...] = get_args(FloatName)

WEIGHT_BITS = (7, 8)

MIN_OPSET, MAX_OPSET = 20, 23
"""Graphs have the first unless another is asked for, or ops of a later one replace many small."""

CALIBRATED = ("int8", "fp8", "fp16")
"""Precisions for which ranges are found: to quantise, and to see what overflows."""


@dataclass(frozen=True, slots=True)
class PrecisionOptions:
    """The options of `export` that say in what numbers the graph computes.

    `rest` is the float type around INT8 experts, None for the target's usual one; `scope` says what
    is quantised beside the experts; `io` is the type of the graph's float inputs and outputs.
    `weight_bits` are those of INT8 weights, None for the target's usual ones. The layers named in
    `floating` keep the rest's type; `min_retention` lets more of them do so
    (`quantization.accuracy_search`).
    """

    name: Precision = "fp32"
    rest: FloatName | None = None
    scope: Scope = "experts"
    io: FloatName = "fp32"
    weight_bits: int | None = None
    floating: frozenset[str] = frozenset()
    min_retention: float | None = None

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be meant."""
        _one_of("--precision", self.name, PRECISIONS)
        _one_of("--quantize", self.scope, SCOPES)
        _one_of("--io-precision", self.io, FLOATS)
        _one_of("--rest", self.rest or "fp32", FLOATS)
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[Mistake]:
        share = self.min_retention
        if self.weight_bits not in (None, *WEIGHT_BITS):
            yield (
                f"--weight-bits {self.weight_bits}: INT8 weights have 7 or 8 bits",
                "leave it out: the target's usual one is exact on every machine",
            )
        if share is not None and not 0 < share <= 1:
            yield (
                f"--min-retention {share:g}: a share above 0 and up to 1",
                "--min-retention 0.99 keeps 99% of the accuracy of FP32 at the same k",
            )
        changed = {
            "--quantize": self.scope != "experts",
            "--rest": self.rest is not None,
            "--weight-bits": self.weight_bits is not None,
            "--min-retention": share is not None,
        }
        for option, is_set in changed.items():
            both = {"--quantize": "int4", "--rest": "fp8"}
            of_both = self.name == both.get(option)
            if is_set and self.name != "int8" and not of_both:
                yield _not_int8(option, self.name)

    @property
    def integers(self) -> bool:
        """Whether weights become integers, with floats around them."""
        return self.name in ("int8", "int4", "fp8")

    @property
    def ranged(self) -> bool:
        """Whether both factors of a product are of eight bits, so that ranges are needed."""
        return self.name in ("int8", "fp8")

    def float_name(self, target: Target) -> FloatName:
        """The float type of everything that is not quantised."""
        match self.name:
            case "int8" | "int4" | "fp8":
                return self.rest or TARGETS[target].rest
            case _:
                return self.name

    def fp16_weights(self, target: Target) -> bool:
        """Whether FP16 is what weights are stored in, and all is computed in FP32."""
        return self.float_name(target) == "fp16" and TARGETS[target].provider == CPU_PROVIDER

    def quant_format(self, target: Target) -> QuantFormat:
        """How integer products are written for a target."""
        return TARGETS[target].integers

    def weight_quantization(self, target: Target) -> WeightQuantization:
        """The integers of weights for a target."""
        if self.name == "fp8":
            return EIGHT_BIT_FLOATS
        if TARGETS[target].compiled:
            return EIGHT_BITS
        if self.weight_bits != WEIGHT_BITS[1]:
            return SEVEN_BITS
        return EIGHT_BITS if self.quant_format(target) in QDQ else EIGHT_BITS_UNSIGNED

    def check(self, target: Target) -> None:
        """Raises `UsageError` with the reason where a target cannot take these numbers."""
        refuse(
            (f"{option} for --target {target}: {problem}", hint)
            for option, problem, hint in self._problems(target)
        )

    def notes(self, target: Target) -> tuple[str, ...]:
        """Returns what a user should know of this precision on a target."""
        note = TARGETS[target].notes.get(self.name)
        return () if note is None else (note,)

    def _problems(self, target: Target) -> Iterator[tuple[str, str, str]]:
        """Yields what a target cannot take: the option, the reason and what to do."""
        if self.name in TARGETS[target].refused:
            reason, instead = TARGETS[target].refused[self.name]
            yield f"--precision {self.name}", reason, instead
        if self.integers and not TARGETS[target].compiled:
            if self.rest not in (None, "fp32"):
                reason = "integer products give FP32 on a CPU"
                yield f"--rest {self.rest}", reason, "leave --rest out"
            if self.io != "fp32":
                reason = "the graph around the integer products is FP32"
                yield f"--io-precision {self.io}", reason, "leave --io-precision out"
        if self.weight_bits == WEIGHT_BITS[0] and TARGETS[target].compiled:
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


def _one_of(option: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise UsageError(f"{option} {value}: unknown value", hint=near_miss(value, known))


def _not_int8(option: str, precision: Precision) -> Mistake:
    return (
        f"{option} belongs to --precision int8, not to {precision}",
        f"add --precision int8, or leave {option} out",
    )


VERIFY_SAMPLES = 256
"""Inputs of a feed that are compared with PyTorch, unless `--verify-samples` says how many."""

AUTO = "auto"

TUNE = "tune"

CHOOSERS = (AUTO, TUNE)
"""What chooses among the lowerings: by prediction, or by measuring them here (`tune`)."""

KOption = int | Fraction | Literal["n", "input"] | tuple[int, ...]
"""k as asked: a number, a share, all experts, a graph input, or a number per layer.

Where a router chose a few experts in training, `n` and shares are of those few: what its model was
trained to compute, not all that it has.
"""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of `export`; `parse_*` make its fields from what is typed.

    `lowerings` names the graphs to write, `auto`, `tune` or a name each; the first is `model.onnx`.
    A layer in `layer_lowerings` has the lowering that is named there, with the reason; without one,
    the lowering's own.
    Parity holds where |difference| ≤ atol + rtol · max|y|; None stands for what the precision
    allows (`tolerance`), over so many inputs of `data` at the most (None: `VERIFY_SAMPLES`), with
    so many `threads` (None: those with which the untouched model is fastest).
    `precision` says in what numbers the graph computes. INT8 takes its ranges from `calibration`, a
    table or its file, or finds them on `data` by `method`; FP16 looks in either for what would
    overflow. With `expose_routing` what every layer chooses is an output of the graphs.
    `destination` is None where nothing is to be left behind. `opset` is raised to what the
    graph needs; with `exact_opset` no op of a later opset is written, whatever it would save.
    `further` are the records of plugins, as a request has them (`bundle.steps`).
    """

    k: KOption = "n"
    target: Target = "onnx"
    lowerings: tuple[str, ...] = (AUTO,)
    layer_lowerings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    batch: AxisRange = DEFAULT_BATCH
    tokens: AxisRange = DEFAULT_TOKENS
    opset: int = MIN_OPSET
    exact_opset: bool = False
    renormalize: bool = False
    expose_routing: bool = False
    atol: float | None = None
    rtol: float | None = None
    verify: bool = True
    verify_samples: int | None = None
    threads: int | None = None
    edits: Edits = NO_EDITS
    precision: PrecisionOptions = PrecisionOptions()
    data: Feed | None = field(default=None, compare=False)
    calibration: CalibrationTable | Path | None = field(default=None, compare=False)
    method: Method | None = None
    engine: EngineOptions | bool | None = None
    destination: Path | None = None
    force: bool = False
    further: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        """Raises `UsageError` for what cannot be meant, whatever the model."""
        if self.target not in TARGETS:
            raise UsageError(
                f"--target {self.target}: unknown target",
                hint=near_miss(self.target, TARGETS.names) + left_out(),
            )
        for name in self.lowerings:
            if name not in CHOOSERS:
                check_name(name)
        if not self.exact_opset:
            object.__setattr__(self, "opset", max(self.opset, self._least_opset))
        refuse(self._mistakes())
        refuse(self._mistakes_of_checking())

    def asked(self, options: type[T]) -> T:
        """Returns what was given of a plugin's options, else its defaults."""
        record = record_in(self.further, options)
        return options() if record is None else record

    @property
    def reads(self) -> int:
        """How many times an export reads its data: for ranges, to compare, to tell the accuracy."""
        ranges = self.finds_ranges and self.calibration is None
        return ranges + self.verify + (self.precision.min_retention is not None)

    @property
    def finds_ranges(self) -> bool:
        """Whether the value ranges of tensors say how this precision is written."""
        stored = self.precision.fp16_weights(self.target)
        return self.precision.name in CALIBRATED and not stored

    @property
    def _least_opset(self) -> int:
        blocked = self.precision.name == "int4" and TARGETS[self.target].standard_ops
        return BLOCKED_OPSET if blocked else MIN_OPSET

    def _mistakes(self) -> Iterator[Mistake]:
        names = ",".join(self.lowerings)
        if not MIN_OPSET <= self.opset <= MAX_OPSET:
            yield (
                f"--opset {self.opset}: opsets {MIN_OPSET} to {MAX_OPSET} are supported",
                "20 is the first with a whole Gelu; leave it unless a runtime needs another",
            )
        if len(set(self.lowerings)) < len(self.lowerings):
            yield f"--lowering {names}: a name is repeated", "name each lowering once"
        if MIN_OPSET <= self.opset < self._least_opset:
            yield (
                f"--precision int4 for --target {self.target}: ONNX has weights in blocks from "
                f"opset {BLOCKED_OPSET} on, and the graph is to have opset {self.opset}",
                f"leave --opset out: {BLOCKED_OPSET} is taken then; or take --target ort-cpu",
            )
        if TUNE in self.lowerings and TARGETS[self.target].compiled:
            yield (
                f"--lowering tune for --target {self.target}: it times graphs in ONNX Runtime, and "
                "this target runs engines",
                "use auto, or name lowerings (--lowering gather,conditional) and compare "
                "their engines on the machine with the GPU: `moexport bench BUNDLE`",
            )
        in_ort = TARGETS[self.target].provider == CPU_PROVIDER
        if TUNE in self.lowerings and self.precision.name == "bf16" and in_ort:
            yield (
                "--lowering tune: ONNX Runtime's CPU provider has no BF16 kernels to time",
                "use auto, or another --precision",
            )
        if self.k == "input" and self.precision.min_retention is not None:
            yield (
                "--min-retention with --k input: retention needs one k, and this graph accepts any",
                "give the k that will be used, or leave --min-retention out",
            )

    def _mistakes_of_checking(self) -> Iterator[Mistake]:
        """What says how outputs are compared, where nothing is, and bounds that are none."""
        samples = self.verify_samples
        if samples is not None and samples < 1:
            yield f"--verify-samples {samples}: at least 1", "--no-verify compares nothing"
        numbers = {"--atol": self.atol, "--rtol": self.rtol, "--verify-samples": samples}
        for option, value in numbers.items():
            if value is not None and not self.verify:
                yield (
                    f"{option} {value} with --no-verify: nothing will be compared",
                    "leave one of them out",
                )
        if not all(0 <= bound < math.inf for bound in (self.atol or 0.0, self.rtol or 0.0)):
            yield (
                f"--atol {self.atol} --rtol {self.rtol}: bounds are finite and not negative",
                "--rtol 1e-4 allows a difference of 1e-4 of max|y|; --no-verify any",
            )

    def check_inputs(self) -> None:
        """Raises where there is nothing to take ranges from, or where a method has no effect."""
        refuse(self._mistakes_of_inputs())
        if isinstance(self.data, Iterator) and self.reads > 1:
            raise FeedError(
                f"--data: the feed is a {type(self.data).__name__}, which can be read once, and "
                f"this export reads it {self.reads} times",
                hint="give a list, an array, a file, or an iterable that begins anew each time",
            )

    def _mistakes_of_inputs(self) -> Iterator[Mistake]:
        precision, table = self.precision, self.calibration
        if self.method is not None and not precision.ranged:
            yield _not_int8("--method", precision.name)
        if self.method is not None and table is not None:
            where = table if isinstance(table, Path) else "that was given"
            yield (
                f"--method {self.method}: the ranges are those of the table {where}",
                "leave --method out, or make another table with `moexport calibrate --method`",
            )
        if table is not None and precision.name not in CALIBRATED:
            yield (
                f"--calibration: --precision {precision.name} needs no ranges",
                "leave --calibration out, or add --precision int8 or fp16",
            )
        if self.data is not None:
            return
        if precision.min_retention is not None:
            yield (
                f"--min-retention {precision.min_retention:g}: it is measured on real inputs, and "
                "there are none",
                "give a feed with --data, with labels where there are any",
            )
        if self.verify_samples is not None:
            yield (
                f"--verify-samples {self.verify_samples}: it counts inputs of a feed, and there is "
                "none",
                "give a feed with --data; without one a few random inputs are compared",
            )

    @property
    def samples_to_verify(self) -> int:
        """The most inputs of a feed that are compared."""
        return self.verify_samples or VERIFY_SAMPLES

    @property
    def tolerance(self) -> Tolerance:
        """The bounds of the parity check: those asked for, else those of the precision."""
        return TOLERANCES[self.precision.name].asked(self.atol, self.rtol)

    @property
    def held_to_rounding(self) -> bool:
        """Whether FP32 graphs may only be as far from float64 as rounding takes them."""
        return self.precision.name == "fp32" and self.atol is None and self.rtol is None


def parsed(request: ExportRequest, destination: Path | None) -> ExportOptions:
    """Returns the options of an export, parsed; raises `UsageError` for what cannot be meant."""
    table = request.calibration
    return ExportOptions(
        k=parse_k(request.k),
        target=request.target,
        lowerings=parse_lowerings(request.lowering),
        batch=parse_range(str(request.batch), "--batch"),
        tokens=parse_range(str(request.tokens), "--tokens"),
        opset=MIN_OPSET if request.opset is None else request.opset,
        exact_opset=request.opset is not None,
        renormalize=request.renormalize,
        expose_routing=request.expose_routing,
        atol=request.atol,
        rtol=request.rtol,
        verify=request.verify,
        verify_samples=request.verify_samples,
        threads=request.threads,
        precision=PrecisionOptions(
            name=request.precision,
            rest=request.rest,
            scope=request.quantize,
            io=request.io_precision,
            weight_bits=request.weight_bits,
            floating=frozenset(request.keep_floating),
            min_retention=request.min_retention,
        ),
        data=request.data,
        calibration=Path(table) if isinstance(table, str) else table,
        method=request.method,
        engine=request.engine,
        destination=destination,
        force=request.force,
        further=request.further,
    )


BLOCKED_OPSET = 21
"""The first in which DequantizeLinear knows blocks, and INT4."""


def parse_k(k: int | float | str | Sequence[int]) -> KOption:
    """Returns k from `4`, `0.25`, `n/4`, `n`, `trained`, `input`, `4,4,8` or as numbers.

    Raises `UsageError` for all else.
    """
    if isinstance(k, float) and not k.is_integer():
        k = str(Fraction(k).limit_denominator(1 << 20))
    elif isinstance(k, Sequence) and not isinstance(k, str):
        k = ",".join(map(str, k))
    text = str(k)  # numpy's integers among them; what cannot be meant is refused as text
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
            if not 0 < share <= 1:
                raise UsageError(
                    f"--k {text}: a share must be above 0 and at most 1",
                    hint="--k 0.25 keeps a quarter of the experts",
                )
            return share
        return _positive(value)
    except (ValueError, ZeroDivisionError):
        raise UsageError(
            f"--k {text}: not a number of experts",
            hint=_meant(value)
            + "use a number (4), a share (0.25 or n/4), n, input, or a number per layer (4,4,8)",
        ) from None


def _meant(text: str) -> str:
    """What else somebody may have meant who wrote no k."""
    words = {"all": "n", "max": "n", "full": "n", "half": "n/2", "quarter": "n/4", "n": "n"}
    words |= dict.fromkeys(("dynamic", "runtime", "variable", "input"), "input")
    meant = words.get(text.lower())
    if re.fullmatch(r"\d+(\.\d+)?%", text):
        meant = f"{float(text[:-1]) / 100:g}"
    return f"did you mean {meant}? " if meant else ""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise UsageError(
            f"--k {text}: at least one expert must be kept", hint="use 1 ≤ k ≤ n, or n for all"
        )
    return value


def resolve_k(k: KOption, specs: Mapping[str, MoESpec]) -> dict[str, int | None]:
    """Returns each layer's k, None where it is a graph input.

    Raises `UsageError` for a k above n and for a list of the wrong length.
    """
    names = list(specs)
    if k == "input":
        return dict.fromkeys(names)
    values: Sequence[int | Fraction | str] = k if isinstance(k, tuple) else [k] * len(names)
    if len(values) != len(names):
        raise UsageError(
            f"--k {','.join(map(str, values))}: {len(values)} values for {len(names)} MoE layers",
            hint=f"give one k for all, or one each for: {', '.join(names)}",
        )
    return {name: _of_layer(value, specs[name]) for name, value in zip(names, values, strict=True)}


def check_renormalize(specs: Mapping[str, MoESpec]) -> None:
    """Raises `UsageError` for a layer whose coefficients cannot be renormalised."""
    from ..graphs.layers.base import a_layer

    for spec in specs.values():
        if not spec.renormalizable:
            raise UsageError(
                f"--renormalize: layer {spec.name} is {a_layer(spec.kind)}, whose coefficients "
                "stay as they are",
                hint="leave --renormalize out",
            )


def _of_layer(value: int | Fraction | str, spec: MoESpec) -> int:
    n = spec.experts
    if value == "n":
        return spec.trained_k
    if isinstance(value, Fraction):
        return max(1, round(value * spec.trained_k))
    assert isinstance(value, int)
    if not 1 <= value <= n:
        raise UsageError(
            f"--k {value}: layer {spec.name} has {n} experts",
            hint=f"use 1 ≤ k ≤ {n}, or n for all",
        )
    return value


def parse_lowerings(text: str) -> tuple[str, ...]:
    """Returns the names of a comma-separated list; `UsageError` for a name that is not one."""
    names = tuple(listed(text))
    if not names:
        raise UsageError("--lowering is empty", hint="--lowering auto lets the cost model choose")
    for name in names:
        if name in CHOOSERS:
            continue
        try:
            check_name(name)
        except LoweringError as error:
            raise UsageError(f"--lowering {name}: {error.message}", hint=error.hint) from None
    return names
