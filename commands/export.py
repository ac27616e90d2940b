"""`export` and `calibrate`; `cli.py` adds them to the program."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.console import Console
from ..common.text import size
from ..errors import UsageError
from ..graphs.targets import Target
from .build import BuildFlags, wished
from .options import (
    FEED,
    AsJson,
    Data,
    FloatType,
    Method,
    ModelArgument,
    ModelFlags,
    Precision,
    Quantize,
    Verbosity,
    output_option,
)
from .printing import departures, harms_text, json_text, plan_json, plan_text, table_text

if TYPE_CHECKING:
    from ..exporter.bundle.manifest import Manifest
    from ..exporter.options import ExportOptions
    from ..exporter.quantization.calibrate import CalibrationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFlags:
    """What graph is written, and how it is checked."""

    k: Annotated[
        str, typer.Option(help="Experts kept: 4, 0.25, n/4, n, input, or a list per layer 4,4,8.")
    ] = "n"
    target: Annotated[
        Target, typer.Option(help="Who runs the graph; onnx is standard ops alone.")
    ] = "onnx"
    lowering: Annotated[
        str,
        typer.Option(
            help="auto predicts, tune measures; or dense, gather, grouped, …; a,b writes both."
        ),
    ] = "auto"
    data: Data = None
    batch: Annotated[
        str, typer.Option(metavar="MIN:OPT:MAX", help="The batch axis; one number fixes it.")
    ] = "1:1:32"
    tokens: Annotated[
        str, typer.Option(metavar="MIN:OPT:MAX", help="The token axis, where it is dynamic.")
    ] = "1:196:1024"
    opset: Annotated[int, typer.Option(help="The ONNX opset.")] = 20
    renormalize: Annotated[
        bool, typer.Option("--renormalize", help="Divide C by its sum over the kept experts.")
    ] = False
    precision: Annotated[
        Precision, typer.Option(help="What the graph computes in; int8 needs --data.")
    ] = Precision.FP32
    quantize: Annotated[Quantize, typer.Option(help="int8: the experts, or all linear layers.")] = (
        Quantize.EXPERTS
    )
    rest: Annotated[
        FloatType | None,
        typer.Option(help="int8: the float type of the rest [default: fp32; for TensorRT fp16]."),
    ] = None
    weight_bits: Annotated[
        int | None, typer.Option(help="int8 on CPUs: 7, or 8, slower on those without VNNI.")
    ] = None
    io_precision: Annotated[
        FloatType, typer.Option(help="The type of the graph's float inputs and outputs.")
    ] = FloatType.FP32
    min_retention: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="int8: keeps layers in floats until 0.99 is kept."),
    ] = None
    method: Annotated[
        Method | None,
        typer.Option(help="int8: how ranges are chosen from --data [default: percentile]."),
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="TABLE.JSON", help="int8: ranges that `calibrate` wrote."),
    ] = None
    atol: Annotated[
        float | None, typer.Option(help="Parity: absolute difference allowed [default: 1e-6].")
    ] = None
    rtol: Annotated[
        float | None,
        typer.Option(
            help="Parity: difference allowed, of max|y| [default: FP32 1e-4, FP16 0.01, INT8 0.1]."
        ),
    ] = None
    ablate: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER:EXPERT", help="The expert contributes nothing; 3,5 for more."),
    ] = None
    rewrite: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Outputs of muMoE layers to re-write.")
    ] = None
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Write the bundle without comparing it.")
    ] = False

    def options(self) -> ExportOptions:
        """Returns them parsed; `UsageError` for one that cannot be meant, or not for the target."""
        from ..exporter.axes import parse_range
        from ..exporter.edits import read_edits
        from ..exporter.options import ExportOptions, PrecisionOptions, parse_k, parse_lowerings

        options = ExportOptions(
            k=parse_k(self.k),
            target=self.target,
            lowerings=parse_lowerings(self.lowering),
            batch=parse_range(self.batch, "--batch"),
            tokens=parse_range(self.tokens, "--tokens"),
            opset=self.opset,
            renormalize=self.renormalize,
            atol=self.atol,
            rtol=self.rtol,
            verify=not self.no_verify,
            numbers=PrecisionOptions(
                precision=self.precision.value,
                rest=None if self.rest is None else self.rest.value,
                scope=self.quantize.value,
                io=self.io_precision.value,
                weight_bits=self.weight_bits,
                min_retention=self.min_retention,
            ),
            edits=read_edits(self.ablate or (), self.rewrite),
        )
        options.numbers.check(options.target)
        self._check_method()
        return options

    def _check_method(self) -> None:
        """Raises UsageError for a --method that nothing would make use of."""
        if self.method is None:
            return
        if self.precision is not Precision.INT8:
            raise UsageError(
                f"--method belongs to --precision int8, not to {self.precision.value}",
                hint="add --precision int8, or leave --method out",
            )
        if self.calibration is not None:
            raise UsageError(
                f"--method {self.method.value}: the ranges are those of the table "
                f"{self.calibration}",
                hint="leave --method out, or make another table with `moexport calibrate --method`",
            )


def export(
    *,
    model: ModelArgument,
    output: Annotated[Path, output_option("BUNDLE", "The folder to write.")],
    reading: ModelFlags,
    flags: GraphFlags,
    engine: Annotated[
        bool | None,
        typer.Option(
            "--engine/--no-engine",
            help="Compile engines, or write graphs alone; engines where this machine can.",
        ),
    ] = None,
    building: BuildFlags,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Export a checkpoint to a verified bundle: ONNX graphs, weights and a manifest."""
    console = verbosity.console()
    from ..exporter.bundle.destination import check_destination

    options = flags.options()
    wish = wished(engine, building.options(), options.target)
    check_destination(output, force=force or dry_run)
    from ..exporter.export import export as export_bundle
    from ..exporter.export import prepare
    from ..exporter.plan import check_request
    from ..exporter.quantization.accuracy_search import with_retention
    from ..exporter.quantization.calibrate import ranges_for_export

    loaded = reading.load(model, console, data=flags.data)
    for note in loaded.notes:
        console.note(note)
    check_request(loaded, options)
    for text in options.edits.texts():
        console.note(f"edited: {text}")
    data = flags.data
    table = ranges_for_export(
        loaded,
        options,
        method=(flags.method or Method.PERCENTILE).value,
        data=data,
        path=flags.calibration,
        progress=console,
    )
    options = with_retention(loaded, options, table, data, progress=console)
    if dry_run:
        console.step("tracing")
        prepared = prepare(loaded, options, table, console)
        console.finish()
        for note in options.numbers.notes(options.target):
            console.note(note)
        print(json_text(plan_json(prepared, output)) if as_json else plan_text(prepared, output))
        return
    bundle = export_bundle(
        loaded, output, options, data=data, table=table, engine=wish, force=force, progress=console
    )
    console.finish()
    if as_json:
        print(bundle.manifest.to_json(), end="")
        return
    _say_exported(output, bundle.manifest, console, told=len(loaded.notes))


def _say_exported(output: Path, manifest: Manifest, console: Console, *, told: int) -> None:
    """Says what was written and how well it does; the first `told` notes were said before."""
    for layer in manifest.layers:
        kept = "a graph input" if layer.k is None else f"{layer.k} of {layer.experts}"
        console.note(f"{layer.name}: k = {kept}, {layer.lowering} ({layer.reason})")
    for text in departures(manifest):
        console.note(text)
    if manifest.parity is not None:
        from ..exporter.parity import Parity, describe

        console.note(describe(Parity(**manifest.parity)))
    for note in manifest.notes[told:]:
        console.note(note)
    total = sum(record.bytes for record in manifest.files.values())
    print(f"{output}: {', '.join(manifest.files)} ({size(total)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFlags:
    """How ranges are found."""

    k: Annotated[str, typer.Option(help="Experts kept: 4, 0.25, n, or a list per layer 4,4,8.")] = (
        "n"
    )
    method: Annotated[Method, typer.Option(help="How ranges are chosen from what was seen.")] = (
        Method.PERCENTILE
    )
    percentile: Annotated[
        float | None,
        typer.Option(help="percentile: the share of values in range, in % [default: 99.99]."),
    ] = None
    samples: Annotated[int | None, typer.Option(help="Inputs to take [default: all].")] = None
    batch: Annotated[int, typer.Option(help="Inputs that are run at once.")] = 16
    renormalize: Annotated[bool, typer.Option("--renormalize", help="As the export will be.")] = (
        False
    )

    def options(self) -> CalibrationOptions:
        """Returns them parsed; `UsageError` for one that cannot be meant."""
        from ..calibration.methods import DEFAULT_PERCENTILE
        from ..exporter.options import parse_k
        from ..exporter.quantization.calibrate import CalibrationOptions

        if self.percentile is not None and self.method is not Method.PERCENTILE:
            raise UsageError(
                f"--percentile {self.percentile:g}: the method is {self.method.value}, which has "
                "none",
                hint="leave --percentile out, or give --method percentile",
            )
        return CalibrationOptions(
            k=parse_k(self.k),
            method=self.method.value,
            percentile=DEFAULT_PERCENTILE if self.percentile is None else self.percentile,
            samples=self.samples,
            batch=self.batch,
            renormalize=self.renormalize,
        )


def calibrate(
    *,
    model: ModelArgument,
    data: Annotated[str, FEED],
    output: Annotated[Path, output_option("TABLE.JSON", "The table to write.")],
    reading: ModelFlags,
    flags: CalibrationFlags,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Rank layers by what INT8 does to each alone.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a table of other origin.")
    ] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Find the range of every tensor over real inputs, for INT8 and FP16 exports."""
    from ..exporter.quantization.calibrate import calibrate_to

    options = flags.options()
    with verbosity.console() as console:
        loaded = reading.load(model, console, data=data)
        table, made = calibrate_to(output, loaded, data, options, force=force, progress=console)
        if not made:
            console.note(f"{output} is up to date: same model, feed, k and method")
        if sensitivity:
            from ..exporter.quantization.accuracy_search import rank

            harms = rank(loaded, options, table, data, progress=console)
            console.finish()
            records = [asdict(harm) for harm in harms]
            print(json_text({"layers": records}) if as_json else harms_text(harms))
            return
    print(table.to_json() if as_json else table_text(table), end="\n" if not as_json else "")
