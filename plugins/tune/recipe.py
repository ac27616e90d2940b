"""`recipe.yaml`: what `tune` found for each layer, to be exported again bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...calibration.table import CALIBRATION_FILE
from ...common.documents import from_data, read_document
from ...common.files import sha256
from ...common.option import Mistake, changed, record_in, refuse_changed
from ...common.registry import left_out
from ...errors import UsageError
from ...exporter.bundle.manifest import FileRecord, Manifest
from ...exporter.bundle.steps import Export, Step
from ...exporter.bundle.substitutes import SUBSTITUTES_FILE, read_substitutes
from ...exporter.edits import Edits, KeptExperts, MergedExperts
from ...exporter.inputs import parse_range
from ...exporter.model import Model, fingerprint
from ...exporter.options import AUTO, ExportOptions, PrecisionOptions
from ...exporter.requests import ExportRequest
from ...graphs.targets import TARGETS, Precision, Scope, Target
from .request import RecipeOptions

API = 1

RECIPE_FILE = "recipe.yaml"

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """What one MoE layer is exported as, and why.

    `experts` are those that stay, by their numbers in the checkpoint; empty where all do. `k` of
    them are computed. Where `constant`, the others give constants, else nothing. Where `merged`,
    one takes the place of all. `lowering` is empty while a search has not chosen it.
    """

    k: int
    precision: Precision = "fp32"
    lowering: str = ""
    experts: tuple[int, ...] = ()
    why: str = ""
    constant: bool = False
    merged: bool = False

    @property
    def fewer(self) -> bool:
        """Whether the layer has fewer experts than in the checkpoint."""
        return bool(self.experts) or self.merged

    @property
    def n(self) -> int:
        """How many experts the layer has, 0 for all."""
        return 1 if self.merged else len(self.experts)

    @property
    def form(self) -> tuple[int, int, Precision]:
        """What its time depends on: k, how many experts there are (0: all), and the precision."""
        return self.k, self.n, self.precision

    def text(self, experts: int) -> str:
        """In words, for a layer of so many: `k = 4 of 16, int8`, `8 of 16 experts kept, fp32`."""
        if self.merged:
            return f"all experts merged into one, {self.precision}"
        n = len(self.experts) or experts
        parts = [f"{n} of {experts} experts kept"] if self.experts else []
        parts += [] if self.experts and self.k == n else [f"k = {self.k} of {n}"]
        return ", ".join((*parts, self.precision))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the graphs and weights of a bundle.

    `model` is the model's fingerprint and `data` the SHA-256 of the data it was found on; layers
    are in the order of execution. `calibration` and `substitutes` are the SHA-256 of files that lie
    beside the recipe: the table of ranges, and what takes the places of experts that were dropped
    or merged. They are empty where none is needed. `contract` says what was asked and confirmed.
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
    schema: int = SCHEMA

    @property
    def edits(self) -> Edits:
        """The experts that stay, of the layers in which not all do; the layers of merged ones."""
        return Edits(
            kept=tuple(
                KeptExperts(name, layer.experts, constant=layer.constant)
                for name, layer in self.layers.items()
                if layer.experts
            ),
            merged=tuple(
                MergedExperts(name) for name, layer in self.layers.items() if layer.merged
            ),
        )

    @property
    def floating(self) -> frozenset[str]:
        """The layers that stay in floats where others do not."""
        return frozenset(
            name for name, layer in self.layers.items() if layer.precision != self.precision
        )

    def text(self) -> str:
        """Returns the recipe as YAML."""
        import yaml

        content = asdict(self)
        ordered = {"schema": content.pop("schema"), **content}
        for layer in ordered["layers"].values():
            layer["experts"] = list(layer["experts"])
        return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=100)

    def write(self, path: Path) -> None:
        """Writes the recipe to a file."""
        path.write_text(self.text(), encoding="utf-8")


def read_recipe(path: Path) -> Recipe:
    """Returns the recipe in a file; `UsageError` says what is wrong with it and where."""
    try:
        content = read_document(path, "yaml", lambda said: UsageError(f"--recipe {said}"))
    except OSError as error:
        raise UsageError(
            f"--recipe {path}: cannot be read: {error.strerror}",
            hint="`moexport tune` writes recipe.yaml into its bundle",
        ) from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise UsageError(
            f"--recipe {path}: schema {schema!r}, and this version reads schema {SCHEMA}",
            hint="give the recipe.yaml that `moexport tune` wrote",
        )
    recipe = from_data(Recipe, content, f"--recipe {path}", error=UsageError)
    if recipe.target not in TARGETS:
        raise UsageError(
            f"--recipe {path}: target is {recipe.target!r}, which nothing that is installed brings",
            hint="install the plugin that runs it; there is "
            f"{', '.join(TARGETS.names)}{left_out()}",
        )
    for name, layer in recipe.layers.items():
        if not layer.lowering:
            raise UsageError(f"--recipe {path}: layer {name} has no lowering")
        if list(layer.experts) != sorted(set(layer.experts)):
            raise UsageError(f"--recipe {path}: experts of layer {name} are not in ascending order")
    return recipe


def file_beside(path: Path, digest: str, file: str) -> Path | None:
    """Returns a file that a recipe needs, which lies beside it; None where it has no hash.

    Raises `UsageError` where it is missing, or is another.
    """
    if not digest:
        return None
    place = path.parent / file
    if not place.is_file():
        raise UsageError(
            f"--recipe {path}: {file}, which it needs, does not lie beside it",
            hint=f"copy {file} from the bundle that the recipe is of",
        )
    if sha256(place) != digest:
        raise UsageError(
            f"--recipe {path}: {place} is not the file that the recipe was found with",
            hint=f"copy {file} from the bundle that the recipe is of",
        )
    return place


_BESIDE = frozenset(
    {"recipe", "data", "atol", "rtol", "verify", "verify_samples", "steer", "engine", "force"}
    | {"expose_routing", "layout", "threads"}
)
"""Options that a recipe leaves open."""


def recipe_options(
    recipe: Recipe, options: ExportOptions, substitutes: Mapping[str, np.ndarray] | None = None
) -> ExportOptions:
    """Returns options in which everything that decides graphs and weights is a recipe's.

    `substitutes` are what takes the places of experts (`Edits.substitutes`).
    """
    integers = recipe.precision in ("int8", "int4", "fp8")
    edits = recipe.edits.with_substitutes(substitutes or {})
    return replace(
        with_recipe(options, recipe),
        k=tuple(layer.k for layer in recipe.layers.values()),
        target=recipe.target,
        lowerings=(AUTO,),
        layer_lowerings={name: (one.lowering, one.why) for name, one in recipe.layers.items()},
        batch=parse_range(recipe.batch, "--recipe: batch"),
        tokens=parse_range(recipe.tokens, "--recipe: tokens"),
        opset=recipe.opset,
        renormalize=False,
        precision=PrecisionOptions(
            recipe.precision,
            scope=recipe.quantize,
            floating=recipe.floating if integers else frozenset(),
        ),
        edits=replace(edits, steers=options.edits.steers),
    )


def with_recipe(options: ExportOptions, recipe: Recipe) -> ExportOptions:
    """Returns options of an export whose bundle holds a recipe."""
    others = (each for each in options.further if not isinstance(each, Recipe))
    return replace(options, further=(*others, recipe))


def recipe_in(options: ExportOptions) -> Recipe | None:
    """Returns the recipe of options that `recipe_options` made; None for others."""
    return record_in(options.further, Recipe)


def _asked(options: ExportOptions) -> bool:
    return recipe_in(options) is not None or options.asked(RecipeOptions).recipe is not None


def _refuses(request: ExportRequest) -> None:
    if request.asked(RecipeOptions).recipe is None:
        return
    for record in (request, *request.further):
        names = {*changed(record)} - _BESIDE
        refuse_changed(record, names, " with --recipe: the recipe already sets it")


def _change(options: ExportOptions, request: ExportRequest) -> ExportOptions:
    del request
    path = Path(options.asked(RecipeOptions).recipe or "")
    recipe = read_recipe(path)
    ranges = file_beside(path, recipe.calibration, CALIBRATION_FILE)
    beside = file_beside(path, recipe.substitutes, SUBSTITUTES_FILE)
    substitutes = None if beside is None else read_substitutes(beside.parent)
    return replace(recipe_options(recipe, options, substitutes), calibration=ranges)


def _check(options: ExportOptions, model: Model | None) -> Iterator[Mistake]:
    recipe = recipe_in(options)
    if model is None or recipe is None:
        return
    if [*model.layers] != [*recipe.layers] or recipe.model not in ("", fingerprint(model)):
        yield (
            "--recipe: it is of another model, or of this one with other weights or configuration",
            "give the checkpoint and the settings that it was found with, or tune again",
        )


def _finish(export: Export, directory: Path, manifest: Manifest) -> Manifest:
    """Writes the recipe into the bundle that it says, to be exported again."""
    recipe, place = recipe_in(export.options), directory / RECIPE_FILE
    assert recipe is not None, "an export that was asked for by a recipe has it"
    recipe.write(place)
    files = {**manifest.files, place.name: FileRecord.of(place)}
    return replace(manifest, contract=recipe.contract, files=dict(sorted(files.items())))


RECIPE = Step(
    "recipe",
    asked=_asked,
    refuses=_refuses,
    change=_change,
    check=_check,
    finish=_finish,
    contents={RECIPE_FILE: "what `moexport tune` found for each layer, to export it again"},
)
