"""`report.html`: one self-contained page about a results file.

The page fetches nothing: plotly.js (the basic bundle: scatter, bar, pie), style, script and data
are in it. Its parts lie in `assets/`; placeholders are `%%NAME%%`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from ...common.writing import write_text
from ..analyses.findings import studies_in
from ..measure.latency import disturbance
from ..results import PYTORCH_EAGER, Results, Row
from .compare import Comparison
from .summary import (
    GPU_MS,
    KEPT,
    NAMES,
    UNTOUCHED,
    Section,
    caveat,
    empty_charts,
    headline,
    limit_lines,
    line_name,
    milliseconds,
    pareto_front,
    percent,
    sections,
    short_name,
    summary,
    times,
)
from .tables import analyses_section, comparison_section, parity_table, rows_table


def write_report(results: Results, path: Path, comparison: Comparison | None = None) -> None:
    """Writes the page, whole or not at all."""
    write_text(html(results, comparison), path)


def html(results: Results, comparison: Comparison | None = None) -> str:
    """Returns the page: summary, charts, every row, environment and method.

    With a `comparison` it also says what changed since an earlier file.
    """
    shown = sections(results)
    names = [model.name for model in results.models]
    parts = {
        "TITLE": escape(f"moexport benchmark: {', '.join(names)}"),
        "STYLE": _asset("report.css"),
        "CREATED": escape(results.created.replace("T", " ").replace("+00:00", " UTC")),
        "DISTURBED": escape(disturbance(results)),
        "EMPTY": escape(" ".join(empty_charts(shown[0]).values()) if shown else ""),
        "SUMMARY": escape(summary(shown[0]) if shown else "No rows were measured."),
        "CAVEAT": escape(caveat(shown[0]) if shown else ""),
        "KEPT": f"{KEPT:.0%}",
        "TILES": tiles(shown[0]) if shown else "",
        "COMPARISON": comparison_section(comparison),
        "ANALYSES": analyses_section(studies_in(results.analyses)),
        "ROUTING": parity_table(shown),
        "ROWS": rows_table(shown, results),
        "ENVIRONMENT": environment_list(results),
        "METHOD": method(results),
        "DATA": embedded_json([payload(section) for section in shown if section.ks]),
        "PLOTLY": _asset("plotly-basic.min.js"),
        "SCRIPT": _asset("report.js"),
    }
    # Cut once, so that text inside one part is never taken for a placeholder.
    pieces = _asset("report.html").split("%%")
    return "".join(parts[p] if index % 2 else p for index, p in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def embedded_json(value: Any) -> str:
    """Returns JSON that cannot end the script element it stands in."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def payload(section: Section) -> dict[str, Any]:
    """Returns what the page's script draws for one model and batch size."""
    reference = section.reference
    best = pareto_front(section)
    return {
        "model": section.model,
        "batch": section.batch,
        "experts": section.experts,
        "ks": list(section.ks),
        "top": section.top_ms,
        "quality": section.quality,
        "summary": summary(section),
        "caveat": caveat(section),
        "tiles": tiles(section),
        "empty": empty_charts(section),
        "reference": None if reference is None else _point(section, reference, UNTOUCHED, best),
        "limits": [
            {"name": line.name, "points": [{"k": k, "ms": ms} for k, ms in line.points]}
            for line in limit_lines(section)
        ],
        "lines": [
            {
                "name": line.name,
                "short": short_name(line.rows[0]),
                "look": line.look,
                "points": [_point(section, row, line.name, best) for row in line.rows],
            }
            for line in section.series
        ],
    }


def _point(section: Section, row: Row, name: str, best: Sequence[Row]) -> dict[str, Any]:
    return {
        "name": name,
        "k": row.k,
        "kept": row.kept,
        "front": row in best,
        "memory": row.peak_memory_mb,
        "runtime": row.runtime_memory_mb,
        "parts": [{"layer": p.layer, "part": p.part, "ms": p.ms} for p in row.parts],
        **_latency(section, row),
        **_quality(row),
        **_agreement(row),
        "row": "<br>".join(_lines(section, row, name)),
    }


def _latency(section: Section, row: Row) -> dict[str, Any]:
    latency = row.latency_ms
    if latency is None:
        return {"median": None, "above": 0, "below": 0, "cut": False, "latency": ""}
    ratio = section.speedup(row)
    speed = "" if ratio is None or section.base(row) is row else f", {times(ratio)}"
    device = "" if row.device_ms is None else f", on the GPU {milliseconds(row.device_ms.median)}"
    return {
        "median": latency.median,
        "above": max(0.0, max(latency.rounds) - latency.median),
        "below": max(0.0, latency.median - min(latency.rounds)),
        "cut": section.bar(latency).cut,
        "latency": f"{milliseconds(latency.median)} ms{speed} (p90 {milliseconds(latency.p90)}"
        f"{device})",
    }


def _quality(row: Row) -> dict[str, Any]:
    accuracy, perplexity = row.accuracy, row.perplexity
    if accuracy is not None:
        value, interval = accuracy.top1, accuracy.top1_interval
        text = f"{value:.2%}"
        if interval is not None:
            text += f" ({interval.low:.1%} to {interval.high:.1%})"
    elif perplexity is not None:
        value, interval = perplexity.value, perplexity.interval
        text = f"{value:.4g}"
        if interval is not None:
            text += f" ({interval.low:.4g} to {interval.high:.4g})"
    else:
        return {"quality": None, "quality_above": 0, "quality_below": 0, "accuracy": ""}
    kept = "" if row.kept is None else f", {row.kept:.1%} kept"
    return {
        "quality": value,
        "quality_above": 0 if interval is None else interval.high - value,
        "quality_below": 0 if interval is None else value - interval.low,
        "accuracy": text + kept,
    }


def _agreement(row: Row) -> dict[str, Any]:
    if row.routing is None:
        return {"exact": None, "agreement": ""}
    text = f"{row.routing.exact:.2%} of samples, Jaccard {row.routing.jaccard:.4f}"
    return {"exact": row.routing.exact, "agreement": text}


def _lines(section: Section, row: Row, name: str) -> list[str]:
    """A row in a few lines, for where the pointer rests on it."""
    lines = [f"<b>{escape(name)}</b>", f"k = {row.k} of {row.experts}, batch {row.batch}"]
    latency = _latency(section, row)["latency"]
    quality = _quality(row)["accuracy"]
    lines += [str(text) for text in (latency, quality) if text]
    if row.routing is not None:
        lines.append(f"same experts: {row.routing.exact:.1%}")
    if row.peak_memory_mb is not None:
        lines.append(f"peak memory: {row.peak_memory_mb:,.0f} MB")
    return lines


def tiles(section: Section) -> str:
    """Returns the numbers of the row that the summary is about, as HTML."""
    row = headline(section)
    if row is None:
        return ""
    ratio = section.speedup(row)
    about = "" if section.faster_or_slower(row) else "≈ "
    reference = section.reference
    found = [
        ("Experts computed", f"{row.k} of {row.experts}", line_name(row)),
        (
            "Speed",
            "–" if ratio is None else about + times(ratio),
            f"against the untouched PyTorch model{section.place(row)}",
        ),
        (
            "Perplexity kept" if row.perplexity is not None else "Accuracy kept",
            "–" if row.kept is None else percent(row.kept),
            _kept_detail(row),
        ),
        (
            "Same experts chosen",
            "–" if row.routing is None else percent(row.routing.exact),
            "of samples, as in PyTorch" if row.routing else _why_no_routing(row),
        ),
    ]
    if row.peak_memory_mb is not None:
        before = None if reference is None else reference.peak_memory_mb
        found.append(
            (
                "Peak memory",
                f"{row.peak_memory_mb:,.0f} MB",
                "of a process" if before is None else f"PyTorch: {before:,.0f} MB",
            )
        )
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for name, value, detail in found
    )


def _kept_detail(row: Row) -> str:
    interval = row.kept_interval
    if interval is not None:
        return f"{percent(interval.low)} to {percent(interval.high)} (95%)"
    if row.perplexity is not None:
        return f"perplexity {row.perplexity.value:.4g}"
    return "no labels" if row.accuracy is None else f"top-1 {row.accuracy.top1:.2%}"


def _why_no_routing(row: Row) -> str:
    return "all are computed" if row.k == row.experts else "not measured"


def environment_list(results: Results) -> str:
    """Returns the machine and the versions as a list of names and values."""
    facts: list[tuple[str, str]] = []
    for name, value in results.environment.items():
        if name == "packages" and isinstance(value, dict):
            facts += [(str(package), str(version)) for package, version in value.items()]
        elif name == "memory_bytes" and isinstance(value, int):
            facts.append(("memory", f"{value / 2**30:.1f} GiB"))
        else:
            facts.append((name, _plain(value)))
    return _facts(facts)


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_plain(item) for item in value)
    return str(value)


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f'<dl class="facts">{items}</dl>'


def method(results: Results) -> str:
    """Returns how the rows were measured, what was not, and the commands that do it again."""
    listed = "".join(f"<li>{escape(line)}</li>" for line in method_lines(results))
    absent = "".join(
        f"<li>{escape(engine.engine)}: {escape(engine.reason)}</li>" for engine in results.absent
    )
    left = f"<h3>Not measured</h3><ul>{absent}</ul>" if absent else ""
    again = f"<pre>{escape(reproduce(results))}</pre>" if results.command else ""
    heading = "<h3>To do it again</h3>" if again else ""
    return f"<ul>{listed}</ul>{left}{heading}{again}"


def method_lines(results: Results) -> list[str]:
    """Returns sentences on how the rows were measured."""
    p = results.protocol
    lines = []
    if {"rounds", "round_s", "warmup"} <= p.keys():
        lines.append(
            f"{p['rounds']} interleaved rounds in random order, at least {p['round_s']:g} s per "
            f"engine and round, after {p['warmup']} calls of warm-up; no call is left out."
        )
    threads = results.environment.get("threads")
    if threads is not None:
        lines.append(f"{threads} thread{'s' if threads != 1 else ''} for every engine.")
    if any(row.scope == "gpu" for row in results.rows):
        lines.append("Latencies of scope gpu are device time, the others from array to array.")
    else:
        lines.append("Latency is wall clock from host array to host array, on real inputs in turn.")
    lines += _on_gpu(results)
    if "samples" in p:
        labelled = "labelled" if p.get("labelled") else "unlabelled"
        lines.append(f"Accuracy, routing and parity on {p['samples']:,} {labelled} samples.")
    lines += _rates(p.get("rates", ()))
    if p.get("waited"):
        most = max(each["share"] for each in p["waited"])
        lines.append(f"Threads waited for a core {most:.0%} of the time that they wanted one.")
    lines.append("Spread is the range of the round medians relative to their median.")
    for model in results.models:
        size = "" if model.parameters is None else f", {model.parameters:,} parameters"
        lines.append(f"{model.name}: {model.family or 'model'}{size}, from {model.source or '–'}.")
    return lines


GPU_CLOCK = (
    "On a GPU the wall clock holds the copies to it and back and the wait for it; the host waits "
    "as CUDA does by default, which on most machines is by spinning. Engines of TensorRT are "
    "recorded and replayed as CUDA graphs where they can be; PyTorch and ONNX Runtime launch "
    "kernel by kernel. FP32 products are not rounded to TF32, unless an engine was built so."
)

GPU_EVENTS = (
    f"{GPU_MS} are between two CUDA events, one pair per call, around the computation on a stream "
    "of its own; the copies are outside, gaps between kernels inside. They are taken in the same "
    "rounds, by calls of their own, in buffers that the calls before have allocated."
)


def _on_gpu(results: Results) -> list[str]:
    """What the times of rows on a GPU hold, and what their speed is against; empty without any."""
    rows = [row for row in results.rows if row.on_gpu and row.latency_ms is not None]
    if not rows:
        return []
    lines = [GPU_CLOCK]
    if any(row.device_ms is not None for row in rows):
        lines.append(GPU_EVENTS)
    silent = dict.fromkeys(
        f"{NAMES.get(row.engine, row.engine)} ({row.provider})"
        for row in rows
        if row.device_ms is None
    )
    if silent:
        lines.append(f"There are no {GPU_MS} of {', '.join(silent)}, only the wall clock.")
    there = any(row.engine == PYTORCH_EAGER for row in rows)
    lines.append(
        "Rows on a GPU are compared with the untouched PyTorch model on the GPU, the others with "
        "it on the CPU."
        if there
        else "Rows on a GPU are compared with the untouched PyTorch model on the CPU: on the GPU "
        "it was not measured."
    )
    return lines


def _rates(measured: Sequence[dict[str, Any]]) -> list[str]:
    """What the limit is, with the rates that were measured beside the rows."""
    if not measured:
        return []
    said = (
        ("streaming at {} GB/s", "stream_gb_s"),
        ("FP32 products at {} GFLOP/s", "matmul_gflop_s"),
        ("INT8 products at {} GOP/s", "int8_gop_s"),
    )
    rates = []
    for words, name in said:
        found = [rate[name] for rate in measured if rate.get(name) is not None]
        if found:
            low, high = f"{min(found):.0f}", f"{max(found):.0f}"
            rates.append(words.format(low if low == high else f"{low} to {high}"))
    return [
        "The limit is the least time that this machine needs to move a row's bytes and to compute "
        f"its operations, whichever takes longer, part by part; measured beside: "
        f"{', '.join(rates)}."
    ]


def reproduce(results: Results) -> str:
    """Returns the commands that measure again and compare with this file."""
    packages = results.environment.get("packages")
    pins = ""
    if isinstance(packages, dict):
        listed = [f"{name}=={version}" for name, version in packages.items() if name != "moexport"]
        pins = f"pip install {' '.join(listed)}\n" if listed else ""
    return f"{pins}{results.command}"
