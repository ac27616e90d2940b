"""The list of a report's sections other than its charts and rows: one record per section.

The page, the Markdown and the tests read the list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...common.text import size
from ..results import Results, Row
from .compare import Change, ResultsComparison
from .content import SECTIONS, Cell, ReportSection, SectionContent, TableContent
from .outputs import outputs_section
from .runs import HEADS, NOTE, NamedRun, answers
from .summary import Section, floored, headline, line_name, milliseconds, percent, sections, times

PARITY_NOTE = (
    "Compared with PyTorch at the same k: the share of samples for which every layer selected the "
    "same experts, the mean Jaccard index of the selected sets, and the outputs. Routing is not "
    "compared if all experts are kept, or in PyTorch's own rows."
)

HEAT_NOTE = (
    "Inputs per second of the fastest export for each k, batch size and precision; stronger "
    "colours are faster. Equal factors in speed are equal steps in colour."
)

LOSING_NOTE = (
    "Correct answers for the classes that lose the most, on the inputs for accuracy; with few "
    "inputs, differences are mostly chance."
)


SIDE_BY_SIDE = (
    "The row to deploy of each model, chosen as in the page's first sentence. Each is compared "
    "with its own untouched PyTorch model."
)


def _side_by_side(results: Results) -> SectionContent | None:
    shown = sections(results)
    if len({section.model for section in shown}) < 2:
        return None
    groups: dict[str, list[Sequence[Cell]]] = {}
    for section in shown:
        row = headline(section)
        if row is None:
            continue
        accuracy = "–" if row.accuracy is None else percent(row.accuracy.top1)
        if row.perplexity is not None and row.accuracy is None:
            accuracy = f"perplexity {row.perplexity.value:.4g}"
        gains = (section.gain(row), section.speedup(row))
        groups.setdefault(section.sizes, []).append(
            (
                section.model,
                row.k_of_n(),
                line_name(row),
                "–" if row.median_ms is None else milliseconds(row.median_ms),
                "–" if row.throughput is None else f"{row.throughput:,.0f}",
                accuracy,
                _retention(section, row),
                *("–" if gain is None else times(gain) for gain in gains),
                "–" if row.disk_bytes is None else size(row.disk_bytes),
            )
        )
    heads = (
        *("Model", "k", "Runs in", "Median ms", "Inputs/s", "Accuracy", "Kept"),
        *("vs all experts", "vs PyTorch", "On disk"),
    )
    return SectionContent(tables=(TableContent("", heads, groups),), notes=(SIDE_BY_SIDE,))


def _retention(section: Section, row: Row) -> str:
    """Returns a row's retention, and the lower end of its interval."""
    low = section.proven(row)
    if row.kept is None or low is None:
        return "–"
    kept = percent(row.kept)
    return kept if low == row.kept else f"{kept} (at least {percent(floored(low))})"


def _by_k_and_batch(results: Results) -> SectionContent | None:
    """Returns inputs per second by k and batch size, if there are several of both."""
    tables = []
    rows = [
        row
        for row in results.rows
        if row.throughput and row.error is None and row.phase is None
        if not row.engine.startswith("pytorch")
    ]
    for model, precision in dict.fromkeys((row.model, row.precision) for row in rows):
        exported = [row for row in rows if (row.model, row.precision) == (model, precision)]
        batches = sorted({row.batch for row in exported})
        fastest: dict[tuple[int, int], Row] = {}
        for row in sorted(exported, key=lambda row: row.throughput or 0.0):
            fastest[row.k, row.batch] = row
        ks = sorted({row.k for row in exported}, reverse=True)
        if len(batches) < 2 or len(ks) < 2:
            continue
        n = max(row.experts for row in exported)
        heat = _heat({key: row.throughput or 0.0 for key, row in fastest.items()})
        quiet = ("–", "quiet")
        lines = [(f"{k}/{n}", *(heat.get((k, batch), quiet) for batch in batches)) for k in ks]
        heads = ("k", *(f"batch {batch}" for batch in batches))
        tables.append(TableContent("", heads, {f"{model}, {precision.upper()}": lines}))
    return SectionContent(tables=tuple(tables), notes=(HEAT_NOTE,)) if tables else None


def _heat(values: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], Cell]:
    """Returns cells that are coloured by the logarithms of their values."""
    logs = {key: math.log(value) for key, value in values.items()}
    low, span = min(logs.values()), max(1e-9, max(logs.values()) - min(logs.values()))
    return {
        key: (f"{values[key]:,.0f}", f"heat-{round(9 * (log - low) / span)}")
        for key, log in logs.items()
    }


def _losing_classes(results: Results) -> SectionContent | None:
    """Returns the classes whose accuracy falls at each k, compared with the untouched model."""
    groups: dict[str, list[Sequence[Cell]]] = {}
    for row in results.rows:
        name = f"{row.model}, k = {row.k_of_n(' of ')}, {row.precision.upper()}"
        if not row.losing or row.engine.startswith("pytorch") or name in groups:
            continue  # the loss depends on neither engine nor batch size
        groups[name] = [
            (
                str(change.label),
                f"{change.n:,}",
                f"{change.untouched / change.n:.1%}",
                f"{change.right / change.n:.1%}",
                (f"{change.right - change.untouched:+,}", "bad"),
            )
            for change in row.losing[:5]
        ]
    heads = ("Class", "Inputs", "Untouched", "Here", "Correct answers")
    tables = (TableContent("", heads, groups),)
    return SectionContent(tables=tables, notes=(LOSING_NOTE,)) if groups else None


def _parity(results: Results) -> SectionContent:
    """Returns how often each graph chose PyTorch's experts, and how close its outputs are."""
    groups: dict[str, list[Sequence[Cell]]] = {}
    for section in sections(results):
        # Agreement does not depend on the batch size, so it is shown once.
        if section.model in groups:
            continue
        lines: list[Sequence[Cell]] = []
        for line in section.series:
            for row in line.rows:
                routing, parity = row.routing, row.parity
                if routing is None and parity is None:
                    continue
                routed = outputs = ("–", "–")
                if routing is not None:
                    routed = (f"{row.same_experts:.2%}", f"{routing.jaccard:.4f}")
                    if routing.ties:
                        routed = (f"{routed[0]} ({routing.ties:.1%} ties)", routed[1])
                if parity is not None:
                    outputs = (f"{parity.max_abs:.2g}", f"{parity.cosine:.7f}")
                lines.append((line.name, row.k_of_n(), *routed, *outputs))
        groups[section.model] = lines
    heads = ("Engine", "k", "Same experts", "Jaccard", "Largest difference", "Cosine")
    note = PARITY_NOTE if any(groups.values()) else "Not measured."
    return SectionContent(tables=(TableContent("", heads, groups),), notes=(note,))


def _changes(comparison: ResultsComparison | None) -> SectionContent | None:
    if comparison is None:
        return None
    heads = ("Engine", "k", "Before, ms", "Now, ms", "Change", "Kept before", "Kept now")
    groups: dict[str, list[Sequence[Cell]]] = {}
    for change in comparison.notable:
        key = f"{change.now.model}, {change.now.sizes}"
        groups.setdefault(key, []).append(_change(change))
    return SectionContent(
        tables=(TableContent("", heads, groups),),
        intro=(comparison.sentence,),
        notes=comparison.notes,
    )


def _change(change: Change) -> tuple[Cell, ...]:
    difference: Cell = "–"
    if change.ratio is not None:
        sign, kind = f"{change.ratio - 1:+.0%}", "good" if change.ratio < 1 else "bad"
        difference = (sign, kind) if change.beyond_spread else (f"≈ {sign}", "quiet")
    rows = (change.before, change.now)
    latencies = ["–" if r.median_ms is None else milliseconds(r.median_ms) for r in rows]
    kept = ["–" if row.kept is None else percent(row.kept) for row in rows]
    name = change.now.k_of_n()
    return (line_name(change.now), name, *latencies, difference, *kept)


def _runs(results: Results, runs: Sequence[NamedRun]) -> SectionContent | None:
    if not runs:
        return None
    table = TableContent("", HEADS, answers(results, runs))
    return SectionContent(tables=(table,), notes=(NOTE,))


def all_sections(
    comparison: ResultsComparison | None = None, runs: Sequence[NamedRun] = ()
) -> list[ReportSection]:
    """Returns every section, in the order of the page.

    The built-in ones show the results, changes since earlier results, and other runs.
    """
    built_in = (
        ReportSection(
            name="runs",
            title="Several runs",
            place=10,
            content=lambda results: _runs(results, runs),
        ),
        ReportSection(
            name="comparison",
            title="What changed",
            place=20,
            content=lambda _: _changes(comparison),
        ),
        ReportSection(name="models", title="Models side by side", place=5, content=_side_by_side),
        ReportSection(name="heat", title="Speed by k and batch", place=50, content=_by_k_and_batch),
        ReportSection(
            name="losing",
            title="Classes that lose at a smaller k",
            place=60,
            content=_losing_classes,
        ),
        ReportSection(name="outputs", title="Each output", place=55, content=outputs_section),
        ReportSection(name="parity", title="Parity with PyTorch", place=90, content=_parity),
    )
    return sorted((*built_in, *SECTIONS), key=lambda section: section.place)


def contents(
    results: Results, comparison: ResultsComparison | None, runs: Sequence[NamedRun] = ()
) -> Iterator[tuple[ReportSection, SectionContent]]:
    """Yields the sections of these results with their content, without empty tables."""
    for section in all_sections(comparison, runs):
        content = section.content(results) if section.applies_to(results) else None
        if content is None:
            continue
        tables = (
            replace(table, groups={name: rows for name, rows in table.groups.items() if rows})
            for table in content.tables
        )
        yield section, replace(content, tables=tuple(table for table in tables if table.groups))
