"""What each expert of a layer is for: the classes that lose accuracy when it is removed.

For expert e, d_c = |ŷ_c − y_c| / y_c is the share of class c's accuracy that its removal changes.
The distance of d to the one-hot vector of its largest entry is the expert's class polysemanticity
(Eq. 4 of the muMoE paper): 0 for an expert without which one class is lost and no other changes.

From top to bottom: what is found, how, its JSON and text, its figure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import nn

from ..common.console import Progress, Silent
from ..common.text import table
from ..common.writing import whole_file, write_text
from ..errors import FeedError, UsageError
from ..exporter.model import Model
from ..graphs.layers.base import NO_EDITS, LayerEdits, MoELayer, moe_layers, sharing_weights
from ..graphs.layers.mumoe import MuMoE
from .data import Array, LabelledData
from .metrics import one_per_sample
from .report.figures import COLOURS, INK, REFERENCE, drawn

BATCH = 64

SCHEMA = 1

JSON_FILE, FIGURE_FILE = "specialise.json", "specialise.png"

SHOWN, DRAWN = 10, 40
"""Experts in the text and in the figure, those that change most; the JSON holds all."""


@dataclass(frozen=True, slots=True)
class ExpertEffect:
    """What removing one expert does.

    `level` counts from 1. `inputs` took the expert in (a coefficient that is not zero); `accuracy`
    and `change` are by class, None for a class without inputs. `polysemanticity` is None where no
    class changes.
    """

    level: int
    expert: int
    inputs: int
    accuracy: tuple[float | None, ...]
    change: tuple[float | None, ...]
    polysemanticity: float | None

    @property
    def most_changed(self) -> int:
        """The class whose accuracy changes most."""
        return max(range(len(self.change)), key=lambda c: abs(self.change[c] or 0.0))


@dataclass(frozen=True, slots=True)
class Group:
    """A subgroup of the inputs and, by level, its mean coefficients ā [n]: what Eq. 5 takes.

    A Soft MoE layer has no coefficients of that kind; its groups have none.
    """

    group: int | bool | str
    samples: int
    coefficients: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Specialisation:
    """The result of `moexport specialise`. `accuracy` and `samples` are by class."""

    model: str
    family: str
    layer: str
    kind: str
    levels: tuple[int, ...]
    accuracy: tuple[float | None, ...]
    samples: tuple[int, ...]
    experts: tuple[ExpertEffect, ...]
    groups: tuple[Group, ...]

    @property
    def mean_polysemanticity(self) -> float | None:
        """Over the experts whose removal changes a class; None where there is no such expert."""
        values = [e.polysemanticity for e in self.experts if e.polysemanticity is not None]
        return sum(values) / len(values) if values else None

    @property
    def ranked(self) -> list[ExpertEffect]:
        """The experts that change a class, those that change the accuracy most first."""
        changing = [e for e in self.experts if e.polysemanticity is not None]
        return sorted(
            changing, key=lambda e: (-sum(abs(c or 0.0) for c in e.change), e.level, e.expert)
        )

    def expert_name(self, effect: ExpertEffect) -> str:
        """An expert as `--ablate` takes it: its number, with its level where there are more."""
        return f"{effect.level}.{effect.expert}" if len(self.levels) > 1 else str(effect.expert)

    def overall(self, accuracy: Sequence[float | None]) -> float:
        """An accuracy by class as the share of all inputs."""
        right = sum((a or 0.0) * s for a, s in zip(accuracy, self.samples, strict=True))
        return right / sum(self.samples)


@torch.inference_mode()
def specialise(
    model: Model,
    data: LabelledData,
    *,
    layer: str | None = None,
    groups: Array | None = None,
    batch: int = BATCH,
    progress: Progress | None = None,
) -> Specialisation:
    """Returns what each expert of a layer, by default the last, does for the accuracy by class.

    One pass over the data, and one per expert over the inputs that take it in; those that give it a
    coefficient of zero cannot change. `groups` [samples] are the subgroups whose mean coefficients
    are taken, by default the classes. Raises UsageError for a layer that is not there, FeedError
    for data without labels or a model that does not classify.
    """
    progress = progress or Silent()
    name = _layer_name(model, layer)
    if data.labels is None:
        raise FeedError(
            f"accuracy by class needs labels, and '{data.input_name}' comes without",
            hint="save them beside the inputs: numpy.savez(path, input=…, label=…)",
        )
    if groups is not None and groups.shape != (len(data),):
        raise FeedError(f"{groups.shape} subgroups for {len(data)} inputs")
    module = sharing_weights(model.module)
    watched = moe_layers(module)[name]
    progress.step(f"accuracy by class of {model.source.path}", total=len(data))
    base = _base(module, watched, data, batch, progress)
    places = [(level, e) for level, n in enumerate(watched.spec.levels) for e in range(n)]
    work = sum(int(base.takes_in[level][:, e].sum()) for level, e in places)
    progress.step(f"removing each of {len(places)} experts of {name}", total=work)
    effects = []
    for level, expert in places:
        watched.edits = LayerEdits(frozenset({(level, expert)}))
        rows = np.flatnonzero(base.takes_in[level][:, expert])
        right = base.right.copy()
        for part in _parts(rows, batch):
            right[part] = _predicted(module, data.inputs[part]) == data.labels[part]
            progress.advance(len(part))
        effects.append(_effect(level, expert, len(rows), base, right, data.labels))
    watched.edits = NO_EDITS
    return Specialisation(
        model=model.source.path,
        family=model.family,
        layer=name,
        kind=watched.spec.kind,
        levels=watched.spec.levels,
        accuracy=base.by_class(base.right, data.labels),
        samples=tuple(np.bincount(data.labels, minlength=base.classes).tolist()),
        experts=tuple(effects),
        groups=_groups(base, data.labels if groups is None else groups),
    )


@dataclass(frozen=True)
class _Base:
    """The untouched model on all inputs: what is right [s], and by level which experts take part.

    `takes_in` are booleans [s, n], `means` the coefficients [s, n] averaged over tokens.
    """

    classes: int
    right: Array
    takes_in: tuple[Array, ...]
    means: tuple[Array, ...]

    def by_class(self, right: Array, labels: Array) -> tuple[float | None, ...]:
        """The accuracy of each class."""
        seen = np.bincount(labels, minlength=self.classes)
        hits = np.bincount(labels[right], minlength=self.classes)
        return tuple(
            float(hit / count) if count else None for hit, count in zip(hits, seen, strict=True)
        )


def _base(
    module: nn.Module, layer: MoELayer, data: LabelledData, batch: int, progress: Progress
) -> _Base:
    records: list[list[Array]] = []

    def record(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, MuMoE)
        records.append([a.numpy() for a in layer.coefficients(args[0])])

    handle = layer.register_forward_pre_hook(record) if isinstance(layer, MuMoE) else None
    assert data.labels is not None
    right, takes_in, means, classes = [], [], [], 0
    try:
        for rows in data.batches(batch):
            records.clear()
            scores = _scores(module, data.inputs[rows])
            classes = scores.shape[1]
            data.check_classes(classes)
            right.append(scores.argmax(axis=1) == data.labels[rows])
            for coefficients in records:
                takes_in.append([(a != 0).any(axis=1) for a in coefficients])
                means.append([a.mean(axis=1, dtype=np.float64) for a in coefficients])
            progress.advance(len(scores))
    finally:
        if handle is not None:
            handle.remove()
    all_of_them = [np.ones((len(data), n), dtype=bool) for n in layer.spec.levels]
    return _Base(
        classes,
        np.concatenate(right),
        tuple(map(np.concatenate, zip(*takes_in, strict=True))) if takes_in else (*all_of_them,),
        tuple(map(np.concatenate, zip(*means, strict=True))),
    )


def _effect(
    level: int, expert: int, inputs: int, base: _Base, right: Array, labels: Array
) -> ExpertEffect:
    before = base.by_class(base.right, labels)
    after = base.by_class(right, labels)
    change = tuple(
        None if was is None or now is None else now - was
        for was, now in zip(before, after, strict=True)
    )
    return ExpertEffect(level + 1, expert, inputs, after, change, polysemanticity(before, change))


def polysemanticity(
    accuracy: Sequence[float | None], change: Sequence[float | None]
) -> float | None:
    """Returns ‖d − 1‖ for d_c = |change_c| / accuracy_c and the one-hot vector of the largest d_c.

    Classes without inputs, or of which nothing was right before, do not count; None where d = 0.
    """
    shares = [abs(c) / y for y, c in zip(accuracy, change, strict=True) if y and c is not None]
    largest = max(shares, default=0.0)
    if largest == 0:
        return None
    return math.sqrt(sum(d * d for d in shares) - largest**2 + (1 - largest) ** 2)


def _groups(base: _Base, by: Array) -> tuple[Group, ...]:
    found = []
    for value in np.unique(by):
        rows = by == value
        means = tuple(tuple(mean[rows].mean(axis=0).tolist()) for mean in base.means)
        found.append(Group(value.item(), int(rows.sum()), means))
    return tuple(found)


def _layer_name(model: Model, wanted: str | None) -> str:
    names = list(model.layers)
    if wanted is None:
        return names[-1]
    if wanted not in names:
        raise UsageError(
            f"--layer {wanted}: the model has no such MoE layer",
            hint=f"its MoE layers: {', '.join(names)}",
        )
    return wanted


def _parts(rows: Array, size: int) -> Iterator[Array]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _predicted(module: nn.Module, x: Array) -> Array:
    predicted: Array = _scores(module, x).argmax(axis=1)
    return predicted


def _scores(module: nn.Module, x: Array) -> Array:
    """Class scores [b, classes]; a muMoE head on vectors gives [b, 1, classes]."""
    output: torch.Tensor = module(torch.from_numpy(np.ascontiguousarray(x)))
    scores = one_per_sample(output.numpy())
    if scores.ndim != 2:
        raise FeedError(
            f"accuracy by class needs outputs of shape (batch, classes), and the model gives "
            f"{scores.shape}",
            hint="a layer or a language model does not classify its inputs",
        )
    return scores


def to_json(found: Specialisation) -> str:
    """Returns everything as indented JSON, each list of numbers on one line."""
    content = asdict(found)
    experts, groups = content.pop("experts"), content.pop("groups")
    head = {"schema": SCHEMA, **content, "mean_polysemanticity": found.mean_polysemanticity}
    fields = [f"  {json.dumps(key)}: {_line(value)}" for key, value in head.items()]
    for key, records in (("experts", experts), ("groups", groups)):
        lines = ",\n".join(f"    {_line(record)}" for record in records)
        fields.append(f"  {json.dumps(key)}: [\n{lines}\n  ]")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def write(found: Specialisation, directory: Path) -> tuple[Path, ...]:
    """Writes `specialise.json` and `specialise.png`, each whole; returns their paths.

    Raises OutputError where that cannot be.
    """
    paths = (directory / JSON_FILE, directory / FIGURE_FILE)
    write_text(to_json(found), paths[0])
    with whole_file(paths[1]) as partial:
        draw(found, partial)
    return paths


def text(found: Specialisation) -> str:
    """Returns the experts whose removal changes most, and how many change nothing."""
    changing = found.ranked
    mean = found.mean_polysemanticity
    lines = [
        f"model       {found.model} ({found.family})",
        f"layer       {found.layer}: {' × '.join(map(str, found.levels))} experts, all kept",
        f"accuracy    {found.overall(found.accuracy):.1%} of {sum(found.samples)} inputs",
        f"experts     {len(changing)} of {len(found.experts)} change the accuracy of a class when "
        "removed",
    ]
    if mean is not None:
        lines.append(f"polysemanticity {mean:.3f} on average over these (0: one class, all of it)")
        lines += ["", table(HEADER, [_cells(found, each) for each in changing[:SHOWN]])]
    if len(changing) > SHOWN:
        lines.append(f"… and {len(changing) - SHOWN} more")
    return "\n".join(lines)


HEADER = (
    "expert",
    "inputs",
    "accuracy",
    "class changed most",
    "before",
    "after",
    "polysemanticity",
)


def _cells(found: Specialisation, effect: ExpertEffect) -> tuple[str, ...]:
    changed = effect.most_changed
    return (
        found.expert_name(effect),
        str(effect.inputs),
        f"{found.overall(effect.accuracy):.1%}",
        str(changed),
        f"{found.accuracy[changed]:.1%}",
        f"{effect.accuracy[changed]:.1%}",
        f"{effect.polysemanticity:.3f}",
    )


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def draw(found: Specialisation, path: Path) -> None:
    """Writes a PNG: a row per expert, its change of each class beside its polysemanticity."""
    shown = found.ranked[:DRAWN]
    size = (8.6, 1.9 + 0.21 * max(len(shown), 3))
    with drawn([path], size, sharey=True, width_ratios=(1.9, 1)) as ((left, right),):
        left.set_title("Change in accuracy, by class")
        if shown:
            _changes(left, found, shown)
            _distances(right, found, shown)
        else:
            for axes in (left, right):
                axes.set_axis_off()
            left.text(0.5, 0.5, "no expert's removal changes a class", ha="center", color=INK)
        left.figure.suptitle(_title(found, len(shown)), fontsize=9.5, color=INK)


def _title(found: Specialisation, shown: int) -> str:
    changing = len(found.ranked)
    text = (
        f"{Path(found.model).stem}, layer {found.layer}: removing {changing} of "
        f"{len(found.experts)} experts changes a class ({sum(found.samples)} inputs)"
    )
    return text if shown == changing else f"{text}; the {shown} that change most"


def _changes(axes: Axes, found: Specialisation, shown: list[ExpertEffect]) -> None:
    """A cell per expert and class: red where accuracy is lost, blue where it is won."""
    table = np.array([[np.nan if c is None else c for c in e.change] for e in shown])
    largest = float(np.nanmax(np.abs(table)))
    image = axes.imshow(
        table, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest"
    )
    axes.grid(visible=False)
    axes.set_yticks(range(len(shown)), [found.expert_name(each) for each in shown], fontsize=7.5)
    axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    axes.set_xlabel("class")
    axes.set_ylabel("expert removed")
    bar = axes.figure.colorbar(image, ax=axes, location="bottom", aspect=45, pad=0.02)
    bar.ax.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    bar.outline.set_visible(False)


def _distances(axes: Axes, found: Specialisation, shown: list[ExpertEffect]) -> None:
    """A dot per expert, and the mean over all that change a class."""
    values = [each.polysemanticity or 0.0 for each in shown]
    axes.hlines(range(len(shown)), 0, values, color="#d5dbe4", linewidth=1)
    axes.plot(values, range(len(shown)), "o", color=COLOURS[0], markersize=4)
    mean = found.mean_polysemanticity
    assert mean is not None
    axes.set_title(f"Polysemanticity, mean {mean:.2f}")
    axes.axvline(mean, color=REFERENCE, linestyle="--", linewidth=1.2)
    axes.set_xlim(left=0)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_xlabel("0: one class lost, no other changed")
