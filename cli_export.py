"""`export` and `calibrate`; `cli.py` adds them to the program."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .cli_engines import (
    Capabilities,
    EngineCache,
    HardwareCompatible,
    Level,
    Profiles,
    Refit,
    StripPlan,
    Tf32,
    TimingCache,
    VersionCompatible,
    Workspace,
    engine_options,
    wished,
)
from .cli_options import (
    AsJson,
    Config,
    Data,
    Family,
    FloatType,
    Method,
    ModelArgument,
    Precision,
    Quantize,
    Quiet,
    Sets,
    Target,
    Verbose,
    Weights,
    load_model,
)
from .console import Console, size
from .errors import UsageError
from .printing import departures, harms_text, json_text, plan_json, plan_text, table_text


def export(
    model: ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="BUNDLE", help="The folder to write.")
    ],
    family: Family = None,
    config: Config = None,
    sets: Sets = None,
    weights: Weights = None,
    k: Annotated[
        str, typer.Option(help="Experts kept: 4, 0.25, n/4, n, input, or a list per layer 4,4,8.")
    ] = "n",
    target: Annotated[
        Target, typer.Option(help="Who runs the graph; onnx is standard ops alone.")
    ] = Target.ONNX,
    lowering: Annotated[
        str,
        typer.Option(
            help="auto predicts, tune measures here; or dense, gather, grouped, …; a,b for more."
        ),
    ] = "auto",
    data: Data = None,
    batch: Annotated[
        str, typer.Option(metavar="MIN:OPT:MAX", help="The batch axis; one number fixes it.")
    ] = "1:1:32",
    tokens: Annotated[
        str, typer.Option(metavar="MIN:OPT:MAX", help="The token axis, where it is dynamic.")
    ] = "1:196:1024",
    opset: Annotated[int, typer.Option(help="The ONNX opset.")] = 20,
    renormalize: Annotated[
        bool, typer.Option("--renormalize", help="Divide C by its sum over the kept experts.")
    ] = False,
    precision: Annotated[
        Precision, typer.Option(help="What the graph computes in; int8 needs --data.")
    ] = Precision.FP32,
    quantize: Annotated[
        Quantize, typer.Option(help="int8: the experts, or all linear layers.")
    ] = Quantize.EXPERTS,
    rest: Annotated[
        FloatType | None, typer.Option(help="int8: the type around it; fp16 for TensorRT.")
    ] = None,
    weight_bits: Annotated[
        int | None, typer.Option(help="int8 on CPUs: 7, or 8, slower on those without VNNI.")
    ] = None,
    io_precision: Annotated[
        FloatType, typer.Option(help="The type of the graph's float inputs and outputs.")
    ] = FloatType.FP32,
    min_retention: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="int8: keeps layers in floats until 0.99 is kept."),
    ] = None,
    method: Annotated[
        Method | None, typer.Option(help="int8: how ranges are chosen from --data; percentile.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="TABLE.JSON", help="int8: ranges that `calibrate` wrote."),
    ] = None,
    atol: Annotated[
        float | None, typer.Option(help="Parity: absolute difference allowed; 1e-6.")
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(help="Parity: difference allowed, of max|y|; 1e-4 in FP32, 0.1 in INT8."),
    ] = None,
    ablate: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER:EXPERT", help="The expert contributes nothing; 3,5 for more."),
    ] = None,
    rewrite: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Outputs of muMoE layers to re-write.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Write the bundle without comparing it.")
    ] = False,
    engine: Annotated[
        bool | None,
        typer.Option(
            "--engine/--no-engine",
            help="Compile engines, or write graphs alone; engines where this machine can.",
        ),
    ] = None,
    profiles: Profiles = None,
    compute_capability: Capabilities = None,
    timing_cache: TimingCache = None,
    workspace: Workspace = None,
    optimization_level: Level = None,
    version_compatible: VersionCompatible = False,
    hardware_compatible: HardwareCompatible = None,
    strip_plan: StripPlan = False,
    refit: Refit = False,
    tf32: Tf32 = False,
    engine_cache: EngineCache = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Export a checkpoint to a verified bundle: ONNX graphs, weights and a manifest."""
    console = Console(verbose=verbose, quiet=quiet)
    from .exporter.atomic import check_destination
    from .exporter.edits import read_edits
    from .exporter.numbers import Numbers
    from .exporter.options import ExportOptions, parse_k, parse_lowerings, parse_range

    options = ExportOptions(
        k=parse_k(k),
        target=target.value,
        lowerings=parse_lowerings(lowering),
        batch=parse_range(batch, "--batch"),
        tokens=parse_range(tokens, "--tokens"),
        opset=opset,
        renormalize=renormalize,
        atol=atol,
        rtol=rtol,
        verify=not no_verify,
        numbers=Numbers(
            precision=precision.value,
            rest=None if rest is None else rest.value,
            scope=quantize.value,
            io=io_precision.value,
            weight_bits=weight_bits,
            min_retention=min_retention,
        ),
        edits=read_edits(ablate or (), rewrite),
    )
    options.numbers.check(options.target)
    _check_method(method, precision, calibration)
    engines = engine_options(
        profiles,
        compute_capability,
        timing_cache,
        workspace,
        optimization_level,
        version_compatible,
        hardware_compatible,
        strip_plan,
        refit,
        tf32,
        engine_cache,
    )
    wish = wished(engine, engines, target.value)
    check_destination(output, force=force or dry_run)
    from .exporter.export import export as export_bundle
    from .exporter.export import prepare
    from .exporter.plan import check_request
    from .exporter.retention import with_retention
    from .exporter.tables import ranges_for_export

    loaded = load_model(console, model, family, config, sets, weights)
    for note in loaded.notes:
        console.note(note)
    check_request(loaded, options)
    for text in options.edits.texts():
        console.note(f"edited: {text}")
    table = ranges_for_export(
        loaded,
        options,
        method=(method or Method.PERCENTILE).value,
        data=data,
        path=calibration,
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
    manifest = bundle.manifest
    if as_json:
        print(manifest.to_json(), end="")
        return
    for layer in manifest.layers:
        kept = "a graph input" if layer.k is None else f"{layer.k} of {layer.experts}"
        console.note(f"{layer.name}: k = {kept}, {layer.lowering} ({layer.reason})")
    for text in departures(manifest):
        console.note(text)
    if manifest.parity is not None:
        from .exporter.parity import Parity, describe

        console.note(describe(Parity(**manifest.parity)))
    for note in manifest.notes[len(loaded.notes) :]:
        console.note(note)
    total = sum(record.bytes for record in manifest.files.values())
    print(f"{output}: {', '.join(manifest.files)} ({size(total)})")


def _check_method(method: Method | None, precision: Precision, table: Path | None) -> None:
    """Raises UsageError for a --method that nothing would make use of."""
    if method is None:
        return
    if precision is not Precision.INT8:
        raise UsageError(
            f"--method belongs to --precision int8, not to {precision.value}",
            hint="add --precision int8, or leave --method out",
        )
    if table is not None:
        raise UsageError(
            f"--method {method.value}: the ranges are those of the table {table}",
            hint="leave --method out, or make another table with `moexport calibrate --method`",
        )


def calibrate(
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Option(
            metavar="FEED", help="Inputs: an .npz, a folder of .npy, or package.module:iterable."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="TABLE.JSON", help="The table to write.")
    ],
    family: Family = None,
    config: Config = None,
    sets: Sets = None,
    weights: Weights = None,
    k: Annotated[
        str, typer.Option(help="Experts kept: 4, 0.25, n, or a list per layer 4,4,8.")
    ] = "n",
    method: Annotated[
        Method, typer.Option(help="How ranges are chosen from what was seen.")
    ] = Method.PERCENTILE,
    percentile: Annotated[
        float | None,
        typer.Option(help="The share of values in range, in %, of that method; 99.99."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Inputs to take; all.")] = None,
    batch: Annotated[int, typer.Option(help="Inputs that are run at once.")] = 16,
    renormalize: Annotated[
        bool, typer.Option("--renormalize", help="As the export will be.")
    ] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Rank layers by what INT8 does to each alone.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a table of other origin.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Find the range of every tensor over real inputs, for INT8 and FP16 exports."""
    from .calibration.methods import DEFAULT_PERCENTILE
    from .exporter.calibrate import CalibrationOptions
    from .exporter.options import parse_k
    from .exporter.tables import calibrate_to

    if percentile is not None and method is not Method.PERCENTILE:
        raise UsageError(
            f"--percentile {percentile:g}: the method is {method.value}, which has none",
            hint="leave --percentile out, or give --method percentile",
        )
    options = CalibrationOptions(
        k=parse_k(k),
        method=method.value,
        percentile=DEFAULT_PERCENTILE if percentile is None else percentile,
        samples=samples,
        batch=batch,
        renormalize=renormalize,
    )
    with Console(verbose=verbose, quiet=quiet) as console:
        loaded = load_model(console, model, family, config, sets, weights)
        table, made = calibrate_to(output, loaded, data, options, force=force, progress=console)
        if not made:
            console.note(f"{output} is up to date: same model, feed, k and method")
        if sensitivity:
            from .exporter.sensitivity import rank

            harms = rank(loaded, options, table, data, progress=console)
            console.finish()
            records = [asdict(harm) for harm in harms]
            print(json_text({"layers": records}) if as_json else harms_text(harms))
            return
    print(table.to_json() if as_json else table_text(table), end="\n" if not as_json else "")
