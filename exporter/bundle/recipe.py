"""`recipe.yaml`: what `tune` found for each layer, to be exported again bit for bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...common.documents import from_data, read_document
from ...common.files import sha256
from ...common.registry import left_out
from ...errors import UsageError
from ...graphs.targets import TARGETS, Precision, Scope, Target
from ..edits import Edits, KeptExperts, MergedExperts

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
