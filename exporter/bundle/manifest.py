"""`manifest.json`: what a bundle holds, where it came from and how well it was checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...errors import BundleError

MANIFEST_FILE = "manifest.json"
SCHEMA = 1

MAIN_GRAPH = "model.onnx"

DIGEST = "sha256"
"""The key of the manifest's own hash."""

OPTIONAL = ("levels", "limits", "implied", "below")
"""Keys of layers and ports that are left out where there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that `verify` looked at."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Where the model came from: path, SHA-256 of its weights, family and configuration."""

    path: str
    sha256: str
    family: str
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One MoE layer as exported: `kind` is `soft-moe` or `mumoe`; `k` is None for a graph input."""

    name: str
    kind: str
    experts: int
    slots: int
    dim: int
    hidden: int
    k: int | None
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
    """One ONNX file: its lowerings by layer and its own parity."""

    file: str
    lowerings: dict[str, str]
    selected: dict[str, str]
    parity: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class PortRecord:
    """Name, dtype and shape of a graph input or output; names stand for dynamic axes.

    `limits` are the largest sizes of named axes, where there are any; arrays may leave out the axis
    `implied`, which is of size 1 then. Values of an integer input lie in 0 … `below` − 1.
    """

    name: str
    dtype: str
    shape: list[int | str]
    limits: dict[str, int] = field(default_factory=dict)
    implied: str | None = None
    below: int | None = None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Hash and size of one file."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole record; `to_json` and `read` keep it in `manifest.json`."""

    moexport: str
    created: str
    source: SourceRecord
    layers: list[LayerRecord]
    graphs: list[GraphRecord]
    k: str
    target: str
    precision: str
    renormalize: bool
    opset: int
    batch: str
    inputs: list[PortRecord]
    outputs: list[PortRecord]
    parity: dict[str, Any] | None
    files: dict[str, FileRecord]
    environment: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    engines: list[dict[str, Any]] = field(default_factory=list)
    edits: list[dict[str, Any]] = field(default_factory=list)
    """`--ablate` and `--rewrite` (`edits.Edits.records`); empty where the model is as trained."""
    tokens: str = ""
    tuning: dict[str, Any] = field(default_factory=dict)
    """What `--lowering tune` measured (`tuning.Tuning`); empty where nothing was."""
    schema: int = SCHEMA

    def to_json(self) -> str:
        """The manifest as indented JSON, `schema` first and its own hash last."""
        content = asdict(self)
        for record in (*content["layers"], *content["inputs"], *content["outputs"]):
            for key in OPTIONAL:
                if key in record and not record[key]:
                    del record[key]
        ordered = {"schema": content.pop("schema"), **content}
        ordered[DIGEST] = digest(ordered)
        return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Reads a bundle's manifest; `BundleError` when there is none or it is not readable."""
        path = directory / MANIFEST_FILE
        if not path.is_file():
            raise BundleError(
                f"{directory}: not a bundle (there is no {MANIFEST_FILE})",
                hint="a bundle is the folder that `moexport export -o` wrote",
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: not readable as JSON ({error})") from error
        found = content.get("schema") if isinstance(content, dict) else None
        if found != SCHEMA:
            raise BundleError(
                f"{path}: schema {found!r}, but this version reads schema {SCHEMA}",
                hint="use the version of moexport that wrote the bundle, or export again",
            )
        known = {entry.name for entry in fields(Manifest)}
        try:
            manifest = Manifest(
                **{key: value for key, value in content.items() if key in known}
                | {
                    "source": SourceRecord(**content["source"]),
                    "layers": [LayerRecord(**layer) for layer in content["layers"]],
                    "graphs": [GraphRecord(**graph) for graph in content["graphs"]],
                    "inputs": [PortRecord(**port) for port in content["inputs"]],
                    "outputs": [PortRecord(**port) for port in content["outputs"]],
                    "files": {
                        name: FileRecord(**record) for name, record in content["files"].items()
                    },
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"{path}: not a complete manifest ({error})") from error
        for key in ("layers", "graphs", "inputs", "outputs"):
            if not getattr(manifest, key):
                raise BundleError(f"{path}: not a complete manifest ({key} is empty)")
        return manifest


def digest(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a manifest's content without its own hash, whatever its layout."""
    rest = {key: value for key, value in content.items() if key != DIGEST}
    # Read back, so that what JSON changes (a number as a key) is the same before and after.
    canonical = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_as_written(directory: Path) -> bool:
    """Whether a bundle's manifest says what was written; only its layout may have changed."""
    content = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
    return bool(content.get(DIGEST) == digest(content))
