"""The commands and options that concern TensorRT engines; `cli.py` adds them to the program."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_options import AsJson, BundleArgument, Quiet, Verbose
from .console import Console, size
from .printing import json_text

if TYPE_CHECKING:
    from .exporter.engines.additions import Made
    from .exporter.engines.bundle import EnginePlan
    from .exporter.engines.options import EngineOptions

Profiles = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        metavar="AXIS=MIN:OPT:MAX,…",
        help="An engine profile: batch=1:8:32,k=1:4:16; may be given several times.",
    ),
]
Capabilities = Annotated[
    str | None,
    typer.Option(
        "--compute-capability",
        metavar="8.9,12.0",
        help="Cards that a TensorRT-RTX engine is for, or current; 8.0,8.6,8.9,12.0.",
    ),
]
TimingCache = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Kernel timings of TensorRT, shared between builds."),
]
Workspace = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Scratch memory of a kernel on the GPU: 2GiB."),
]
Level = Annotated[int | None, typer.Option(help="How long to search for kernels: 0 to 5; 3.")]
VersionCompatible = Annotated[
    bool, typer.Option("--version-compatible", help="Runs in later versions of TensorRT, too.")
]
HardwareCompatible = Annotated[
    str | None,
    typer.Option(metavar="LEVEL", help="ampere-plus or same-compute-capability: runs there, too."),
]
StripPlan = Annotated[
    bool, typer.Option("--strip-plan", help="Leaves the weights out; loading takes the bundle's.")
]
Refit = Annotated[bool, typer.Option("--refit", help="Weights can be exchanged after the build.")]
Tf32 = Annotated[
    bool, typer.Option("--tf32", help="FP32 products in TF32: faster, 10 bits of mantissa.")
]
EngineCache = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Where engines are kept for the next time; off for nowhere."),
]


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


RunEngine = Annotated[
    Engine, typer.Option(help="ONNX Runtime, or an engine that was built into the bundle.")
]
RunProvider = Annotated[Provider, typer.Option(help="Where ONNX Runtime runs the graph.")]
TrustEngine = Annotated[
    bool,
    typer.Option(
        "--trust-engine", help="Load an engine that no manifest vouches for: a plan is code."
    ),
]


def check_runner(engine: Engine, provider: Provider, trust: bool, threads: int | None) -> None:
    """Raises `UsageError` for options that the chosen runner does not have."""
    from .errors import UsageError

    if engine is Engine.ONNXRUNTIME:
        if trust:
            raise UsageError(
                "--trust-engine: no engine is loaded with --engine onnxruntime",
                hint="name one: --engine tensorrt-rtx",
            )
        return
    if provider is not Provider.CPU or threads is not None:
        option = "--threads" if threads is not None else "--provider"
        raise UsageError(
            f"{option}: it is ONNX Runtime's, and {engine.value} runs the engine",
            hint=f"leave {option} out, or choose --engine onnxruntime",
        )


def inspect_engine(path: Path, *, trust: bool, as_json: bool) -> str:
    """Returns what `inspect` says of an engine: layers, precisions, sizes and profiles."""
    from .exporter.engines.inspect import engine_facts, engine_text

    facts = engine_facts(path, trust=trust)
    return json_text(facts) if as_json else engine_text(facts)


def engine_options(
    profiles: list[str] | None,
    capabilities: str | None,
    timing_cache: Path | None,
    workspace: str | None,
    level: int | None,
    version_compatible: bool,
    hardware_compatible: str | None,
    strip_plan: bool,
    refit: bool,
    tf32: bool,
    cache: str | None,
) -> EngineOptions:
    """Returns the options as typed; `UsageError` for one that cannot be meant."""
    from .exporter.engines.cache import default_cache
    from .exporter.engines.options import EngineOptions, parse_bytes, parse_capabilities
    from .exporter.engines.profiles import parse_profile
    from .writing import check_folder

    place = default_cache() if cache is None else None if cache == "off" else Path(cache)
    if place is not None and cache is not None:  # one's own that cannot be written keeps nothing
        check_folder(place)
    return EngineOptions(
        profiles=tuple(parse_profile(each) for each in profiles or ()),
        compute_capabilities=parse_capabilities(capabilities or ""),
        timing_cache=timing_cache,
        workspace=None if workspace is None else parse_bytes(workspace, "--workspace"),
        optimization_level=level,
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,  # type: ignore[arg-type]  # checked with the flavour
        strip_plan=strip_plan,
        refit=refit,
        tf32=tf32,
        cache=place,
    )


def wished(engine: bool | None, options: EngineOptions, target: str) -> EngineOptions | bool | None:
    """Returns what an export shall do about engines: an option of theirs asks for them.

    Raises `UsageError` for an option that the target's engines do not have.
    """
    from .errors import UsageError
    from .exporter.engines.flavours import FLAVOURS, flavour
    from .exporter.engines.options import option_name

    asked = options.asked()
    if engine is False and asked:
        raise UsageError(
            f"--no-engine and {option_name(asked[0])} exclude each other", hint="leave one out"
        )
    if engine is False or (target not in FLAVOURS and not engine and not asked):
        return False
    if target not in FLAVOURS and asked:
        raise UsageError(
            f"{option_name(asked[0])}: --target {target} has no engines",
            hint=f"engines are built for --target {' and '.join(FLAVOURS)}",
        )
    options.check(flavour(target))
    return options if engine or asked else None


def build(
    bundle: BundleArgument,
    target: Annotated[
        str | None,
        typer.Option(help="tensorrt or tensorrt-rtx; that of the bundle."),
    ] = None,
    graph: Annotated[
        str | None, typer.Option(help="A file or lowering, where the bundle holds several; all.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="MIN:OPT:MAX", help="The batch axis; as exported.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="MIN:OPT:MAX", help="The token axis; as exported.")
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
        bool, typer.Option("--dry-run", help="Print what would be built and build nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Build what is there already.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Compile TensorRT engines from a bundle's graphs, into the bundle."""
    from .exporter.ranges import parse_range

    options = engine_options(
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
    ranges = {
        axis: parse_range(text, f"--{axis}")
        for axis, text in (("batch", batch), ("tokens", tokens))
        if text is not None
    }
    from .exporter.engines.additions import add_to_bundle, staging
    from .exporter.engines.bundle import make_engines, plan_engines
    from .exporter.manifest import Manifest

    manifest = Manifest.read(bundle)
    plans = plan_engines(manifest, target or manifest.target, options, graph=graph, ranges=ranges)
    if dry_run:
        print(json_text([_plan_json(each) for each in plans]) if as_json else _plan_text(plans))
        return
    with Console(verbose=verbose, quiet=quiet) as console, staging(bundle) as staged:
        made = list(make_engines(bundle, manifest, plans, staged, console, rebuild=force))
        add_to_bundle(bundle, made, staged)
    if as_json:
        print(json_text([each.record.as_json() for each in made]))
        return
    for each in made:
        print(_made_text(bundle, each))


def _plan_json(plan: EnginePlan) -> dict[str, object]:
    return {
        "file": plan.file,
        "graph": plan.graph.file,
        "flavour": plan.flavour.name,
        "version": plan.flavour.version(),
        "compute_capabilities": list(plan.cards),
        "profiles": [each.as_json() for each in plan.profiles],
        "options": plan.options.as_json(),
    }


def _plan_text(plans: list[EnginePlan]) -> str:
    lines = []
    for plan in plans:
        lines.append(
            f"{plan.file} from {plan.graph.file}, {plan.flavour.title} {plan.flavour.version()}"
        )
        if plan.cards:
            lines.append(f"  compute capability {', '.join(plan.cards)}")
        lines += [f"  profile {each}" for each in plan.profiles]
    lines.append("nothing was built (--dry-run)")
    return "\n".join(lines)


def _made_text(bundle: Path, made: Made) -> str:
    record = made.record
    counts = ", ".join(f"{count} in {name}" for name, count in record.precision.items())
    how = {
        "bundle": "there already",
        "cache": "taken from the cache",
        None: f"built in {record.seconds:.1f} s, {size(record.peak_memory_bytes)} at the most",
    }[made.reused]
    place = bundle / record.file
    return f"{place}: {size(place.stat().st_size)}, {counts} products, {how}"
