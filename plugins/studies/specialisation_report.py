"""Writes the result of `specialise` as JSON, text and figures, for one or several models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ...bench.report.charts import DASHED, ChartPanel, axis, chart, empty_chart, layer
from ...common.text import table
from ...common.writing import write_text
from ...errors import UsageError
from .examples import report as examples_report
from .fairness_report import fairness_text, rewriting_text
from .figures import INKS, ChartRows, bars, curve, curves, draw, heat_map, ordinal
from .judge import Judged
from .specialise import BINS, HEAVY, Load, Specialisation
from .usage.report import USAGE_FILE, draw_usage, usage_text

SCHEMA = 1

JSON_FILE, FIGURE_FILE, LOAD_FILE = "specialise.json", "specialise.png", "load.png"
REWRITE_FILE = "rewrite.json"
SEVERAL_FILE, SEVERAL_FIGURE = "polysemanticity.json", "polysemanticity.png"

MAX_SHOWN, MAX_DRAWN = 10, 40
"""How many experts the text and the figure show, largest change first. The JSON has all."""


def to_json(result: Specialisation) -> str:
    """Returns everything as indented JSON, each list of numbers on one line."""
    content = asdict(replace(result, examples=None))
    del content["examples"]
    if result.examples is not None:
        content["examples"] = examples_report.to_dict(result.examples)
    listed = {key: content.pop(key) for key in ("experts", "groups")}
    usage = content.pop("usage")
    if usage is not None:
        listed["usage"] = usage["layers"]
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
    """Returns the results of several models as JSON, each as `to_json` formats it."""
    parts = ",\n".join(to_json(model).rstrip() for model in several)
    return f'{{"schema": {SCHEMA}, "models": [\n{parts}\n]}}\n'


def write(result: Specialisation, directory: Path) -> tuple[Path, ...]:
    """Writes JSON and figures, and a rewrite and examples if there are any; returns the paths.

    Each file is written completely or not at all. Raises `OutputError`.
    """
    written = () if result.examples is None else examples_report.write(result.examples, directory)
    if not result.samples and result.usage is None:
        return written
    paths = [directory / JSON_FILE]
    write_text(to_json(replace(result, examples=None)), paths[0])
    if result.accuracy:
        paths.append(directory / FIGURE_FILE)
        _draw_effects(result, paths[-1])
    if result.load:
        paths.append(directory / LOAD_FILE)
        _draw_load(result, paths[-1])
    if result.usage is not None:
        paths.append(directory / USAGE_FILE)
        draw_usage(result.usage, paths[-1])
    if result.rewriting is not None:
        paths.append(directory / REWRITE_FILE)
        write_text(json.dumps([result.rewriting.entry()], indent=1) + "\n", paths[-1])
    return (*paths, *written)


def write_several(several: Sequence[Specialisation], directory: Path) -> tuple[Path, ...]:
    """Writes each model's files into a folder with its name; returns the files of the comparison.

    The figure is omitted if only the use of experts is known. Raises `UsageError` if two models
    have the same name.
    """
    names = [Path(model.model).stem for model in several]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{name}: two models have this name, but each needs its own folder",
                hint="rename one of the files",
            )
    for name, model in zip(names, several, strict=True):
        write(model, directory / name)
    paths = (directory / SEVERAL_FILE, directory / SEVERAL_FIGURE)
    write_text(several_json(several), paths[0])
    judged = [model for model in several if model.accuracy]
    if not judged:
        return paths[:1]
    _draw_several(judged, paths[1])
    return paths


def text(result: Specialisation) -> str:
    """Returns the experts with the largest effects, the number of experts with any, and the load.

    With subgroups, the fairness of each class and the rewrite follow, if there is one. The last
    part is how often every layer chooses each expert.
    """
    parts = [f"model       {result.model} ({result.family})"]
    if result.accuracy:
        parts[0] += f"\n{_effects_text(result)}"
        if result.judged != "classes":
            rows = [
                (output, _figure(value, result)) for output, value in enumerate(result.accuracy)
            ]
            parts.append(table((NAMES[result.judged], FIGURES[result.judged]), rows))
    if result.fairness is not None:
        parts.append(fairness_text(result.fairness))
    if result.rewriting is not None:
        parts.append(rewriting_text(result.rewriting))
    if result.usage is not None:
        parts.append(usage_text(result.usage, result.layer if result.accuracy else None))
    if result.examples is not None:
        parts.append(examples_report.text(result.examples))
    return "\n\n".join(parts)


def _effects_text(result: Specialisation) -> str:
    """Returns the layer, its load, and the experts with the largest effects."""
    changing = result.ranked
    mean = result.mean_polysemanticity
    figure, what = FIGURES[result.judged], NAMES[result.judged]
    lines = [
        f"layer       {result.layer}: {' × '.join(map(str, result.levels))} experts, all kept",
        _overall_line(result),
        f"experts     {len(changing)} of {len(result.experts)} change the {figure} of "
        f"{ARTICLES[result.judged]} when removed",
        *(_load_line(level, result) for level in result.load),
    ]
    if mean is not None:
        lines.append(f"polysemanticity {mean:.3f} on average over these (0: one {what} only)")
        heads = ("expert", "inputs", figure, f"{what} changed most", "before", "after")
        rows = []
        for effect in changing[:MAX_SHOWN]:
            changed = effect.most_changed
            shares = (
                result.overall(effect.accuracy),
                result.accuracy[changed],
                effect.accuracy[changed],
            )
            overall, before, after = (_figure(share, result) for share in shares)
            cells = (result.expert_name(effect), effect.inputs, overall, changed, before, after)
            rows.append((*cells, f"{effect.polysemanticity:.3f}"))
        lines += ["", table((*heads, "polysemanticity"), rows)]
    if len(changing) > MAX_SHOWN:
        lines.append(f"… and {len(changing) - MAX_SHOWN} more")
    return "\n".join(lines)


NAMES: Mapping[Judged, str] = {"classes": "class", "attributes": "attribute", "targets": "output"}
ARTICLES = {"classes": "a class", "attributes": "an attribute", "targets": "an output"}
FIGURES: Mapping[Judged, str] = {"classes": "accuracy", "attributes": "accuracy", "targets": "R²"}


def _figure(value: float | None, result: Specialisation) -> str:
    if value is None:
        return "not defined"
    return f"{value:.4f}" if result.judged == "targets" else f"{value:.1%}"


def _overall_line(result: Specialisation) -> str:
    """Returns the accuracy on all inputs, or the mean over attributes or outputs."""
    overall = _figure(result.overall(result.accuracy), result)
    if result.judged == "classes":
        return f"accuracy    {overall} of {result.inputs} inputs"
    outputs = f"{len(result.accuracy)} {NAMES[result.judged]}s"
    return f"{FIGURES[result.judged]:<12}{overall}, the mean of {outputs}; {result.inputs} inputs"


def _load_line(load: Load, result: Specialisation) -> str:
    level = f" of level {load.level}" if len(result.levels) > 1 else ""
    unit = "inputs" if load.tokens == result.inputs else "tokens"
    busiest = max(range(len(load.shares)), key=lambda expert: load.shares[expert])
    return (
        f"load        {load.heavy} of {len(load.shares)} experts{level} have a coefficient of "
        f"{HEAVY} or more; expert {busiest} most often, for {load.shares[busiest]:.1%} of the "
        f"{unit}"
    )


SEVERAL_HEADS = ("model", "experts", "change a class", "polysemanticity", "accuracy")


def several_text(several: Sequence[Specialisation]) -> str:
    """Returns a table of several models' mean polysemanticity, by number of experts.

    Models with only the use of experts, or only examples, follow as texts.
    """
    rows = [
        (
            Path(model.model).stem,
            len(model.experts),
            len(model.ranked),
            "–" if model.mean_polysemanticity is None else f"{model.mean_polysemanticity:.3f}",
            _figure(model.overall(model.accuracy), model),
        )
        for model in _by_size(several)
        if model.accuracy
    ]
    parts = [table(SEVERAL_HEADS, rows), CAVEAT] if rows else []
    return "\n\n".join(parts + [text(model) for model in several if not model.accuracy])


CAVEAT = """Polysemanticity is a mean over the experts whose removal changes a class. If many other
experts change none, the mean does not describe the whole layer."""


def _by_size(several: Sequence[Specialisation]) -> list[Specialisation]:
    return sorted(several, key=lambda model: len(model.experts))


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _draw_effects(result: Specialisation, path: Path) -> None:
    """Writes a PNG with a row per expert: the change in each class, and the polysemanticity."""
    changing = result.ranked
    shown = changing[:MAX_DRAWN]
    title = (
        f"{Path(result.model).stem}, layer {result.layer}: removing {len(changing)} of "
        f"{len(result.experts)} experts changes {ARTICLES[result.judged]} ({result.inputs} inputs)"
    )
    if len(shown) < len(changing):
        title += f"; the {len(shown)} with the largest effect"
    left = f"Change in {FIGURES[result.judged]}, by {NAMES[result.judged]}"
    if not shown:
        empty = empty_chart(f"no expert's removal changes {ARTICLES[result.judged]}")
        draw(path, [(left, empty, [{}])], title=title)
        return
    height = 40 + 15 * len(shown)
    change: ChartRows = [
        {"row": result.expert_name(effect), "x": output, "value": value}
        for effect in shown
        for output, value in enumerate(effect.change)
    ]
    largest = max(abs(cell["value"] or 0.0) for cell in change)
    classes = range(len(shown[0].change))
    limits = (-largest, largest)
    table = heat_map(NAMES[result.judged], classes, "expert removed", "redblue", limits)
    distance: ChartRows = [
        {"row": result.expert_name(effect), "y": effect.polysemanticity or 0.0, "ink": INKS[0]}
        for effect in shown
    ]
    mean = result.mean_polysemanticity
    right = f"Polysemanticity, mean {mean:.2f}"
    across = axis("x", "y", "0: one class lost, no other changed")
    line = layer("mean", "rule", "", {"strokeDash": DASHED}, x={"datum": mean}, y=None)
    dots = chart(
        across,
        ordinal(None, labels=False) | {"field": "row"},
        [layer("stems", "rule", x2={"datum": 0}), layer("dots", "circle"), line],
    )
    panels: list[ChartPanel] = [
        (left, table | {"height": height}, change),
        (right, dots | {"height": height, "width": 200}, distance),
    ]
    draw(path, panels, title=title)


def _draw_load(result: Specialisation, path: Path) -> None:
    """Writes a PNG: the share of tokens of each expert, and the largest coefficients of tokens."""
    panels: list[ChartPanel] = []
    percent = axis("y", "y", "", "percent")
    for load in result.load:
        level = f", level {load.level}" if len(result.load) > 1 else ""
        label = f"experts, busiest first ({load.heavy} of {len(load.shares)})"
        busiest = enumerate(sorted(load.shares, reverse=True))
        left = [{"x": x, "y": y, "ink": INKS[0]} for x, y in busiest]
        edges = [((bin + 0.5) / BINS, n / load.tokens) for bin, n in enumerate(load.largest)]
        right = [{"x": x, "y": y, "ink": INKS[1]} for x, y in edges]
        title = f"Tokens with a coefficient of {HEAVY} or more{level}"
        panels.append((title, bars(label, percent), left))
        title = f"The largest coefficient of a token{level}"
        panels.append(
            (title, bars(f"coefficient ({load.tokens} tokens)", percent, format=".2f"), right)
        )
    draw(path, panels)


def _draw_several(several: Sequence[Specialisation], path: Path) -> None:
    """Writes a PNG: mean polysemanticity and the share of experts that change a class, by n."""
    ordered = [(len(model.experts), model) for model in _by_size(several)]
    known = [(n, mean) for n, m in ordered if (mean := m.mean_polysemanticity) is not None]
    changed = [(n, len(model.ranked) / n) for n, model in ordered]
    x = axis("x", "x", "experts", "k")
    means, shares = curves(x, axis("y", "y", "")), curves(x, axis("y", "y", "", "percent"))
    panels = [
        ("Mean class polysemanticity", means, curve(0, "", known)),
        ("Experts whose removal changes a class", shares, curve(0, "", changed)),
    ]
    draw(path, panels, ticks=sorted({n for n, _ in ordered}))
