"""The tables of the report, as HTML: every row, parity and changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ...common.text import count, size
from ..analyses.findings import ExpertStudy
from ..analyses.report import titled
from ..results import Results, Row
from .compare import Change, Comparison
from .summary import GPU_MS, Section, line_name, milliseconds, over, percent, row_name, times

DASH = '<span class="quiet">–</span>'

PARITY_NOTE = (
    "Against PyTorch with the same k: the share of samples for which every layer chose the same "
    "experts, the mean Jaccard index of the chosen sets, and the outputs. There is nothing to "
    "compare where all experts are kept, and in PyTorch's own rows."
)

Cell = tuple[str, object]
"""A cell's HTML and the value that it sorts by, None for none."""

NONE: Cell = (DASH, None)


def rows_table(shown: Sequence[Section], results: Results) -> str:
    """Returns every row of the results, failed ones too; the page's script sorts and filters it."""
    device = any(row.device_ms is not None for row in results.rows)
    several = len({row.model for row in results.rows}) > 1
    batches = len({row.batch for row in results.rows}) > 1
    heads = [*(["Model"] if several else []), *(["Batch"] if batches else []), "Engine", "k"]
    text = len(heads) - 1
    heads += ["Median ms", *([GPU_MS] if device else []), "Speed", "× limit", "Spread"]
    token = any(row.perplexity is not None for row in results.rows)
    heads += ["Perplexity"] if token else ["Top-1", "Top-5"]
    heads += ["Kept", "Same experts", "p90", "p95", "p99", "Min", "Max", "Mean", "Std", "Calls"]
    heads += ["Inputs/s", "Memory MB"]
    by_key = {(section.model, section.batch): section for section in shown}
    body = []
    for row in results.rows:
        section = by_key[row.model, row.batch]
        lead: list[Cell] = [(escape(row.model), row.model)] if several else []
        lead += [(str(row.batch), row.batch)] if batches else []
        name = row_name(row)
        lead += [(escape(name), name), (f"{row.k}/{row.experts}", row.k)]
        body.append(_result_row(section, row, lead, len(heads), token=token, device=device))
    head = "".join(
        f'<th scope="col"{_text_class(index, text)}>{escape(name)}</th>'
        for index, name in enumerate(heads)
    )
    return (
        f'<div class="scroll"><table id="rows"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _text_class(index: int, text: int) -> str:
    return ' class="text"' if index < text else ""


def _result_row(
    section: Section, row: Row, lead: Sequence[Cell], columns: int, *, token: bool, device: bool
) -> str:
    data = {
        "model": row.model,
        "batch": row.batch,
        "engine": line_name(row),
        "precision": row.precision,
        "k": row.k,
    }
    attributes = "".join(f' data-{key}="{escape(str(value))}"' for key, value in data.items())
    kind = ' class="reference"' if row.is_reference else ""
    text = len(lead) - 1
    if row.error is not None:
        cells = _cells(lead, text)
        wide = f'<td class="error" colspan="{columns - len(lead)}">{escape(row.error)}</td>'
        return f"<tr{kind}{attributes}>{cells}{wide}</tr>"
    speed = _speed(section, row)
    if device:
        speed.insert(1, _device(row))
    found = [*lead, *speed, *_quality(row, token=token), *_latencies(row)]
    return f"<tr{kind}{attributes}>{_cells(found, text)}</tr>"


def _cells(cells: Sequence[Cell], text: int) -> str:
    return "".join(
        f'<td{_text_class(index, text)} data-v="{"" if value is None else escape(str(value))}">'
        f"{shown}</td>"
        for index, (shown, value) in enumerate(cells)
    )


def _speed(section: Section, row: Row) -> list[Cell]:
    latency = row.latency_ms
    if latency is None:
        return [NONE] * 4
    ratio = section.speedup(row)
    speed: Cell = NONE
    if ratio is not None:
        itself = section.base(row) is row
        shown = "1×" if itself else times(ratio)
        if not itself and not section.faster_or_slower(row):
            title = "within the spread: no difference"
            shown = f'<span class="quiet" title="{title}">≈ {shown}</span>'
        speed = (shown, ratio)
    return [
        (milliseconds(latency.median), latency.median),
        speed,
        _limit(row),
        (f"{latency.spread:.0%}", latency.spread),
    ]


def _device(row: Row) -> Cell:
    """The time on the GPU, with how it spreads where the pointer rests on it."""
    found = row.device_ms
    if found is None:
        return NONE
    told = (
        f"p90 {milliseconds(found.p90)}, p99 {milliseconds(found.p99)}, spread {found.spread:.0%}"
    )
    return f'<span title="{told}">{milliseconds(found.median)}</span>', found.median


def _limit(row: Row) -> Cell:
    """The time over the least time, with what that is made of where the pointer rests on it."""
    ratio, work = row.over_limit, row.work
    if ratio is None:
        if row.no_limit is None:
            return NONE
        return f'<span class="quiet" title="{escape(row.no_limit)}">–</span>', None
    told = f"at least {milliseconds(row.limit_ms or 0.0)} ms"
    if work is not None:
        operations = work.operations + work.int8_operations
        told += f": {count(operations)} operations, {size(work.bytes)}"
    return f'<span title="{escape(told)}">{over(ratio)}</span>', ratio


def _quality(row: Row, *, token: bool) -> list[Cell]:
    accuracy, perplexity, kept = row.accuracy, row.perplexity, row.kept
    cells: list[Cell] = []
    if token:
        value = None if perplexity is None else perplexity.value
        cells.append(NONE if value is None else (f"{value:.4g}", value))
    else:
        shares = (None, None) if accuracy is None else (accuracy.top1, accuracy.top5)
        cells += [NONE if share is None else (f"{share:.2%}", share) for share in shares]
    cells.append(NONE if kept is None else (_kept(row, kept), kept))
    exact = None if row.routing is None else row.routing.exact
    cells.append(NONE if exact is None else (f"{exact:.1%}", exact))
    return cells


def _kept(row: Row, kept: float) -> str:
    interval = row.kept_interval
    if interval is None:
        return f"{kept:.1%}"
    return f'<span title="95%: {interval.low:.1%} to {interval.high:.1%}">{kept:.1%}</span>'


def _latencies(row: Row) -> list[Cell]:
    latency = row.latency_ms
    if latency is None:
        cells = [NONE] * 8
    else:
        parts = [latency.p90, latency.p95, latency.p99, latency.min, latency.max]
        parts += [latency.mean, latency.std]
        cells = [(milliseconds(value), value) for value in parts]
        cells.append((f"{latency.n:,}", latency.n))
    for value in (row.throughput, row.peak_memory_mb):
        cells.append(NONE if value is None else (f"{value:,.0f}", value))
    return cells


def table(heads: Sequence[str], groups: Mapping[str, Sequence[str]]) -> str:
    """Returns an HTML table that scrolls sideways where the page is narrow.

    The first column holds text. `groups` are HTML rows under a heading each; empty ones are left
    out.
    """
    head = "".join(
        f'<th scope="col"{_text_class(index, 1)}>{escape(name)}</th>'
        for index, name in enumerate(heads)
    )
    bodies = "".join(
        f'<tbody><tr><th scope="rowgroup" colspan="{len(heads)}">{escape(name)}</th></tr>'
        f"{''.join(rows)}</tbody>"
        for name, rows in groups.items()
        if rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>{bodies}</table></div>'


def html_row(cells: Sequence[str]) -> str:
    """Returns one row of HTML cells, the first of them text."""
    body = "".join(f"<td{_text_class(index, 1)}>{cell}</td>" for index, cell in enumerate(cells))
    return f"<tr>{body}</tr>"


def parity_table(shown: Sequence[Section]) -> str:
    """Returns, per graph and k, whether PyTorch's experts were chosen and its values computed."""
    groups: dict[str, list[str]] = {}
    for section in shown:
        # Agreement does not depend on the batch size: it is taken once, and told once.
        if section.model in groups:
            continue
        groups[section.model] = [
            _parity_row(line.name, row)
            for line in section.series
            for row in line.rows
            if row.parity is not None or row.routing is not None
        ]
    if not any(groups.values()):
        return '<p class="note">Not measured.</p>'
    heads = ("Engine", "k", "Same experts", "Jaccard", "Largest difference", "Cosine")
    return table(heads, groups) + f'<p class="note">{escape(PARITY_NOTE)}</p>'


def _parity_row(name: str, row: Row) -> str:
    routing, parity = row.routing, row.parity
    agreement = [DASH, DASH]
    if routing is not None:
        agreement = [f"{routing.exact:.2%}", f"{routing.jaccard:.4f}"]
    values = [DASH, DASH]
    if parity is not None:
        values = [f"{parity.max_abs:.2g}", f"{parity.cosine:.7f}"]
    return html_row([escape(name), f"{row.k}/{row.experts}", *agreement, *values])


def comparison_section(comparison: Comparison | None) -> str:
    """Returns what changed since an earlier file, as a section of the page; empty without one."""
    if comparison is None:
        return ""
    text = f'<p class="note">{escape(comparison.sentence)}</p>'
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in comparison.notes)
    heads = ("Engine", "k", "Before, ms", "Now, ms", "Change", "Kept before", "Kept now")
    groups: dict[str, list[str]] = {}
    for change in comparison.notable:
        key = f"{change.now.model}, batch {change.now.batch}"
        groups.setdefault(key, []).append(_change_row(change))
    listed = table(heads, groups) if groups else ""
    body = f"<h2>What changed</h2>{text}{listed}{notes}"
    return f'<section class="card" id="comparison">{body}</section>'


def _change_row(change: Change) -> str:
    old, new = change.before.latency_ms, change.now.latency_ms
    ratio = change.ratio
    moved = DASH
    if ratio is not None:
        kind = "" if not change.beyond_spread else "good" if ratio < 1 else "bad"
        sign = f"{ratio - 1:+.0%}"
        moved = f'<span class="{kind or "quiet"}">{sign if kind else "≈ " + sign}</span>'
    kept = [DASH if row.kept is None else percent(row.kept) for row in (change.before, change.now)]
    return html_row(
        [
            escape(line_name(change.now)),
            f"{change.now.k}/{change.now.experts}",
            DASH if old is None else milliseconds(old.median),
            DASH if new is None else milliseconds(new.median),
            moved,
            *kept,
        ]
    )


NOTE = (
    "Random: experts drawn anew for each input and layer, once per seed; σ is the seeds' sample "
    "standard deviation. All sets: best per input knows the label; best for all was chosen on the "
    "same labels; distinct best counts the sets with the least loss for some input. Shares are "
    "means over inputs."
)


def analyses_section(studies: Sequence[ExpertStudy]) -> str:
    """Returns the tables of the studies as HTML; empty where there are none."""
    tables = []
    for title, (header, rows) in titled(studies).items():
        groups: dict[str, list[str]] = {}
        for model, *cells in rows:
            groups.setdefault(model, []).append(html_row([escape(cell) for cell in cells]))
        if groups:
            tables.append(f"<h3>{escape(title)}</h3>{table(header[1:], groups)}")
    if not tables:
        return ""
    note = f'<p class="note">{escape(NOTE)}</p>'
    body = f"<h2>Which experts</h2>{''.join(tables)}{note}"
    return f'<section class="card" id="experts">{body}</section>'
