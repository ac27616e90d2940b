"""`report.html`: one self-contained page that draws a results file.

The page fetches nothing: Vega and Vega-Lite (compressed), the charts' specifications, style, script
and data are in it. Its parts are in `assets/`; placeholders are `%%NAME%%`. The results are
embedded unchanged, with a description of every row in words; `report.js` draws and filters them,
and recommends what to deploy.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from ...common.option import panels_of, shell_options, spelled
from ...common.text import count, size
from ...common.writing import check_file, output_errors, write_text
from ...data.user_code import names_code
from ...errors import UsageError
from ...exporter.options import VERIFY_SAMPLES
from ...exporter.requests import LoadRequest
from ..engines import PYTORCH_EAGER
from ..results import ModelInfo, Results, Row, as_json, write
from .charts import STAR, SYMBOLS, core_charts
from .compare import ResultsComparison
from .content import PageChart, ReportSection, decision_of, plugin_sections
from .figures import figures, marks
from .runs import NamedRun, machine_of, run_points
from .sections import all_sections, contents
from .summary import (
    DISAGREE,
    GPU_MS,
    KEPT,
    Section,
    caveat,
    claim,
    engine_name,
    keeps,
    milliseconds,
    row_name,
    sections,
    short_name,
    speeds_differ,
    summary,
    unknown,
)
from .text import absent_lines, method_lines, reproduce, to_csv, to_markdown

BEFORE_CHARTS = 30
"""Sections with a smaller place are answers, shown before the charts."""

UNFOLDED = 40
"""Sections with a smaller place are not folded."""


def write_report(results: Results, path: Path, comparison: ResultsComparison | None = None) -> None:
    """Writes the page atomically."""
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
    """Writes the page, and Markdown, CSV and figures next to it.

    The page shows other `runs` next to the results. Without vl-convert there are no figures. Raises
    UsageError unless the page is an .html file.
    """
    check_file(page)
    if page.suffix not in (".html", ".htm"):
        raise UsageError(
            f"--output {page}: the page must be an .html file",
            hint=f"for example -o {page.stem or 'report'}.html",
        )
    write_text(html(results, comparison, runs), page)
    markdown, rows = page.with_suffix(".md"), page.with_suffix(".csv")
    write_text(to_markdown(results, comparison, runs), markdown)
    write_text(to_csv(results), rows)
    if not can_draw():
        return (page, markdown, rows)
    folder = page.parent
    with output_errors(folder):
        drawn = (
            *figures(results, folder),
            *(path for each in plugin_sections(results) for path in each.figures(results, folder)),
        )
    return (page, markdown, rows, *drawn)


def can_draw() -> bool:
    """Returns whether figures can be drawn; the page's own charts do not need vl-convert."""
    return importlib.util.find_spec("vl_convert") is not None


def html(
    results: Results, comparison: ResultsComparison | None = None, runs: Sequence[NamedRun] = ()
) -> str:
    """Returns the page: the answer, charts, rows, environment, method and changes."""
    shown = sections(results)
    parts = {
        "TITLE": escape(f"moexport benchmark: {', '.join(model.name for model in results.models)}"),
        "STYLE": _asset("report.css"),
        "SUBJECT": escape(shown[0].model if shown else "moexport"),
        "MACHINE": escape(machine_of(results) if "cpu" in results.environment else ""),
        "CREATED": escape(results.created.replace("T", " ").replace("+00:00", " UTC")),
        "SUMMARY": escape(summary(shown[0]) if shown else "No rows were measured."),
        "CAVEAT": escape(caveat(shown[0]) if shown else ""),
        "DATA": embedded_json(payload(results, comparison, runs)),
        "VEGA": _packed("vega.min.js", "vega-lite.min.js"),
        "CARDS": "\n".join(chart.asset(f"{section.name}.html") for section, chart in charts()),
        "CHARTS": ",\n".join(chart.asset(f"{section.name}.js") for section, chart in charts()),
        "SCRIPT": _asset("report.js"),
    }
    # Split once, so that text inside a part is never mistaken for a placeholder.
    pieces = _asset("report.html").split("%%")
    return "".join(parts[p] if index % 2 else p for index, p in enumerate(pieces))


def charts() -> list[tuple[ReportSection, PageChart]]:
    """Returns the sections with their own charts, in the order of the page."""
    return [(each, each.chart) for each in all_sections() if each.chart is not None]


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _packed(*names: str) -> str:
    """Returns assets as gzip in Base64, with the same bytes every time."""
    text = "\n".join(map(_asset, names))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def embedded_json(value: Any) -> str:
    """Returns JSON that cannot end the script element that contains it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def payload(
    results: Results, comparison: ResultsComparison | None = None, runs: Sequence[NamedRun] = ()
) -> dict[str, Any]:
    """Returns the data of the page's script: the results, and their description in words."""
    shown = sections(results)
    row_sections = [next(each for each in shown if each.includes(row)) for row in results.rows]
    symbols = _symbols(results)
    return {
        "results": as_json(results),
        "rows": [
            _description(results, section, row) | marks(section, row, symbols[_style(row)])
            for section, row in zip(row_sections, results.rows, strict=True)
        ],
        "charts": core_charts(next(filter(None, (each.quality for each in shown)), "accuracy")),
        "symbols": SYMBOLS,
        "keep": shown[0].keep if shown else KEPT,
        "disagree": DISAGREE,
        **{
            section.name: chart.points(results) if section.applies_to(results) else None
            for section, chart in charts()
        },
        "gpu": GPU_MS if any(row.device_ms is not None for row in results.rows) else None,
        "disturbed": results.disturbance,
        "tables": [
            {
                **{"id": section.name, "title": section.title},
                **{"first": section.place < BEFORE_CHARTS, "open": section.place < UNFOLDED},
                **asdict(content),
            }
            for section, content in contents(results, comparison, runs)
        ],
        "runs": list(map(run_points, runs)),
        "environment": list(_environment(results)),
        "method": method_lines(results),
        "absent": absent_lines(results),
        "again": reproduce(results),
        "csv": to_csv(results),
    }


def _style(row: Row) -> tuple[str, str | None]:
    return engine_name(row), row.lowering


def _symbols(results: Results) -> dict[tuple[str, str | None], str]:
    """Returns the symbol of each engine and lowering, in the order of their rows."""
    styles = dict.fromkeys(_style(row) for row in results.rows if row.engine != PYTORCH_EAGER)
    symbols = dict(zip(styles, cycle(SYMBOLS), strict=False))
    return symbols | {_style(row): STAR for row in results.rows if row.engine == PYTORCH_EAGER}


def _description(results: Results, section: Section, row: Row) -> dict[str, Any]:
    """Returns a row's name and description on the page, and the index of its `base`."""
    base = section.base(row)
    latency = row.latency_ms
    return {
        "name": row_name(row),
        "short": short_name(row),
        "engine_name": engine_name(row),
        "on_gpu": row.on_gpu,
        "base": next((i for i, other in enumerate(results.rows) if other is base), None),
        "against": f"PyTorch{section.base_device(row)}",
        "speed": section.speedup(row),
        "waited": section.waited if section.disturbed else None,
        "gain": section.gain(row),
        "told": base is row or speeds_differ(base, row),
        "shown": section.proven(row),
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
    """Describes the parts of the minimum time, or why it is unknown or does not apply."""
    if row.no_limit or row.limit_ms is None or row.work is None:
        return row.no_limit or ""
    operations = row.work.operations + row.work.int8_operations
    work = f"{count(operations)} operations, {size(row.work.bytes)}"
    return f"at least {milliseconds(row.limit_ms)} ms: {work}"


def export_command(results: Results, row: Row) -> str | None:
    """Returns the command that exports the graph of a row again, or runs its bundle.

    It is None for rows of PyTorch, and if the results were not made by a command: only the command
    shows how the model is read.
    """
    model = next((info for info in results.models if info.name == row.model), ModelInfo(""))
    source = model.source
    try:
        typed = shlex.split(results.command)
    except ValueError:
        typed = []
    if row.error is not None or not source or typed[:1] != ["moexport"]:
        return None
    decision = decision_of(results)
    if decision is not None and row is results.rows[-1]:  # the row that the search chose
        return recipe_command(source, decision.recipe, "BUNDLE", typed)
    if not row.deploy:
        return None
    command, *options = row.deploy
    data = next(iter(_values_of(typed, "--data")), None)
    if command == "run":
        file = (results.protocol.get("data") or {}).get("source") or ""
        inputs = file if file.endswith(".npz") else "INPUTS.npz"
        return shlex.join(["moexport", command, *options, "-i", inputs, "-o", "OUTPUTS.npz"])
    name = "".join(c if c.isalnum() else "-" for c in Path(source.split(":")[-1]).stem)
    arguments = ["moexport", command, source, "-o", f"{name}-k{row.k}-{row.precision}", *options]
    if row.batch > 1 and "--batch" not in options:
        arguments += ["--batch", f"1:{row.batch}:{max(row.batch, 32)}"]
    arguments += _parity_options(results, row, source, data, typed)
    return shlex.join([*arguments, *_reading_options(typed)])


def _parity_options(
    results: Results, row: Row, source: str, data: str | None, typed: Sequence[str]
) -> list[str]:
    """Returns the options with which an export accepts a row's graph, compared on the row's inputs.

    Random inputs choose experts other than the measured ones. If the share of inputs with the same
    experts is near the minimum that an export accepts, the export compares all inputs, because the
    first few may have a smaller share. Below the minimum it compares none.
    """
    from ...exporter.bundle.parity import tolerance_of  # loads onnx, which a report does not need

    feed, minimum = _check_inputs(source, data, typed), tolerance_of(row.precision).routing
    share, protocol = row.same_experts, results.protocol
    if share is None or minimum == 1:
        return feed
    inputs = protocol.get("samples", 0) + protocol.get("ranges", {}).get("held_out", 0)
    low = share - 3 * math.sqrt(share * (1 - share) / VERIFY_SAMPLES)  # three standard deviations
    if share < minimum or (low < minimum and not feed):
        return ["--no-verify", *(feed if names_code(source) else [])]
    if low < minimum and inputs > VERIFY_SAMPLES:
        return [*feed, "--verify-samples", str(inputs)]
    return feed


def _check_inputs(source: str, data: str | None, typed: Sequence[str]) -> list[str]:
    """Returns the option with the inputs to compare, if they are arrays that an export can read."""
    if not data or Path(data).is_dir() or _values_of(typed, "--pixels"):
        return []
    return ["--data", data] if names_code(source) or Path(data).suffix == ".npz" else []


def recipe_command(source: str, recipe: str, bundle: str, typed: Sequence[str]) -> str:
    """Returns the command that exports a model again according to its recipe.

    `typed` is the command of the search, which shows how the model is read and on which inputs it
    is checked: random ones may be outside the ranges of INT8.
    """
    arguments = ["moexport", "export", source, "--recipe", recipe, "-o", bundle]
    data = next(iter(_values_of(typed, "--data")), None)
    return shlex.join([*arguments, *_check_inputs(source, data, typed), *_reading_options(typed)])


def _reading_options(typed: Sequence[str]) -> list[str]:
    """Returns a command's options for reading its model, which an export of it also needs."""
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
    """Returns the values of an option in a command, as `--option value` or `--option=value`."""
    separate = [value for name, value in pairwise(words) if name == option]
    return separate + [word.split("=", 1)[1] for word in words if word.startswith(f"{option}=")]


def _environment(results: Results) -> Iterator[tuple[str, str]]:
    for name, value in results.environment.items():
        if name == "packages" and isinstance(value, dict):
            yield from ((str(package), str(version)) for package, version in value.items())
        elif name == "cpu" and isinstance(value, dict):
            cpu = dict(value)
            model, instructions = cpu.pop("model", ""), cpu.pop("instructions", None)
            words = [str(model), *([_text_of(instructions)] if instructions else [])]
            yield name, "; ".join((*words, _text_of(cpu)) if cpu else words)
        elif name == "memory_bytes" and isinstance(value, int):
            yield "memory", f"{value / 2**30:.1f} GiB"
        else:
            yield name, _text_of(value)


def _text_of(value: Any) -> str:
    match value:
        case None:
            return "none"
        case dict():
            return ", ".join(f"{key} {item}" for key, item in value.items())
        case list():
            return "; ".join(map(_text_of, value))
        case _:
            return str(value)
