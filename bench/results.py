"""`results.json`: the results of a benchmark as data, shown by reports and figures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from ..common.documents import LARGE_BITS, document, from_data, read_document
from ..common.latency import Latency
from ..common.text import by_level
from ..common.writing import write_text
from ..errors import ResultsError
from .engines import PYTORCH_EAGER

SCHEMA = 1
MAX_LOSING_CLASSES = 10
DISTURBED = 0.1  # times count as disturbed if threads spent this share of them waiting for a core


PhaseName = Literal["decode", "prefill"]
"""A call of a language model computes one new token of each input, or a whole prompt."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The 95% confidence interval of a share or ratio, given the samples."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class AttributeAccuracy:
    """The share of inputs whose attribute is predicted correctly, here and by the unmodified model.

    `positives` is the number of inputs that have the attribute.
    """

    positives: int
    accuracy: float
    untouched: float
    interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Top-1 accuracy on `n` labelled samples, 0..1, and its ratio to the unmodified PyTorch model.

    `top5` is None for models with up to five classes, `retention` if the unmodified model is never
    correct. For a model that predicts `attributes`, `top1` is the mean of their accuracies.
    """

    top1: float
    retention: float | None
    n: int
    top5: float | None = None
    top1_interval: Interval | None = None
    top5_interval: Interval | None = None
    retention_interval: Interval | None = None
    attributes: tuple[AttributeAccuracy, ...] = ()


@dataclass(frozen=True, slots=True)
class Regression:
    """R² on `n` samples over all outputs, and its ratio to that of the unmodified PyTorch model.

    `outputs` has the R² of each output, None if its targets are all equal. `retention` is None if
    the unmodified model's R² is not positive.
    """

    r2: float
    retention: float | None
    n: int
    rmse: float
    mae: float
    outputs: tuple[float | None, ...] = ()
    retention_interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood of the next token, over `tokens` tokens.

    `retention` is the unmodified PyTorch model's perplexity divided by this one: 1 loses nothing,
    less is worse. Both intervals are over sequences, the second over their differences.
    """

    value: float
    retention: float
    tokens: int
    interval: Interval | None = None
    retention_interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class RoutingAgreement:
    """Agreement of the chosen experts with PyTorch's Algorithm 1 at the same k, 0..1.

    `jaccard` is the mean over samples and layers of |A∩B| / |A∪B|, and `exact` the share of samples
    with equal sets in every layer. If each token chooses, the samples are tokens, and `choices` is
    the share of equal choices of tokens in layers. `ties` is the share of choices between scores
    that are closer than rounding; these are excluded or count as equal.
    """

    jaccard: float
    exact: float
    choices: float | None = None
    ties: float | None = None


@dataclass(frozen=True, slots=True)
class OutputParity:
    """Outputs against PyTorch's with the same k: largest absolute difference, and cosine."""

    max_abs: float
    cosine: float


@dataclass(frozen=True, slots=True)
class PartTime:
    """Median time in ms per call of one part of the network, from the runtime's profile.

    `part` is `router`, `dispatch`, `experts` or `combine` of the MoE layer `layer`; `host` is the
    network around the layers and `runtime` the time between nodes, both without a layer.
    """

    layer: str | None
    part: str
    ms: float


@dataclass(frozen=True, slots=True)
class ClassChange:
    """A class with fewer correct answers than in the unmodified model: `right` of `n` inputs."""

    label: int
    n: int
    untouched: int
    right: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one batch: operations (a multiply-add is two), and bytes to move once."""

    operations: float
    int8_operations: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Row:
    """One engine with one k at one batch size, for a language model in one phase.

    In the `phase` prefill or decode, a call computes `tokens` new tokens of each input after `past`
    tokens in its cache; `tokens_per_s` counts the new tokens of all inputs.

    `scope` is what the latency includes: `gpu` (device time) or `end-to-end` (array in memory to
    array); `device_ms` is the GPU's own time for a call by CUDA events around the computation, for
    engines that report it. `limit_ms` is the minimum time that the machine needs for its `work`
    (`measure.roofline`), and `no_limit` is why it is unknown. `throughput` is inputs per second.
    `peak_memory_mb` is the largest resident set of a process that opens the engine and runs batches
    of this size, `runtime_memory_mb` that of the process before it opened anything. `disk_bytes` is
    the size of the graph with its weights, or of the checkpoint. `losing` has up to
    `MAX_LOSING_CLASSES` classes that lose most. `computed_in` is the type of the matrix products,
    for engines that report it, and `no_cuda_graph` why a runtime with CUDA graphs did not replay
    one. A failed row has `error` and no numbers, except for the `parity` of wrong outputs.

    `bundle` names the bundle of the measured graph; if `apart`, the row is named after it, because
    another bundle's row is otherwise the same or because it computes an edited model.
    `graph_sha256` is the hash of the graph (`graph_hash`). `deploy` has the arguments of the
    command that exports the graph again or, for a bundle, runs it, without the model and its
    settings. `node` names the machine of a cluster on which the row was timed; the protocol's
    `nodes` have the environment of each. `point` describes the layers if k does not: a search
    may drop experts. In a hierarchy, `levels` are the experts of each level and `k_levels` how many
    of them are kept; both are empty if layers differ.
    """

    engine: str
    k: int
    experts: int
    batch: int
    model: str = ""
    provider: str | None = None
    precision: str = "fp32"
    lowering: str | None = None
    scope: str = "end-to-end"
    latency_ms: Latency | None = None
    device_ms: Latency | None = None
    work: Workload | None = None
    limit_ms: float | None = None
    no_limit: str | None = None
    throughput: float | None = None
    peak_memory_mb: float | None = None
    runtime_memory_mb: float | None = None
    disk_bytes: int | None = None
    accuracy: Accuracy | None = None
    losing: tuple[ClassChange, ...] = ()
    perplexity: Perplexity | None = None
    regression: Regression | None = None
    routing: RoutingAgreement | None = None
    parity: OutputParity | None = None
    parts: tuple[PartTime, ...] = ()
    error: str | None = None
    phase: PhaseName | None = None
    tokens: int | None = None
    past: int | None = None
    tokens_per_s: float | None = None
    computed_in: str | None = None
    no_cuda_graph: str | None = None
    node: str | None = None
    point: str | None = None
    bundle: str | None = None
    apart: bool = False
    levels: tuple[int, ...] = ()
    k_levels: tuple[int, ...] = ()
    graph_sha256: str | None = None
    deploy: tuple[str, ...] = ()

    @property
    def is_reference(self) -> bool:
        """Whether this is the unmodified PyTorch model on the CPU, which every file has."""
        return self.engine == PYTORCH_EAGER and not self.on_gpu

    def k_of_n(self, separator: str = "/") -> str:
        """Returns k and the experts, in a hierarchy those of each level: `4/16`, `2·1 of 5·3`."""
        if self.levels and self.k_levels:
            return f"{by_level(self.k_levels)}{separator}{by_level(self.levels)}"
        return f"{self.k}{separator}{self.experts}"

    @property
    def sizes(self) -> str:
        """The batch size and the phase as text: `batch 1, decode`."""
        return f"batch {self.batch}" if self.phase is None else f"batch {self.batch}, {self.phase}"

    @property
    def same_experts(self) -> float | None:
        """The share of samples, or of tokens' choices, with the same experts as in PyTorch."""
        if self.routing is None:
            return None
        return self.routing.exact if self.routing.choices is None else self.routing.choices

    @property
    def on_gpu(self) -> bool:
        return self.provider not in (None, "cpu")

    @property
    def median_ms(self) -> float | None:
        return None if self.latency_ms is None else self.latency_ms.median

    @property
    def over_limit(self) -> float | None:
        """The median time divided by `limit_ms`; on a GPU, the GPU's own time, if known."""
        latency = self.device_ms or self.latency_ms
        return None if latency is None or not self.limit_ms else latency.median / self.limit_ms

    @property
    def quality(self) -> Accuracy | Perplexity | Regression | None:
        """The quality of the outputs, if the inputs have labels."""
        return self.accuracy or self.perplexity or self.regression

    @property
    def kept(self) -> float | None:
        """The ratio to the unmodified model's quality: accuracy, perplexity or R²."""
        return None if self.quality is None else self.quality.retention

    @property
    def kept_interval(self) -> Interval | None:
        return None if self.quality is None else self.quality.retention_interval

    @property
    def samples(self) -> tuple[int, str]:
        """The number of inputs, or tokens, on which the quality was measured."""
        if isinstance(self.quality, Accuracy | Regression):
            return self.quality.n, "inputs"
        return (0 if self.quality is None else self.quality.tokens), "tokens"

    @property
    def identity(self) -> tuple[object, ...]:
        """The key of this row in a file."""
        return (
            *(self.model, self.engine, self.provider or "cpu", self.precision, self.lowering),
            *(self.k, self.experts, self.batch, self.phase, self.tokens, self.past, self.point),
            None if self.bundle == self.model else self.bundle,
        )


@dataclass(frozen=True, slots=True)
class BundleInfo:
    """A measured bundle: its name in the rows, its folder, and whether k is an input."""

    name: str
    path: str
    takes_k: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A measured model: its name, family, source, hash and size.

    `kind` is the kind of its MoE layers: soft-moe, mumoe or experts. `bundles` are those measured.
    """

    name: str
    family: str = ""
    source: str = ""
    parameters: int | None = None
    sha256: str = ""
    kind: str = ""
    bundles: tuple[BundleInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Absent:
    """An engine that was not measured, and why."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Results:
    """All results of a benchmark, with everything needed to judge and repeat it.

    `analyses` has further findings about the models, by name, as plain data.
    """

    models: tuple[ModelInfo, ...]
    rows: tuple[Row, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    created: str = ""
    absent: tuple[Absent, ...] = ()
    analyses: dict[str, Any] = field(default_factory=dict)

    def of_model(self, name: str) -> tuple[Row, ...]:
        """Returns the rows of one model, in the order in which they were measured."""
        return tuple(row for row in self.rows if row.model == name)

    @property
    def disturbance(self) -> str:
        """A sentence on disturbance by other processes; empty if there was none."""
        largest = max((wait["share"] for wait in self.protocol.get("waited", ())), default=0.0)
        if largest < DISTURBED:
            return ""
        return (
            "Other programs slowed these measurements down: threads spent up to "
            f"{largest:.0%} of their time waiting for a core. Measure again on a quiet machine."
        )


def as_json(results: Results) -> dict[str, Any]:
    """Returns the content of `results.json` as plain data."""
    models = [asdict(model) for model in results.models]
    body = {
        "schema": SCHEMA,
        "created": results.created,
        "command": results.command,
        "environment": results.environment,
        "model": models[0] if models else None,
        "models": models,
        "protocol": results.protocol,
        "absent": [asdict(engine) for engine in results.absent],
        "rows": [asdict(row) for row in results.rows],
    }
    return body | ({"analyses": results.analyses} if results.analyses else {})


def to_json(results: Results) -> str:
    """Returns the text of `results.json`."""
    return json.dumps(as_json(results), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def write(results: Results, path: Path) -> None:
    """Writes `results.json` atomically; raises OutputError on failure."""
    write_text(to_json(results), path)


# The parts of a file that are validated; environment and protocol may contain more.


class _Cpu(TypedDict, total=False):
    model: str


class _Gpu(TypedDict):
    name: str


class _Environment(TypedDict, total=False):
    packages: dict[str, str | None] | None
    threads: int | None
    cpu: _Cpu | None
    gpu: list[_Gpu] | None


class _Waited(TypedDict):
    share: float


class _Rates(TypedDict, total=False):
    stream_gb_s: float | None
    matmul_gflop_s: float | None
    int8_gop_s: float | None
    bf16_gflop_s: float | None


class _Protocol(TypedDict, total=False):
    rounds: int
    round_s: float
    warmup: int
    samples: int
    labelled: bool
    rates: list[_Rates]
    waited: list[_Waited]


@dataclass(frozen=True, slots=True)
class _Header:
    schema: int
    environment: _Environment
    protocol: _Protocol | None = None


def read(path: Path) -> Results:
    """Returns the results in a file. Raises ResultsError, naming the file and the field."""
    try:
        body = read_document(path, "json", ResultsError, bits=LARGE_BITS)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read ({error.strerror})") from error
    return _results(body, str(path))


def from_json(text: str, *, name: str = "results.json") -> Results:
    """Returns the results in JSON text; ResultsError names the field that is missing or wrong."""
    return _results(document(text, "json", name, ResultsError, LARGE_BITS), name)


def _results(body: Any, name: str) -> Results:
    try:
        json.dumps(body, allow_nan=False)  # refuses NaN, which JSON lacks but Python reads
    except ValueError as error:
        raise ResultsError(f"{name}: not valid JSON: {error}") from error
    schema = from_data(_Header, body, name).schema
    if schema != SCHEMA:
        raise ResultsError(
            f"{name}: schema {schema}, but this version reads schema {SCHEMA}",
            hint="measure again, or use the version of moexport that wrote the file",
        )
    if "models" not in body and "model" in body:
        body["models"] = [body["model"]]
    results = from_data(Results, body, name)
    for index, row in enumerate(results.rows):
        field_of_row = f"{name}: field rows[{index}]"
        if not 1 <= row.k <= row.experts:
            raise ResultsError(
                f"{field_of_row}.k is {row.k}, but the model has {row.experts} experts"
            )
        if row.median_ms is not None and row.median_ms <= 0:
            raise ResultsError(f"{field_of_row}.latency_ms.median is {row.median_ms}")
        if row.latency_ms is not None and not row.latency_ms.rounds:
            raise ResultsError(f"{field_of_row}.latency_ms.rounds is empty")
    return results
