"""`results.json`: what a benchmark found, as data that reports and figures are views of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..common.documents import LARGE_BITS, document, from_data, read_document
from ..common.timing import Latency
from ..common.writing import write_text
from ..errors import ResultsError
from .engines import PYTORCH_EAGER

SCHEMA = 1
MOST_LOSING = 10
DISTURBED = 0.1  # from this share of waiting for a core on, times are those of a shared machine

TOKEN_ROUTED = "experts"
"""The kind of layers whose tokens are routed, as `ModelInfo` has it."""

PhaseName = Literal["decode", "prefill"]
"""What a call of a language model does: one new token of each input, or a whole prompt."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a share or ratio lies with 95% confidence, given the samples that were seen."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Top-1 accuracy on `n` labelled samples, 0..1, and its ratio to the untouched PyTorch model.

    `top5` is None for models of five classes or fewer; `retention` where the untouched model gets
    nothing right.
    """

    top1: float
    retention: float | None
    n: int
    top5: float | None = None
    top1_interval: Interval | None = None
    top5_interval: Interval | None = None
    retention_interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood of the next token, over `tokens` tokens.

    `retention` is the untouched PyTorch model's perplexity divided by this one: 1 keeps all, less
    is worse. Both intervals are over sequences, the second over their differences.
    """

    value: float
    retention: float
    tokens: int
    interval: Interval | None = None
    retention_interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class RoutingAgreement:
    """How far the chosen experts are those of PyTorch's Algorithm 1 with the same k, 0..1.

    `jaccard` is the mean over samples and layers of |A∩B| / |A∪B|; `exact` the share of samples
    whose sets are equal in every layer. Where each token has a choice of its own the samples are
    tokens, and `choices` is the share of choices, of a token in a layer, with the same set. The
    share `ties` of them is of scores closer than rounding: those are left out, or taken for equal.
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
    """Median milliseconds per call of one part of the network, by the runtime's own profile.

    `part` is `router`, `dispatch`, `experts` or `combine` of the MoE layer `layer`; `host` is the
    network around the layers and `runtime` what lies between the nodes, both without a layer.
    """

    layer: str | None
    part: str
    ms: float


@dataclass(frozen=True, slots=True)
class ClassChange:
    """A class of which fewer inputs are right than in the untouched model: of `n`, `right`."""

    label: int
    n: int
    untouched: int
    right: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What one batch asks of a machine: operations (a multiply-add is two), bytes to move once."""

    operations: float
    int8_operations: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Row:
    """One engine with one k at one batch size, and of a language model in one phase.

    In the `phase` prefill or decode a call computes `tokens` new tokens of each input, after `past`
    in its cache: `tokens_per_s` in a second, of all inputs together.

    `scope` says what the latency holds: `gpu` (device time) or `end-to-end` (array in memory to
    array); `device_ms` is the GPU's own time for a call by CUDA events around the computation, for
    engines that tell it. `joules` is the energy of a call, where the machine tells it. `limit_ms`
    is the least time that the machine needs for its `work` (`measure.roofline`), and `no_limit`
    says why that is not known. `throughput` is inputs per second. `peak_memory_mb` is the largest
    resident set of a process that opens the engine and runs batches of this size,
    `runtime_memory_mb` what that process held before it opened anything. `disk_bytes` are those of
    the graph and its weights, or of the checkpoint. `losing` are the classes that lose most, at
    most `MOST_LOSING`. `computed_in` is what the matrix products were computed in, for engines that
    tell it. A row that failed has `error` and no numbers, but for the `parity` of wrong outputs.
    `node` names the machine of a cluster on which the row was timed; the protocol's `nodes` tell
    the environment of each. `point` says what each layer is where k alone does not: of a search,
    whose layers may have fewer experts.
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
    joules: float | None = None
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
    routing: RoutingAgreement | None = None
    parity: OutputParity | None = None
    parts: tuple[PartTime, ...] = ()
    error: str | None = None
    phase: PhaseName | None = None
    tokens: int | None = None
    past: int | None = None
    tokens_per_s: float | None = None
    computed_in: str | None = None
    node: str | None = None
    point: str | None = None

    @property
    def is_reference(self) -> bool:
        """Whether this is the untouched PyTorch model on the CPU, which every file has."""
        return self.engine == PYTORCH_EAGER and not self.on_gpu

    @property
    def sizes(self) -> str:
        """The batch size and the phase in words: `batch 1, decode`."""
        return f"batch {self.batch}" if self.phase is None else f"batch {self.batch}, {self.phase}"

    @property
    def same_experts(self) -> float | None:
        """The share of samples with PyTorch's experts, of tokens' choices where those choose."""
        if self.routing is None:
            return None
        return self.routing.exact if self.routing.choices is None else self.routing.choices

    @property
    def on_gpu(self) -> bool:
        """Whether it ran on a GPU."""
        return self.provider not in (None, "cpu")

    @property
    def median_ms(self) -> float | None:
        """The median of its latency."""
        return None if self.latency_ms is None else self.latency_ms.median

    @property
    def over_limit(self) -> float | None:
        """The median time over the least time that the machine needs."""
        if self.median_ms is None or not self.limit_ms:
            return None
        return self.median_ms / self.limit_ms

    @property
    def kept(self) -> float | None:
        """What is kept of the untouched model's quality: of its accuracy or its perplexity."""
        if self.accuracy is not None:
            return self.accuracy.retention
        return None if self.perplexity is None else self.perplexity.retention

    @property
    def kept_interval(self) -> Interval | None:
        """Where `kept` lies with 95% confidence."""
        if self.accuracy is not None:
            return self.accuracy.retention_interval
        return None if self.perplexity is None else self.perplexity.retention_interval

    @property
    def samples(self) -> tuple[int, str]:
        """How many inputs, or tokens, its quality was taken on."""
        if self.accuracy is not None:
            return self.accuracy.n, "inputs"
        return (0 if self.perplexity is None else self.perplexity.tokens), "tokens"

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells this row from all others of a file."""
        return (
            *(self.model, self.engine, self.provider or "cpu", self.precision, self.lowering),
            *(self.k, self.experts, self.batch, self.phase, self.tokens, self.past, self.point),
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that was measured: its name, family, where it came from, its hash and its size.

    `kind` is that of its MoE layers: soft-moe, mumoe or experts.
    """

    name: str
    family: str = ""
    source: str = ""
    parameters: int | None = None
    sha256: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Absent:
    """An engine that was not measured, and why."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Results:
    """Everything a benchmark found, and what is needed to judge it and to run it again.

    `analyses` holds further findings about the models, each under its name, as plain data.
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
        """The rows of one model, in the order in which they were measured."""
        return tuple(row for row in self.rows if row.model == name)

    @property
    def disturbance(self) -> str:
        """A sentence on how far other work disturbed the rows; empty where it did not."""
        most = max((wait["share"] for wait in self.protocol.get("waited", ())), default=0.0)
        if most < DISTURBED:
            return ""
        return (
            "Other work on the machine disturbed these times: threads waited for a core up to "
            f"{most:.0%} of the time that they wanted one. Measure again on a quiet machine."
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
    """Writes `results.json` whole or not at all; OutputError where it cannot be."""
    write_text(to_json(results), path)


# What is read of a file beside what `Results` needs; environment and protocol may hold more.


@dataclass(frozen=True, slots=True)
class _Cpu:
    model: str = ""


@dataclass(frozen=True, slots=True)
class _Gpu:
    name: str


@dataclass(frozen=True, slots=True)
class _Environment:
    packages: dict[str, str | None] | None = None
    threads: int | None = None
    cpu: _Cpu | None = None
    gpu: tuple[_Gpu, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Waited:
    share: float


@dataclass(frozen=True, slots=True)
class _Rates:
    stream_gb_s: float | None = None
    matmul_gflop_s: float | None = None
    int8_gop_s: float | None = None
    bf16_gflop_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Protocol:
    rounds: int = 0
    round_s: float = 0.0
    warmup: int = 0
    samples: int = 0
    labelled: bool = False
    rates: tuple[_Rates, ...] = ()
    waited: tuple[_Waited, ...] = ()


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
    """Returns the results in a text; ResultsError names the field that is missing or wrong."""
    return _results(document(text, "json", name, ResultsError, LARGE_BITS), name)


def _results(body: Any, name: str) -> Results:
    try:
        json.dumps(body, allow_nan=False)  # which JSON does not have, though Python reads it
    except ValueError as error:
        raise ResultsError(f"{name}: not valid JSON: {error}") from error
    schema = from_data(_Header, body, name).schema
    if schema != SCHEMA:
        raise ResultsError(
            f"{name}: schema {schema}, and this version reads schema {SCHEMA}",
            hint="measure again, or use the version of moexport that wrote the file",
        )
    if "models" not in body and "model" in body:
        body["models"] = [body["model"]]
    results = from_data(Results, body, name)
    for index, row in enumerate(results.rows):
        field_of_row = f"{name}: field rows[{index}]"
        if not 1 <= row.k <= row.experts:
            raise ResultsError(
                f"{field_of_row}.k is {row.k}, and the model has {row.experts} experts"
            )
        if row.median_ms is not None and row.median_ms <= 0:
            raise ResultsError(f"{field_of_row}.latency_ms.median is {row.median_ms}")
        if row.latency_ms is not None and not row.latency_ms.rounds:
            raise ResultsError(f"{field_of_row}.latency_ms.rounds is empty")
    return results
