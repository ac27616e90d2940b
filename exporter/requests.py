"""What is asked of an export and of a bundle, declared once each. Importing this loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from ..common.option import Request, at_least, changed, option, refuse_changed
from ..common.text import near_miss
from ..errors import UsageError
from ..graphs.targets import (
    TARGETS,
    FloatName,
    Method,
    Precision,
    Scope,
    Target,
    compiled_names,
    runtime_names,
)

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..data.feeds import Feed
    from .inputs import Example
    from .tensorrt.options import EngineOptions

AnyPath = str | Path

K = int | float | str | Sequence[int]
"""k as a user says it: a number, a share, `n`, `n/4`, `input`, or a number per layer."""

Provider = Literal["cpu", "cuda", "tensorrt"]
"""Where ONNX Runtime runs a graph: the names of `exporter.session.PROVIDERS`."""

SIZES = "MIN:OPT:MAX"

FEED = "Inputs: an .npz, a folder of .npy, shards (.tar, .parquet) or package.module:iterable."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest(Request):
    """How a model is read."""

    offered: ClassVar[frozenset[str]] = frozenset({"load"})

    family: str | None = option(
        None,
        "Skip detection: soft-moe-vit, mumoe-gpt2, …",
        unset="by keys and shapes",
        heading="Reading MODEL",
    )
    config: Mapping[str, Any] | AnyPath | None = option(
        None,
        "Settings that the weights do not contain: a JSON, YAML or TOML file.",
        unset="none",
        kind=Path,
    )
    sets: Sequence[str] = option(
        (),
        "One such setting: --set num_heads=12. Repeat it for several.",
        unset="none",
        flag="--set",
        metavar="KEY=VALUE",
    )
    example: Example | None = option(
        None,
        "Inputs [b, ...] to check a factory's network with, or a file of them.",
        unset="its own example_input, or random ones",
        in_shell=False,
        compare=False,
    )
    values: bool = option(
        True, "False reads no weights, which is enough to inspect a model.", in_shell=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest(LoadRequest):
    """What is asked about a model."""

    offered: ClassVar[frozenset[str]] = frozenset({"load", "inspect"})

    data: Feed | None = option(
        None,
        FEED,
        unset="nonzero coefficients of muMoE layers are not counted",
        kind=str,
        metavar="FEED",
        compare=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest(Request):
    """How the ranges of a model's tensors are found.

    `batch` is how many inputs the observing graph runs at once, whatever the feed's own batches: it
    costs memory and saves time, and changes a range by no more than the rounding of the model's own
    arithmetic.
    """

    offered: ClassVar[frozenset[str]] = frozenset({"calibrate"})

    k: K = option("n", "Experts to compute, as in export, but not input.", heading="Ranges")
    method: Method = option("percentile", "How to choose the ranges.")
    percentile: float | None = option(
        None, "The percentage of values in range, for the method percentile.", unset="99.99"
    )
    samples: int | None = option(None, "How many inputs to use.", unset="all")
    batch: int = option(16, "How many inputs to run at once.")
    renormalize: bool = option(
        False, "Divide C by its sum over the selected experts; use it if the export does."
    )
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
        "A file for the table; one of the same origin that is there is returned.",
        unset="the table is not written",
        in_shell=False,
    )
    force: bool = option(False, "Replace a table of another origin.", heading="Options")

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be meant."""
        if self.k == "input":
            raise UsageError(
                "--k input: ranges are those of the experts that are kept, and this says none",
                hint="--k n observes all experts, and its table serves an export with --k input",
            )
        if self.method not in get_args(Method):
            raise UsageError(
                f"--method {self.method}: there is no such method",
                hint=near_miss(self.method, get_args(Method)),
            )
        if self.percentile is not None and self.method != "percentile":
            raise UsageError(
                f"--percentile {self.percentile:g}: the method is {self.method}, which has none",
                hint="leave --percentile out, or give --method percentile",
            )
        if self.percentile is not None and not 50 < self.percentile <= 100:
            raise UsageError(
                f"--percentile {self.percentile:g}: a share above 50 and up to 100",
                hint="--percentile 99.99 leaves out the outermost 0.01 % of the values",
            )
        for name in ("samples", "batch"):
            at_least(self, name, 1)

    @property
    def share(self) -> float:
        """The share of values in range, in %, where the method is `percentile`."""
        from ..calibration.methods import DEFAULT_PERCENTILE

        return DEFAULT_PERCENTILE if self.percentile is None else self.percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRequest(Request):
    """How a calibrated model is compared, a layer at a time."""

    k: K = option("n", "As the table was made with.", in_shell=False)
    samples: int | None = option(
        None, "How many inputs are compared, at most 64.", unset="64", in_shell=False
    )
    renormalize: bool = option(False, "As the table was made with.", in_shell=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest(Request):
    """What graphs are written of a model, how they are checked, and what is compiled of them."""

    offered: ClassVar[frozenset[str]] = frozenset({"export"})

    k: K = option(
        "n",
        "Experts to compute of the n of each layer: a number (4), a share (0.25, n/4), all (n), a "
        "number per layer (4,4,8), or input, which makes k an input of the graph. For token-routed "
        "models, n and shares refer to the k that the router was trained with.",
        heading="Graph",
    )
    target: Target = option(
        "onnx",
        "The runtime of the graph; onnx is any of them, in standard ops.",
        further=lambda: TARGETS.names,
    )
    lowering: str = option(
        "auto",
        "How to compute the experts: auto takes the one predicted to be fastest, tune measures "
        "them, or a name (dense, gather, grouped, ...); a,b writes one graph each.",
    )
    batch: str | int = option(
        "1:1:32",
        "The range of batch sizes, optimised for OPT; one number fixes the axis.",
        metavar=SIZES,
    )
    tokens: str | int = option(
        "1:196:1024", "The same for the number of tokens, if that axis is dynamic.", metavar=SIZES
    )
    renormalize: bool = option(False, "Divide C by its sum over the selected experts.")
    expose_routing: bool = option(
        False,
        "Add the selected experts of every layer as outputs of the graphs and their engines; for a "
        "muMoE layer, its coefficients.",
    )
    precision: Precision = option(
        "fp32",
        "The precision of the graph. int8 and fp8 (engines only) need data or a calibration; int4 "
        "quantises the weights only.",
        heading="Precision",
    )
    quantize: Scope = option("experts", "What to quantise: the experts, or all linear layers.")
    method: Method | None = option(
        None, "How to choose INT8 ranges from the data.", unset="percentile"
    )
    calibration: CalibrationTable | AnyPath | None = option(
        None,
        "INT8 ranges that calibrate found, or their file.",
        unset="none",
        kind=Path,
        metavar="TABLE.JSON",
    )
    keep_floating: Sequence[str] = option(
        (), "Names of MoE layers to keep in floating point.", unset="none", in_shell=False
    )
    min_retention: float | None = option(
        None,
        "The share of FP32's accuracy to keep, above 0 and up to 1; sensitive layers then stay in "
        "floating point.",
        unset="all are INT8",
        metavar="SHARE",
    )
    data: Feed | None = option(
        None,
        FEED,
        unset="a few random ones",
        heading="Inputs and parity check",
        kind=str,
        metavar="FEED",
        compare=False,
    )
    atol: float | None = option(None, "The largest absolute difference from PyTorch.", unset="0")
    rtol: float | None = option(
        None,
        "The largest difference from PyTorch relative to max|y|.",
        unset="FP32 1e-4, FP16 0.01, BF16 0.05, INT8 0.1",
    )
    verify_samples: int | None = option(
        None, "The largest number of inputs to compare.", unset="256"
    )
    verify: bool = option(
        True,
        "Compare every graph with PyTorch; a mismatch is an error.",
        flag="--verify/--no-verify",
    )
    threads: int | None = option(
        None,
        "Threads of PyTorch and ONNX Runtime.",
        unset="those with which the untouched model is fastest",
        min=1,
    )
    rest: FloatName | None = option(
        None,
        "The float type of everything that is not quantised.",
        unset="fp32; for TensorRT fp16",
        heading="Numbers",
    )
    weight_bits: int | None = option(
        None,
        "Bits of INT8 weights on CPUs: 7, or 8, which is slower without VNNI.",
        unset="7; for TensorRT 8",
    )
    io_precision: FloatName = option("fp32", "The type of the graph's float inputs and outputs.")
    opset: int | None = option(
        None, "The ONNX opset, 20 to 23.", unset="20; 23 for language models with --target ort-cpu"
    )
    engine: EngineOptions | bool | None = option(
        None,
        "Compile TensorRT engines, with the options of `build`; in Python, `EngineOptions`.",
        unset="if the target has engines and this machine can build them",
        heading="Options",
        kind=bool,
        flag="--engine/--no-engine",
    )
    force: bool = option(False, "Replace an existing bundle.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest(Request):
    """Which engines of a bundle are compiled."""

    target: str | None = option(
        None, "The runtime, tensorrt or tensorrt-rtx.", unset="the bundle's"
    )
    graph: str | None = option(
        None, "The file or lowering of a graph, if the bundle holds several.", unset="all"
    )
    batch: str | int | None = option(
        None,
        "The range of batch sizes, if no profile gives it.",
        unset="as exported",
        metavar=SIZES,
    )
    tokens: str | int | None = option(
        None, "The same for the number of tokens.", unset="as exported", metavar=SIZES
    )
    options: EngineOptions | None = option(
        None,
        "Profiles, compute capabilities and other settings.",
        unset="the defaults",
        in_shell=False,
    )
    rebuild: bool = option(False, "Build engines that exist already.", flag="--force")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest(Request):
    """How far a bundle's outputs may be off, and what may be run to tell."""

    atol: float | None = option(
        None, "The largest absolute difference from PyTorch.", unset="by precision", min=0
    )
    rtol: float | None = option(
        None, "The largest difference from PyTorch relative to max|y|.", unset="by precision", min=0
    )
    trust_engine: bool = option(
        False, "Run unverified engine files, built elsewhere; they may execute code."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(Request):
    """Who runs a graph of a bundle, and how."""

    offered: ClassVar[frozenset[str]] = frozenset({"run"})

    k: int | None = option(None, "Experts to compute, if k is an input of the graph.", unset="none")
    graph: str | None = option(
        None, "The file or lowering of a graph, if the bundle holds several.", unset="the main one"
    )
    batch_size: int | None = option(
        None, "How many inputs to run at once.", unset="the largest batch of the export", min=1
    )
    threads: int | None = option(
        None,
        "The number of threads of ONNX Runtime or OpenVINO.",
        unset="its own choice",
        heading="Runtime",
        min=1,
    )
    engine: str | None = option(
        None,
        "The runtime.",
        unset="that of the graph",
        flag="--engine/--runtime",
        further=lambda: (*runtime_names(), *compiled_names()),
    )
    provider: Provider = option("cpu", "ONNX Runtime's execution provider.")
    trust_engine: bool = option(
        False, "Load an unverified engine file, built elsewhere; it may execute code."
    )
    host_weights: bool = option(False, "Keep an engine's bound experts in host memory.")
    check: bool = option(
        True,
        "Compare the files with the hashes in the manifest before opening them.",
        flag="--check/--no-check",
        heading="Options",
    )
    force: bool = option(False, "Replace existing outputs.")

    def __post_init__(self) -> None:
        """Raises `UsageError` for options that the chosen runner does not have."""
        if self.runs_graph:
            with_ = "" if self.engine is None else f" with --engine {self.engine}"
            refuse_changed(self, ("trust_engine", "host_weights"), f": no engine is loaded{with_}")
        else:
            why = f": it is ONNX Runtime's, and {self.engine} runs the engine"
            refuse_changed(self, ("threads",), why)
        if self.engine is not None:
            self._refuse_what_others_take(self.engine)

    @property
    def runs_graph(self) -> bool:
        """Whether a runtime runs the graph itself, and not an engine that was compiled of it."""
        return self.engine in (None, *runtime_names())

    @property
    def session_options(self) -> dict[str, Any]:
        """What was asked of a session, by the names that `Bundle.session` has for it."""
        named = {name: getattr(each, name) for each in self.further for name in changed(each)}
        return named | ({} if self.provider == "cpu" else {"provider": self.provider})

    def _refuse_what_others_take(self, engine: str) -> None:
        asked = self.session_options
        own = [(e, name) for e in (self, *self.further) for name in changed(e) if name in asked]
        if not own:
            return
        from .bundle.runtimes import RUNTIMES, owner_of  # loads the runtimes of plugins

        record = RUNTIMES[engine] if self.runs_graph else None
        ran = f", and {record.title} runs it" if record else f", and {engine} runs the engine"
        ran = "" if engine == "onnxruntime" else ran  # who does not choose has that one
        for options, name in own:
            if record is None or name not in record.takes:
                refuse_changed(options, (name,), f": it is {owner_of(name)[1]}'s{ran}")
