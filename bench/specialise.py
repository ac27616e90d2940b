"""What each expert of a layer is for: the classes that lose accuracy when it is removed.

For expert e, d_c = |ŷ_c − y_c| / y_c is the share of class c's accuracy that its removal changes.
The distance of d to the one-hot vector of its largest entry is the expert's class polysemanticity
(Eq. 4 of the muMoE paper): 0 for an expert without which one class is lost and no other changes.

From top to bottom: what is found, how, its JSON and text, its figure.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import nn

from ..calibration.feeds import Array
from ..common.console import Progress, Silent
from ..common.text import table
from ..common.writing import whole_file, write_text
from ..errors import FeedError, UsageError
from ..exporter.inputs import check_array, with_axes
from ..exporter.model import Model, check_one_input
from ..graphs.layers.base import NO_EDITS, LayerEdits, MoELayer, moe_layers, sharing_weights
from .data import LabelledData, labelled, load_groups
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
    """A subgroup of the inputs and, by level if there are any, its mean coefficients ā [n]."""

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
    data: str | Path | LabelledData,
    *,
    layer: str | None = None,
    group_by: str | Sequence[int | bool | str] | None = None,
    progress: Progress | None = None,
) -> Specialisation:
    """Returns what each expert of a layer, by default the last, does for the accuracy by class.

    One pass over the data, and one per expert over the inputs that take it in; those that give it a
    coefficient of zero cannot change. `group_by` are the subgroups whose mean coefficients are
    taken, or the array of the file that holds them: by default the classes. Raises UsageError for a
    layer that is not there, FeedError for data without labels or a model that does not classify.
    """
    progress = progress or Silent()
    check_one_input(model, "specialise")
    held = labelled(data, model, 1).head(sys.maxsize)
    x, labels = with_axes(held.inputs, model.input), held.labels
    check_array(x, model.input, f"{model.source.path}: ")
    groups = _subgroups(data, group_by, len(x))
    name = list(model.layers)[-1] if layer is None else layer
    if name not in model.layers:
        raise UsageError(
            f"--layer {name}: the model has no such MoE layer",
            hint=f"its MoE layers: {', '.join(model.layers)}",
        )
    if labels is None:
        raise FeedError(
            f"accuracy by class needs labels, and '{held.input_name}' comes without",
            hint="save them beside the inputs: numpy.savez(path, input=…, label=…)",
        )
    module = sharing_weights(model.module)
    watched = moe_layers(module)[name]
    progress.step(f"accuracy by class of {model.source.path}", total=len(x))
    right, means, takes_in, classes = [], [], [], 0
    for rows in held.batches(BATCH):
        with _coefficients(watched) as found:
            scores = _scores(module, x[rows])
        classes = scores.shape[1]
        held.check_classes(classes)
        right.append(scores.argmax(axis=1) == labels[rows])
        means.append([a.mean(axis=1, dtype=np.float64) for a in found])
        takes_in.append([(a != 0).any(axis=1) for a in found])
        progress.advance(len(scores))
    base = np.concatenate(right)
    # By level: who takes an expert in [s, n], of a layer without coefficients everybody.
    taken = list(map(np.concatenate, zip(*takes_in, strict=True))) or [
        np.ones((len(x), n), dtype=bool) for n in watched.spec.levels
    ]
    by_class = partial(_by_class, labels, classes)
    before = by_class(base)
    places = [(level, e) for level, n in enumerate(watched.spec.levels) for e in range(n)]
    work = sum(int(taken[level][:, e].sum()) for level, e in places)
    progress.step(f"removing each of {len(places)} experts of {name}", total=work)
    effects = []
    for level, expert in places:
        watched.edits = LayerEdits(frozenset({(level, expert)}))
        inputs = np.flatnonzero(taken[level][:, expert])
        right_now = base.copy()
        for part in np.split(inputs, range(BATCH, len(inputs), BATCH)):
            if part.size:
                right_now[part] = _scores(module, x[part]).argmax(axis=1) == labels[part]
                progress.advance(len(part))
        after = by_class(right_now)
        change = tuple(
            None if was is None or now is None else now - was
            for was, now in zip(before, after, strict=True)
        )
        moved = polysemanticity(before, change)
        effects.append(ExpertEffect(level + 1, expert, len(inputs), after, change, moved))
    watched.edits = NO_EDITS
    levels = list(map(np.concatenate, zip(*means, strict=True)))
    return Specialisation(
        model=model.source.path,
        family=model.family,
        layer=name,
        kind=watched.spec.kind,
        levels=watched.spec.levels,
        accuracy=before,
        samples=tuple(np.bincount(labels, minlength=classes).tolist()),
        experts=tuple(effects),
        groups=_groups(levels, labels if groups is None else groups),
    )


def _subgroups(
    data: str | Path | LabelledData, by: str | Sequence[int | bool | str] | None, samples: int
) -> Array | None:
    """The subgroup of each input; None where nobody names any."""
    if isinstance(by, str):
        if isinstance(data, LabelledData):
            raise UsageError(
                f"group_by={by!r} names an array of a file, and the data are none",
                hint="give the subgroup of each input as a sequence",
            )
        return load_groups(Path(data), by, samples)
    groups = None if by is None else np.asarray(by)
    if groups is not None and groups.shape != (samples,):
        raise FeedError(f"{groups.shape} subgroups for {samples} inputs")
    return groups


@contextmanager
def _coefficients(layer: MoELayer) -> Iterator[list[Array]]:
    """Within the context a forward gives the layer's coefficients [b, m, n], by level, if any."""
    found: list[Array] = []

    def record(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        found[:] = [made.chosen.numpy() for made in layer.choices(args[0]).values()]

    # Where coefficients mix the experts, they are what is chosen.
    handle = layer.register_forward_pre_hook(record) if layer.spec.rewritable else None
    try:
        yield found
    finally:
        if handle is not None:
            handle.remove()


def _by_class(labels: Array, classes: int, right: Array) -> tuple[float | None, ...]:
    """The accuracy of each class, None for one without inputs."""
    seen = np.bincount(labels, minlength=classes)
    hits = np.bincount(labels[right], minlength=classes)
    return tuple(float(h / count) if count else None for h, count in zip(hits, seen, strict=True))


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


def _groups(means: Sequence[Array], by: Array) -> tuple[Group, ...]:
    """Each subgroup with its mean coefficients, of those [s, n] of the levels."""
    return tuple(
        Group(
            value.item(),
            int((by == value).sum()),
            tuple(tuple(mean[by == value].mean(axis=0).tolist()) for mean in means),
        )
        for value in np.unique(by)
    )


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
    """Writes `specialise.json` and `specialise.png`, each whole, or OutputError; returns paths."""
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
        heads = ("expert", "inputs", "accuracy", "class changed most", "before", "after")
        rows = []
        for each in changing[:SHOWN]:
            changed = each.most_changed
            shares = (found.overall(each.accuracy), found.accuracy[changed], each.accuracy[changed])
            overall, before, after = (f"{share:.1%}" for share in shares)
            cells = (found.expert_name(each), each.inputs, overall, changed, before, after)
            rows.append((*cells, f"{each.polysemanticity:.3f}"))
        lines += ["", table((*heads, "polysemanticity"), rows)]
    if len(changing) > SHOWN:
        lines.append(f"… and {len(changing) - SHOWN} more")
    return "\n".join(lines)


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def draw(found: Specialisation, path: Path) -> None:
    """Writes a PNG: a row per expert, its change of each class beside its polysemanticity."""
    changing = found.ranked
    shown = changing[:DRAWN]
    title = (
        f"{Path(found.model).stem}, layer {found.layer}: removing {len(changing)} of "
        f"{len(found.experts)} experts changes a class ({sum(found.samples)} inputs)"
    )
    if len(shown) < len(changing):
        title += f"; the {len(shown)} that change most"
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
        left.figure.suptitle(title, fontsize=9.5, color=INK)


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
