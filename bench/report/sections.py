"""The sections of a report beside its charts and rows: a record each, in one list.

The page, the Markdown and the tests read the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...common.text import size
from ..analyses.findings import studies_in, tuning_in
from ..analyses.report import titled
from ..fairness import compared_in
from ..results import Interval, Results, Row
from ..service.findings import services_in
from .compare import Change, ResultsComparison
from .fairness import FAIR_HEADS, compared_rows
from .runs import HEADS, NOTE, NamedRun, answers
from .service import answers as served
from .service import service_notes, service_tables
from .summary import line_name, milliseconds, percent, sections

Cell = str | tuple[str, str]
"""Text, or text and what it is: good, bad, quiet, or heat-0 to heat-9."""


@dataclass(frozen=True, slots=True)
class TableContent:
    """A table: its title, the headings of its columns, and groups of rows by their heading."""

    title: str
    heads: Sequence[str]
    groups: Mapping[str, Sequence[Sequence[Cell]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionContent:
    """What a section holds: sentences before and after its tables."""

    tables: tuple[TableContent, ...]
    intro: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reported:
    """What a report is of: results, what changed since earlier ones, and other runs beside them."""

    results: Results
    comparison: ResultsComparison | None = None
    runs: Sequence[NamedRun] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A section of a report; `content` returns None where the results have nothing for it."""

    name: str
    title: str
    content: Callable[[Reported], SectionContent | None]


PARITY_NOTE = (
    "Compared with PyTorch at the same k: the share of samples for which every layer selected the "
    "same experts, the mean Jaccard index of the selected sets, and the outputs. Routing is not "
    "compared if all experts are kept, nor in PyTorch's own rows."
)

RANDOM_NOTE = (
    "Random: experts are drawn for each input and layer, once per seed; σ is the sample standard "
    "deviation over the seeds. All sets: best per input uses the label; best for all was selected "
    "on the same labels; distinct best is the number of sets with the least loss for at least one "
    "input. Shares are means over inputs."
)


HEAT_NOTE = (
    "Inputs a second of the fastest export for each k and batch size; the darker, the more. The "
    "same factor in speed is the same step in colour."
)

LOSING_NOTE = (
    "Right answers of the classes that lose most, on the inputs of the accuracy; of few inputs, "
    "differences are mostly chance."
)


def _by_k_and_batch(report: Reported) -> SectionContent | None:
    """Inputs a second over k and batch size, where there are several of both."""
    tables = []
    for model in dict.fromkeys(row.model for row in report.results.rows):
        exported = [
            row
            for row in report.results.of_model(model)
            if row.throughput and row.error is None and row.phase is None
            if not row.engine.startswith("pytorch")
        ]
        batches = sorted({row.batch for row in exported})
        fastest: dict[tuple[int, int], Row] = {}
        for row in sorted(exported, key=lambda row: row.throughput or 0.0):
            fastest[row.k, row.batch] = row
        ks = sorted({row.k for row in exported}, reverse=True)
        if len(batches) < 2 or len(ks) < 2:
            continue
        n = max(row.experts for row in exported)
        heat = _heat({place: row.throughput or 0.0 for place, row in fastest.items()})
        quiet = ("–", "quiet")
        lines = [(f"{k}/{n}", *(heat.get((k, batch), quiet) for batch in batches)) for k in ks]
        heads = ("k", *(f"batch {batch}" for batch in batches))
        tables.append(TableContent("", heads, {model: lines}))
    return SectionContent(tables=tuple(tables), notes=(HEAT_NOTE,)) if tables else None


def _heat(values: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], Cell]:
    """Cells that are coloured by the factor from the least to the largest value."""
    logs = {place: math.log(value) for place, value in values.items()}
    low, span = min(logs.values()), max(1e-9, max(logs.values()) - min(logs.values()))
    return {
        place: (f"{values[place]:,.0f}", f"heat-{round(9 * (log - low) / span)}")
        for place, log in logs.items()
    }


def _losing(report: Reported) -> SectionContent | None:
    """Which classes lose at each k, beside the untouched model."""
    groups: dict[str, list[Sequence[Cell]]] = {}
    for row in report.results.rows:
        name = f"{row.model}, k = {row.k} of {row.experts}, {row.precision.upper()}"
        if not row.losing or row.engine.startswith("pytorch") or name in groups:
            continue  # what is lost depends on neither engine nor batch size
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
    heads = ("Class", "Inputs", "Untouched", "Here", "Right answers")
    tables = (TableContent("", heads, groups),)
    return SectionContent(tables=tables, notes=(LOSING_NOTE,)) if groups else None


def _parity(report: Reported) -> SectionContent:
    """Per graph and k, whether PyTorch's experts were chosen and its values computed."""
    groups: dict[str, list[Sequence[Cell]]] = {}
    for section in sections(report.results):
        # Agreement does not depend on the batch size: it is taken once, and told once.
        if section.model in groups:
            continue
        lines: list[Sequence[Cell]] = []
        for line in section.series:
            for row in line.rows:
                routing, parity = row.routing, row.parity
                if routing is None and parity is None:
                    continue
                same = near = ("–", "–")
                if routing is not None:
                    same = (f"{row.same_experts:.2%}", f"{routing.jaccard:.4f}")
                    if routing.ties:
                        same = (f"{same[0]} ({routing.ties:.1%} ties)", same[1])
                if parity is not None:
                    near = (f"{parity.max_abs:.2g}", f"{parity.cosine:.7f}")
                lines.append((line.name, f"{row.k}/{row.experts}", *same, *near))
        groups[section.model] = lines
    heads = ("Engine", "k", "Same experts", "Jaccard", "Largest difference", "Cosine")
    note = PARITY_NOTE if any(groups.values()) else "Not measured."
    return SectionContent(tables=(TableContent("", heads, groups),), notes=(note,))


def _changes(report: Reported) -> SectionContent | None:
    """What changed since an earlier file."""
    comparison = report.comparison
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
    moved: Cell = "–"
    if change.ratio is not None:
        sign, kind = f"{change.ratio - 1:+.0%}", "good" if change.ratio < 1 else "bad"
        moved = (sign, kind) if change.beyond_spread else (f"≈ {sign}", "quiet")
    both = (change.before, change.now)
    latencies = ["–" if r.median_ms is None else milliseconds(r.median_ms) for r in both]
    kept = ["–" if row.kept is None else percent(row.kept) for row in both]
    name = f"{change.now.k}/{change.now.experts}"
    return (line_name(change.now), name, *latencies, moved, *kept)


def _search(report: Reported) -> SectionContent | None:
    """The points that a search found on its front, and those that were confirmed."""
    search = tuning_in(report.results.analyses)
    if search is None:
        return None
    heads = ("ms", "size", "kept", "95% interval", "confirmed", "95% interval", "what it is")
    lines: list[Sequence[Cell]] = []
    for point in search.points:
        if not point.front and point.confirmed is None:
            continue
        confirmed: tuple[Cell, Cell] = (("–", "quiet"), "")
        if point.confirmed is not None and point.confirmed_kept is not None:
            held = search.keep is None or point.confirmed.low >= search.keep
            kind = "good" if held else "bad"
            confirmed = ((percent(point.confirmed_kept), kind), interval_text(point.confirmed))
        chosen = " (chosen)" if point.chosen else ""
        lines.append(
            (
                milliseconds(point.ms),
                size(point.bytes),
                percent(point.kept),
                interval_text(point.searched),
                *confirmed,
                f"{point.text}{chosen}",
            )
        )
    intro = (
        f"{len(search.points)} graphs were made in {search.seconds:.0f} s. The search saw "
        f"{search.searching} inputs; {search.confirming} others, read once, confirm what it found. "
        f"Kept is of the untouched model's {search.metric}."
    )
    groups = {f"{search.model}, batch {search.batch}": lines}
    table = TableContent("", heads, groups)
    return SectionContent(tables=(table,), intro=tuple(filter(None, (intro, search.why_runtime))))


def interval_text(interval: Interval) -> str:
    """Returns an interval of shares: `98.1% to 99.9%`."""
    return f"{percent(interval.low)} to {percent(interval.high)}"


def _experts(report: Reported) -> SectionContent | None:
    """The tables of the studies of experts."""
    studies = studies_in(report.results.analyses)
    tables = []
    for title, (header, rows) in titled(studies).items():
        groups: dict[str, list[Sequence[Cell]]] = {}
        for model, *cells in rows:
            groups.setdefault(model, []).append(cells)
        if groups:
            tables.append(TableContent(title, header[1:], groups))
    return SectionContent(tables=tuple(tables), notes=(RANDOM_NOTE,)) if studies else None


def _subgroups(report: Reported) -> SectionContent | None:
    """How fairly subgroups are treated, by model and class."""
    groups: dict[str, list[Sequence[Cell]]] = {}
    for model in compared_in(report.results.analyses):
        for output, row in compared_rows(model):
            groups.setdefault(f"{model.model}, class {output}", []).append(row)
    heads = ("Model", *(f"{head[0].upper()}{head[1:]}" for head in FAIR_HEADS[1:]))
    note = "Each class against all others, in PyTorch; 95% intervals."
    if not groups:
        return None
    return SectionContent(tables=(TableContent("", heads, groups),), notes=(note,))


def _runs(report: Reported) -> SectionContent | None:
    """The answers of several runs."""
    if not report.runs:
        return None
    table = TableContent("", HEADS, answers(report.results, report.runs))
    return SectionContent(tables=(table,), notes=(NOTE,))


def _service(report: Reported) -> SectionContent | None:
    """What each case serves in MLPerf's scenarios."""
    findings = services_in(report.results.analyses)
    if findings is None:
        return None
    return SectionContent(
        tables=tuple(TableContent(*table) for table in service_tables(report.results)),
        intro=tuple(served(report.results)),
        notes=service_notes(findings),
    )


SECTIONS = (
    ReportSection(name="runs", title="Several runs", content=_runs),
    ReportSection(name="comparison", title="What changed", content=_changes),
    ReportSection(name="search", title="What tune found", content=_search),
    ReportSection(name="service", title="In service", content=_service),
    ReportSection(name="heat", title="Speed by k and batch", content=_by_k_and_batch),
    ReportSection(name="losing", title="Which classes lose at a smaller k", content=_losing),
    ReportSection(name="experts", title="Which experts", content=_experts),
    ReportSection(name="subgroups", title="Subgroups", content=_subgroups),
    ReportSection(name="parity", title="Parity with PyTorch", content=_parity),
)
"""Every section, in the order of the page."""


def contents(
    results: Results, comparison: ResultsComparison | None, runs: Sequence[NamedRun] = ()
) -> Iterator[tuple[ReportSection, SectionContent]]:
    """Yields the sections of these results, each with what it holds: no table without rows."""
    for section in SECTIONS:
        content = section.content(Reported(results, comparison, runs))
        if content is None:
            continue
        tables = (
            replace(table, groups={name: rows for name, rows in table.groups.items() if rows})
            for table in content.tables
        )
        yield section, replace(content, tables=tuple(table for table in tables if table.groups))
