"""The options of exports and bundles, each declared once. This module is cheap to import."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..common.option import Request, at_least, changed, option, refuse_changed
from ..errors import UsageError
from ..graphs.k import K, parse_k
from ..graphs.sizes import AxisRange, Sizes, parse_range
from ..graphs.targets import Method, runtime_names

if TYPE_CHECKING:
    from ..data.batches import Feed
    from .tensorrt.options import EngineOptions

AnyPath = str | Path

Provider = Literal["cpu", "cuda", "tensorrt"]
"""The execution providers of ONNX Runtime: the names in `exporter.session.PROVIDERS`."""

SIZES = "MIN:OPT:MAX"

FEED = "Inputs: an .npz, a folder of .npy, shards (.tar, .parquet) or package.module:iterable."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest(Request):
    """How a model is read."""

    offered: ClassVar[frozenset[str]] = frozenset({"load"})

    family: str | None = option(
        None, "Skip detection: soft-moe-vit, mumoe-gpt2, …", unset="by keys and shapes"
    )
    config: Mapping[str, Any] | AnyPath | None = option(
        None,
        "Settings that the weights do not contain: a JSON, YAML or TOML file.",
        unset="none",
        is_path=True,
    )
    sets: Sequence[str] = option(
        (),
        "One such setting: --set num_heads=12. Repeat it for several.",
        unset="none",
        flag="--set",
    )
    example: Any = option(
        None,
        "Inputs [b, ...] to check a network of your own with, or a file of them.",
        unset="its own example_input, or random ones",
        in_shell=False,
        compare=False,
    )
    values: bool = option(
        True, "False reads no weights, which is enough to inspect a model.", in_shell=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest(LoadRequest):
    """The options that describe a model."""

    offered: ClassVar[frozenset[str]] = frozenset({"load", "inspect"})

    data: Feed | None = option(
        None,
        "Inputs, as in export: with labels, with outputs of your own model, or for muMoE layers.",
        unset="nothing is run",
        compare=False,
    )
    tokens: int | None = option(
        None,
        "Tokens of one input, if the model accepts any number.",
        unset="196, and 1 for layers that take vectors",
    )

    def __post_init__(self) -> None:
        at_least(self, "tokens", 1)


class AxisSizes:
    """A request with `batch` and `tokens`, which are parsed once."""

    batch: Sizes
    tokens: Sizes

    @cached_property
    def batches(self) -> AxisRange:
        """The batch sizes of the graph."""
        return parse_range(self.batch, "--batch")

    @cached_property
    def token_counts(self) -> AxisRange:
        """The numbers of tokens of the graph, if that axis is dynamic."""
        return parse_range(self.tokens, "--tokens")

    @property
    def ranges(self) -> dict[str, AxisRange]:
        """Both ranges, by axis."""
        return {"batch": self.batches, "tokens": self.token_counts}


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRequest(Request):
    """The k and the number of inputs with which a model is observed, or its layers compared."""

    k: K = option("n", "Experts to compute, as in export, but not input.")
    samples: int | None = option(
        None, "How many inputs to use.", unset="all, or 64 (the maximum) to compare layers"
    )
    renormalize: bool = option(
        False, "Divide the selected combine weights by their sum; use it if the export does."
    )

    def __post_init__(self) -> None:
        if parse_k(self.k) == "input":
            raise UsageError(
                "--k input: ranges depend on the number of kept experts, which `input` leaves open",
                hint="--k n observes all experts; its table is valid for an export with --k input",
            )
        at_least(self, "samples", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest(SensitivityRequest):
    """How the ranges of a model's tensors are found.

    `batch` is the number of inputs that the observing graph runs at once, whatever the feed's own
    batches. Larger batches need more memory but less time, and change ranges only by rounding.
    """

    offered: ClassVar[frozenset[str]] = frozenset({"calibrate"})

    method: Method = option("percentile", "How to choose the ranges.")
    percentile: float | None = option(
        None, "The percentage of values in range, for the method percentile.", unset="99.99"
    )
    batch: int = option(16, "How many inputs to run at once.")
    loading: LoadRequest = option(
        LoadRequest(), "How nodes of a cluster read the model.", in_shell=False
    )
    workspace: AnyPath | None = option(
        None,
        "A folder for the weights while they are in use.",
        unset="that of `out`, or the system's temporary one",
        in_shell=False,
    )
    out: AnyPath | None = option(
        None,
        "A file for the table; an existing one of the same origin is returned.",
        unset="the table is not written",
        in_shell=False,
    )
    force: bool = option(False, "Replace a table of another origin.")

    def __post_init__(self) -> None:
        SensitivityRequest.__post_init__(self)
        if self.percentile is not None and self.method != "percentile":
            raise UsageError(
                f"--percentile {self.percentile:g}: the method {self.method} has no percentile",
                hint="leave --percentile out, or give --method percentile",
            )
        if self.percentile is not None and not 50 < self.percentile <= 100:
            raise UsageError(
                f"--percentile {self.percentile:g}: the value must be above 50 and at most 100",
                hint="--percentile 99.99 leaves out the outermost 0.01 % of the values",
            )
        at_least(self, "batch", 1)

    @property
    def share(self) -> float:
        """The share of values in range, in %, for the method `percentile`."""
        from ..calibration.methods import DEFAULT_PERCENTILE

        return DEFAULT_PERCENTILE if self.percentile is None else self.percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest(Request):
    """Which engines of a bundle are compiled."""

    target: str | None = option(
        None, "The runtime, tensorrt or tensorrt-rtx.", unset="the bundle's"
    )
    graph: str | None = option(
        None, "The file or lowering of a graph, if the bundle has several.", unset="all"
    )
    batch: Sizes | None = option(
        None, "The range of batch sizes, if no profile gives it.", unset="as exported"
    )
    tokens: Sizes | None = option(None, "The same for the number of tokens.", unset="as exported")
    options: EngineOptions | None = option(
        None,
        "Profiles, compute capabilities and other settings.",
        unset="the defaults",
        in_shell=False,
    )
    rebuild: bool = option(False, "Build engines that exist already.", flag="--force")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest(Request):
    """The tolerances for a bundle's outputs, and the graphs that `verify` may run."""

    atol: float | None = option(
        None, "The largest absolute difference from PyTorch.", unset="by precision"
    )
    rtol: float | None = option(
        None, "The largest difference from PyTorch relative to max|y|.", unset="by precision"
    )
    data: Feed | None = option(
        None,
        "Inputs with labels, or outputs of your own model, to run every graph on.",
        unset="only the inputs in the bundle",
        compare=False,
    )
    trust_engine: bool = option(
        False, "Run unverified engine files, built elsewhere; they may execute code."
    )

    def __post_init__(self) -> None:
        for name in ("atol", "rtol"):
            at_least(self, name, 0)
            if not (getattr(self, name) or 0) < math.inf:
                raise UsageError(
                    f"--{name} {getattr(self, name)}: not a finite number",
                    hint=f"leave --{name} out",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(Request):
    """The runtime of a bundle's graph, and its options."""

    offered: ClassVar[frozenset[str]] = frozenset({"run"})

    k: int | None = option(None, "Experts to compute, if k is an input of the graph.", unset="none")
    graph: str | None = option(
        None, "The file or lowering of a graph, if the bundle has several.", unset="the main one"
    )
    batch_size: int | None = option(
        None, "How many inputs to run at once.", unset="the largest batch of the export"
    )
    threads: int | None = option(
        None, "The number of threads of ONNX Runtime or OpenVINO.", unset="its own choice"
    )
    engine: str | None = option(
        None, "The runtime.", unset="that of the graph", flag="--engine/--runtime"
    )
    provider: Provider = option("cpu", "ONNX Runtime's execution provider.")
    cuda_graphs: bool = option(
        True,
        "Replay repeated runs on the provider cuda as CUDA graphs.",
        flag="--cuda-graphs/--no-cuda-graphs",
    )
    trust_engine: bool = option(
        False, "Load an unverified engine file, built elsewhere; it may execute code."
    )
    host_weights: bool = option(False, "Keep an engine's bound experts in host memory.")
    check: bool = option(
        True,
        "Compare the files with the hashes in the manifest before opening them.",
        flag="--check/--no-check",
    )
    force: bool = option(False, "Replace existing outputs.")

    def __post_init__(self) -> None:
        """Raises `UsageError` for options that the chosen runner does not have."""
        if self.runs_graph:
            given = "" if self.engine is None else f" with --engine={self.engine}"
            refuse_changed(self, ("trust_engine", "host_weights"), f": no engine is loaded{given}")
        else:
            why = f": it belongs to ONNX Runtime, but {self.engine} runs the engine"
            refuse_changed(self, ("threads",), why)
        if self.runs_graph and self.provider != "cuda":
            refuse_changed(self, ("cuda_graphs",), ": only --provider cuda replays them")
        if self.engine is not None:
            self._refuse_foreign_options(self.engine)

    @property
    def runs_graph(self) -> bool:
        """Whether a runtime runs the graph itself, and not an engine compiled from it."""
        return self.engine in (None, *runtime_names())

    @property
    def session_options(self) -> dict[str, Any]:
        """The options of a session, by their names in `Bundle.session`."""
        named = {name: getattr(r, name) for r in self.further for name in changed(r)}
        own = {name: getattr(self, name) for name in ("provider", "cuda_graphs")}
        return named | {name: own[name] for name in changed(self) if name in own}

    def _refuse_foreign_options(self, engine: str) -> None:
        given = self.session_options
        owned = [(r, name) for r in (self, *self.further) for name in changed(r) if name in given]
        if not owned:
            return
        from .bundle.runtimes import RUNTIMES, owner_of  # loads the runtimes of plugins

        record = RUNTIMES[engine] if self.runs_graph else None
        suffix = f", but {record.title} runs it" if record else f", but {engine} runs the engine"
        suffix = "" if engine == "onnxruntime" else suffix  # the default
        for options, name in owned:
            if record is None or name not in record.takes:
                refuse_changed(options, (name,), f": it belongs to {owner_of(name)[1]}{suffix}")
