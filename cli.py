"""The command line: parses, calls one function, prints. Heavy imports wait inside the commands."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_engines import (
    Capabilities,
    Engine,
    EngineCache,
    HardwareCompatible,
    Level,
    Profiles,
    Provider,
    Refit,
    RunEngine,
    RunProvider,
    StripPlan,
    Tf32,
    TimingCache,
    TrustEngine,
    VersionCompatible,
    Workspace,
    build,
    check_runner,
    engine_options,
    inspect_engine,
    wished,
)
from .console import Console, size
from .errors import MoexportError, UsageError
from .printing import (
    bundle_text,
    check_text,
    diagnosis_text,
    harms_text,
    json_text,
    model_text,
    plan_json,
    plan_text,
    table_text,
)
from .writing import check_folder

if TYPE_CHECKING:
    from .exporter.model import Model

app = typer.Typer(
    name="moexport",
    help="Deploy trained Soft MoE and muMoE models: k of n experts chosen inside the ONNX graph.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Target(StrEnum):
    """Who runs the graph; the names of `graphs.lowerings.base.Target`."""

    ONNX = "onnx"
    ORT_CPU = "ort-cpu"
    ORT_CUDA = "ort-cuda"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


class Method(StrEnum):
    """How a calibration chooses ranges; the names of `calibration.table.Method`."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    ENTROPY = "entropy"
    MSE = "mse"


class Precision(StrEnum):
    """What a graph computes in; the names of `graphs.arithmetic.Precision`."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


class FloatType(StrEnum):
    """The float types among them."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Quantize(StrEnum):
    """What INT8 is for; the names of `exporter.numbers.Scope`."""

    EXPERTS = "experts"
    ALL = "all"


class Paper(StrEnum):
    """Experiments of the papers; the names of `bench.paper`."""

    MNIST = "mnist"
    MNIST_NORMALISED = "mnist-normalised"
    LATENCY = "latency"
    MUMOE = "mumoe"


class Kind(StrEnum):
    """Kinds of MoE layers; the names of `graphs.moe.Kind`."""

    SOFT_MOE = "soft-moe"
    MUMOE = "mumoe"


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A checkpoint file or folder, or package.module:factory."),
]
BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="A folder that export wrote.")
]
Family = Annotated[str | None, typer.Option(help="Skip detection: soft-moe-vit, mumoe-gpt2, …")]
Config = Annotated[
    Path | None,
    typer.Option(help="What shapes cannot tell: constructor arguments as JSON, YAML or TOML."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One such argument: --set num_heads=12."),
]
Weights = Annotated[Path | None, typer.Option(help="The weights for a package.module:factory.")]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FEED", help="Inputs: an .npz, a folder of .npy, or package.module:iterable."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more; show tracebacks.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but results and errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command(epilog="Example: moexport inspect vit.pt --set num_heads=12")
def inspect(
    model: ModelArgument,
    family: Family = None,
    config: Config = None,
    sets: Sets = None,
    weights: Weights = None,
    data: Data = None,
    trust_engine: TrustEngine = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Show a model's family, MoE layers and parameters, and what each k costs.

    Of a bundle its layers and files, of an engine its layers, precisions and profiles.
    """
    if model.endswith(".plan"):
        print(inspect_engine(Path(model), trust=trust_engine, as_json=as_json))
        return
    if (Path(model) / "manifest.json").is_file():
        from .exporter.manifest import Manifest

        manifest = Manifest.read(Path(model))
        print(manifest.to_json() if as_json else bundle_text(Path(model), manifest))
        return
    from .exporter.inspect import inspect as inspect_model

    with Console(verbose=verbose, quiet=quiet) as console:
        # Only coefficients that are to be counted need the weights: shapes tell the rest.
        shapes = _load(console, model, family, config, sets, weights, values=data is not None)
        report = inspect_model(shapes, data)
    print(json_text(report.as_json()) if as_json else model_text(report))


@app.command(epilog="Example: moexport export vit.pt -o out --set num_heads=12 --k 0.25")
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
        str, typer.Option(help="Experts kept: 4, 0.25, n, input, or a list per layer 4,4,8.")
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
        Method, typer.Option(help="int8: how ranges are chosen from --data.")
    ] = Method.PERCENTILE,
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
    from .exporter.retention import with_retention
    from .exporter.tables import ranges_for_export

    loaded = _load(console, model, family, config, sets, weights)
    for note in (*loaded.notes, *(f"edited: {text}" for text in options.edits.texts())):
        console.note(note)
    table = ranges_for_export(
        loaded, options, method=method.value, data=data, path=calibration, progress=console
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
    if manifest.parity is not None:
        from .exporter.parity import Parity, describe

        console.note(describe(Parity(**manifest.parity)))
    for note in manifest.notes[len(loaded.notes) :]:
        console.note(note)
    total = sum(record.bytes for record in manifest.files.values())
    print(f"{output}: {', '.join(manifest.files)} ({size(total)})")


app.command(epilog="Example: moexport build out --compute-capability 8.9 --profile batch=1:8:32")(
    build
)


@app.command(epilog="Example: moexport calibrate vit.pt --data train.npz -o table.json --k 0.25")
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
        loaded = _load(console, model, family, config, sets, weights)
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


@app.command(epilog="Example: moexport verify out")
def verify(
    bundle: BundleArgument,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Check a bundle's hashes, its graphs and their parity; exit 1 when one fails."""
    del verbose
    from .exporter.bundle import Bundle

    checks = []
    for check in Bundle.open(bundle).verify():
        checks.append(check)
        if not as_json and not quiet:
            print(check_text(check))
    passed = all(check.passed for check in checks)
    if as_json:
        print(json_text({"passed": passed, "checks": [asdict(check) for check in checks]}))
    if not passed:
        failed = [check for check in checks if not check.passed]
        first = f"{failed[0].name}: {failed[0].detail}"
        raise MoexportError(
            f"{bundle}: {len(failed)} of {len(checks)} checks failed; {first}",
            hint="export the bundle again, or copy it again from where it is whole",
        )


@app.command(epilog="Example: moexport run out -i x.npz -o y.npz --k 16")
def run(
    bundle: BundleArgument,
    input_file: Annotated[
        Path, typer.Option("--input", "-i", metavar="X.NPZ", help="The inputs, [b, …].")
    ],
    output_file: Annotated[
        Path, typer.Option("--output", "-o", metavar="Y.NPZ", help="Where to write the outputs.")
    ],
    k: Annotated[int | None, typer.Option(help="k, where it is a graph input.")] = None,
    graph: Annotated[
        str | None, typer.Option(help="A file or lowering, where the bundle holds several.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; the runtime chooses.")] = None,
    engine: RunEngine = Engine.ONNXRUNTIME,
    provider: RunProvider = Provider.CPU,
    trust_engine: TrustEngine = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Run a bundle on inputs from an .npz file, in ONNX Runtime or as an engine."""
    check_runner(engine, provider, trust_engine, threads)
    from .exporter.run import run_file

    shape = run_file(
        bundle,
        input_file,
        output_file,
        k=k,
        graph=graph,
        threads=threads,
        engine=engine.value,
        provider=provider.value,
        trust_engine=trust_engine,
    )
    Console(verbose=verbose, quiet=quiet).note(f"{output_file}: output of shape {shape}")


@app.command(
    epilog="Example: moexport bench vit.pt -o report --k n,0.5,0.25 --batch 1,16 --data test.npz"
)
def bench(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write.")],
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL|BUNDLE…", help="A model, or a model and its bundles."),
    ] = None,
    family: Family = None,
    config: Config = None,
    sets: Sets = None,
    weights: Weights = None,
    k: Annotated[str, typer.Option(help="Experts kept, a list: n,0.5,0.25 or 16,8,4.")] = (
        "n,0.5,0.25,0.125"
    ),
    lowering: Annotated[str, typer.Option(help="A list of lowerings, or auto.")] = "auto",
    precision: Annotated[
        str, typer.Option(help="A list: fp32,fp16,bf16,int8 (ranges from --data).")
    ] = "fp32",
    engine: Annotated[
        str, typer.Option(help="pytorch-compile, onnxruntime, tensorrt-rtx, …, a list; all.")
    ] = "all",
    batch: Annotated[str, typer.Option(help="Batch sizes, a list.")] = "1",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Labelled: an .npz, a folder of images by class, package.module:iterable.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=5)] = 5,
    samples: Annotated[int | None, typer.Option(help="Inputs for accuracy; all.", min=1)] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of every engine.", min=1)] = None,
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory, in a process per engine.")
    ] = True,
    pixels: Annotated[
        str | None, typer.Option(help="Scale of images: unit, symmetric or imagenet.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="OLD.JSON", help="Earlier results; those of -o if it has any."),
    ] = None,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(metavar="5%", help="Exit 1 if a row is slower than before by more."),
    ] = None,
    analysis: Annotated[
        str, typer.Option(help="retention, random, subsets, shares, a list; all. Needs labels.")
    ] = "",
    max_subsets: Annotated[
        int | None, typer.Option(help="The most sets of experts to try all of.", min=1)
    ] = None,
    paper: Annotated[
        Paper | None, typer.Option(help="Run the papers' own experiment instead of a model.")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Measure accuracy, routing and latency for every k against PyTorch; write a report.

    Run again after an interruption, it goes on where it stopped.
    """
    console = Console(verbose=verbose, quiet=quiet)
    check_folder(output)
    if paper is not None:
        if models:
            raise UsageError(
                f"--paper {paper.value} makes its own models, and {models[0]} was named too",
                hint="leave the model or --paper out",
            )
        _paper(console, paper, output, threads, as_json=as_json)
        return
    if not models:
        raise UsageError(
            "bench: no model to measure", hint="moexport bench vit.pt -o report, or --paper mnist"
        )
    ks = [part.strip() for part in k.split(",") if part.strip()]
    batches = _sizes(batch, "--batch")
    from .bench.guard import earlier, fail_if, parse_share

    share = None if fail_if_slower is None else parse_share(fail_if_slower)
    before = earlier(output, compare, wanted=share is not None)
    from .api import bench as run_bench
    from .exporter.bundle import Bundle

    listed = [
        Bundle.open(name)
        if (Path(name) / "manifest.json").is_file()
        else _load(console, name, family, config, sets, weights)
        for name in models
    ]
    results = run_bench(
        listed,
        data=data,
        k=ks,
        lowering=lowering,
        precision=precision,
        engine=engine,
        batch=batches,
        out=output,
        rounds=rounds,
        samples=samples,
        threads=threads,
        memory=memory,
        pixels=pixels,
        before=before,
        analysis=analysis,
        max_subsets=max_subsets,
        command=_command(),
        progress=console,
    )
    console.finish()
    _print_results(results, output, as_json=as_json)
    if before is not None:
        for line in fail_if(before, results, share):
            console.note(line)
    elif share is not None:
        console.note(f"--fail-if-slower: {output} holds no earlier results to compare with")


def _paper(
    console: Console, paper: Paper, output: Path, threads: int | None, *, as_json: bool
) -> None:
    from .bench.paper import run_paper
    from .bench.results import to_json

    with console:
        results, text = run_paper(paper.value, output, console, threads=threads, command=_command())
    print(to_json(results) if as_json else f"{text}\n\nreport: {output / 'report.html'}")


def _print_results(results: Any, output: Path, *, as_json: bool) -> None:
    from .bench.results import to_json
    from .bench.summary import rows_table

    print(to_json(results) if as_json else rows_table(results))
    if not as_json:
        print(f"\nreport: {output / 'report.html'}")


@app.command(epilog="Example: moexport specialise digits.pt --data test.npz -o experts")
def specialise(
    model: ModelArgument,
    data: Annotated[
        Path, typer.Option(metavar="X.NPZ", help="input and label: accuracy is taken by class.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Where to write JSON and figure."),
    ] = None,
    family: Family = None,
    config: Config = None,
    sets: Sets = None,
    weights: Weights = None,
    layer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The layer whose experts are removed; the last."),
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option(metavar="ARRAY", help="Subgroups for mean coefficients; the labels."),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Say what each expert is for: how its removal changes the accuracy of every class."""
    from .api import specialise as run_specialise
    from .bench.specialise_views import text, to_json, write

    if output is not None:
        check_folder(output)
    with Console(verbose=verbose, quiet=quiet) as console:
        loaded = _load(console, model, family, config, sets, weights)
        found = run_specialise(loaded, data, layer=layer, group_by=group_by, progress=console)
    written = () if output is None else write(found, output)
    print(to_json(found) if as_json else text(found), end="" if as_json else "\n")
    if written and not as_json:
        print(f"\nwritten: {', '.join(map(str, written))}")


@app.command(epilog="Example: moexport report results.json -o report.html")
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS.JSON", help="What bench wrote.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The page; Markdown, CSV and figures go beside it."),
    ],
    compare: Annotated[
        Path | None,
        typer.Option(metavar="OLD.JSON", help="Tell what changed beyond the spread since then."),
    ] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Make the report again from a results file."""
    from .bench.compare import compare as compare_results
    from .bench.results import read
    from .bench.run import write_views

    console = Console(verbose=verbose, quiet=quiet)
    now = read(results)
    comparison = None if compare is None else compare_results(read(compare), now)
    paths = write_views(now, output, comparison)
    if comparison is not None:
        print(comparison.sentence)
        for line in (*(change.label for change in comparison.told), *comparison.notes):
            print(f"  {line}")
    console.note(f"wrote {', '.join(str(path) for path in paths)}")


@app.command(epilog="Example: moexport demo -o demo")
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where everything goes.")
    ] = Path("demo"),
    family: Annotated[
        Kind, typer.Option(help="The kind of networks that are trained.")
    ] = Kind.SOFT_MOE,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier demo.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Train Soft MoEs or muMoEs on handwritten digits, export, verify and measure them."""
    if family is Kind.MUMOE:
        from .bench.mumoe_demo import run_mumoe_demo as run
    else:
        from .bench.demo import run_demo as run

    with Console(verbose=verbose, quiet=quiet) as console:
        outcome = run(output, console, force=force)
    print(outcome.text)


@app.command(epilog="Example: moexport doctor --json")
def doctor(as_json: AsJson = False, verbose: Verbose = False, quiet: Quiet = False) -> None:
    """Say what this machine can build and run, and why not the rest."""
    del verbose, quiet
    from .exporter.doctor import diagnose

    diagnosis = diagnose()
    print(json_text(diagnosis.as_json()) if as_json else diagnosis_text(diagnosis))


def _load(
    console: Console,
    source: str,
    family: str | None,
    config: Path | None,
    sets: list[str] | None,
    weights: Path | None,
    *,
    values: bool = True,
) -> Model:
    console.step(f"loading {source}")
    from .exporter.load import load, read_config

    given = read_config(config, sets or ())
    return load(source, family=family, config=given, weights=weights, values=values)


def _sizes(text: str, option: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{option} {text}: not a list of sizes", hint=f"for example {option} 1,16")
    return sizes


def _command() -> str:
    return " ".join(["moexport", *sys.argv[1:]])
