"""The command `calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import api
from ..bench.executors import executor_of
from ..common.console import show
from ..common.text import count, table
from ..exporter.requests import FEED, CalibrateRequest, LoadRequest, SensitivityRequest
from .options import AsJson, ModelArgument, Verbosity, json_text, loader, output_option

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..exporter.quantization.accuracy_search import LayerSensitivity


def calibrate(
    *,
    model: ModelArgument,
    data: Annotated[str, typer.Option(metavar="FEED", help=FEED)],
    output: Annotated[Path, output_option("TABLE.JSON", "The table to write.")],
    reading: LoadRequest,
    request: CalibrateRequest,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Rank the layers by their sensitivity to INT8.")
    ] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Measure tensor ranges on real inputs, for INT8 and FP16."""
    with verbosity.console() as console:
        load = cache(loader(reading, model, console, data))
        request = replace(request, loading=reading, out=output, progress=console)
        here = executor_of(request) is None
        ranges = api.calibrate(load if here else model, data, request)
        if sensitivity:
            ranked = api.sensitivity(
                load(),
                ranges,
                data,
                SensitivityRequest(
                    k=request.k,
                    samples=request.samples,
                    renormalize=request.renormalize,
                    progress=console,
                ),
            )
            console.finish()
            records = [asdict(layer) for layer in ranked]
            show(json_text({"layers": records}) if as_json else sensitivity_text(ranked))
            return
    show(ranges.to_json() if as_json else table_text(ranges), end="\n" if not as_json else "")


def sensitivity_text(ranked: Sequence[LayerSensitivity]) -> str:
    """Returns what INT8 does to each layer alone, the most sensitive first."""
    rows = [
        (h.layer, f"{h.cosine:.7f}", f"{h.max_rel:.2g}", f"{h.routing:.1%}", f"{h.jaccard:.4f}")
        for h in ranked
    ]
    return table(("MoE layer", "cosine", "error of max|y|", "same experts", "Jaccard"), rows)


def table_text(calibration: CalibrationTable) -> str:
    """Returns a calibration table's ranges beside what was observed, and what it was made from."""
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
    how = origin.method if origin.percentile is None else f"{origin.method} {origin.percentile:g}"
    kept = ", ".join(f"{layer} {k}" for layer, k in origin.k.items())
    return (
        table(("tensor", "low", "high", "minimum", "maximum", "values"), rows)
        + f"\n\n{how} over {origin.samples:,} inputs; k: {kept}"
    )
