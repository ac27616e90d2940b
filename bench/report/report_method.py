"""What the report says of the machine and of how it was measured, as sentences and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..results import PYTORCH_EAGER, Results
from .views import GPU_MS, NAMES

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
    if "rounds" in p and "warmup" in p:
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
