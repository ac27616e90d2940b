"""The report's main chart, with all models, as PNG and SVG files for a README or a paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..engines import PYTORCH_EAGER
from ..results import Interval, Results, Row
from .charts import (
    DASHED,
    DASHES,
    DOTTED,
    LEVEL,
    REFERENCE,
    SOLID,
    STAR,
    SYMBOLS,
    Spec,
    empty_chart,
    ink_of,
    over_k,
    side_by_side,
    write_pictures,
)
from .summary import (
    UNTOUCHED,
    Section,
    Series,
    engine_name,
    line_name,
    milliseconds,
    percent,
    row_name,
    sections,
    times,
)

FAR_APART = 6  # values that differ by a larger factor get a logarithmic axis, as on the page


def marks(section: Section, row: Row, symbol: str) -> dict[str, Any]:
    """Returns a row's data for charts: values with their bars, style and text."""
    untouched = row.engine == PYTORCH_EAGER
    rounds = () if row.latency_ms is None else row.latency_ms.rounds
    perplexity = row.perplexity
    values: dict[str, tuple[float | None, Interval | None]] = {
        "ms": (row.median_ms, Interval(min(rounds), max(rounds)) if rounds else None),
        "rate": (row.tokens_per_s, _rates(row)),
        "kept": (row.kept, row.kept_interval),
        "ppl": (None, None) if perplexity is None else (perplexity.value, perplexity.interval),
    }
    bars: dict[str, float | None] = {}
    for name, (value, interval) in values.items():
        # The median of all calls can be slightly outside the medians of its rounds.
        ends = [] if value is None else [value]
        if ends and interval is not None:
            ends += [interval.low, interval.high]
        bars |= {name: value, f"{name}_low": min(ends, default=None)}
        bars[f"{name}_high"] = max(ends, default=None)
    pytorch_dash = DASHED if untouched else DOTTED
    return {
        **bars,
        "limit": row.limit_ms,
        "untouched": untouched,
        "ink": REFERENCE if untouched else ink_of(row.precision),
        "symbol": STAR if untouched else symbol,
        "dash": pytorch_dash if row.engine.startswith("pytorch") else SOLID,
        "hover": "\n".join(_hover(section, row)),
    }


def _rates(row: Row) -> Interval | None:
    """Returns the tokens per second of the slowest and the fastest round."""
    if row.tokens_per_s is None or row.latency_ms is None:
        return None
    rates = [row.tokens_per_s * row.latency_ms.median / ms for ms in row.latency_ms.rounds]
    return Interval(min(rates), max(rates))


def _hover(section: Section, row: Row) -> Iterator[str]:
    yield row_name(row)
    yield f"k = {row.k_of_n(' of ')}, {row.sizes}"
    if row.median_ms is not None:
        speed = section.speedup(row)
        yield f"{milliseconds(row.median_ms)} ms" + ("" if speed is None else f", {times(speed)}")
    if row.kept is not None:
        yield f"{percent(row.kept)} kept"
    if row.tokens_per_s is not None:
        yield f"{row.tokens_per_s:,.0f} tokens/s"
    if row.same_experts is not None:
        yield f"same experts: {percent(row.same_experts)}"


def figures(results: Results, directory: Path) -> tuple[Path, ...]:
    """Writes a figure per batch size, as PNG and SVG; returns the files.

    Each shows latency and accuracy over k. The figure of the smallest batch size is
    `latency_accuracy`, others are `latency_accuracy_batch{b}`; all models share a pair of axes. For
    language models, `tokens_perplexity` has tokens per second in each phase, and perplexity.
    """
    shown = [section for section in sections(results) if section.series]
    plain = [section for section in shown if section.phase is None]
    phases = [section for section in shown if section.phase is not None]
    written = (*_figures("tokens_perplexity", phases, directory),)
    return (*written, *_figures("latency_accuracy", plain, directory))


def _figures(name: str, chosen: Sequence[Section], directory: Path) -> Iterator[Path]:
    """Writes a figure per batch size; yields its files."""
    for index, batch in enumerate(sorted({section.batch for section in chosen})):
        in_batch = [section for section in chosen if section.batch == batch]
        file = name if index == 0 else f"{name}_batch{batch}"
        paths = [directory / f"{file}{suffix}" for suffix in (".png", ".svg")]
        write_pictures(_picture(in_batch), paths)
        yield from paths


def _picture(chosen: Sequence[Section]) -> Spec:
    """Returns the chart of latency or tokens per second, then the quality of each kind of model."""
    models = tuple(dict.fromkeys(section.model for section in chosen))
    lines = dict(zip(map(id, chosen), _lines(chosen), strict=True))
    prefix = "" if len(models) > 1 else f"{models[0]}: "

    def rows(group: Sequence[Section]) -> list[dict[str, Any]]:
        return [
            row
            for each in group
            for row in _rows(each, lines[id(each)], models.index(each.model), bool(prefix))
        ]

    panels = []
    for phase in dict.fromkeys(section.phase for section in chosen):
        drawn = rows([section for section in chosen if section.phase == phase])
        field = "ms" if phase is None else "rate"
        title = "median latency, ms" if phase is None else "tokens per second"
        panel = over_k(field, title, "log" if _far_apart(drawn, field) else "zero")
        what = "latency" if phase is None else phase
        panels.append((f"{prefix}{what}, batch {chosen[0].batch}", panel, drawn))
    # Quality depends on no phase: each model is judged once.
    by_model = {section.model: section for section in reversed(chosen)}
    judged = [by_model[model] for model in models]
    for quality in dict.fromkeys(s.quality for s in judged if s.quality) or (None,):
        drawn = rows([section for section in judged if section.quality == quality])
        if quality == "perplexity":
            panel = over_k("ppl", "perplexity, lower is better", "near", apart=True)
            panels.append((f"{prefix}perplexity", panel, drawn))
        else:
            panel = empty_chart("not measured: no labels")
            if quality:
                panel = over_k("kept", f"share of PyTorch's {quality} kept", "share", apart=True)
            panels.append((f"{prefix}{quality or 'accuracy'} kept", panel, drawn))
    named = {line.name: line for group in lines.values() for line in group}
    legend = {
        n: (ink_of(s.rows[0].precision), SYMBOLS[s.style % len(SYMBOLS)]) for n, s in named.items()
    }
    if any(section.reference for section in chosen):
        legend |= {UNTOUCHED: (REFERENCE, LEVEL)}
    experts = {section.experts for section in chosen}
    noun = "experts computed" if chosen[0].phase is None else "experts for a token"
    label = f"{noun}, k" + (f" of {experts.pop()}" if len(experts) == 1 else "")
    ks = sorted({k for section in chosen for k in section.ks})
    return side_by_side(panels, legend, () if prefix else models, ticks=ks, of=label)


def _rows(
    section: Section, lines: Sequence[Series], model: int, single: bool
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a section as charts draw them, each model with its dashes."""
    dash = DASHES[model % len(DASHES)]
    named = [(line, row) for line in lines for row in line.rows]
    for index, (line, row) in enumerate(named):
        fields = {"index": index, "k": row.k, "precision": row.precision, "model": model}
        drawn = marks(section, row, SYMBOLS[line.style % len(SYMBOLS)]) | {
            "untouched": False,
            "limit": None,
        }
        if not row.engine.startswith("pytorch"):
            drawn["dash"] = dash
        yield drawn | fields | {"line": f"{model} {line.name}", "ink": ink_of(row.precision)}
    if section.reference is not None:
        drawn = marks(section, section.reference, STAR) | {
            "limit": None,
            "model": model,
            "line": "",
        }
        yield drawn | {"index": -2, "k": section.reference.k, "dash": DASHED if single else dash}


def _far_apart(rows: Sequence[dict[str, Any]], field: str) -> bool:
    values = [row[field] for row in rows if row[field] is not None]
    return max(values, default=1.0) > FAR_APART * min(values, default=1.0)


def _lines(chosen: Sequence[Section]) -> list[list[Series]]:
    """Returns the lines of each section: one per engine and precision if each k has one lowering.

    A name has the same style in all sections; exported graphs come before PyTorch.
    """
    rows = [row for section in chosen for row in section.rows]
    precisions = {row.precision for row in rows if not row.engine.startswith("pytorch")}
    by_section: list[dict[str, list[Row]]] = []
    for section in chosen:
        lines: dict[str, list[Row]] = {}
        for row in section.rows:
            name = engine_name(row)
            if len(precisions) > 1 and not row.engine.startswith("pytorch"):
                name += f", {row.precision.upper()}"
            lines.setdefault(name, []).append(row)
        split = [name for name, line in lines.items() if len({row.k for row in line}) < len(line)]
        for row in (row for name in split for row in lines.pop(name)):
            lines.setdefault(line_name(row), []).append(row)
        by_section.append(lines)
    names = dict.fromkeys(name for lines in by_section for name in lines)
    ordered = sorted(names, key=lambda name: name.startswith("PyTorch"))
    return [
        [
            Series(name, style, tuple(sorted(lines[name], key=lambda row: row.k)))
            for style, name in enumerate(ordered)
            if name in lines
        ]
        for lines in by_section
    ]
