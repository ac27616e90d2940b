"""A results file as text: tables for the terminal, Markdown, CSV, and the method."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...common.latency import differs
from ...common.text import csv_cell, markdown, markdown_text, table
from ...common.text import lines as text_lines
from ...common.threads import Threads
from ..engines import PYTORCH_EAGER, titles
from ..results import Results, Row
from .compare import ResultsComparison
from .content import SectionContent, left_out, plugin_sections
from .outputs import outputs_text
from .runs import NamedRun
from .sections import contents
from .summary import (
    GPU_MS,
    Section,
    caveat,
    excess,
    floored,
    line_name,
    milliseconds,
    row_name,
    sections,
    summary,
    times,
)


def rows_table(results: Results) -> str:
    """Returns a table and the answer of each section, then failures and analyses."""
    blocks = []
    device = _device_heading(results)
    for section in sections(results):
        rows = sorted(
            section.all_rows, key=lambda row: (not row.is_reference, -row.k, line_name(row))
        )
        header = (
            *("k", "engine", "batch", "ms (median)", *device),
            *(() if section.phase is None else ("tokens/s",)),
            *("vs PyTorch", "× limit", section.quality or "accuracy", "kept", "at least"),
            "same experts",
        )
        cells = [_cells(section, row, len(device)) for row in rows]
        answers = "\n".join(filter(None, (*_limits(rows), summary(section), caveat(section))))
        blocks.append(f"{section.model}, {section.sizes}\n{table(header, cells)}\n{answers}")
    ranges = results.protocol.get("ranges")
    if ranges:
        blocks.append(f"The INT8 ranges come from {ranges['text']}.")
    findings = (section.text(results) for section in plugin_sections(results))
    texts = (*blocks, outputs_text(results), _failures(results), *findings, left_out(results))
    return "\n\n".join(filter(None, texts))


def _limits(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each reason why limits do not apply."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.over_limit is not None and row.over_limit < 1:
            reason = row.no_limit or "limit does not apply: the weights may stay in a cache"
            by_reason.setdefault(reason, []).append(f"{line_name(row)}, k = {row.k}")
    for reason, names in by_reason.items():
        yield f"{'; '.join(names)}: {reason}"


def _device_heading(results: Results) -> tuple[str, ...]:
    """Returns the heading of the device's times, if any row has them."""
    return (GPU_MS,) if any(row.device_ms is not None for row in results.rows) else ()


def _cells(section: Section, row: Row, devices: int) -> tuple[str, ...]:
    speedup, low = section.speedup(row), section.proven(row)
    quality = _number(row.accuracy and row.accuracy.top1, ".1%")
    if row.perplexity is not None and row.accuracy is None:
        quality = f"{row.perplexity.value:.3f}"
    elif row.regression is not None:
        quality = f"{row.regression.r2:.4f}"
    return (
        row.k_of_n(),
        line_name(row) + (" (untouched)" if row.is_reference else ""),
        str(row.batch),
        _number(row.median_ms, ".3f"),
        *[_number(row.device_ms and row.device_ms.median, ".3f")] * devices,
        *(() if row.phase is None else (_number(row.tokens_per_s, ",.0f"),)),
        "–" if speedup is None else f"{speedup:.2f}×",
        "–" if row.over_limit is None else excess(row.over_limit) if row.over_limit >= 1 else "<1",
        quality,
        _number(row.kept, ".1%"),
        "–" if low is None else f"{floored(low):.1%}",
        _number(row.same_experts, ".1%"),
    )


def _number(value: object, spec: str, missing: str = "–") -> str:
    return missing if value is None else format(value, spec)


def _failures(results: Results) -> str:
    """Returns a line for each reason, with the rows that failed for it."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for row in results.rows:
        if row.error:
            ks = by_reason.setdefault(row.error, {}).setdefault(line_name(row), [])
            ks += [str(row.k)] if str(row.k) not in ks else []
    lines = []
    for reason, names in by_reason.items():
        listed = "; ".join(f"{name}, k = {', '.join(ks)}" for name, ks in names.items())
        lines.append(f"failed: {listed}: {reason}")
    return "\n".join(lines)


def to_markdown(
    results: Results, comparison: ResultsComparison | None = None, runs: Sequence[NamedRun] = ()
) -> str:
    """Returns the report as Markdown: each section's summary and rows, and the method."""
    lines = []
    device = _device_heading(results)
    for section in sections(results):
        title = markdown_text(section.model)
        header = (
            *("engine", "k", "median, ms", *device),
            *(() if section.phase is None else ("tokens/s",)),
            *("vs PyTorch", "× limit", "spread", "quality", "kept", "same experts"),
        )
        lines += [f"## {title}, {section.sizes}", "", markdown_text(summary(section)), ""]
        if caveat(section):
            lines += [markdown_text(caveat(section)), ""]
        members = [row for row in results.rows if section.includes(row)]
        rows = [_markdown_cells(row, section.speedup(row), len(device)) for row in members]
        rows = [(*map(markdown_text, row), *[""] * (len(header) - len(row))) for row in rows]
        lines += [markdown(header, rows, words=1), ""]
    for shown, content in contents(results, comparison, runs):
        lines += [f"## {shown.title}", "", *_section_lines(content)]
    if results.disturbance:
        lines += [f"> {markdown_text(results.disturbance)}", ""]
    lines += ["## How it was measured", ""]
    lines += [f"- {markdown_text(line)}" for line in method_lines(results)]
    lines += [f"- not measured: {markdown_text(line)}" for line in absent_lines(results)]
    if reproduce(results):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", reproduce(results))), default=0))
        lines += ["", f"{fence}sh", reproduce(results), fence]
    return "\n".join(lines) + "\n"


def _section_lines(content: SectionContent) -> Iterator[str]:
    """Yields the lines of a section's sentences and tables in Markdown."""
    for sentence in content.intro:
        yield from (markdown_text(sentence), "")
    for shown in content.tables:
        for heading, rows in shown.groups.items():
            title = ", ".join(filter(None, (shown.title, heading)))
            cells = [
                [markdown_text(c if isinstance(c, str) else c[0]) for c in row] for row in rows
            ]
            yield from (f"### {markdown_text(title)}", "", markdown(shown.heads, cells), "")
    for note in content.notes:
        yield from (markdown_text(note), "")


def _markdown_cells(row: Row, speedup: float | None, devices: int) -> tuple[str, ...]:
    name, k = row_name(row), row.k_of_n()
    if row.error is not None:
        return name, k, f"failed: {row.error}"
    quality = _number(row.accuracy and row.accuracy.top1, ".2%", "")
    if row.perplexity is not None and row.accuracy is None:
        quality = f"ppl {row.perplexity.value:.4g}"
    elif row.regression is not None:
        quality = f"R² {row.regression.r2:.4f}"
    on_gpu = "" if row.device_ms is None else milliseconds(row.device_ms.median)
    return (
        *(name, k, "" if row.median_ms is None else milliseconds(row.median_ms)),
        *[on_gpu] * devices,
        *(() if row.phase is None else (_number(row.tokens_per_s, ",.0f", ""),)),
        "" if speedup is None else times(speedup),
        "" if row.over_limit is None else excess(row.over_limit),
        _number(row.latency_ms and row.latency_ms.spread, ".0%", ""),
        quality,
        _number(row.kept, ".1%", ""),
        _number(row.same_experts, ".1%", ""),
    )


LATENCY = (
    *("median_ms", "spread", "p90_ms", "p95_ms", "p99_ms", "min_ms", "max_ms", "mean_ms"),
    "std_ms",
)

COLUMNS: Mapping[str, str] = {
    **{name: name for name in ("model", "engine", "provider", "precision", "lowering")},
    **{name: name for name in ("k", "experts", "batch", "scope")},
    **{name: f"latency_ms.{name.removesuffix('_ms')}" for name in LATENCY},
    **{f"device_{name}": f"device_ms.{name.removesuffix('_ms')}" for name in LATENCY},
    "calls": "latency_ms.n",
    "inputs_per_s": "throughput",
    "speedup": "",  # computed by the section, which has the base
    "top1": "accuracy.top1",
    "top1_low": "accuracy.top1_interval.low",
    "top1_high": "accuracy.top1_interval.high",
    "top5": "accuracy.top5",
    "perplexity": "perplexity.value",
    "kept": "kept",
    "same_experts": "routing.exact",
    "jaccard": "routing.jaccard",
    "max_abs": "parity.max_abs",
    "cosine": "parity.cosine",
    "peak_memory_mb": "peak_memory_mb",
    "operations": "work.operations",
    "int8_operations": "work.int8_operations",
    "bytes": "work.bytes",
    **{name: name for name in ("limit_ms", "over_limit", "no_limit", "error")},
    **{name: name for name in ("phase", "tokens", "past", "tokens_per_s")},
    "same_choices": "routing.choices",
    "ties": "routing.ties",
    "computed_in": "computed_in",
    **{name: f"regression.{name}" for name in ("r2", "rmse", "mae")},
}
"""The columns of a CSV file, and the path of each in a row: `a.b` is empty if there is no a."""


def to_csv(results: Results) -> str:
    """Returns every row as CSV, one column per number."""
    shown = sections(results)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS.keys(), lineterminator="\n")
    writer.writeheader()
    for row in results.rows:
        speedup = next(each for each in shown if each.includes(row)).speedup(row)
        values = {name: _value(row, path) if path else speedup for name, path in COLUMNS.items()}
        writer.writerow({name: csv_cell(value) for name, value in values.items()})
    return text.getvalue()


def _value(row: Row, path: str) -> object:
    value: object = row
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def method_lines(results: Results) -> list[str]:
    """Returns sentences on how the rows were measured."""
    protocol = results.protocol
    lines = []
    if {"rounds", "round_s", "warmup"} <= protocol.keys():
        lines.append(
            f"{protocol['rounds']} interleaved rounds in random order, at least "
            f"{protocol['round_s']:g} s per engine and round, after {protocol['warmup']} warm-up "
            "calls; no call is discarded."
        )
    threads = protocol.get("threads") or results.environment.get("threads")
    if threads is not None:
        sentence = threads if isinstance(threads, str) else Threads(threads).sentence
        lines.append(f"Every engine: {sentence}.")
    lines.append(
        "Latencies with scope gpu are device time; the others are wall-clock time, host to host."
        if any(row.scope == "gpu" for row in results.rows)
        else "Latency is wall-clock time on real inputs, with inputs and outputs in host memory."
    )
    lines += _on_gpu(results)
    if any(row.phase is not None for row in results.rows):
        lines.append(PHASES)
    if protocol.get("ranges"):
        lines.append(f"The INT8 ranges come from {protocol['ranges']['text']}.")
    if "samples" in protocol:
        labelled = "labelled" if protocol.get("labelled") else "unlabelled"
        samples = f"{protocol['samples']:,} {labelled} samples"
        lines.append(f"Accuracy, routing and parity were measured on {samples}.")
    lines += _rates(protocol.get("rates", ()))
    if protocol.get("waited"):
        largest = max(wait["share"] for wait in protocol["waited"])
        lines.append(f"Threads waited for a core for up to {largest:.0%} of their time.")
    lines.append("Spread is the range of the round medians relative to their median.")
    lines += filter(None, [left_out(results)])
    for model in results.models:
        size = "" if model.parameters is None else f", {model.parameters:,} parameters"
        lines.append(f"{model.name}: {model.family or 'model'}{size}, from {model.source or '–'}.")
    return lines


def absent_lines(results: Results) -> list[str]:
    """Returns why engines were not measured, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for absent in results.absent:
        reason = absent.reason.removesuffix(f": --engine {absent.engine}")
        by_reason.setdefault(reason, []).append(absent.engine)
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]


PHASES = (
    "Prefill computes a whole prompt (the time to the first token). Decode computes one token "
    "after it, with the prompt's keys and values in the cache. Every engine does the same work and "
    "computes the logits of every new token. Outputs stay on the engine's device, where the next "
    "call needs them. “Same experts” counts the choices of each token in each layer, but not those "
    "between scores that differ by less than rounding."
)

GPU_CLOCK = (
    "On a GPU, wall-clock times include the copies to and from the GPU and the wait for the "
    "result; the host waits in CUDA's default way, which on most machines is spinning. TensorRT "
    "engines, graphs in ONNX Runtime's CUDA provider and compiled PyTorch are replayed as CUDA "
    "graphs if possible; other PyTorch rows launch kernel by kernel, and those in FP16 compute "
    "the whole network in FP16. FP32 products do not use TF32 unless an engine was built with it."
)

GPU_EVENTS = (
    f"{GPU_MS} is the time between two CUDA events around the computation, one pair per call, on a "
    "separate stream. It includes gaps between kernels but no copies. It comes from separate "
    "calls in the same rounds, with buffers that already exist."
)


def _on_gpu(results: Results) -> list[str]:
    """Returns what times on a GPU include, and the base of their speed; empty without a GPU."""
    rows = [row for row in results.rows if row.on_gpu and row.latency_ms is not None]
    if not rows:
        return []
    lines = [GPU_CLOCK]
    if any(row.device_ms is not None for row in rows):
        lines.append(GPU_EVENTS)
    without_events = dict.fromkeys(
        f"{titles().get(row.engine, row.engine)} ({row.provider})"
        for row in rows
        if row.device_ms is None
    )
    if without_events:
        lines.append(f"{', '.join(without_events)}: wall clock only, no {GPU_MS}.")
    reasons = dict.fromkeys(
        f"{line_name(row)}: launched kernel by kernel: {row.no_cuda_graph}."
        for row in rows
        if row.no_cuda_graph
    )
    lines += [*reasons, *_k_changes(rows)]
    has_gpu_reference = any(row.engine == PYTORCH_EAGER for row in rows)
    lines.append(
        "Rows on a GPU are compared with the untouched PyTorch model on the GPU, the others with "
        "the one on the CPU."
        if has_gpu_reference
        else "Rows on a GPU are compared with the untouched PyTorch model on the CPU, because it "
        "was not measured on the GPU."
    )
    return lines


def _k_changes(rows: Sequence[Row]) -> list[str]:
    """Returns how a smaller k changes the GPU's time and that of the whole call, if known."""
    lines, by_engine = [], dict[tuple[str, str, str], list[Row]]()
    for row in rows:
        if row.device_ms is not None and row.lowering is not None:
            by_engine.setdefault((row.model, line_name(row), row.sizes), []).append(row)
    for (model, name, sizes), engine_rows in by_engine.items():
        full = max(engine_rows, key=lambda row: row.k)
        low = min(engine_rows, key=lambda row: row.k)
        assert full.device_ms and low.device_ms and full.latency_ms and low.latency_ms
        if full.k == low.k:
            continue
        pairs = ((GPU_MS, full.device_ms, low.device_ms), (WALL, full.latency_ms, low.latency_ms))
        changes = [
            f"{title} {a.median:.3f} → {b.median:.3f}"
            if differs(a, b)
            else f"{title} unchanged within the spread ({a.median:.3f}, {b.median:.3f})"
            for title, a, b in pairs
        ]
        lines.append(f"{model}, {name}, {sizes}, k {full.k} → {low.k}: {'; '.join(changes)}.")
    return lines


WALL = "array to array ms"


def _rates(measured: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a description of the limit, with the rates measured in the same rounds."""
    if not measured:
        return []
    descriptions = {
        "stream_gb_s": "streaming at {} GB/s",
        "matmul_gflop_s": "FP32 products at {} GFLOP/s",
        "bf16_gflop_s": "BF16 products at {} GFLOP/s",
        "fp16_gflop_s": "FP16 products at {} GFLOP/s",
        "int8_gop_s": "INT8 products at {} GOP/s",
    }
    rates = []
    for on_gpu in (False, True):
        device_rates = [rate for rate in measured if rate.get("gpu", False) is on_gpu]
        for name, words in descriptions.items():
            values = [rate[name] for rate in device_rates if rate.get(name) is not None]
            if values:
                ends = dict.fromkeys((f"{min(values):.0f}", f"{max(values):.0f}"))
                rates.append(words.format(" to ".join(ends)) + " on the GPU" * on_gpu)
    return [
        "The limit is the minimum time that this machine needs to move a row's bytes or to compute "
        "its operations, whichever takes longer for each part. Rates measured in the same rounds: "
        f"{', '.join(rates)}."
    ]


def reproduce(results: Results) -> str:
    """Returns what a repetition needs: versions, hashes of models and data, and the command.

    Each name and version stays on its line and is one word in a shell.
    """
    packages = results.environment.get("packages")
    versions = dict(packages) if isinstance(packages, dict) else {}
    version = versions.pop("moexport", None)
    lines = [] if version is None else [f"# moexport {version}"]
    pins = shlex.join(f"{name}=={pinned}" for name, pinned in versions.items())
    lines += [f"pip install {pins}"] if pins else []
    for model in results.models:
        digest = f": sha256 {model.sha256}" if model.sha256 else ""
        lines.append(f"# model {model.name}, {model.source or 'made in Python'}{digest}")
    data = results.protocol.get("data")
    if isinstance(data, dict):
        unnamed = "in memory" if results.protocol.get("labelled") else "random inputs"
        source = data.get("source") or unnamed
        lines.append(f"# data {source}: sha256 {data.get('sha256')}")
    ranges = results.protocol.get("ranges")
    if ranges:
        lines.append(f"# INT8 ranges from {ranges['text']}")
        lines += [f"#   saved in {path}" for path in ranges.get("found", {}).values()]
    elif results.protocol.get("calibration"):  # results of an earlier version
        lines.append(f"# INT8 ranges from {results.protocol['calibration']}")
    return text_lines(*lines, *([results.command] if results.command else []))
