"""The command `calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.console import show
from ..common.libraries import check_pytorch
from ..common.text import count, table
from ..exporter.executors import executor_of
from ..exporter.requests import FEED, CalibrateRequest
from .options import ModelArgument, json_text, options_of, output_option, parse_feed
from .printing import Printing
from .reading import ReadingOptions, loader

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..exporter.quantization.accuracy_search import LayerSensitivity


OPTIONS = options_of(
    CalibrateRequest, {"Ranges": ("k", "method", "percentile", "samples", "batch", "renormalize")}
)


def calibrate(
    *,
    model: ModelArgument,
    data: Annotated[str, typer.Option(metavar="FEED", parser=parse_feed, help=FEED)],
    output: Annotated[Path, output_option("TABLE.JSON", "The table to write.")],
    reading: ReadingOptions,
    request: Annotated[CalibrateRequest, OPTIONS],
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Rank the layers by their sensitivity to INT8.")
    ] = False,
    printing: Printing,
) -> None:
    """Measure tensor ranges on real inputs, for INT8 and FP16."""
    with printing.console() as console:
        request = replace(request, loading=reading, out=output, progress=console)
        locally = executor_of(request) is None
        check_pytorch("calibration")
        from ..calibration.table import check_table_path

        check_table_path(output)
        from ..exporter.quantization.calls import calibrate as measure
        from ..exporter.quantization.calls import sensitivity as rank

        load = cache(loader(reading, model, console, data))
        ranges = measure(load if locally else model, data, request)
        if sensitivity:
            ranked = rank(load(), ranges, data, request)
            console.finish()
            records = [asdict(layer) for layer in ranked]
            show(json_text({"layers": records}) if printing.as_json else sensitivity_text(ranked))
            return
    show(ranges.to_json().rstrip() if printing.as_json else table_text(ranges))


def sensitivity_text(ranked: Sequence[LayerSensitivity]) -> str:
    """Returns a table of the layers, the most sensitive to INT8 first."""
    rows = [
        (s.layer, f"{s.cosine:.7f}", f"{s.max_rel:.2g}", f"{s.routing:.1%}", f"{s.jaccard:.4f}")
        for s in ranked
    ]
    return table(("MoE layer", "cosine", "error / max|y|", "same experts", "Jaccard"), rows)


def table_text(calibration: CalibrationTable) -> str:
    """Returns a calibration table as text: ranges, observed extremes, and origin."""
    origin = calibration.origin
    rows = [
        (
            key,
            f"{r.low:.4g}",
            f"{r.high:.4g}",
            f"{r.minimum:.4g}",
            f"{r.maximum:.4g}",
            count(r.count),
        )
        for key, r in calibration.ranges.items()
    ]
    percentile = "" if origin.percentile is None else f" {origin.percentile:g}"
    ks = ", ".join(f"{layer} {k}" for layer, k in origin.k.items())
    return (
        table(("tensor", "low", "high", "minimum", "maximum", "values"), rows)
        + f"\n\n{origin.method}{percentile} over {origin.samples:,} inputs; k: {ks}"
    )
