"""What is asked of a search, declared once: bounds, metric, what may vary, how long it may take.

And what an export takes of a search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...common.option import (
    Mistake,
    Panel,
    Request,
    option,
    parse_seconds,
    parse_share,
    parse_size,
    refuse,
)
from ...common.registry import left_out
from ...common.text import listed, near_miss
from ...errors import UsageError
from ...exporter.requests import SIZES, AnyPath
from ...graphs.targets import TARGETS, Precision, Target

if TYPE_CHECKING:
    from ...exporter.inputs import AxisRange


def _usual_range(axis: str) -> AxisRange:
    from ...exporter import inputs

    return inputs.DEFAULT_BATCH if axis == "batch" else inputs.DEFAULT_TOKENS


API = 1

DEFAULT_KEEP = 0.99

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int4")
"""What is tried, where the target computes it and the model's layers take it."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What an export takes of a search."""

    recipe: AnyPath | None = option(
        None,
        "The recipe.yaml that tune wrote: what each layer is to be.",
        unset="none",
        metavar="RECIPE.YAML",
    )


RECIPE = Panel("recipe", "Graph", ("export",), RecipeOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest(Request):
    """What is required of a bundle, what is searched for it, and how."""

    offered: ClassVar[frozenset[str]] = frozenset({"tune"})

    keep: str | float | None = option(
        None,
        "The share of the untouched model's quality to keep, 99% or 0.99.",
        unset="99%, if there is no other requirement",
        heading="Requirements",
        metavar="SHARE",
    )
    max_latency: str | float | None = option(
        None, "The largest latency of a batch of OPT, 5ms.", unset="any", metavar="TIME"
    )
    max_bytes: str | int | None = option(
        None,
        "The largest size of graph and weights, 20MB (decimal) or 20MiB (binary).",
        unset="any",
        metavar="BYTES",
    )
    scenario: Literal["server"] | None = option(
        None,
        "The load to search for: server, the most requests whose p99 is --max-latency.",
        unset="none, the least latency",
        kind=Literal["server"],
    )
    metric: str | None = option(
        None,
        "The measure of quality: accuracy, perplexity, agreement with the untouched model, or "
        "package.module:function of outputs and labels.",
        unset="what the data allow",
    )
    target: str = option(
        "ort-cpu",
        "The runtime of the graph: onnx, ort-cpu, ort-cuda or openvino; a list searches all of it.",
        heading="Search space",
    )
    batch: str | int = option(
        "1:1:32", "The range of batch sizes, optimised for OPT.", metavar=SIZES
    )
    tokens: str | int = option(
        "1:196:1024", "The same for the number of tokens, if that axis is dynamic.", metavar=SIZES
    )
    precision: str | None = option(
        None, "The precisions to try, as fp32,int8.", unset="all that the target computes"
    )
    all_experts: bool = option(False, "Do not remove or merge experts.")
    time: str | float | None = option(
        None,
        "The time limit of the search, 10min.",
        unset="until no better candidate is expected",
        heading="Search",
        metavar="TIME",
    )
    threads: int | None = option(
        None,
        "Threads of every engine.",
        unset="those with which the untouched model is fastest",
        min=1,
    )
    pixels: str | None = option(
        None, "The scale of images: unit, symmetric or imagenet.", unset="as the folder says"
    )
    report: AnyPath | None = option(
        None,
        "The folder for results and report.",
        unset="in a shell BUNDLE-report, in Python nothing is written",
        metavar="DIR",
    )
    command: str = option(
        "", "What the results say they were made by.", unset="nothing", in_shell=False
    )
    force: bool = option(False, "Replace an existing bundle.", heading="Options")

    def search(self) -> SearchOptions:
        """Returns the bounds and means, parsed; `UsageError` for what cannot be meant."""
        from ...exporter.inputs import parse_range

        latency, most = self.max_latency, self.max_bytes
        alone = latency is None and most is None
        keep = DEFAULT_KEEP if alone or self.scenario is not None else None
        ms = None if latency is None else 1e3 * parse_seconds(latency, "--max-latency", "ms")
        return SearchOptions(
            keep=keep if self.keep is None else parse_share(self.keep, "--keep"),
            latency_ms=ms,
            bytes=None if most is None else parse_size(most, "--max-bytes"),
            scenario=self.scenario,
            metric=self.metric,
            targets=parse_targets(self.target),
            batch=parse_range(str(self.batch), "--batch"),
            tokens=parse_range(str(self.tokens), "--tokens"),
            precisions=parse_tried(self.precision or ""),
            subsets=not self.all_experts,
            seconds=None if self.time is None else parse_seconds(self.time, "--time", "s"),
            threads=self.threads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The bounds of a search and its means, as `TuneRequest.search` makes them.

    `keep` is the share of the untouched model's quality that must be kept, None where other bounds
    alone count. `latency_ms` is of a batch of OPT, `bytes` of the graphs and weights. With a
    `scenario` the most requests a second are searched for, whose p99 is `latency_ms`. `metric` is
    `accuracy`, `perplexity`, `agreement` or a function's name, None for what the data allow.
    `targets` are searched together, the first for the model as trained. `precisions` are those to
    try, none for all that a target serves; `seconds` bounds the search.
    """

    keep: float | None = DEFAULT_KEEP
    latency_ms: float | None = None
    bytes: int | None = None
    scenario: Literal["server"] | None = None
    metric: str | None = None
    targets: tuple[Target, ...] = ("ort-cpu",)
    batch: AxisRange = field(default_factory=lambda: _usual_range("batch"))
    tokens: AxisRange = field(default_factory=lambda: _usual_range("tokens"))
    precisions: tuple[Precision, ...] = ()
    subsets: bool = True
    seconds: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        """Raises `UsageError` for what cannot be meant, whatever the model."""
        refuse(self._mistakes())

    def tried(self, target: Target) -> tuple[Precision, ...]:
        """Returns the precisions to try on a target."""
        return tuple(
            name for name in self.precisions or PRECISIONS if _refusal(target, name) is None
        )

    def _mistakes(self) -> Iterator[Mistake]:
        for target in (each for each in self.targets if TARGETS[each].compiled):
            yield (
                f"--target {target}: tune measures graphs in ONNX Runtime or OpenVINO, and this "
                "target runs engines",
                "tune for ort-cuda on the machine with the GPU, and give its k to export",
            )
        if self.keep is not None and not 0 < self.keep < 1:
            yield (
                f"--keep {self.keep:.6g}: a share above 0 and below 1",
                "--keep 99% keeps 99% of the untouched model's accuracy; no number of inputs shows "
                "that all of it is kept",
            )
        if self.scenario is not None and self.latency_ms is None:
            yield (
                f"--scenario {self.scenario}: there is no bound of latency",
                "for example --max-latency 50ms, which 99% of the requests keep then",
            )
        unknown = [name for name in self.precisions if name not in PRECISIONS]
        if unknown:
            yield (
                f"--precision {','.join(self.precisions)}: tune tries {', '.join(PRECISIONS)}",
                f"leave {unknown[0]} out",
            )
        for name in self.precisions:
            reasons = [_refusal(target, name) for target in self.targets]
            if all(reasons):
                yield (
                    f"--precision {name} for --target {','.join(self.targets)}: {reasons[0]}",
                    "leave it out",
                )
        if self.precisions and "fp32" not in self.precisions:
            yield (
                f"--precision {','.join(self.precisions)}: everything is compared with FP32",
                "add fp32 to the list",
            )


def _refusal(target: Target, precision: Precision) -> str | None:
    """Why a precision is not tried on a target, None where it is."""
    record = TARGETS[target]
    if precision in record.refused:
        return record.refused[precision][0]
    return record.notes.get(precision) if precision in ("fp16", "bf16") else None


def parse_targets(text: str) -> tuple[Target, ...]:
    """Returns the targets of a list; raises `UsageError` for a name that is none of them."""
    names = tuple(dict.fromkeys(listed(text)))
    for name in names:
        if name not in TARGETS:
            raise UsageError(
                f"--target {name}: there is no such target",
                hint=near_miss(name, TARGETS.names) + left_out(),
            )
    if not names:
        raise UsageError("--target: names no target", hint="for example ort-cpu,openvino")
    return names


def parse_tried(text: str) -> tuple[Precision, ...]:
    """Returns the precisions of a list, none for an empty one; `SearchOptions` checks them."""
    names: Any = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    precisions: tuple[Precision, ...] = names
    return precisions
