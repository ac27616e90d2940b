"""`manifest.json`: what a bundle holds, where it came from and how well it was checked."""

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
from ...common.locations import AnyPlace, holds, local_files
from ...common.registry import left_out
from ...common.timing import Latency
from ...errors import BundleError
from ...graphs.targets import TARGETS

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import ModelProto, TensorProto

MANIFEST_FILE = "manifest.json"
SCHEMA = 1

MAIN_GRAPH = "model.onnx"

METADATA = "moexport"
"""The key of what a graph says of itself, in its metadata."""

DIGEST = "sha256"
"""The key of the manifest's own hash."""

OPTIONAL = ("levels", "limits", "implied", "below", "default", "batches", "groups_of")
"""Keys of layers, graphs and ports that are left out where there is nothing to say."""


Count = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that `verify` looked at; `hint` is what to do where the bundle is not to blame."""

    name: str
    passed: bool
    detail: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Where the model came from: path, SHA-256 of its weights, family and configuration."""

    path: str
    sha256: str
    family: str
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One MoE layer as exported: `kind` as its spec says; `k` is None for a graph input."""

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
    """The value of `model.onnx` that holds the chosen experts, or the kept coefficients of a muMoE
    layer's first level; None where all are kept."""
    levels: list[int] = field(default_factory=list)
    """Experts of each level of a muMoE layer; empty for Soft MoE."""
    precision: str = "fp32"
    precision_reason: str = ""


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One ONNX file: its lowerings by layer and its own parity.

    `batches` are the first and the last size of the batch that it is for, where other graphs of the
    bundle are for the rest; every graph takes every size.
    """

    file: str
    lowerings: dict[str, str]
    selected: dict[str, str]
    parity: dict[str, Any] | None
    batches: list[int] = field(default_factory=list)


Dimension = Annotated[int, Meta(ge=1)] | str
"""A fixed size, or the name of a dynamic axis (`batch`, `tokens`, `past`, `height`, `width`), or
the sum of two (`past + tokens`)."""

Default = Literal["ones", "positions", "empty", "zeros"]
"""What stands for an input that is left out: ones, as of a mask without gaps; the position of each
token, as the mask counts them; a tensor of which the `past` axis is empty; or zeros, strengths that
change nothing."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, numpy dtype name and shape of an input or output of a model or a graph.

    `limits` are the largest sizes that named axes may have; arrays may leave out the axis
    `implied`, which is of size 1 then. Values of an integer input lie in 0 … `below` − 1. `default`
    says what an input is that callers leave out; without one it must be given. So many inputs as
    `groups_of` says are computed together, and a batch is a multiple of them.
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
        """The shape with each dynamic axis replaced by its size in `sizes`."""
        return tuple(
            sum(sizes[axis] for axis in size.split(" + ")) if isinstance(size, str) else size
            for size in self.shape
        )

    def within(self, fixed: Mapping[str, int]) -> tuple[Dimension, ...]:
        """The shape in which axes that are `fixed` have their sizes, in sums too: `past + 5`."""
        return tuple(
            size if isinstance(size, int) else axis_within(size, fixed) for size in self.shape
        )


def axis_within(axis: str, fixed: Mapping[str, int]) -> Dimension:
    """Returns a named axis, or a sum of such, in which those that are `fixed` have their sizes."""
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
        """Returns the record of a file as it is."""
        return FileRecord(sha256=sha256(path), bytes=path.stat().st_size)


@dataclass(frozen=True, slots=True)
class TimedLowering:
    """One lowering of a layer and what one batch took, in milliseconds."""

    lowering: str
    latency_ms: Latency


@dataclass(frozen=True, slots=True)
class TunedLayers:
    """Layers of one shape and k, measured once: each candidate's latency, the fastest first.

    `layers` are their names and `k` what was kept, also where k is a graph input. `left_out` says
    why a lowering that could serve was not timed. Without candidates there was nothing to compare:
    `chosen` is the only one.
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
    """Everything that `--lowering tune` measured for one export, and on what.

    `machine` is the CPU or GPU, `inputs` says what the layers were fed.
    """

    machine: str
    provider: str
    runtime: str
    threads: int
    rounds: int
    inputs: str
    measured: tuple[TunedLayers, ...]

    def of(self, layer: str) -> TunedLayers:
        """Returns what was found for a layer."""
        return next(group for group in self.measured if layer in group.layers)


class Fp32NodeRecord(TypedDict):
    """A node of the backbone that stayed in FP32, and why; `usual` where it does in any model."""

    node: str
    op_type: str
    reason: str
    usual: bool


class Numbers(TypedDict, total=False):
    """What numbers a model is computed in (`quantization.precision.precision_record`)."""

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
    """The whole record; `to_json` and `read` keep it in `manifest.json`."""

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
    """What was edited (`edits.Edits.records`); empty where the model is as trained."""
    tokens: str = ""
    contract: dict[str, Any] = field(default_factory=dict)
    """What `tune` was asked, found and confirmed (`Recipe.contract`); empty without a recipe."""
    tuning: Tuning | None = None
    """What `--lowering tune` measured; an empty object in the file where nothing was."""
    peak_memory_bytes: Count | None = None
    """The most that a process took which ran one input here; None where it was not measured."""
    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What steps of plugins add, each under its own name: read by them alone, and kept by all."""
    schema: int = SCHEMA

    def to_json(self) -> str:
        """The manifest as indented JSON, `schema` first and its own hash last."""
        content = asdict(self)
        content["tuning"] = content["tuning"] or {}
        listed = ("layers", "graphs", "inputs", "outputs")
        for record in (record for key in listed for record in content[key]):
            for key in OPTIONAL:
                if key in record and not record[key]:
                    del record[key]
        if self.peak_memory_bytes is None:
            del content["peak_memory_bytes"]
        if not self.plugins:
            del content["plugins"]
        _without_empty_counts(content)
        ordered = {"schema": content.pop("schema"), **content}
        ordered[DIGEST] = digest(ordered)
        return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Reads a bundle's manifest; `BundleError` when there is none or it cannot be one."""
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
        """Raises `BundleError` for the manifest in a folder where nothing here knows its target."""
        if self.target not in TARGETS:
            raise BundleError(
                f"{directory / MANIFEST_FILE}: target is {self.target!r}, which nothing that is "
                "installed brings",
                hint="install the plugin that runs it, or the version of moexport that wrote it; "
                f"there is {', '.join(TARGETS.names)}{left_out()}",
            )

    def graph_for(self, batch: int) -> GraphRecord:
        """Returns the graph for a batch of some size: the main one, or the nearest of several."""

        def distance(graph: GraphRecord) -> int:
            first, last = graph.batches or (1, batch)
            return max(first - batch, batch - last, 0)

        main = self.graphs[0]
        return min((g for g in self.graphs if g.batches), key=distance) if main.batches else main

    def _problems(self) -> Iterator[str]:
        """What no export writes, though its type is right."""
        for name in self.files:
            if not all(map(is_plain_name, name.split("/"))):
                yield f"{name!r} is no name of a file in the bundle's folder"
        for graph in self.graphs:
            if not is_plain_name(graph.file):
                yield f"{graph.file!r} is no name of a file in the bundle's folder"
            span = graph.batches
            if span and not (len(span) == 2 and 1 <= span[0] <= span[1]):
                yield f"{graph.file} cannot be for batches of {span}"
        for layer in self.layers:
            if (layer.k or 1) > layer.experts:
                yield f"layer {layer.name} has {layer.experts} experts and a k of {layer.k}"


def is_plain_name(name: str) -> bool:
    """Whether a name is of a file in the same folder, whatever system reads it."""
    return bool(name) and name not in (".", "..") and not re.search(r"[/\\:\x00]", name)


def local_bundle(where: AnyPlace) -> Path:
    """Returns a bundle's folder; of a URL that of a copy of the files that its manifest lists."""

    def listed(folder: Path) -> Iterable[str]:
        return Manifest.read(folder).files if (folder / MANIFEST_FILE).is_file() else ()

    return local_files(where, listed, MANIFEST_FILE)


def is_bundle(where: AnyPlace) -> bool:
    """Whether a path or URL is that of a folder with a manifest."""
    return holds(where, MANIFEST_FILE)


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


def _without_empty_counts(content: Any) -> None:
    """Removes the empty histograms of latencies: a bundle that was written before has none."""
    if isinstance(content, dict):
        if content.get("counts") == ():
            del content["counts"]
        for value in content.values():
            _without_empty_counts(value)
    elif isinstance(content, list | tuple):
        for value in content:
            _without_empty_counts(value)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What a graph says of a MoE layer: experts, k (`k` for a graph input) and lowering."""

    n: int
    k: int | str
    lowering: str


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a graph says of itself in its metadata.

    Its layers, the type of its floats, what its inputs are that are left out, how large axes may be
    together (`past + tokens`), and how many inputs are computed together. `sizes` are the least and
    the largest size of an axis where the network computes something else beyond them.
    """

    layers: dict[str, LayerFacts]
    floats: str = "fp32"
    defaults: dict[str, Default] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    groups_of: Count | None = None
    sizes: dict[str, tuple[Count, Count | None]] = field(default_factory=dict)

    @staticmethod
    def read(text: str, file: str) -> GraphFacts:
        """Reads the metadata entry `METADATA` of a graph; `BundleError` for what is none."""
        return read_json(GraphFacts, text, f"{file}: metadata", error=BundleError)

    @staticmethod
    def of(model: ModelProto, file: str) -> GraphFacts | None:
        """Returns what a graph says of itself; None for one that moexport did not write."""
        entries = [entry.value for entry in model.metadata_props if entry.key == METADATA]
        return GraphFacts.read(entries[0], file) if entries else None


def external_files(model: ModelProto) -> set[str]:
    """Returns the names of the files that a graph keeps weights in, wherever they hang.

    Attributes of nodes, subgraphs, functions and sparse tensors may keep some as well.
    """
    return {
        entry.value
        for tensor in _tensors(model)
        for entry in tensor.external_data
        if entry.key == "location"
    }


def _tensors(message: Message) -> Iterator[TensorProto]:
    """All tensors within a message of ONNX, found by its fields: no place of them is left out."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for described, value in message.ListFields():
        if described.message_type is not None:
            for child in (value,) if hasattr(value, "DESCRIPTOR") else value:
                yield from _tensors(child)


def digest(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a manifest's content without its own hash, whatever its layout."""
    rest = {key: value for key, value in content.items() if key != DIGEST}
    # Read back, so that what JSON changes (a number as a key) is the same before and after.
    canonical = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_as_written(directory: Path) -> bool:
    """Whether a bundle's manifest says what was written; only its layout may have changed."""
    content = _content(directory)
    return bool(content.get(DIGEST) == digest(content))
