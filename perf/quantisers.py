"""One quantiser in a process of its own, so that its time and its peak memory are its own.

`python -m perf.quantisers ours CHECKPOINT FEED BUNDLE`, or
`theirs GRAPH FEED OUT FORMAT METHOD`; prints seconds and megabytes as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from moexport import export, load
from onnxruntime import quantization

BATCH = 16
"""Of both: what `moexport calibrate` runs at once."""


class _Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
    """The feed as `quantize_static` reads it, in batches."""

    def __init__(self, feed: Path) -> None:
        x = np.load(feed)["input"]
        self._batches: Iterator[np.ndarray] = (
            x[start : start + BATCH] for start in range(0, len(x) // BATCH * BATCH, BATCH)
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch by input name, or None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else {"input": batch}


def ours(checkpoint: Path, feed: Path, out: Path) -> None:
    """Calibrates and exports with all experts."""
    export(load(checkpoint), out, target="ort-cpu", precision="int8", data=feed, verify=False)


def theirs(graph: Path, feed: Path, out: Path, form: str, method: str) -> None:
    """`quantize_static`: activations uint8, weights int8 per channel, as ours."""
    methods = quantization.CalibrationMethod
    quantization.quantize_static(
        graph,
        out,
        _Reader(feed),
        quant_format=quantization.QuantFormat[form],
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        calibrate_method={
            "minmax": methods.MinMax,
            "percentile": methods.Percentile,
            "entropy": methods.Entropy,
        }[method],
    )


def _peak_mb() -> float:
    """The high-water mark of this process; that of getrusage begins with its parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    which, *arguments = sys.argv[1:]
    base, started = _peak_mb(), time.monotonic()
    if which == "ours":
        ours(*map(Path, arguments))
    else:
        theirs(*map(Path, arguments[:3]), *arguments[3:])  # type: ignore[arg-type]
    took = time.monotonic() - started
    print(json.dumps({"seconds": took, "base_mb": base, "peak_mb": _peak_mb()}))
