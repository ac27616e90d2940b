"""What `specialise` found as JSON, as text and as figures, of one model or of several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ...bench.report.figures import COLOURS, INK, REFERENCE, drawn, in_percent, log2_axis
from ...common.text import table
from ...common.writing import whole_file, write_text
from ...errors import UsageError
from .fairness_report import fairness_text, rewriting_text
from .specialise import BINS, HEAVY, ExpertEffect, Load, Specialisation

SCHEMA = 1

JSON_FILE, FIGURE_FILE, LOAD_FILE = "specialise.json", "specialise.png", "load.png"
REWRITE_FILE = "rewrite.json"
SEVERAL_FILE, SEVERAL_FIGURE = "polysemanticity.json", "polysemanticity.png"

SHOWN, DRAWN = 10, 40
"""Experts in the text and in the figure, those that change most; the JSON holds all."""


def to_json(result: Specialisation) -> str:
    """Returns everything as indented JSON, each list of numbers on one line."""
    content = asdict(result)
    listed = {key: content.pop(key) for key in ("experts", "groups")}
    fairness = content.pop("fairness")
    head = {"schema": SCHEMA, **content, "mean_polysemanticity": result.mean_polysemanticity}
    if fairness is not None:
        head["fairness"] = {"accuracy": fairness["accuracy"]}
        listed["classes"] = fairness["classes"]
    fields = [f"  {json.dumps(key)}: {_line(value)}" for key, value in head.items()]
    for key, records in listed.items():
        lines = ",\n".join(f"    {_line(record)}" for record in records)
        fields.append(f"  {json.dumps(key)}: [\n{lines}\n  ]")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def several_json(several: Sequence[Specialisation]) -> str:
    """Returns what was found of several models as JSON, each as alone."""
    parts = ",\n".join(to_json(model).rstrip() for model in several)
    return f'{{"schema": {SCHEMA}, "models": [\n{parts}\n]}}\n'


def write(result: Specialisation, directory: Path) -> tuple[Path, ...]:
    """Writes JSON and figures, and a rewriting if there is one; returns the paths.

    Each file is written whole, or raises OutputError.
    """
    paths = [directory / JSON_FILE, directory / FIGURE_FILE]
    write_text(to_json(result), paths[0])
    with whole_file(paths[1]) as partial:
        draw(result, partial)
    if result.load:
        paths.append(directory / LOAD_FILE)
        with whole_file(paths[-1]) as partial:
            draw_load(result, partial)
    if result.rewriting is not None:
        paths.append(directory / REWRITE_FILE)
        write_text(json.dumps([result.rewriting.entry()], indent=1) + "\n", paths[-1])
    return tuple(paths)


def write_several(several: Sequence[Specialisation], directory: Path) -> tuple[Path, ...]:
    """Writes each model's files into a folder of its name, and what compares them; returns these.

    Raises UsageError for two models of one name.
    """
    names = [Path(model.model).stem for model in several]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{name}: two of the models have this name, and each has a folder of its name",
                hint="rename one of the files",
            )
    for name, model in zip(names, several, strict=True):
        write(model, directory / name)
    paths = (directory / SEVERAL_FILE, directory / SEVERAL_FIGURE)
    write_text(several_json(several), paths[0])
    with whole_file(paths[1]) as partial:
        draw_several(several, partial)
    return paths


def text(result: Specialisation) -> str:
    """Returns the experts whose removal changes most, how many change nothing, and the load.

    Where subgroups were named, each class's fairness; and the rewriting, if there is one.
    """
    changing = result.ranked
    mean = result.mean_polysemanticity
    lines = [
        f"model       {result.model} ({result.family})",
        f"layer       {result.layer}: {' × '.join(map(str, result.levels))} experts, all kept",
        f"accuracy    {result.overall(result.accuracy):.1%} of {sum(result.samples)} inputs",
        f"experts     {len(changing)} of {len(result.experts)} change the accuracy of a class when "
        "removed",
        *(_load_line(level, result) for level in result.load),
    ]
    if mean is not None:
        lines.append(f"polysemanticity {mean:.3f} on average over these (0: one class, all of it)")
        heads = ("expert", "inputs", "accuracy", "class changed most", "before", "after")
        rows = []
        for effect in changing[:SHOWN]:
            changed = effect.most_changed
            shares = (
                result.overall(effect.accuracy),
                result.accuracy[changed],
                effect.accuracy[changed],
            )
            overall, before, after = (f"{share:.1%}" for share in shares)
            cells = (result.expert_name(effect), effect.inputs, overall, changed, before, after)
            rows.append((*cells, f"{effect.polysemanticity:.3f}"))
        lines += ["", table((*heads, "polysemanticity"), rows)]
    if len(changing) > SHOWN:
        lines.append(f"… and {len(changing) - SHOWN} more")
    if result.fairness is not None:
        lines += ["", fairness_text(result.fairness)]
    if result.rewriting is not None:
        lines += ["", rewriting_text(result.rewriting)]
    return "\n".join(lines)


def _load_line(load: Load, result: Specialisation) -> str:
    level = f" of level {load.level}" if len(result.levels) > 1 else ""
    unit = "inputs" if load.tokens == sum(result.samples) else "tokens"
    busiest = max(range(len(load.shares)), key=lambda expert: load.shares[expert])
    return (
        f"load        {load.heavy} of {len(load.shares)} experts{level} have a coefficient of "
        f"{HEAVY} or more; expert {busiest} most often, for {load.shares[busiest]:.1%} of the "
        f"{unit}"
    )


SEVERAL_HEADS = ("model", "experts", "change a class", "polysemanticity", "accuracy")


def several_text(several: Sequence[Specialisation]) -> str:
    """Returns the mean polysemanticity of several models by their numbers of experts."""
    rows = [
        (
            Path(model.model).stem,
            len(model.experts),
            len(model.ranked),
            "–" if model.mean_polysemanticity is None else f"{model.mean_polysemanticity:.3f}",
            f"{model.overall(model.accuracy):.1%}",
        )
        for model in _by_size(several)
    ]
    return f"{table(SEVERAL_HEADS, rows)}\n\n{CAVEAT}"


CAVEAT = """Polysemanticity is a mean over the experts whose removal changes a class. The others
have none: with many of them the mean says little of the layer as a whole."""


def _by_size(several: Sequence[Specialisation]) -> list[Specialisation]:
    return sorted(several, key=lambda model: len(model.experts))


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def draw(result: Specialisation, path: Path) -> None:
    """Writes a PNG: a row per expert, its change of each class beside its polysemanticity."""
    changing = result.ranked
    shown = changing[:DRAWN]
    title = (
        f"{Path(result.model).stem}, layer {result.layer}: removing {len(changing)} of "
        f"{len(result.experts)} experts changes a class ({sum(result.samples)} inputs)"
    )
    if len(shown) < len(changing):
        title += f"; the {len(shown)} that change most"
    size = (8.6, 1.9 + 0.21 * max(len(shown), 3))
    with drawn([path], size, sharey=True, width_ratios=(1.9, 1)) as ((left, right),):
        left.set_title("Change in accuracy, by class")
        if shown:
            _changes(left, result, shown)
            _distances(right, result, shown)
        else:
            for axes in (left, right):
                axes.set_axis_off()
            left.text(0.5, 0.5, "no expert's removal changes a class", ha="center", color=INK)
        left.figure.suptitle(title, fontsize=9.5, color=INK)


def _changes(axes: Axes, result: Specialisation, shown: list[ExpertEffect]) -> None:
    """A cell per expert and class: red where accuracy is lost, blue where it is won."""
    table = np.array([[np.nan if c is None else c for c in e.change] for e in shown])
    largest = float(np.nanmax(np.abs(table)))
    image = axes.imshow(
        table, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest"
    )
    axes.grid(visible=False)
    axes.set_yticks(
        range(len(shown)), [result.expert_name(effect) for effect in shown], fontsize=7.5
    )
    axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    axes.set_xlabel("class")
    axes.set_ylabel("expert removed")
    bar = axes.figure.colorbar(image, ax=axes, location="bottom", aspect=45, pad=0.02)
    in_percent(bar.ax.xaxis)
    bar.outline.set_visible(False)


def _distances(axes: Axes, result: Specialisation, shown: list[ExpertEffect]) -> None:
    """A dot per expert, and the mean over all that change a class."""
    values = [effect.polysemanticity or 0.0 for effect in shown]
    axes.hlines(range(len(shown)), 0, values, color="#d5dbe4", linewidth=1)
    axes.plot(values, range(len(shown)), "o", color=COLOURS[0], markersize=4)
    mean = result.mean_polysemanticity
    assert mean is not None
    axes.set_title(f"Polysemanticity, mean {mean:.2f}")
    axes.axvline(mean, color=REFERENCE, linestyle="--", linewidth=1.2)
    axes.set_xlim(left=0)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_xlabel("0: one class lost, no other changed")


def draw_load(result: Specialisation, path: Path) -> None:
    """Writes a PNG: how many tokens each expert works for, and how large coefficients get."""
    size = (8.6, 0.6 + 2.3 * len(result.load))
    with drawn([path], size, rows=len(result.load)) as grid:
        for (left, right), load in zip(grid, result.load, strict=True):
            level = f", level {load.level}" if len(result.load) > 1 else ""
            left.set_title(f"Tokens with a coefficient of {HEAVY} or more{level}")
            left.bar(range(len(load.shares)), sorted(load.shares, reverse=True), color=COLOURS[0])
            left.set_xlabel(f"experts, the busiest first ({load.heavy} of {len(load.shares)})")
            in_percent(left.yaxis)
            left.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            right.set_title(f"The largest coefficient of a token{level}")
            edges = [(bin + 0.5) / BINS for bin in range(BINS)]
            right.bar(edges, [n / load.tokens for n in load.largest], 0.9 / BINS, color=COLOURS[1])
            right.set_xlim(0, 1)
            right.set_xlabel(f"coefficient ({load.tokens} tokens)")
            in_percent(right.yaxis)


def draw_several(several: Sequence[Specialisation], path: Path) -> None:
    """Writes a PNG: mean polysemanticity by number of experts, and how many change a class."""
    ordered = _by_size(several)
    counts = [len(model.experts) for model in ordered]
    with drawn([path], (8.6, 3.2)) as ((left, right),):
        left.set_title("Mean class polysemanticity")
        known = [(n, e.mean_polysemanticity) for n, e in zip(counts, ordered, strict=True)]
        points = [(n, mean) for n, mean in known if mean is not None]
        if points:
            left.plot(*zip(*points, strict=True), "o-", color=COLOURS[0])
        left.set_ylim(bottom=0)
        right.set_title("Experts whose removal changes a class")
        right.plot(counts, [len(e.ranked) / n for n, e in zip(counts, ordered, strict=True)], "s-")
        right.set_ylim(0, 1.05)
        in_percent(right.yaxis)
        for axes in (left, right):
            log2_axis(axes, sorted(set(counts)), "experts")
