"""`manifest.json`: the contents of a bundle, their origin and the results of checks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from msgspec import Meta

from ...common.documents import from_data, read_document, read_json
from ...common.files import sha256
from ...common.latency import Latency
from ...common.locations import AnyPlace, has_file, local_files
from ...common.registry import left_out
from ...common.text import by_level
from ...errors import BundleError
from ...graphs.sizes import DEFAULT_BATCH, AxisRange, parse_range
from ...graphs.targets import TARGETS

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

MANIFEST_FILE = "manifest.json"
SCHEMA = 1
MAIN_GRAPH = "model.onnx"

METADATA = "moexport"
"""The key in a graph's metadata under which it describes itself."""

DIGEST = "sha256"
"""The key of the manifest's own hash."""

OPTIONAL = (
    *("levels", "k_levels", "trained", "limits"),
    *("implied", "below", "default", "batches", "groups_of"),
)
"""Optional keys of layers, graphs and tensor specs."""

Count = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check in `verify`; `hint` is a remedy if the bundle is not at fault."""

    name: str
    passed: bool
    detail: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The origin of the model: path, SHA-256 of its weights, family and configuration."""

    path: str
    sha256: str
    family: str
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """A layer's plan (`graphs.lowerings.base.LayerPlan`) in the manifest.

    `k` is None if it is a graph input.
    """

    name: str
    kind: str
    experts: Count
    slots: int
    dim: int
    hidden: int
    k: Count | None
    lowering: str
    reason: str
    selected: str | None
    """The value of `model.onnx` with the chosen experts, or with the kept coefficients of a muMoE
    layer's first level; None if all are kept."""
    levels: list[int] = field(default_factory=list)
    """The experts of each level of a muMoE layer; empty for Soft MoE."""
    precision: str = "fp32"
    precision_reason: str = ""
    k_levels: list[Count] = field(default_factory=list)
    """The k of each level if a share of each was requested; otherwise each keeps k, or all."""
    trained: Count | None = None
    """The number of trained experts, if some of them were dropped or merged."""

    @property
    def kept(self) -> str:
        """Its k as text; for a hierarchy, the k of each level: `2·2·1`."""
        if self.k is None:
            return "input"
        if len(self.levels) < 2:
            return str(self.k)
        return by_level(self.k_levels or [min(self.k, n) for n in self.levels])

    @property
    def of_experts(self) -> str:
        """Its number of experts as text; for a hierarchy, that of each level: `4·3·2`."""
        return by_level(self.levels) if len(self.levels) > 1 else str(self.experts)


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One ONNX file: its lowerings by layer and its own parity.

    `batches` are the smallest and largest batch size of a graph in a bundle with several graphs;
    every graph accepts every size.
    """

    file: str
    lowerings: dict[str, str]
    selected: dict[str, str]
    parity: dict[str, Any] | None
    batches: list[int] = field(default_factory=list)


Dimension = Annotated[int, Meta(ge=1)] | str
"""A fixed size, the name of a dynamic axis (`batch`, `tokens`, `past`, `height`, `width`), or the
sum of two (`past + tokens`)."""

Default = Literal["ones", "positions", "empty", "zeros"]
"""The default of an input: ones, as for a mask without gaps; the position of each token in the
mask; a tensor with an empty `past` axis; or zeros, for strengths without effect."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, numpy dtype name and shape of an input or output of a model or a graph.

    `limits` are the largest sizes of named axes; arrays may omit the axis `implied`, which then has
    size 1. Values of an integer input are 0 … `below` − 1. `default` describes an optional input;
    without it the input is required. Inputs are computed together in groups of `groups_of`, so
    batch sizes are multiples of it.
    """

    name: str
    dtype: str
    shape: Annotated[tuple[Dimension, ...], Meta(min_length=1)]
    limits: dict[str, Count] = field(default_factory=dict)
    implied: str | None = None
    below: Count | None = None
    default: Default | None = None
    groups_of: Count | None = None

    @property
    def dynamic_axes(self) -> tuple[str, ...]:
        """Names of the dynamic axes, in order."""
        return tuple(size for size in self.shape if isinstance(size, str))

    def concrete(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape with dynamic axes, and sums of them, replaced by their `sizes`."""
        return tuple(
            size
            if isinstance(size, int)
            else sum(int(a) if a.isdecimal() else sizes[a] for a in size.split(" + "))
            for size in self.shape
        )

    def within(self, fixed: Mapping[str, int]) -> tuple[Dimension, ...]:
        """Returns the shape with the sizes of `fixed` axes filled in, also in sums: `past + 5`."""
        return tuple(
            size if isinstance(size, int) else axis_within(size, fixed) for size in self.shape
        )


def axis_within(axis: str, fixed: Mapping[str, int]) -> Dimension:
    """Returns a named axis, or a sum of axes, with the sizes of `fixed` axes filled in."""
    parts = [fixed.get(part, part) for part in axis.split(" + ")]
    if all(isinstance(part, int) for part in parts):
        return sum(map(int, parts))
    return " + ".join(map(str, parts))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Hash and size of one file."""

    sha256: str
    bytes: Annotated[int, Meta(ge=0)]

    @staticmethod
    def of(path: Path) -> FileRecord:
        """Returns the record of a file in its current state."""
        return FileRecord(sha256=sha256(path), bytes=path.stat().st_size)


@dataclass(frozen=True, slots=True)
class TimedLowering:
    """One lowering of a layer, and its time for one batch in milliseconds."""

    lowering: str
    latency_ms: Latency


@dataclass(frozen=True, slots=True)
class TunedLayers:
    """Layers of one shape and k, measured once: each candidate's latency, the fastest first.

    `layers` are their names and `k` the number kept, even if k is a graph input. `left_out` gives
    the reason for each possible lowering that was not timed. Without candidates there was nothing
    to compare, and `chosen` is the only one.
    """

    layers: Annotated[tuple[str, ...], Meta(min_length=1)]
    experts: int
    k: int
    batch: int
    tokens: int
    precision: str
    chosen: str
    candidates: tuple[TimedLowering, ...]
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tuning:
    """All measurements of `--lowering tune` for one export, and their conditions.

    `machine` is the CPU or GPU; `inputs` describes the layers' inputs.
    """

    machine: str
    provider: str
    runtime: str
    threads: int
    rounds: int
    inputs: str
    measured: tuple[TunedLayers, ...]

    def of(self, layer: str) -> TunedLayers:
        """Returns the measurements of a layer."""
        return next(group for group in self.measured if layer in group.layers)


class Fp32NodeRecord(TypedDict):
    """A node of the backbone that stayed in FP32, and why; `usual` ones do so in any model."""

    node: str
    op_type: str
    reason: str
    usual: bool


class Numbers(TypedDict, total=False):
    """The numeric types of a model (`quantization.precision.precision_record`)."""

    rest: str
    router: str
    io: str
    fp32_nodes: list[Fp32NodeRecord]
    usual_fp32_nodes: dict[str, int]
    form: str
    weights: str
    activations: str
    linears: dict[str, str | None]
    retention: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The complete record; `to_json` and `read` convert it to and from `manifest.json`."""

    moexport: str
    created: str
    source: SourceRecord
    layers: Annotated[list[LayerRecord], Meta(min_length=1)]
    graphs: Annotated[list[GraphRecord], Meta(min_length=1)]
    k: str
    target: str
    precision: str
    renormalize: bool
    opset: int
    batch: str
    inputs: Annotated[list[TensorSpec], Meta(min_length=1)]
    outputs: Annotated[list[TensorSpec], Meta(min_length=1)]
    parity: dict[str, Any] | None
    files: dict[str, FileRecord]
    environment: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    numbers: Numbers = field(default_factory=Numbers)
    engines: list[dict[str, Any]] = field(default_factory=list)
    edits: list[dict[str, Any]] = field(default_factory=list)
    """The edits (`edits.Edits.records`); empty if the model is as trained."""
    tokens: str = ""
    contract: dict[str, Any] = field(default_factory=dict)
    """The request, results and confirmation of `tune` (`Recipe.contract`); empty without a
    recipe."""
    tuning: Tuning | None = None
    """The measurements of `--lowering tune`; if there are none, an empty object in the file."""
    peak_memory_bytes: Count | None = None
    """The peak memory of a process that ran one input here; None if it was not measured."""
    answers: dict[str, Any] = field(default_factory=dict)
    """Accuracies of PyTorch and of the graphs on labelled data, the difference between PyTorch and
    the user's own model (`answers.Answers.record`), how often experts are chosen
    (`checks.choices`)."""
    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Additions of plugins' steps, by their names; only the plugins read them."""
    schema: int = SCHEMA

    @property
    def batches(self) -> AxisRange:
        """The batch sizes of the graphs."""
        size = self.inputs[0].shape[0]
        known = self.batch or DEFAULT_BATCH
        return parse_range(size if isinstance(size, int) else known, "--batch")

    @property
    def group_size(self) -> int:
        """The number of inputs that are computed together; batch sizes are multiples of it."""
        return self.inputs[0].groups_of or 1

    @property
    def experts(self) -> dict[str, int]:
        """The number of experts of each layer."""
        return {layer.name: layer.experts for layer in self.layers}

    def to_json(self) -> str:
        """Returns the manifest as indented JSON, `schema` first and its own hash last."""
        content = asdict(self)
        content["tuning"] = content["tuning"] or {}
        listed = ("layers", "graphs", "inputs", "outputs")
        for record in (record for key in listed for record in content[key]):
            for key in OPTIONAL:
                if key in record and not record[key]:
                    del record[key]
        for key in ("answers", "plugins", "peak_memory_bytes"):
            if not content[key]:
                del content[key]
        _remove_empty_counts(content)
        ordered = {"schema": content.pop("schema"), **content}
        ordered[DIGEST] = digest(ordered)
        return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Reads a bundle's manifest; raises `BundleError` if it is missing or invalid."""
        path = directory / MANIFEST_FILE
        content = _content(directory)
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise BundleError(
                f"{path}: schema {schema!r}, but this version reads schema {SCHEMA}",
                hint="use the version of moexport that wrote the bundle, or export again",
            )
        what = f"{path}: not a complete manifest"
        content["tuning"] = content.get("tuning") or None
        manifest = from_data(Manifest, content, what, error=BundleError)
        for problem in manifest._problems():
            raise BundleError(f"{what}: {problem}")
        return manifest

    def check_target(self, directory: Path) -> None:
        """Raises `BundleError` if the manifest's target is unknown here."""
        if self.target not in TARGETS:
            raise BundleError(
                f"{directory / MANIFEST_FILE}: target is {self.target!r}, which no installed "
                "package provides",
                hint="install the plugin that runs it, or the version of moexport that wrote it; "
                f"available: {', '.join(TARGETS.names)}{left_out()}",
            )

    def graph_for(self, batch: int) -> GraphRecord:
        """Returns the graph for a batch size: the main one, or the closest of several."""

        def distance(graph: GraphRecord) -> int:
            first, last = graph.batches or (1, batch)
            return max(first - batch, batch - last, 0)

        main = self.graphs[0]
        return min((g for g in self.graphs if g.batches), key=distance) if main.batches else main

    def _problems(self) -> Iterator[str]:
        """Yields why values of the correct types are invalid: no export writes them."""
        for name in self.files:
            if not all(map(is_plain_name, name.split("/"))):
                yield f"{name!r} is not the name of a file in the bundle's folder"
        for graph in self.graphs:
            if not is_plain_name(graph.file):
                yield f"{graph.file!r} is not the name of a file in the bundle's folder"
            span = graph.batches
            if span and not (len(span) == 2 and 1 <= span[0] <= span[1]):
                yield f"{graph.file} cannot be for batches of {span}"
        for layer in self.layers:
            if (layer.k or 1) > layer.experts:
                yield f"layer {layer.name} has {layer.experts} experts and a k of {layer.k}"
            if layer.k_levels and len(layer.k_levels) != len(layer.levels):
                yield f"layer {layer.name} has {len(layer.levels)} levels, but a k of {layer.kept}"


def is_plain_name(name: str) -> bool:
    """Whether a name refers to a file in the same folder on every system."""
    return bool(name) and name not in (".", "..") and not re.search(r"[/\\:\x00]", name)


def local_bundle(where: AnyPlace) -> Path:
    """Returns a bundle's folder; for a URL, that of a copy of the files in its manifest."""

    def listed(folder: Path) -> Iterable[str]:
        return Manifest.read(folder).files if (folder / MANIFEST_FILE).is_file() else ()

    return local_files(where, listed, MANIFEST_FILE)


def is_bundle(where: AnyPlace) -> bool:
    """Whether a path or URL is that of a folder with a manifest."""
    return has_file(where, MANIFEST_FILE)


def _content(directory: Path) -> Any:
    path = directory / MANIFEST_FILE
    if not directory.is_dir():
        raise BundleError(
            f"{directory}: there is no such folder",
            hint="give a folder that `moexport export` wrote",
        )
    if not path.is_file():
        raise BundleError(
            f"{directory}: not a bundle (there is no {MANIFEST_FILE})",
            hint="a bundle is the folder that `moexport export -o` wrote",
        )
    try:
        return read_document(path, "json", BundleError)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error})") from error


def _remove_empty_counts(content: Any) -> None:
    """Removes empty histograms of latencies, which older bundles do not have."""
    if isinstance(content, dict):
        if content.get("counts") == ():
            del content["counts"]
        for value in content.values():
            _remove_empty_counts(value)
    elif isinstance(content, list | tuple):
        for value in content:
            _remove_empty_counts(value)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A graph's record of a MoE layer: experts, k (`k` for a graph input) and lowering."""

    n: int
    k: int | str
    lowering: str


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """A graph's description of itself in its metadata.

    It has the layers, the float type, the defaults of optional inputs, the joint limits of axes
    (`past + tokens`), and the number of inputs that are computed together. `sizes` are the smallest
    and largest size of an axis, if the network takes a different code path beyond them.
    """

    layers: dict[str, LayerFacts]
    floats: str = "fp32"
    defaults: dict[str, Default] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    groups_of: Count | None = None
    sizes: dict[str, tuple[Count, Count | None]] = field(default_factory=dict)

    @staticmethod
    def read(text: str, file: str) -> GraphFacts:
        """Reads the metadata entry `METADATA` of a graph; raises `BundleError` if it is invalid."""
        return read_json(GraphFacts, text, f"{file}: metadata", error=BundleError)

    @staticmethod
    def of(model: ModelProto, file: str) -> GraphFacts | None:
        """Returns a graph's description of itself; None if moexport did not write it."""
        entries = [entry.value for entry in model.metadata_props if entry.key == METADATA]
        return GraphFacts.read(entries[0], file) if entries else None


def external_files(model: ModelProto) -> set[str]:
    """Returns the names of the files with a graph's external weights.

    These may also belong to attributes of nodes, subgraphs, functions and sparse tensors.
    """
    return {
        entry.value
        for tensor in tensors_in(model)
        for entry in tensor.external_data
        if entry.key == "location"
    }


def nodes_in(graph: GraphProto) -> Iterator[NodeProto]:
    """Yields the nodes of a graph and of its branches."""
    return (node for part in graphs_in(graph) for node in part.node)


def graphs_in(graph: GraphProto) -> Iterator[GraphProto]:
    """Yields a graph, then its branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_in(attribute.g)


def tensors_in(message: Message) -> Iterator[TensorProto]:
    """Yields all tensors within an ONNX message, found by traversing all fields."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for child in (value,) if hasattr(value, "DESCRIPTOR") else value:
                yield from tensors_in(child)


def digest(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a manifest's content without its own hash, whatever its layout."""
    rest = {key: value for key, value in content.items() if key != DIGEST}
    # Parsed again, so that JSON's conversions (number keys to text) do not change the hash.
    canonical = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_as_written(directory: Path) -> bool:
    """Whether a bundle's manifest has its original content, whatever its layout."""
    content = _content(directory)
    return bool(content.get(DIGEST) == digest(content))
