"""Reads and writes `recipe.yaml`: the choices of `tune` for each layer, to repeat the export."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...calibration.table import CALIBRATION_FILE
from ...common.documents import from_data, read_document
from ...common.files import sha256
from ...common.option import Mistake, changed, record_in, refuse_changed, spelled
from ...common.registry import left_out
from ...common.text import size
from ...data.user_code import names_code
from ...errors import UsageError
from ...exporter.bundle.manifest import FileRecord, Manifest
from ...exporter.bundle.steps import Export, Step
from ...exporter.bundle.substitutes import SUBSTITUTES_FILE, read_substitutes
from ...exporter.options import AUTO, BLOCKED_OPSET, MIN_OPSET, ExportOptions
from ...exporter.requests import LoadRequest
from ...graphs.edits import Edits, KeptExperts, MergedExperts
from ...graphs.sizes import parse_range
from ...graphs.targets import TARGETS, Precision, Scope, Target
from .request import RecipeOptions, no_such_recipe

if TYPE_CHECKING:
    from ...exporter.model import Model, Source

API = 1

RECIPE_FILE = "recipe.yaml"

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """How one MoE layer is exported, and why.

    `experts` are the numbers, in the checkpoint, of those that stay; empty if all do. `k` of them
    are computed. If `constant`, the others return constants; otherwise, they are removed. If
    `merged`, one expert replaces all. `lowering` is empty until a search chooses it.
    """

    k: int
    precision: Precision = "fp32"
    lowering: str = ""
    experts: tuple[int, ...] = ()
    why: str = ""
    constant: bool = False
    merged: bool = False

    @property
    def is_reduced(self) -> bool:
        """Whether the layer has fewer experts than in the checkpoint."""
        return bool(self.experts) or self.merged

    @property
    def n(self) -> int:
        """The number of experts that stay; 0 for all."""
        return 1 if self.merged else len(self.experts)

    @property
    def form(self) -> tuple[int, int, Precision]:
        """What the layer's time depends on: k, the number of experts (0 for all) and precision."""
        return self.k, self.n, self.precision

    def text(self, experts: int) -> str:
        """Describes the layer, which has `experts` experts in the checkpoint.

        Examples: `k = 4 of 16, int8` and `8 of 16 experts kept, fp32`.
        """
        if self.merged:
            return f"all experts merged into one, {self.precision}"
        n = len(self.experts) or experts
        parts = [f"{n} of {experts} experts kept"] if self.experts else []
        parts += [] if self.experts and self.k == n else [f"k = {self.k} of {n}"]
        return ", ".join((*parts, self.precision))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the graphs and weights of a bundle.

    `model` is the model's fingerprint and `data` the SHA-256 of the search's data; layers are in
    the order of execution. `calibration` and `substitutes` are the SHA-256 of files in the recipe's
    folder: the table of ranges, and the arrays that replace removed or merged experts. They are
    empty if the files are not needed. `family` and `config` are the settings for reading the model,
    empty if the model's files contain them. `contract` has the bounds and the confirmed result.
    """

    model: str
    data: str
    target: Target
    batch: str
    tokens: str
    opset: int
    precision: Precision
    quantize: Scope
    layers: dict[str, LayerRecipe]
    calibration: str = ""
    substitutes: str = ""
    contract: dict[str, Any] = field(default_factory=dict)
    moexport: str = ""
    family: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def edits(self) -> Edits:
        return edits_of(self.layers)

    def text(self) -> str:
        """Returns the recipe as YAML."""
        import yaml

        content = asdict(self)
        ordered = {"schema": content.pop("schema"), **content}
        for layer in ordered["layers"].values():
            layer["experts"] = list(layer["experts"])
        return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=100)

    def write(self, path: Path) -> None:
        path.write_text(self.text(), encoding="utf-8")


def edits_of(layers: Mapping[str, LayerRecipe]) -> Edits:
    """Returns the edits that remove or merge experts in some layers."""
    kept = (
        KeptExperts(name, layer.experts, constant=layer.constant)
        for name, layer in layers.items()
        if layer.experts
    )
    merged = (MergedExperts(name) for name, layer in layers.items() if layer.merged)
    return Edits((*kept, *merged))


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe; raises a `UsageError` that locates the mistake in an invalid one."""
    try:
        content = read_document(path, "yaml", lambda message: UsageError(f"--recipe {message}"))
    except OSError as error:
        raise no_such_recipe(path, error.strerror) from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise UsageError(
            f"--recipe {path}: schema {schema!r}, but this version reads schema {SCHEMA}",
            hint="pass the recipe.yaml that `moexport tune` wrote",
        )
    recipe = from_data(Recipe, content, f"--recipe {path}", error=UsageError)
    if recipe.target not in TARGETS:
        raise UsageError(
            f"--recipe {path}: target is {recipe.target!r}, which no installed package provides",
            hint="install the plugin that provides it; the targets are "
            f"{', '.join(TARGETS.names)}{left_out()}",
        )
    for name, layer in recipe.layers.items():
        if not layer.lowering:
            raise UsageError(f"--recipe {path}: layer {name} has no lowering")
        if list(layer.experts) != sorted(set(layer.experts)):
            raise UsageError(f"--recipe {path}: experts of layer {name} are not in ascending order")
    return recipe


def _checked_file(path: Path, digest: str, file: str) -> Path | None:
    """Returns a file in the recipe's folder that the recipe needs; None if it does not need one.

    Raises `UsageError` if the file is missing or was changed.
    """
    if not digest:
        return None
    needed = path.parent / file
    if not needed.is_file():
        mistake = f"{file}, which the recipe needs, is not next to it"
    elif sha256(needed) != digest:
        mistake = f"{needed} was changed, or belongs to another recipe"
    else:
        return needed
    hint = f"copy {file} from the bundle that contains this recipe"
    raise UsageError(f"--recipe {path}: {mistake}", hint=hint)


_NOT_IN_RECIPE = frozenset(
    {"recipe", "data", "atol", "rtol", "verify", "verify_samples", "steer", "engine", "force"}
    | {"expose_routing", "layout", "threads"}
)
"""Options that a recipe does not set."""


def recipe_options(
    recipe: Recipe, options: ExportOptions, substitutes: Mapping[str, np.ndarray] | None = None
) -> ExportOptions:
    """Returns the options with everything that the recipe determines.

    `substitutes` are the arrays that replace experts (`Edits.substitutes`).
    """
    integers = recipe.precision in ("int8", "int4", "fp8")
    floating = (n for n, layer in recipe.layers.items() if layer.precision != recipe.precision)
    edits = recipe.edits.with_substitutes(substitutes or {})
    return replace(
        with_recipe(options, recipe),
        k=tuple(layer.k for layer in recipe.layers.values()),
        target=recipe.target,
        lowering=AUTO,
        layer_lowerings={n: (layer.lowering, layer.why) for n, layer in recipe.layers.items()},
        batch=parse_range(recipe.batch, "--recipe: batch"),
        tokens=parse_range(recipe.tokens, "--recipe: tokens"),
        opset=None if recipe.opset in (MIN_OPSET, BLOCKED_OPSET) else recipe.opset,  # as needed
        renormalize=False,
        precision=recipe.precision,
        quantize=recipe.quantize,
        keep_floating=tuple(sorted(floating)) if integers else (),
        edits=Edits((*edits.listed, *options.edits.steers)),
    )


def with_recipe(options: ExportOptions, recipe: Recipe) -> ExportOptions:
    """Returns the options of an export whose bundle contains the recipe."""
    others = (record for record in options.further if not isinstance(record, Recipe))
    return replace(options, further=(*others, recipe))


def recipe_in(options: ExportOptions) -> Recipe | None:
    """Returns the recipe that `recipe_options` added to options; None for other options."""
    return record_in(options.further, Recipe)


def settings_of(model: Model) -> dict[str, Any]:
    """Returns the fields of a recipe that describe how the model was read."""
    from ...exporter.families import FAMILIES  # PyTorch is imported already

    config = json.loads(json.dumps(model.config))
    if model.family in FAMILIES:
        return {"family": model.family, "config": config}
    # For a network from user code, the configuration has its factory's arguments.
    return {"config": config} if names_code(model.source.path) else {}


def reading_options(source: Source) -> list[str]:
    """Returns the plugins' options with which a model was read, as in a shell."""
    words = []
    for record in source.further:
        for name in changed(record):
            value = getattr(record, name)
            option = spelled(type(record), name)
            values = value if isinstance(value, list | tuple) else [value]
            words += [word for item in values for word in (option, str(item))]
    return words


def free_path(bundle: Path, suffix: str = "again") -> Path:
    """Returns the first of `BUNDLE-again`, `BUNDLE-again-2` and so on that does not exist."""
    endings = ("", *(f"-{number}" for number in range(2, 1000)))
    paths = (bundle.with_name(f"{bundle.name}-{suffix}{ending}") for ending in endings)
    return next(path for path in paths if not path.exists())


def _reading(reading: LoadRequest, request: ExportOptions, source: str) -> LoadRequest:
    """Adds the recipe's settings for reading the model, unless the user gave a configuration."""
    path = request.asked(RecipeOptions).recipe
    if path is None or reading.config is not None:
        return reading
    recipe = read_recipe(Path(path))
    if names_code(source) == bool(recipe.family):
        return reading  # this is another model, which is refused once it is read
    family = reading.family or recipe.family or None
    return replace(reading, family=family, config=recipe.config or None)


def _applies(options: ExportOptions) -> bool:
    return recipe_in(options) is not None or options.asked(RecipeOptions).recipe is not None


def _refuses(options: ExportOptions) -> None:
    if options.asked(RecipeOptions).recipe is None:
        return
    for record in (options, *options.further):
        names = {*changed(record)} - _NOT_IN_RECIPE
        refuse_changed(record, names, " with --recipe: the recipe already sets it")


def _change(options: ExportOptions) -> ExportOptions:
    path = Path(options.asked(RecipeOptions).recipe or "")
    recipe = read_recipe(path)
    ranges = _checked_file(path, recipe.calibration, CALIBRATION_FILE)
    arrays = _checked_file(path, recipe.substitutes, SUBSTITUTES_FILE)
    substitutes = None if arrays is None else read_substitutes(arrays.parent)
    return replace(recipe_options(recipe, options, substitutes), calibration=ranges)


def _check(options: ExportOptions, model: Model | None) -> Iterator[Mistake]:
    recipe = recipe_in(options)
    if model is None or recipe is None:
        return
    from ...exporter.model import fingerprint  # PyTorch is imported already

    if [*model.layers] != [*recipe.layers] or recipe.model not in ("", fingerprint(model)):
        yield (
            "--recipe: the recipe is for another model, or for this model with other weights or "
            "another configuration",
            "use the checkpoint and the settings of the search, or run tune again",
        )


def _page(manifest: Manifest) -> Iterator[str]:
    """Yields the bounds of the search and the confirmed result, for the bundle's page."""
    contract = manifest.contract
    if not {"metric", "kept", "interval", "inputs", "asked"} <= contract.keys():
        return  # a recipe written by hand or by an older version
    yield "## What this bundle keeps"
    low, high = contract["interval"]
    kept = f"{contract['kept']:.1%} of the {contract['metric']}"
    text = (
        f"On {contract['inputs']:,} inputs that the search of `moexport tune` did not use, this "
        f"bundle keeps {kept} (95% interval {low:.1%} to {high:.1%})"
    )
    if "accuracy" in contract:
        low, high = contract["accuracy_interval"]
        text += (
            f": an accuracy of {contract['accuracy']:.1%} ({low:.1%} to {high:.1%}); PyTorch "
            f"has {contract['untouched_accuracy']:.1%}"
        )
    keep, latency_ms, max_bytes = map(contract["asked"].get, ("keep", "latency_ms", "bytes"))
    bounds = bounds_text(keep, contract["metric"], latency_ms, max_bytes)
    requirement = f" The requirement was {bounds}." if bounds else ""
    yield f"{text}.{requirement}"


def bounds_text(
    keep: float | None, metric: str, latency_ms: float | None, most_bytes: int | None
) -> str:
    """Returns the bounds as text: `to keep 99% of the accuracy and to take at most 5 ms`."""
    bounds = [] if keep is None else [f"to keep {100 * keep:g}% of the {metric}"]
    bounds += [] if latency_ms is None else [f"to take at most {latency_ms:g} ms"]
    bounds += [] if most_bytes is None else [f"to take at most {size(most_bytes)}"]
    return " and ".join(bounds)


def _finish(export: Export, directory: Path, manifest: Manifest) -> Manifest:
    """Writes the recipe into the bundle, so that the export can be repeated."""
    recipe, path = recipe_in(export.options), directory / RECIPE_FILE
    assert recipe is not None, "the options contain a recipe"
    recipe.write(path)
    files = {**manifest.files, path.name: FileRecord.of(path)}
    return replace(manifest, contract=recipe.contract, files=dict(sorted(files.items())))


RECIPE = Step(
    "recipe",
    requested=_applies,
    refuses=_refuses,
    change=_change,
    check=_check,
    finish=_finish,
    page=_page,
    reading=_reading,
    contents={RECIPE_FILE: "the choices of `moexport tune` for each layer, to repeat the export"},
)
