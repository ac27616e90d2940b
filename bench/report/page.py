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
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...common.option import panels_of, shell_options, spelled
from ...common.text import count, size
from ...common.user_code import names_code
from ...common.writing import check_file, output_errors, write_text
from ...errors import UsageError
from ...exporter.requests import LoadRequest
from ..engines import GraphEngine, engine_of
from ..results import TOKEN_ROUTED, ModelInfo, Results, Row, as_json, write
from .compare import ResultsComparison
from .content import PageChart, ReportSection, decision_of, showing
from .figures import figures
from .runs import NamedRun, run_points
from .sections import all_sections, contents
from .summary import (
    DISAGREE,
    GPU_MS,
    KEPT,
    Section,
    by_row,
    caveat,
    claim,
    engine_name,
    keeps,
    milliseconds,
    row_name,
    section_of,
    sections,
    short_name,
    summary,
    unknown,
)
from .text import method_lines, reproduce, to_csv, to_markdown


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
    results: Results,
    page: Path,
    comparison: ResultsComparison | None = None,
    runs: Sequence[NamedRun] = (),
) -> tuple[Path, ...]:
    """Writes the page (.html, else UsageError), and Markdown, CSV and figures beside it.

    The page draws other `runs` beside the results. Without Matplotlib there are no figures.
    """
    check_file(page)
    if page.suffix not in (".html", ".htm"):
        raise UsageError(
            f"--output {page}: the page is HTML",
            hint=f"for example -o {page.stem or 'report'}.html",
        )
    write_text(html(results, comparison, runs), page)
    markdown, rows = page.with_suffix(".md"), page.with_suffix(".csv")
    write_text(to_markdown(results, comparison, runs), markdown)
    write_text(to_csv(results), rows)
    if not can_draw():
        return (page, markdown, rows)
    with output_errors(page.parent):
        drawn = (
            *figures(results, page.parent),
            *(path for each in showing(results) for path in each.figures(results, page.parent)),
        )
    return (page, markdown, rows, *drawn)


def can_draw() -> bool:
    """Whether figures can be drawn: the page draws its own, which needs no Matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


def html(
    results: Results,
    comparison: ResultsComparison | None = None,
    runs: Sequence[NamedRun] = (),
) -> str:
    """Returns the page: the answer, charts, rows, environment, method, and what has changed."""
    shown = sections(results)
    names = [model.name for model in results.models]
    parts = {
        "TITLE": escape(f"moexport benchmark: {', '.join(names)}"),
        "STYLE": _asset("report.css"),
        "CREATED": escape(results.created.replace("T", " ").replace("+00:00", " UTC")),
        "SUMMARY": escape(summary(shown[0]) if shown else "No rows were measured."),
        "CAVEAT": escape(caveat(shown[0]) if shown else ""),
        "DATA": embedded_json(payload(results, comparison, runs)),
        "PLOTLY": _packed("plotly-basic.min.js"),
        "CARDS": "\n".join(chart.asset(f"{section.name}.html") for section, chart in charts()),
        "CHARTS": ",\n".join(chart.asset(f"{section.name}.js") for section, chart in charts()),
        "SCRIPT": _asset("report.js"),
    }
    # Cut once, so that text inside one part is never taken for a placeholder.
    pieces = _asset("report.html").split("%%")
    return "".join(parts[p] if index % 2 else p for index, p in enumerate(pieces))


def charts() -> list[tuple[ReportSection, PageChart]]:
    """Returns the sections that draw charts of their own, in the order of the page."""
    return [(each, each.chart) for each in all_sections() if each.chart is not None]


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _packed(name: str) -> str:
    """An asset as gzip in Base64; the same bytes every time."""
    return base64.b64encode(gzip.compress(_asset(name).encode(), mtime=0)).decode()


def embedded_json(value: Any) -> str:
    """Returns JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def payload(
    results: Results,
    comparison: ResultsComparison | None = None,
    runs: Sequence[NamedRun] = (),
) -> dict[str, Any]:
    """Returns what the page's script draws: the results, and what is said of them in words."""
    shown = sections(results)
    sections_by_row = by_row(shown)
    return {
        "results": as_json(results),
        "rows": [_words(results, sections_by_row[section_of(row)], row) for row in results.rows],
        "keep": shown[0].keep if shown else KEPT,
        "disagree": DISAGREE,
        **{
            section.name: chart.points(results) if section.is_of(results) else None
            for section, chart in charts()
        },
        "gpu": GPU_MS if any(row.device_ms is not None for row in results.rows) else None,
        "disturbed": results.disturbance,
        "tables": [
            {"id": section.name, "title": section.title} | asdict(content)
            for section, content in contents(results, comparison, runs)
        ],
        "runs": list(map(run_points, runs)),
        "environment": list(_environment(results)),
        "method": method_lines(results),
        "absent": [f"{engine.engine}: {engine.reason}" for engine in results.absent],
        "again": reproduce(results),
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
        "base": next((i for i, other in enumerate(results.rows) if other is base), None),
        "against": f"PyTorch{section.place(row)}",
        "speed": section.speedup(row),
        "gain": section.gain(row),
        "told": base is row or section.faster_or_slower(row),
        "shown": section.shown(row),
        "samples": row.samples,
        "full_k": section.full_k,
        "sizes": row.sizes,
        "same": row.same_experts,
        "spread": None if latency is None else latency.spread,
        "device_spread": None if row.device_ms is None else row.device_ms.spread,
        "limit_told": _limit(row),
        "claim": claim(section, row),
        "unknown": None if row.kept is not None or row.error else unknown(row),
        "keeps": keeps(section, row),
        "command": export_command(results, row),
    }


def _limit(row: Row) -> str:
    """What the least time is made of, or why it is not known or does not hold."""
    if row.no_limit or row.limit_ms is None or row.work is None:
        return row.no_limit or ""
    operations = row.work.operations + row.work.int8_operations
    moved = f"{count(operations)} operations, {size(row.work.bytes)}"
    return f"at least {milliseconds(row.limit_ms)} ms: {moved}"


def export_command(results: Results, row: Row) -> str | None:
    """Returns the command that exports what a row measured; None for PyTorch's own rows.

    The model and what its shapes do not tell are taken from the command of the results.
    """
    kind = engine_of(row.engine, row.provider)
    target: str | None = kind.target if isinstance(kind, GraphEngine) else None
    model = next((info for info in results.models if info.name == row.model), ModelInfo(""))
    source = model.source
    try:
        typed = shlex.split(results.command)
    except ValueError:
        typed = []
    if target is None or row.error is not None or not source or typed[:1] != ["moexport"]:
        return None
    decision = decision_of(results)
    if decision is not None and row is results.rows[-1]:  # the one that was chosen
        return recipe_command(source, decision.recipe, "BUNDLE", typed)
    own = (reference for reference in results.of_model(row.model) if reference.is_reference)
    full_k = next((reference.k for reference in own), row.experts)
    if target == "ort-cpu":  # What a benchmark may be told to take another for.
        target = (_values_of(typed, "--target") or [target])[0]
    name = "".join(c if c.isalnum() else "-" for c in Path(source.split(":")[-1]).stem)
    words = ["moexport", "export", source, "-o", f"{name}-k{row.k}-{row.precision}"]
    words += ["--k", "n" if row.k == full_k else str(row.k), "--target", target]
    if row.lowering and "+" not in row.lowering:
        words += ["--lowering", row.lowering]
    if row.precision != "fp32":
        words += ["--precision", row.precision]
    if row.batch > 1:
        words += ["--batch", f"1:{row.batch}:{max(row.batch, 32)}"]
    data = results.protocol.get("calibration") or next(iter(_values_of(typed, "--data")), None)
    if row.precision == "int8" and model.kind != TOKEN_ROUTED:
        # A folder of images by class is no feed of arrays; the reader knows what is.
        words += ["--data", data if data and (data.endswith(".npz") or ":" in data) else "FEED"]
    return shlex.join([*words, *_carried(typed)])


def recipe_command(source: str, recipe: str, bundle: str, typed: Sequence[str]) -> str:
    """Returns the command that exports a model again as its recipe says.

    `typed` is the command of the search, which tells how the model is read: a network of the
    user's own also on which inputs it is checked, where those are not images.
    """
    words = ["moexport", "export", source, "--recipe", recipe, "-o", bundle]
    data = next(iter(_values_of(typed, "--data")), None)
    if data and names_code(source) and not (Path(data).is_dir() or _values_of(typed, "--pixels")):
        words += ["--data", data]
    return shlex.join([*words, *_carried(typed)])


def _carried(typed: Sequence[str]) -> list[str]:
    """What a command says of how its model is read: an export of the same model needs it, too."""
    panels = panels_of(LoadRequest)
    records: list[type[Any]] = [LoadRequest, *(panel.options for panel in panels)]
    options = (spelled(record, name) for record in records for name in shell_options(record))
    return [
        word
        for option in options
        for value in _values_of(typed, option)
        for word in (option, value)
    ]


def _values_of(words: Sequence[str], option: str) -> list[str]:
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
