"""`results.json`: what a benchmark found, as data that reports and figures are views of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from ..errors import MoexportError
from .timing import Latency

SCHEMA = 1

PYTORCH_EAGER = "pytorch-eager"
PYTORCH_ALGORITHM_2 = "pytorch-algorithm-2"
ONNXRUNTIME = "onnxruntime"

T = TypeVar("T")


class ResultsError(MoexportError):
    """A results file that cannot be read, or that is not one."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Top-1 accuracy on `n` labelled samples, 0..1, and its ratio to the untouched PyTorch model.

    `retention` is None where the untouched model gets nothing right.
    """

    top1: float
    retention: float | None
    n: int


@dataclass(frozen=True, slots=True)
class RoutingAgreement:
    """How far the chosen experts are those of PyTorch's Algorithm 1 with the same k, 0..1.

    `jaccard` is the mean over samples and layers of |A∩B| / |A∪B|; `exact` the share of samples
    whose sets are equal in every layer.
    """

    jaccard: float
    exact: float


@dataclass(frozen=True, slots=True)
class Parity:
    """Outputs against PyTorch's with the same k: largest absolute difference, and cosine."""

    max_abs: float
    cosine: float


@dataclass(frozen=True, slots=True)
class Row:
    """One engine with one k at one batch size.

    `scope` says what the latency holds: `gpu` (device time) or `end-to-end` (host array to host
    array). `limit_ms` is the least time that the machine needs for it (`bench.roofline`).
    `throughput` is inputs per second. A row that failed has `error` and no numbers.
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
    limit_ms: float | None = None
    throughput: float | None = None
    peak_memory_mb: float | None = None
    accuracy: Accuracy | None = None
    routing: RoutingAgreement | None = None
    parity: Parity | None = None
    error: str | None = None

    @property
    def is_reference(self) -> bool:
        """Whether this is the untouched PyTorch model."""
        return self.engine == PYTORCH_EAGER


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that was measured: its name, family, the path it came from, and its size."""

    name: str
    family: str = ""
    source: str = ""
    parameters: int | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """Everything a benchmark found, and what is needed to judge it and to run it again."""

    models: tuple[ModelInfo, ...]
    rows: tuple[Row, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    created: str = ""

    def of_model(self, name: str) -> tuple[Row, ...]:
        """The rows of one model, in the order in which they were measured."""
        return tuple(row for row in self.rows if row.model == name)


def to_json(results: Results) -> str:
    """Returns the text of `results.json`."""
    models = [asdict(model) for model in results.models]
    body = {
        "schema": SCHEMA,
        "created": results.created,
        "command": results.command,
        "environment": results.environment,
        "model": models[0] if models else None,
        "models": models,
        "protocol": results.protocol,
        "rows": [asdict(row) for row in results.rows],
    }
    return json.dumps(body, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def write(results: Results, path: Path) -> None:
    """Writes `results.json` whole or not at all: a temporary file beside it is renamed."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(to_json(results), encoding="utf-8")
    partial.replace(path)


def read(path: Path) -> Results:
    """Returns the results in a file. Raises ResultsError, naming the file and the field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(
            f"{path}: cannot be read ({error})", hint="give a results.json that `bench` wrote"
        ) from error
    return from_json(text, name=str(path))


def from_json(text: str, *, name: str = "results.json") -> Results:
    """Returns the results in a text; keys it does not know are passed over.

    Raises ResultsError that names the file and the field that is missing or of the wrong type.
    """
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise ResultsError(f"{name}: not JSON ({error})") from error
    root = _Reader(name, "", body)
    schema = root.get("schema", int)
    if schema != SCHEMA:
        raise ResultsError(
            f"{name}: schema {schema}, and this version reads schema {SCHEMA}",
            hint="measure again, or use the version of moexport that wrote the file",
        )
    models = root.items("models") if "models" in root.body else [root.child("model")]
    return Results(
        models=tuple(_model(model) for model in models),
        rows=tuple(_row(row) for row in root.items("rows")),
        environment=root.get("environment", dict),
        protocol=root.get("protocol", dict, default={}),
        command=root.get("command", str, default=""),
        created=root.get("created", str, default=""),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """A JSON object and the path that leads to it, for messages."""

    file: str
    path: str
    body: Any

    def __post_init__(self) -> None:
        if not isinstance(self.body, dict):
            where = self.path or "the file"
            raise ResultsError(f"{self.file}: {where} is not an object but {_kind(self.body)}")

    def where(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str, kind: type[T], *, default: T | None = None) -> T:
        """The value under `key`; raises when it is missing without a default, or of no use."""
        if key not in self.body:
            if default is None:
                raise ResultsError(f"{self.file}: field {self.where(key)} is missing")
            return default
        return self._checked(key, self.body[key], kind)

    def optional(self, key: str, kind: type[T]) -> T | None:
        """The value under `key`, or None where it is null or missing."""
        value = self.body.get(key)
        return None if value is None else self._checked(key, value, kind)

    def _checked(self, key: str, value: Any, kind: type[T]) -> T:
        # JSON has one kind of number, and bool is an int to Python.
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ResultsError(
                f"{self.file}: field {self.where(key)} should be {_NAMES[kind]}, not {_kind(value)}"
            )
        return value

    def child(self, key: str) -> _Reader:
        return _Reader(self.file, self.where(key), self.get(key, dict))

    def optional_object(self, key: str, build: Callable[[_Reader], T]) -> T | None:
        return None if self.body.get(key) is None else build(self.child(key))

    def items(self, key: str) -> list[_Reader]:
        values = self.get(key, list)
        return [_Reader(self.file, f"{self.where(key)}[{i}]", v) for i, v in enumerate(values)]


_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "an object",
    list: "a list",
}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    return _NAMES.get(type(value), type(value).__name__)


def _model(reader: _Reader) -> ModelInfo:
    return ModelInfo(
        name=reader.get("name", str),
        family=reader.get("family", str, default=""),
        source=reader.get("source", str, default=""),
        parameters=reader.optional("parameters", int),
    )


def _latency(reader: _Reader) -> Latency:
    rounds = []
    for index, value in enumerate(reader.get("rounds", list)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ResultsError(
                f"{reader.file}: field {reader.where('rounds')}[{index}] should be a number, "
                f"not {_kind(value)}"
            )
        rounds.append(float(value))
    plain = {
        f.name: reader.get(f.name, float) for f in fields(Latency) if f.name not in {"n", "rounds"}
    }
    return Latency(n=reader.get("n", int), rounds=tuple(rounds), **plain)


def _accuracy(reader: _Reader) -> Accuracy:
    return Accuracy(
        reader.get("top1", float), reader.optional("retention", float), reader.get("n", int)
    )


def _routing(reader: _Reader) -> RoutingAgreement:
    return RoutingAgreement(reader.get("jaccard", float), reader.get("exact", float))


def _parity(reader: _Reader) -> Parity:
    return Parity(reader.get("max_abs", float), reader.get("cosine", float))


def _row(reader: _Reader) -> Row:
    row = Row(
        engine=reader.get("engine", str),
        k=reader.get("k", int),
        experts=reader.get("experts", int),
        batch=reader.get("batch", int),
        model=reader.get("model", str, default=""),
        provider=reader.optional("provider", str),
        precision=reader.get("precision", str),
        lowering=reader.optional("lowering", str),
        scope=reader.get("scope", str),
        latency_ms=reader.optional_object("latency_ms", _latency),
        throughput=reader.optional("throughput", float),
        peak_memory_mb=reader.optional("peak_memory_mb", float),
        accuracy=reader.optional_object("accuracy", _accuracy),
        routing=reader.optional_object("routing", _routing),
        parity=reader.optional_object("parity", _parity),
        error=reader.optional("error", str),
    )
    if not 1 <= row.k <= row.experts:
        raise ResultsError(
            f"{reader.file}: field {reader.where('k')} is {row.k}, and the model has "
            f"{row.experts} experts"
        )
    return row
