"""The commands and options that concern TensorRT engines; `cli.py` adds them to the program."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .options import AsJson, BundleArgument, Verbosity
from .printing import engine_plan_json, engine_plans_text, json_text, made_text

if TYPE_CHECKING:
    from ..exporter.tensorrt.options import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFlags:
    """How engines are built."""

    profiles: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            metavar="AXIS=MIN:OPT:MAX,…",
            help="An engine profile: batch=1:8:32,k=1:4:16; may be given several times.",
        ),
    ] = None
    compute_capability: Annotated[
        str | None,
        typer.Option(
            metavar="8.9,12.0",
            help="Cards that a TensorRT-RTX engine is for, or current [default: 8.0,8.6,8.9,12.0].",
        ),
    ] = None
    timing_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Kernel timings of TensorRT, shared between builds."),
    ] = None
    workspace: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Scratch memory of a kernel on the GPU: 2GiB."),
    ] = None
    optimization_level: Annotated[
        int | None, typer.Option(help="How long to search for kernels: 0 to 5 [default: 3].")
    ] = None
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="Runs in later versions of TensorRT, too.")
    ] = False
    hardware_compatible: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL", help="ampere-plus or same-compute-capability: runs there, too."
        ),
    ] = None
    strip_plan: Annotated[
        bool,
        typer.Option("--strip-plan", help="Leaves the weights out; loading takes the bundle's."),
    ] = False
    refit: Annotated[
        bool, typer.Option("--refit", help="Weights can be exchanged after the build.")
    ] = False
    tf32: Annotated[
        bool, typer.Option("--tf32", help="FP32 products in TF32: faster, 10 bits of mantissa.")
    ] = False
    engine_cache: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Where engines are kept for the next time; off for nowhere."
        ),
    ] = None

    def options(self) -> EngineOptions:
        """Returns them parsed; `UsageError` for one that cannot be meant."""
        from ..common.writing import check_folder
        from ..exporter.tensorrt.cache import default_cache
        from ..exporter.tensorrt.options import EngineOptions, parse_bytes, parse_capabilities
        from ..exporter.tensorrt.profiles import parse_profile

        workspace, asked = self.workspace, self.engine_cache
        cache = default_cache() if asked is None else None if asked == "off" else Path(asked)
        if asked is not None and cache is not None:  # the default keeps nothing where it cannot
            check_folder(cache, "--engine-cache")
        return EngineOptions(
            profiles=tuple(parse_profile(each) for each in self.profiles or ()),
            compute_capabilities=parse_capabilities(self.compute_capability or ""),
            timing_cache=self.timing_cache,
            workspace=None if workspace is None else parse_bytes(workspace, "--workspace"),
            optimization_level=self.optimization_level,
            version_compatible=self.version_compatible,
            hardware_compatible=self.hardware_compatible,  # type: ignore[arg-type]  # backend checks
            strip_plan=self.strip_plan,
            refit=self.refit,
            tf32=self.tf32,
            cache=cache,
        )


class Engine(StrEnum):
    """Who runs a bundle."""

    ONNXRUNTIME = "onnxruntime"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


class Provider(StrEnum):
    """Where ONNX Runtime runs a graph; the names of `exporter.session.PROVIDERS`."""

    CPU = "cpu"
    CUDA = "cuda"
    TENSORRT = "tensorrt"


TrustEngine = Annotated[
    bool,
    typer.Option(
        "--trust-engine", help="Load an engine that no manifest vouches for: a plan is code."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFlags:
    """Who runs a graph of a bundle, and how."""

    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads [default: the runtime chooses].")
    ] = None
    engine: Annotated[
        Engine, typer.Option(help="ONNX Runtime, or an engine that was built into the bundle.")
    ] = Engine.ONNXRUNTIME
    provider: Annotated[Provider, typer.Option(help="Where ONNX Runtime runs the graph.")] = (
        Provider.CPU
    )
    trust_engine: TrustEngine = False

    def check(self) -> None:
        """Raises `UsageError` for options that the chosen runner does not have."""
        if self.engine is Engine.ONNXRUNTIME:
            if self.trust_engine:
                raise UsageError(
                    "--trust-engine: no engine is loaded with --engine onnxruntime",
                    hint="name one: --engine tensorrt-rtx",
                )
            return
        if self.provider is not Provider.CPU or self.threads is not None:
            option = "--threads" if self.threads is not None else "--provider"
            raise UsageError(
                f"{option}: it is ONNX Runtime's, and {self.engine.value} runs the engine",
                hint=f"leave {option} out, or choose --engine onnxruntime",
            )


def wished(engine: bool | None, options: EngineOptions, target: str) -> EngineOptions | bool | None:
    """Returns what an export shall do about engines: an option of theirs asks for them.

    Raises `UsageError` for an option that the target's engines do not have.
    """
    from ..exporter.tensorrt.backends import BACKENDS, backend_named
    from ..exporter.tensorrt.options import option_name

    asked = options.asked()
    if engine is False and asked:
        raise UsageError(
            f"--no-engine and {option_name(asked[0])} exclude each other", hint="leave one out"
        )
    if engine is False or (target not in BACKENDS and not engine and not asked):
        return False
    if target not in BACKENDS and asked:
        raise UsageError(
            f"{option_name(asked[0])}: --target {target} has no engines",
            hint=f"engines are built for --target {' and '.join(BACKENDS)}",
        )
    options.check(backend_named(target))
    return options if engine or asked else None


def build(
    *,
    bundle: BundleArgument,
    target: Annotated[
        str | None,
        typer.Option(help="tensorrt or tensorrt-rtx [default: that of the bundle]."),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(help="A file or lowering, where the bundle holds several [default: all]."),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(metavar="MIN:OPT:MAX", help="The batch axis [default: as exported]."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="MIN:OPT:MAX", help="The token axis [default: as exported]."),
    ] = None,
    flags: BuildFlags,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be built and build nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Build what is there already.")] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Compile TensorRT engines from a bundle's graphs, into the bundle."""
    from ..exporter.axes import parse_range

    options = flags.options()
    ranges = {
        axis: parse_range(text, f"--{axis}")
        for axis, text in (("batch", batch), ("tokens", tokens))
        if text is not None
    }
    from ..exporter.bundle.manifest import Manifest
    from ..exporter.tensorrt.engines import add_engines, plan_engines

    manifest = Manifest.read(bundle)
    plans = plan_engines(manifest, target or manifest.target, options, graph=graph, ranges=ranges)
    if dry_run:
        shown = [engine_plan_json(each) for each in plans]
        print(json_text(shown) if as_json else engine_plans_text(plans))
        return
    with verbosity.console() as console:
        made = add_engines(bundle, manifest, plans, console, rebuild=force)
    if as_json:
        print(json_text([each.record.as_json() for each in made]))
        return
    for each in made:
        print(made_text(bundle, each))
