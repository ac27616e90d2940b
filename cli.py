"""The command line: parses, calls one function, prints. Heavy imports wait inside the commands."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .commands.bench import bench, demo, report, specialise
from .commands.build import RunnerFlags, TrustEngine, build
from .commands.export import calibrate, export
from .commands.options import (
    AsJson,
    BundleArgument,
    Data,
    ModelArgument,
    ModelFlags,
    Verbosity,
    output_option,
    program,
)
from .commands.printing import (
    bundle_text,
    check_text,
    diagnosis_text,
    engine_text,
    json_text,
    model_text,
)
from .errors import MoexportError


def inspect(
    *,
    model: ModelArgument,
    reading: ModelFlags,
    data: Data = None,
    trust_engine: TrustEngine = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Show a model's family, MoE layers and parameters, and what each k costs.

    Of a bundle its layers and files, of an engine its layers, precisions and profiles.
    """
    if model.endswith(".plan"):
        from .exporter.tensorrt.plan_file import engine_facts

        facts = engine_facts(Path(model), trust=trust_engine)
        print(json_text(facts) if as_json else engine_text(facts))
        return
    if (Path(model) / "manifest.json").is_file():
        from .exporter.bundle.manifest import Manifest

        manifest = Manifest.read(Path(model))
        print(manifest.to_json() if as_json else bundle_text(Path(model), manifest))
        return
    from .exporter.inspect import inspect as inspect_model

    with verbosity.console() as console:
        # Only coefficients that are to be counted need the weights: shapes tell the rest.
        shapes = reading.load(model, console, data=data, values=data is not None)
        found = inspect_model(shapes, data)
    print(json_text(found.as_json()) if as_json else model_text(found))


def verify(
    *,
    bundle: BundleArgument,
    atol: Annotated[
        float | None, typer.Option(min=0, help="Allowed difference [default: by precision].")
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(min=0, help="The same, of max|y| [default: by precision].")
    ] = None,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Check a bundle's hashes, its graphs and their parity; exit 1 when one fails."""
    from .exporter.bundle.bundle import Bundle
    from .exporter.bundle.destination import others_in

    opened = Bundle.open(bundle)
    checks = []
    for check in opened.verify(atol=atol, rtol=rtol):
        checks.append(check)
        if not as_json and not verbosity.quiet:
            print(check_text(check))
    others = others_in(bundle, opened.manifest.files)
    if others:
        verbosity.console().note(f"not of the bundle, and not checked: {', '.join(others[:6])}")
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


def run(
    *,
    bundle: BundleArgument,
    input_file: Annotated[
        Path, typer.Option("--input", "-i", metavar="X.NPZ", help="The inputs, [b, …].")
    ],
    output: Annotated[Path, output_option("Y.NPZ", "Where to write the outputs.")],
    k: Annotated[int | None, typer.Option(help="k, where it is a graph input.")] = None,
    graph: Annotated[
        str | None, typer.Option(help="A file or lowering, where the bundle holds several.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Inputs at once [default: the largest batch of the export]."),
    ] = None,
    runner: RunnerFlags,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Compare no file with the manifest's hash.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    verbosity: Verbosity,
) -> None:
    """Run a bundle on inputs from an .npz file, in ONNX Runtime or as an engine."""
    runner.check()
    from .exporter.bundle.run import RunOptions, run_file

    options = RunOptions(
        graph=graph,
        engine=runner.engine.value,
        provider=runner.provider.value,
        threads=runner.threads,
        trust_engine=runner.trust_engine,
        batch_size=batch_size,
        check=not no_check,
    )
    with verbosity.console() as console:
        written = run_file(bundle, input_file, output, options, k=k, force=force, progress=console)
    console.note(f"{output}: output of shape {written.shape}")
    if written.not_finite:
        console.note(
            f"{written.not_finite} values of the output are NaN or infinite: look at the inputs; "
            "a 16-bit graph overflows beyond what was calibrated"
        )


def doctor(*, as_json: AsJson = False, verbosity: Verbosity) -> None:
    """Say what this machine can build and run, and why not the rest."""
    del verbosity
    from .exporter.doctor import diagnose

    diagnosis = diagnose()
    print(json_text(diagnosis.as_json()) if as_json else diagnosis_text(diagnosis))


app = program(
    "moexport",
    "Deploy trained Soft MoE and muMoE models: k of n experts chosen inside the ONNX graph.",
    {
        "moexport inspect vit.pt --set num_heads=12": inspect,
        "moexport export vit.pt -o out --set num_heads=12 --k 0.25": export,
        "moexport build out --compute-capability 8.9 --profile batch=1:8:32": build,
        "moexport calibrate vit.pt --data train.npz -o table.json --k 0.25": calibrate,
        "moexport verify out": verify,
        "moexport run out -i x.npz -o y.npz --k 16": run,
        "moexport bench vit.pt -o report --k n,0.5,0.25 --batch 1,16 --data test.npz": bench,
        "moexport specialise digits.pt --data test.npz -o experts": specialise,
        "moexport report results.json -o report.html": report,
        "moexport demo -o demo": demo,
        "moexport doctor --json": doctor,
    },
)
