"""The command `run`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..common.console import Console, show
from ..exporter.requests import Provider, RunRequest
from ..graphs.targets import compiled_names, runtime_names
from .options import AsJson, BundleArgument, Quiet, Verbose, json_text, option_for, output_option
from .panels import further

if TYPE_CHECKING:
    Runtime = str
else:
    Runtime = Literal[*runtime_names(), *compiled_names()]  # includes runtimes of plugins


def run(
    context: typer.Context,
    *,
    bundle: BundleArgument,
    input_file: Annotated[
        Path, typer.Option("--input", "-i", metavar="X.NPZ", help="An .npz with the inputs.")
    ],
    output: Annotated[Path, output_option("Y.NPZ", "The .npz to write.")],
    k: Annotated[int | None, option_for(RunRequest, "k")] = None,
    graph: Annotated[str | None, option_for(RunRequest, "graph")] = None,
    batch_size: Annotated[int | None, option_for(RunRequest, "batch_size", min=1)] = None,
    threads: Annotated[int | None, option_for(RunRequest, "threads", "Runtime", min=1)] = None,
    engine: Annotated[Runtime | None, option_for(RunRequest, "engine", "Runtime")] = None,
    provider: Annotated[Provider, option_for(RunRequest, "provider", "Runtime")] = "cpu",
    cuda_graphs: Annotated[bool, option_for(RunRequest, "cuda_graphs", "Runtime")] = True,
    trust_engine: Annotated[bool, option_for(RunRequest, "trust_engine", "Runtime")] = False,
    host_weights: Annotated[bool, option_for(RunRequest, "host_weights", "Runtime")] = False,
    check: Annotated[bool, option_for(RunRequest, "check", "Options")] = True,
    force: Annotated[bool, option_for(RunRequest, "force", "Options")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Run a bundle on the inputs in an .npz file."""
    from ..exporter.bundle.run import run as run_bundle

    with Console(verbose=verbose, quiet=quiet) as console:
        request = RunRequest(
            k=k,
            graph=graph,
            batch_size=batch_size,
            threads=threads,
            engine=engine,
            provider=provider,
            cuda_graphs=cuda_graphs,
            trust_engine=trust_engine,
            host_weights=host_weights,
            check=check,
            force=force,
            progress=console,
            further=further(context, RunRequest),
        )
        written = run_bundle(bundle, input_file, output, request)
    if as_json:
        facts = {name: fact for name, fact in asdict(written).items() if fact != {}}
        show(json_text({"output": str(output), **facts}))
    else:
        others = "".join(f", {name} {shape}" for name, shape in written.further.items())
        console.note(f"{output}: output of shape {written.shape}{others}")
    if written.not_finite:
        console.note(
            f"{written.not_finite} values of the output are NaN or infinite: check the inputs; "
            "a 16-bit graph overflows beyond the calibrated range"
        )
