"""The command `calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.console import Console, show
from ..common.libraries import check_pytorch
from ..common.text import count, table
from ..exporter.executors import executor_of
from ..exporter.requests import FEED, CalibrateRequest, LoadRequest
from ..graphs.targets import Method
from .options import (
    AsJson,
    ModelArgument,
    Quiet,
    Verbose,
    json_text,
    option_for,
    output_option,
    typed_feed,
)
from .panels import further
from .reading import ConfigOption, FamilyOption, SetOption, loader

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..exporter.quantization.accuracy_search import LayerSensitivity


def calibrate(
    context: typer.Context,
    *,
    model: ModelArgument,
    data: Annotated[str, typer.Option(metavar="FEED", parser=typed_feed, help=FEED)],
    output: Annotated[Path, output_option("TABLE.JSON", "The table to write.")],
    family: FamilyOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    k: Annotated[str, option_for(CalibrateRequest, "k", "Ranges")] = "n",
    method: Annotated[Method, option_for(CalibrateRequest, "method", "Ranges")] = "percentile",
    percentile: Annotated[
        float | None, option_for(CalibrateRequest, "percentile", "Ranges")
    ] = None,
    samples: Annotated[int | None, option_for(CalibrateRequest, "samples", "Ranges")] = None,
    batch: Annotated[int, option_for(CalibrateRequest, "batch", "Ranges")] = 16,
    renormalize: Annotated[bool, option_for(CalibrateRequest, "renormalize", "Ranges")] = False,
    force: Annotated[bool, option_for(CalibrateRequest, "force", "Options")] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Rank the layers by their sensitivity to INT8.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Measure tensor ranges on real inputs, for INT8 and FP16."""
    reading = LoadRequest(
        family=family, config=config, sets=sets or (), further=further(context, LoadRequest)
    )
    with Console(verbose=verbose, quiet=quiet) as console:
        request = CalibrateRequest(
            k=k,
            method=method,
            percentile=percentile,
            samples=samples,
            batch=batch,
            renormalize=renormalize,
            force=force,
            loading=reading,
            out=output,
            progress=console,
            further=further(context, CalibrateRequest),
        )
        here = executor_of(request) is None
        check_pytorch("calibration")
        from ..calibration.table import check_place

        check_place(output)
        from ..exporter.quantization.calls import calibrate as measure
        from ..exporter.quantization.calls import sensitivity as rank

        load = cache(loader(reading, model, console, data))
        ranges = measure(load if here else model, data, request)
        if sensitivity:
            ranked = rank(load(), ranges, data, request)
            console.finish()
            records = [asdict(layer) for layer in ranked]
            show(json_text({"layers": records}) if as_json else sensitivity_text(ranked))
            return
    show(ranges.to_json() if as_json else table_text(ranges), end="\n" if not as_json else "")


def sensitivity_text(ranked: Sequence[LayerSensitivity]) -> str:
    """Returns a table of the layers, the most sensitive to INT8 first."""
    rows = [
        (h.layer, f"{h.cosine:.7f}", f"{h.max_rel:.2g}", f"{h.routing:.1%}", f"{h.jaccard:.4f}")
        for h in ranked
    ]
    return table(("MoE layer", "cosine", "error of max|y|", "same experts", "Jaccard"), rows)


def table_text(calibration: CalibrationTable) -> str:
    """Returns a calibration table's ranges, the observed extremes, and its origin."""
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
