"""Compares the calibration methods, and ONNX Runtime's own quantiser on the same model.

The model is the paper's MNIST network on digits, with ranges from the training images and accuracy
on the whole test set. The other quantiser is `onnxruntime.quantization.quantize_static` on the
dense graph (k = n), because it does not know which experts are selected. Each quantiser runs in a
separate process, which measures its time and peak memory: `python -m perf.calibration ours
CHECKPOINT FEED BUNDLE`, or `theirs GRAPH FEED OUT FORMAT METHOD`, prints them as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from moexport import Bundle, Model, export, load
from moexport.bench.data import LabelledData
from moexport.calibration.table import METHODS, CalibrationTable
from moexport.common import timing
from moexport.common.console import Progress
from moexport.common.text import markdown
from moexport.exporter.bundle.parity import jaccard
from moexport.exporter.job import calibration_job
from moexport.exporter.quantization.calibrate import Observed, observe_model
from moexport.exporter.requests import CalibrateRequest
from moexport.exporter.session import Session, SessionOptions
from moexport.plugins.demo import digits
from onnxruntime import quantization

from .measure import peak_bytes

EXPERTS = (16, 64)
KS = ("n", "1/4")
PERCENTILES = (99.0, 99.9, 99.99, 99.999)
BATCHES = (1, 32)
THREADS = 1
"""These networks are too small for several threads."""

STATIC_METHODS = {
    "minmax": quantization.CalibrationMethod.MinMax,
    "percentile": quantization.CalibrationMethod.Percentile,
    "entropy": quantization.CalibrationMethod.Entropy,
}
"""The methods of `quantize_static`."""

QUANTISER_BATCH = 16
"""The batch size of both quantisers, which is that of `moexport calibrate`."""

Row = Mapping[str, object]
"""The saved results of one method or quantiser on one network."""


def measure(progress: Progress) -> dict[str, object]:
    """Trains the networks and measures `methods` and, with all experts, `tools`."""
    data = digits.load_digits()
    methods: list[Row] = []
    tools: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        feed = place / "train.npz"
        np.savez(feed, input=data.train.inputs)
        for experts in EXPERTS:
            progress.step(f"training n = {experts}")
            checkpoint = place / f"digits-n{experts}.pt"
            digits.save(digits.train(digits.Training(experts=experts), data.train), checkpoint)
            model = load(checkpoint)
            for k in KS:
                progress.step(f"n = {experts}, k = {k}: methods")
                methods += compare_methods(model, feed, k, data.test, place)
            progress.step(f"n = {experts}: quantisers")
            tools += compare_tools(checkpoint, feed, data.test, place)
    return {"samples": len(data.train), "test": len(data.test), "methods": methods, "tools": tools}


def tables(body: Any) -> str:
    """Returns both tables of the saved results as Markdown."""
    return f"{methods_table(body)}\n\n{tools_table(body)}"


def compare_methods(
    model: Model, feed: Path, k: str, test: LabelledData, place: Path
) -> Iterator[Row]:
    """Yields the effect of INT8 on the test set at one k, for each method of finding ranges.

    `same_experts` is the share of images for which the same experts were chosen, `max_error` the
    largest difference from FP32 at the same k, divided by the largest output. The model is observed
    once.
    """
    observed = observe_model(calibration_job(model, feed, CalibrateRequest(k=k)))
    (layer,) = model.layers.values()
    name = f"n{layer.spec.experts}-{k.replace('/', '-')}"
    single = export(model, place / f"{name}-fp32", k=k, target="ort-cpu", verify=False)
    expected, routed = _answers(single, test.inputs)
    for label, ranges in ranges_of(observed):
        bundle = export(
            model,
            place / f"{name}-{label}",
            k=k,
            target="ort-cpu",
            precision="int8",
            calibration=ranges,
            verify=False,
        )
        y, chosen = _answers(bundle, test.inputs)
        same = 1.0
        if routed is not None and chosen is not None:
            same = float((jaccard(chosen, routed) == 1).mean())
        yield {
            "experts": layer.spec.experts,
            "k": observed.origin.k[layer.spec.name],
            "method": label,
            "fp32_top1": _top1(expected, test),
            "int8_top1": _top1(y, test),
            "same_experts": same,
            "max_error": float(np.abs(y - expected).max() / np.abs(expected).max()),
        }


def ranges_of(observed: Observed) -> Iterator[tuple[str, CalibrationTable]]:
    """Yields the table of every method; for percentiles, one table each."""
    for method in METHODS:
        if method != "percentile":
            yield method, observed.table(method)
            continue
        for percentile in PERCENTILES:
            yield f"{method} {percentile:g}", observed.table(method, percentile)


def _answers(bundle: Bundle, x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns a graph's outputs and, if it selects experts, the selected ones."""
    selected = bundle.manifest.layers[0].selected
    observe = None if selected is None else {selected: 7}  # int64
    session = bundle.session(options=SessionOptions(threads=THREADS, observe=observe))
    values = session.run(x)
    return values[session.output_names[0]], None if selected is None else values[selected]


def _top1(y: np.ndarray, test: LabelledData) -> float:
    return float((y.argmax(axis=1) == test.labels).mean())


def compare_tools(checkpoint: Path, feed: Path, test: LabelledData, place: Path) -> Iterator[Row]:
    """Yields accuracy, times and memory of FP32, moexport, and both formats of `quantize_static`.

    `calibration_s` and `peak_mb` are the time and the peak memory of a process that calibrates and
    quantises; `base_mb` is its memory before that. `failure` is the runtime's message for a graph
    that it does not run.
    """
    experts = load(checkpoint).layers["layer"].spec.experts
    dense = export(load(checkpoint), place / f"dense-{experts}", lowering="dense", verify=False)
    ours = place / f"ours-{experts}"
    graphs = {"FP32": dense.path / "model.onnx", "moexport": ours / "model.onnx"}
    costs: dict[str, dict[str, float]] = {
        "FP32": {},
        "moexport": _child("ours", checkpoint, feed, ours),
    }
    for form, method in product(("QDQ", "QOperator"), STATIC_METHODS):
        tool = f"quantize_static {form} {method}"
        graphs[tool] = place / f"{experts}-{form}-{method}.onnx"
        costs[tool] = _child("theirs", graphs["FP32"], feed, graphs[tool], form, method)
    sessions = {
        tool: Session(path, SessionOptions(threads=THREADS)) for tool, path in graphs.items()
    }
    protocol = timing.Protocol(inputs=8, round_s=0.1)
    measured = {}
    for batch in BATCHES:
        inputs = [test.batch(index, batch) for index in range(protocol.inputs)]
        calls = {
            tool: (lambda index, session=session, inputs=inputs: session(inputs[index]))
            for tool, session in sessions.items()
        }
        measured[batch] = timing.measure(calls, protocol)
    for tool, session in sessions.items():
        failure = next((m.failures[tool] for m in measured.values() if tool in m.failures), None)
        yield {
            "experts": experts,
            "tool": tool,
            "top1": None if failure else _top1(session(test.inputs), test),
            "latency_ms": {
                str(batch): m.latencies[tool].median
                for batch, m in measured.items()
                if tool in m.latencies
            },
            "failure": failure,
            "calibration_s": costs[tool].get("seconds"),
            "base_mb": costs[tool].get("base_mb"),
            "peak_mb": costs[tool].get("peak_mb"),
            "bytes": _bytes(graphs[tool]),
        }


def _bytes(path: Path) -> int:
    """Returns the size of a graph and of the weights in its folder."""
    weights = path.parent / "weights.bin"
    return path.stat().st_size + (weights.stat().st_size if weights.exists() else 0)


def _child(*arguments: object) -> dict[str, float]:
    """Runs a quantiser in its own process and returns its time and memory."""
    command = [sys.executable, "-m", "perf.calibration", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cost: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return cost


class _Feed(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Reads a feed in batches for `quantize_static`."""

    def __init__(self, feed: Path) -> None:
        x = np.load(feed)["input"]
        self._batches: Iterator[np.ndarray] = (
            x[start : start + QUANTISER_BATCH]
            for start in range(0, len(x) // QUANTISER_BATCH * QUANTISER_BATCH, QUANTISER_BATCH)
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Returns the next batch by input name, or None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else {"input": batch}


def ours(checkpoint: Path, feed: Path, out: Path) -> None:
    """Calibrates and exports with all experts."""
    export(load(checkpoint), out, target="ort-cpu", precision="int8", data=feed, verify=False)


def theirs(graph: Path, feed: Path, out: Path, form: str, method: str) -> None:
    """Runs `quantize_static` with uint8 activations and int8 weights per channel, like moexport."""
    quantization.quantize_static(
        graph,
        out,
        _Feed(feed),
        quant_format=quantization.QuantFormat[form],
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        calibrate_method=STATIC_METHODS[method],
    )


def methods_table(found: Any) -> str:
    """Returns the methods as Markdown: an output's largest error, and the change in accuracy."""
    networks = sorted({(row["experts"], -row["k"]) for row in found["methods"]})
    rows = {(row["method"], row["experts"], -row["k"]): row for row in found["methods"]}
    return markdown(
        ("method", *(f"n={n}, k={-k}" for n, k in networks)),
        (
            (f"`{method}`", *(_loss(rows[method, *network]) for network in networks))
            for method in dict.fromkeys(row["method"] for row in found["methods"])
        ),
        words=1,
    )


def _loss(row: Mapping[str, Any]) -> str:
    points = 100 * (row["int8_top1"] - row["fp32_top1"])
    text = f"{points:+.2f}".replace("-", "−") if abs(points) > 1e-9 else "0"
    return f"{row['max_error']:.4f} ({text})"


def tools_table(found: Any) -> str:
    """Returns the quantisers whose graphs run, as Markdown."""
    batches = tuple(f"ms, batch {batch}" for batch in BATCHES)
    costs = ("s to quantise", "peak MB, of which imports", "kB")
    rows = []
    for row in found["tools"]:
        if row["failure"] is not None:
            continue
        times = [f"{row['latency_ms'][str(batch)]:.3f}" for batch in BATCHES]
        cost = ("–", "–")
        if row["calibration_s"] is not None:
            cost = (f"{row['calibration_s']:.1f}", f"{row['peak_mb']:.0f}, {row['base_mb']:.0f}")
        kb = f"{row['bytes'] / 1e3:.0f}"
        rows.append((str(row["experts"]), row["tool"], f"{row['top1']:.2%}", *times, *cost, kb))
    header = ("n", "quantiser", "top-1", *batches, *costs)
    return markdown(header, rows, words=2)


if __name__ == "__main__":
    which, *arguments = sys.argv[1:]
    base, started = peak_bytes(), time.monotonic()
    if which == "ours":
        ours(*map(Path, arguments))
    else:
        theirs(*map(Path, arguments[:3]), *arguments[3:])  # type: ignore[arg-type]
    took = time.monotonic() - started
    print(json.dumps({"seconds": took, "base_mb": base / 1e6, "peak_mb": peak_bytes() / 1e6}))
