"""The options of a search, and the option of `export` for its recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...common.option import Mistake, Panel, Request, option, refuse
from ...common.registry import left_out
from ...common.text import near_miss, parse_seconds, parse_share, parse_size, split_list
from ...data.pixels import check_pixels
from ...errors import UsageError
from ...exporter.requests import AnyPath, AxisSizes
from ...graphs.sizes import Sizes
from ...graphs.targets import TARGETS, Precision, Target

API = 1

DEFAULT_KEEP = 0.99

METRICS = ("accuracy", "r2", "perplexity", "agreement")
"""The built-in measures of quality."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int4")
"""The precisions to try if the target and the model's layers support them."""


def no_such_recipe(path: Path, why: str | None) -> UsageError:
    return UsageError(
        f"--recipe {path}: cannot be read: {why}",
        hint="`moexport tune` writes recipe.yaml into its bundle",
    )


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The option of an export that applies a recipe."""

    recipe: AnyPath | None = option(
        None,
        "A recipe.yaml that tune wrote, with the settings of each layer.",
        unset="none",
        is_path=True,
    )


RECIPE = Panel(
    "recipe", "Graph", ("export",), RecipeOptions, "moexport.plugins.tune.cli:recipe_options"
)


@dataclass(frozen=True, kw_only=True)  # no slots: parsed values are cached
class TuneRequest(AxisSizes, Request):
    """The options of a search."""

    offered: ClassVar[frozenset[str]] = frozenset({"tune"})

    keep: str | float | None = option(
        None,
        "The share of the untouched model's quality to keep, such as 99% or 0.99.",
        unset="99% if there is no other requirement",
    )
    max_latency: str | float | None = option(
        None, "The largest latency of a batch of OPT inputs, such as 5ms.", unset="any"
    )
    max_bytes: str | int | None = option(
        None,
        "The largest size of the graph and weights, such as 20MB (decimal) or 20MiB (binary).",
        unset="any",
    )
    scenario: Literal["server"] | None = option(
        None,
        "Maximise the requests per second under a load: server, with p99 within --max-latency.",
        unset="none: minimise the latency",
    )
    metric: str | None = option(
        None,
        "The measure of quality: accuracy, r2, perplexity, agreement with the untouched model, or "
        "package.module:function of outputs and labels.",
        unset="one that fits the data",
    )
    target: str = option(
        "ort-cpu", "The runtime of the graph: onnx, ort-cpu, ort-cuda or openvino; or several."
    )
    batch: Sizes = option("1:1:32", "The range of batch sizes; OPT is the size to optimise for.")
    tokens: Sizes = option("1:196:1024", "The range of token counts, if that axis is dynamic.")
    precision: str | None = option(
        None, "The precisions to try, such as fp32,int8.", unset="all that the target supports"
    )
    all_experts: bool = option(False, "Do not remove or merge experts.")
    time: str | float | None = option(
        None,
        "The time limit of the search, such as 10min.",
        unset="until no better candidate is expected",
    )
    threads: int | None = option(
        None, "The number of threads of every engine.", unset="the fastest for the untouched model"
    )
    pixels: str | None = option(
        None, "The scale of pixels: unit, symmetric, imagenet.", unset="none; required for images"
    )
    report: AnyPath | None = option(
        None,
        "The folder for the results and the report.",
        unset="in a shell BUNDLE-report; in Python, nothing is written",
        is_path=True,
    )
    command: str = option(
        "", "The command to record as the origin of the results.", unset="nothing", in_shell=False
    )
    force: bool = option(False, "Replace an existing bundle.")

    def check(self) -> None:
        """Raises `UsageError` for options that are invalid for every model."""
        refuse(self._mistakes())

    @property
    def kept(self) -> float | None:
        """The share of the untouched model's quality to keep; None if only other bounds apply."""
        if self.keep is not None:
            return parse_share(self.keep, "--keep")
        unbounded = self.max_latency is None and self.max_bytes is None
        return DEFAULT_KEEP if unbounded or self.scenario is not None else None

    @property
    def latency_ms(self) -> float | None:
        """The latency bound for a batch of OPT inputs or, with `scenario`, 99% of the requests."""
        latency = self.max_latency
        return None if latency is None else 1e3 * parse_seconds(latency, "--max-latency", "ms")

    @property
    def most_bytes(self) -> int | None:
        """The bound on the size of the graph and weights."""
        return None if self.max_bytes is None else parse_size(self.max_bytes, "--max-bytes")

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets to search together; the first also runs the model as trained."""
        names = tuple(dict.fromkeys(split_list(self.target)))
        for name in names:
            if name not in TARGETS:
                raise UsageError(
                    f"--target {name}: there is no such target",
                    hint=near_miss(name, TARGETS.names) + left_out(),
                )
        if not names:
            raise UsageError("--target: the list is empty", hint="for example, ort-cpu,openvino")
        return names

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions to try; empty for all that a target supports."""
        names: Any = dict.fromkeys(split_list(self.precision or ""))
        return tuple(names)

    @property
    def seconds(self) -> float | None:
        return None if self.time is None else parse_seconds(self.time, "--time", "s")

    @property
    def searched(self) -> dict[str, Any]:
        """The options that must be unchanged for a search to continue."""
        return {
            "keep": self.kept,
            "latency_ms": self.latency_ms,
            "bytes": self.most_bytes,
            "scenario": self.scenario,
            "metric": self.metric,
            "targets": self.targets,
            "batch": asdict(self.batches),
            "tokens": asdict(self.token_counts),
            "precisions": self.precisions,
            "subsets": not self.all_experts,
            "seconds": None,
            "threads": self.threads,
        }

    def tried(self, target: Target) -> tuple[Precision, ...]:
        return tuple(
            name for name in self.precisions or PRECISIONS if _refusal(target, name) is None
        )

    def _mistakes(self) -> Iterator[Mistake]:
        # each property parses its option, and raises if that is invalid
        _ = self.most_bytes, self.batches, self.token_counts, self.seconds, self.latency_ms
        if self.pixels is not None:
            check_pixels(self.pixels)
        if self.metric is not None and ":" not in self.metric and self.metric not in METRICS:
            yield (
                f"--metric {self.metric}: there is no such metric",
                f"{', '.join(METRICS)}, or package.module:function",
            )
        for target in (name for name in self.targets if TARGETS[name].compiled):
            yield (
                f"--target {target}: tune measures graphs in ONNX Runtime or OpenVINO, not engines",
                "tune for ort-cuda on a machine with a GPU, and export with the k that it finds",
            )
        keep = self.kept
        if keep is not None and not 0 < keep < 1:
            yield (
                f"--keep {keep:.6g}: the share must be above 0 and below 1",
                "--keep 99% keeps 99% of the untouched model's accuracy; no number of inputs can "
                "show that 100% is kept",
            )
        if self.threads is not None and self.threads < 1:
            yield (
                f"--threads {self.threads}: the number must be at least 1",
                "leave --threads out: tune measures which number is fastest",
            )
        if self.scenario is not None and self.latency_ms is None:
            yield (
                f"--scenario {self.scenario}: the latency bound is missing",
                "add, for example, --max-latency 50ms, which then applies to 99% of the requests",
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
                    f"leave {name} out",
                )
        if self.precisions and "fp32" not in self.precisions:
            yield (
                f"--precision {','.join(self.precisions)}: fp32 is missing, but tune compares "
                "everything with it",
                "add fp32 to the list",
            )


def _refusal(target: Target, precision: Precision) -> str | None:
    """Returns why a precision is not tried on a target; None if it is tried."""
    record = TARGETS[target]
    if precision in record.refused:
        return record.refused[precision][0]
    # A target has a note on a 16-bit type only if that is no faster than FP32: it is not tried.
    return record.notes.get(precision) if precision in ("fp16", "bf16") else None
