"""Runs an observing graph over a feed and adds up what it sees."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from ..errors import CalibrationError
from .histogram import Histogram
from .observers import Observed, ObservingGraph


@dataclass(frozen=True, slots=True)
class Observations:
    """What was seen: a histogram of each ranged tensor, the largest |x| of each other."""

    histograms: Mapping[str, Histogram]
    peaks: Mapping[str, float]


def observe(path: Path, graph: ObservingGraph, batches: Iterable[np.ndarray]) -> Observations:
    """Returns what the graph that was saved at `path` sees over all batches.

    Raises `CalibrationError` that names the tensor for values that are not finite, for one that is
    zero throughout, and for one that no input ever reached.
    """
    session = _session(path)
    (name,) = [value.name for value in session.get_inputs()]
    wanted = [value.name for value in session.get_outputs()]
    histograms: dict[str, Histogram] = {}
    peaks = dict.fromkeys(graph.peaks, 0.0)
    done = 0
    for batch in batches:
        values = dict(zip(wanted, session.run(wanted, {name: batch}), strict=True))
        for key, observed in graph.ranged.items():
            seen = _seen(key, values, observed, f"inputs {done} to {done + len(batch) - 1}")
            histograms[key] = histograms[key] + seen if key in histograms else seen
        for key, output in graph.peaks.items():
            peaks[key] = max(peaks[key], float(values[output]))
        done += len(batch)
    _check(graph, histograms)
    return Observations(histograms, peaks)


def _session(path: Path) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    # A pre-packed copy of every weight would double the memory.
    settings.add_session_config_entry("session.disable_prepacking", "1")
    return ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def _seen(key: str, values: Mapping[str, np.ndarray], names: Observed, where: str) -> Histogram:
    magnitude = float(values[names.magnitude])
    if not math.isfinite(magnitude):
        kind = "NaN" if math.isnan(magnitude) else "infinite values"
        raise CalibrationError(
            f"{key} holds {kind} for {where}: no range can be found",
            hint="the model itself gives no usable answer for these inputs: look for what they "
            "hold, or leave them out of the feed",
        )
    return Histogram(
        values[names.counts].astype(np.int64),
        float(values[names.width]),
        float(values[names.minimum]),
        float(values[names.maximum]),
    )


def _check(graph: ObservingGraph, histograms: Mapping[str, Histogram]) -> None:
    for key in graph.ranged:
        if key not in histograms:
            raise CalibrationError(
                f"{key}: no input reached this tensor", hint="the feed holds no inputs"
            )
        if histograms[key].peak == 0.0:
            raise CalibrationError(
                f"{key} is zero throughout: no scale can be found",
                hint="give a feed of real inputs; if the model's own weights are zero here, it "
                "cannot be quantised",
            )
