"""`report.html`: one self-contained page that draws a results file.

The page fetches nothing: plotly.js (the basic bundle: scatter, bar, pie; compressed), style, script
and data are in it. Its parts lie in `assets/`; placeholders are `%%NAME%%`. The results are
embedded as they are, with what is said of every row in words beside; `report.js` draws them,
filters them and answers what to deploy.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...common.text import count, size
from ...common.writing import check_file, output_errors, write_text
from ...errors import UsageError
from ..analyses.findings import ExpertStudy, FrontPoint, TuningRecord, studies_in, tuning_in
from ..analyses.report import figures as charts
from ..analyses.report import titled
from ..engines import GraphEngine, engine_of
from ..fairness import ModelFairness, compared_in
from ..results import TOKEN_ROUTED, Interval, ModelInfo, Results, Row, as_json, write
from .compare import Change, ResultsComparison
from .fairness import FAIR_HEADS, compared_rows
from .figures import figures
from .summary import (
    GPU_MS,
    KEPT,
    Section,
    by_row,
    caveat,
    claim,
    engine_name,
    line_name,
    milliseconds,
    percent,
    row_name,
    section_of,
    sections,
    short_name,
    summary,
)
from .text import method_lines, reproduce, to_csv, to_markdown

Cell = str | tuple[str, str]
"""Text, or text and what it is: good, bad, quiet."""

Card = dict[str, Any]
"""`id`, `title`, `intro` and `notes` (sentences), and `tables`; each has a `title`, `heads` and
`groups` of rows by their heading."""

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


def write_report(results: Results, path: Path, comparison: ResultsComparison | None = None) -> None:
    """Writes the page, whole or not at all."""
    write_text(html(results, comparison), path)


def write_all(
    results: Results, out: Path, comparison: ResultsComparison | None = None
) -> tuple[Path, ...]:
    """Writes results.json and every view of it to a folder; returns their paths."""
    write(results, out / "results.json")
    return (out / "results.json", *write_views(results, out / "report.html", comparison))


def write_views(
    results: Results, page: Path, comparison: ResultsComparison | None = None
) -> tuple[Path, ...]:
    """Writes the page (.html, else UsageError), and Markdown, CSV and figures beside it.

    Without Matplotlib there are no figures.
    """
    check_file(page)
    if page.suffix not in (".html", ".htm"):
        raise UsageError(
            f"--output {page}: the page is HTML",
            hint=f"for example -o {page.stem or 'report'}.html",
        )
    write_report(results, page, comparison)
    markdown, rows = page.with_suffix(".md"), page.with_suffix(".csv")
    write_text(to_markdown(results, comparison), markdown)
    write_text(to_csv(results), rows)
    if not can_draw():
        return (page, markdown, rows)
    with output_errors(page.parent):
        drawn = (*figures(results, page.parent), *charts(studies_in(results.analyses), page.parent))
    return (page, markdown, rows, *drawn)


def can_draw() -> bool:
    """Whether figures can be drawn: the page draws its own, which needs no Matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


def html(results: Results, comparison: ResultsComparison | None = None) -> str:
    """Returns the page: the answer, charts, rows, environment, method, and what has changed."""
    shown = sections(results)
    names = [model.name for model in results.models]
    parts = {
        "TITLE": escape(f"moexport benchmark: {', '.join(names)}"),
        "STYLE": _asset("report.css"),
        "CREATED": escape(results.created.replace("T", " ").replace("+00:00", " UTC")),
        "SUMMARY": escape(summary(shown[0]) if shown else "No rows were measured."),
        "CAVEAT": escape(caveat(shown[0]) if shown else ""),
        "DATA": embedded_json(payload(results, comparison)),
        "PLOTLY": _packed("plotly-basic.min.js"),
        "SCRIPT": _asset("report.js"),
    }
    # Cut once, so that text inside one part is never taken for a placeholder.
    pieces = _asset("report.html").split("%%")
    return "".join(parts[p] if index % 2 else p for index, p in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _packed(name: str) -> str:
    """An asset as gzip in Base64; the same bytes every time."""
    return base64.b64encode(gzip.compress(_asset(name).encode(), mtime=0)).decode()


def embedded_json(value: Any) -> str:
    """Returns JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def payload(results: Results, comparison: ResultsComparison | None = None) -> dict[str, Any]:
    """Returns what the page's script draws: the results, and what is said of them in words."""
    shown = sections(results)
    found = by_row(shown)
    studies, compared = studies_in(results.analyses), compared_in(results.analyses)
    search = tuning_in(results.analyses)
    return {
        "results": as_json(results),
        "rows": [_words(results, found[section_of(row)], row) for row in results.rows],
        "keep": KEPT,
        "search": None if search is None else search_points(search),
        "gpu": GPU_MS if any(row.device_ms is not None for row in results.rows) else None,
        "disturbed": results.disturbance,
        "tables": [
            *([] if comparison is None else [comparison_card(comparison)]),
            *([] if search is None else [search_card(search)]),
            *([analyses_card(studies)] if studies else []),
            *([subgroups_card(compared)] if compared else []),
            parity_card(shown),
        ],
        "environment": list(_environment(results)),
        "method": method_lines(results),
        "absent": [f"{each.engine}: {each.reason}" for each in results.absent],
        "again": reproduce(results) if results.command else "",
        "csv": to_csv(results),
    }


def _words(results: Results, section: Section, row: Row) -> dict[str, Any]:
    """What the page calls a row, says of it, and what its speed is against (`base`: its index)."""
    base = section.base(row)
    latency = row.latency_ms
    return {
        "name": row_name(row),
        "short": short_name(row),
        "engine_name": engine_name(row),
        "on_gpu": row.on_gpu,
        "base": next((i for i, each in enumerate(results.rows) if each is base), None),
        "against": f"PyTorch{section.place(row)}",
        "speed": section.speedup(row),
        "told": base is row or section.faster_or_slower(row),
        "full_k": section.full_k,
        "sizes": row.sizes,
        "same": row.same_experts,
        "spread": None if latency is None else latency.spread,
        "device_spread": None if row.device_ms is None else row.device_ms.spread,
        "limit_told": _limit(row),
        "claim": claim(section, row),
        "command": export_command(results, row),
    }


def _limit(row: Row) -> str:
    """What the least time is made of, or why it is not known."""
    if row.limit_ms is None or row.work is None:
        return row.no_limit or ""
    operations = row.work.operations + row.work.int8_operations
    moved = f"{count(operations)} operations, {size(row.work.bytes)}"
    return f"at least {milliseconds(row.limit_ms)} ms: {moved}"


CARRIED = ("--family", "--config", "--set", "--weights", "--adapter")
"""Options of `bench` that an export of the same model needs, too."""


def export_command(results: Results, row: Row) -> str | None:
    """Returns the command that exports what a row measured; None for PyTorch's own rows.

    The model and what its shapes do not tell are taken from the command of the results.
    """
    kind = engine_of(row.engine, row.provider)
    target: str | None = kind.target if isinstance(kind, GraphEngine) else None
    model = next((each for each in results.models if each.name == row.model), ModelInfo(""))
    source = model.source
    try:
        given = shlex.split(results.command)
    except ValueError:
        given = []
    if target is None or row.error is not None or not source or given[:1] != ["moexport"]:
        return None
    search = tuning_in(results.analyses)
    if search is not None and row is results.rows[-1]:  # the one that was chosen
        words = ["moexport", "export", source, "--recipe", search.recipe, "-o", "BUNDLE"]
        return shlex.join([*words, *_carried(given)])
    own = (each for each in results.of_model(row.model) if each.is_reference)
    full_k = next((each.k for each in own), row.experts)
    if target == "ort-cpu":  # What a benchmark may be told to take another for.
        target = (_given(given, "--target") or [target])[0]
    name = "".join(c if c.isalnum() else "-" for c in Path(source.split(":")[-1]).stem)
    words = ["moexport", "export", source, "-o", f"{name}-k{row.k}-{row.precision}"]
    words += ["--k", "n" if row.k == full_k else str(row.k), "--target", target]
    if row.lowering and "+" not in row.lowering:
        words += ["--lowering", row.lowering]
    if row.precision != "fp32":
        words += ["--precision", row.precision]
    if row.batch > 1:
        words += ["--batch", f"1:{row.batch}:{max(row.batch, 32)}"]
    data = results.protocol.get("calibration") or next(iter(_given(given, "--data")), None)
    if row.precision == "int8" and model.kind != TOKEN_ROUTED:
        # A folder of images by class is no feed of arrays; the reader knows what is.
        words += ["--data", data if data and (data.endswith(".npz") or ":" in data) else "FEED"]
    return shlex.join([*words, *_carried(given)])


def _carried(given: Sequence[str]) -> list[str]:
    """What a command says of how its model is read."""
    return [
        word for option in CARRIED for value in _given(given, option) for word in (option, value)
    ]


def _given(words: Sequence[str], option: str) -> list[str]:
    """The values that a command gives an option, as `--option value` or `--option=value`."""
    after = [value for name, value in pairwise(words) if name == option]
    return after + [word.split("=", 1)[1] for word in words if word.startswith(f"{option}=")]


def _environment(results: Results) -> Iterator[tuple[str, str]]:
    """The machine and the versions as names and values."""
    for name, value in results.environment.items():
        if name == "packages" and isinstance(value, dict):
            yield from ((str(package), str(version)) for package, version in value.items())
        elif name == "memory_bytes" and isinstance(value, int):
            yield "memory", f"{value / 2**30:.1f} GiB"
        else:
            yield name, _plain(value)


def _plain(value: Any) -> str:
    match value:
        case None:
            return "none"
        case dict():
            return ", ".join(f"{key} {item}" for key, item in value.items())
        case list():
            return "; ".join(map(_plain, value))
        case _:
            return str(value)


def _card(
    name: str,
    title: str,
    tables: Sequence[tuple[str, Sequence[str], Mapping[str, Sequence[Sequence[Cell]]]]],
    *,
    intro: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Card:
    listed = [
        {
            "title": each,
            "heads": heads,
            "groups": {key: rows for key, rows in groups.items() if rows},
        }
        for each, heads, groups in tables
        if any(groups.values())
    ]
    return {"id": name, "title": title, "intro": intro, "tables": listed, "notes": notes}


def parity_card(shown: Sequence[Section]) -> Card:
    """Returns, per graph and k, whether PyTorch's experts were chosen and its values computed."""
    groups: dict[str, list[Sequence[Cell]]] = {}
    for section in shown:
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
    return _card("parity", "Parity with PyTorch", [("", heads, groups)], notes=[note])


def comparison_card(comparison: ResultsComparison) -> Card:
    """Returns what changed since an earlier file."""
    heads = ("Engine", "k", "Before, ms", "Now, ms", "Change", "Kept before", "Kept now")
    groups: dict[str, list[Sequence[Cell]]] = {}
    for change in comparison.notable:
        key = f"{change.now.model}, {change.now.sizes}"
        groups.setdefault(key, []).append(_change(change))
    return _card(
        "comparison",
        "What changed",
        [("", heads, groups)],
        intro=[comparison.sentence],
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


def search_card(search: TuningRecord) -> Card:
    """Returns the points that a search found on its front, and what was confirmed."""
    heads = ("ms", "size", "kept", "95% interval", "confirmed", "95% interval", "what it is")
    lines: list[Sequence[Cell]] = []
    for point in search.points:
        if not point.front:
            continue
        confirmed: tuple[Cell, Cell] = (("–", "quiet"), "")
        if point.confirmed is not None and point.confirmed_kept is not None:
            held = search.keep is None or point.confirmed.low >= search.keep
            kind = "good" if held else "bad"
            confirmed = ((percent(point.confirmed_kept), kind), _interval(point.confirmed))
        chosen = " (chosen)" if point.chosen else ""
        lines.append(
            (
                milliseconds(point.ms),
                size(point.bytes),
                percent(point.kept),
                _interval(point.searched),
                *confirmed,
                f"{point.text}{chosen}",
            )
        )
    intro = (
        f"{len(search.points)} graphs were made in {search.seconds:.0f} s. The search saw "
        f"{search.searching} inputs; {search.confirming} others, read once, confirm what it found. "
        f"Kept is of the untouched model's {search.metric}."
    )
    table: dict[str, Sequence[Sequence[Cell]]] = {f"{search.model}, batch {search.batch}": lines}
    return _card("search", "What tune found", [("", heads, table)], intro=[intro])


def _interval(interval: Interval) -> str:
    return f"{percent(interval.low)} to {percent(interval.high)}"


def search_points(search: TuningRecord) -> dict[str, Any]:
    """Returns what the page draws of a search: every point, with what hovering over it says."""
    return {
        "keep": search.keep,
        "metric": search.metric,
        "points": [
            {
                "ms": point.ms,
                "kept": point.kept,
                "low": point.searched.low,
                "high": point.searched.high,
                "front": point.front,
                "chosen": point.chosen,
                "told": _told(point),
            }
            for point in search.points
        ],
    }


def _told(point: FrontPoint) -> list[str]:
    lines = [f"{milliseconds(point.ms)} ms, {size(point.bytes)}"]
    lines.append(f"{percent(point.kept)} kept, {_interval(point.searched)}")
    if point.confirmed is not None and point.confirmed_kept is not None:
        lines.append(f"confirmed: {percent(point.confirmed_kept)}, {_interval(point.confirmed)}")
    for layer in point.layers:
        of = f"{len(layer.experts)} of {layer.of}" if layer.experts else str(layer.of)
        chosen = "all experts merged into one" if layer.merged else f"k = {layer.k}, experts {of}"
        lines.append(f"{layer.layer}: {chosen}, {layer.precision}")
    return lines


def analyses_card(studies: Sequence[ExpertStudy]) -> Card:
    """Returns the tables of the studies of experts."""
    tables = []
    for title, (header, rows) in titled(studies).items():
        groups: dict[str, list[Sequence[Cell]]] = {}
        for model, *cells in rows:
            groups.setdefault(model, []).append(cells)
        tables.append((title, header[1:], groups))
    return _card("experts", "Which experts", tables, notes=[RANDOM_NOTE])


def subgroups_card(found: Sequence[ModelFairness]) -> Card:
    """Returns how fairly subgroups are treated, by model and class."""
    groups: dict[str, list[Sequence[Cell]]] = {}
    for each in found:
        for output, row in compared_rows(each):
            groups.setdefault(f"{each.model}, class {output}", []).append(row)
    heads = ("Model", *(f"{head[0].upper()}{head[1:]}" for head in FAIR_HEADS[1:]))
    note = "Each class against all others, in PyTorch; 95% intervals."
    return _card("subgroups", "Subgroups", [("", heads, groups)], notes=[note])
