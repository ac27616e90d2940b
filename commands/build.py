"""The command `build`: compiles the graphs of a bundle to engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.console import Console, show
from ..common.option import changed, declared, refuse_changed
from ..common.text import lines, size
from ..exporter.options import ExportOptions
from ..exporter.requests import SIZES, BuildRequest
from ..exporter.tensorrt.options import (
    EngineOptions,
    parsed_capabilities,
    parsed_profile,
    parsed_workspace,
)
from .options import AsJson, BundleArgument, Quiet, Verbose, json_text, option_for, typed_path
from .panels import given

if TYPE_CHECKING:
    from ..exporter.tensorrt.records import EnginePlan


def cached(options: EngineOptions) -> EngineOptions:
    """Returns options with the engine cache on, unless `--engine-cache off` was given."""
    from ..common.writing import check_folder
    from ..exporter.tensorrt.cache import default_cache

    if options.cache is None:
        return replace(options, cache=default_cache())
    if str(options.cache) == "off":
        return replace(options, cache=None)
    check_folder(options.cache, "--engine-cache")  # the default cache may be unusable
    return options


def engines_requested(
    engine: EngineOptions | bool | None, options: EngineOptions
) -> EngineOptions | bool | None:
    """Returns the `engine` value of an export: any engine option requests engines.

    Raises `UsageError` if an engine option is combined with --no-engine.
    """
    if engine is False:
        names = declared(EngineOptions).keys()
        refuse_changed(options, names, " and --no-engine exclude each other")
    return cached(options) if engine or changed(options) else engine


@dataclass(frozen=True, slots=True)
class EngineSwitch:
    """Whether an export compiles engines; if None, target and machine decide."""

    engine: bool | None


def engine_switch(
    engine: Annotated[bool | None, option_for(ExportOptions, "engine", "Engines")] = None,
) -> EngineSwitch:
    """Returns the value of the engine switch of `export`."""
    return EngineSwitch(engine=engine)


def engine_options(
    profiles: Annotated[
        list[Any] | None,
        option_for(
            EngineOptions,
            "profiles",
            "Engines",
            metavar="AXIS=MIN:OPT:MAX,…",
            parser=parsed_profile,
        ),
    ] = None,
    compute_capabilities: Annotated[
        Any | None,
        option_for(
            EngineOptions,
            "compute_capabilities",
            "Engines",
            metavar="8.9,12.0",
            parser=parsed_capabilities,
        ),
    ] = None,
    timing_cache: Annotated[
        Path | None,
        option_for(EngineOptions, "timing_cache", "Engines", metavar="FILE", parser=typed_path),
    ] = None,
    workspace: Annotated[
        Any | None,
        option_for(EngineOptions, "workspace", "Engines", metavar="BYTES", parser=parsed_workspace),
    ] = None,
    optimization_level: Annotated[
        int | None, option_for(EngineOptions, "optimization_level", "Engines")
    ] = None,
    version_compatible: Annotated[
        bool, option_for(EngineOptions, "version_compatible", "Engines")
    ] = False,
    hardware_compatible: Annotated[
        str | None, option_for(EngineOptions, "hardware_compatible", "Engines", metavar="LEVEL")
    ] = None,
    tf32: Annotated[bool, option_for(EngineOptions, "tf32", "Engines")] = False,
    cache: Annotated[
        Path | None, option_for(EngineOptions, "cache", "Engines", metavar="DIR", parser=typed_path)
    ] = None,
    strip_plan: Annotated[
        bool, option_for(EngineOptions, "strip_plan", "Weights of engines")
    ] = False,
    weight_streaming: Annotated[
        str | None,
        option_for(EngineOptions, "weight_streaming", "Weights of engines", metavar="auto|BYTES"),
    ] = None,
    bind_weights: Annotated[
        bool, option_for(EngineOptions, "bind_weights", "Weights of engines")
    ] = False,
) -> EngineOptions:
    """Returns the engine options of `build` and `export`."""
    return EngineOptions(
        profiles=tuple(profiles or ()),
        compute_capabilities=compute_capabilities or (),
        timing_cache=timing_cache,
        workspace=workspace,
        optimization_level=optimization_level,
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,  # type: ignore[arg-type]  # `check` verifies it
        tf32=tf32,
        cache=cache,
        strip_plan=strip_plan,
        weight_streaming=weight_streaming,
        bind_weights=bind_weights,
    )


def build(
    context: typer.Context,
    *,
    bundle: BundleArgument,
    target: Annotated[str | None, option_for(BuildRequest, "target")] = None,
    graph: Annotated[str | None, option_for(BuildRequest, "graph")] = None,
    batch: Annotated[str | None, option_for(BuildRequest, "batch", metavar=SIZES)] = None,
    tokens: Annotated[str | None, option_for(BuildRequest, "tokens", metavar=SIZES)] = None,
    rebuild: Annotated[bool, option_for(BuildRequest, "rebuild")] = False,
    expose_routing: Annotated[bool, option_for(EngineOptions, "expose_routing")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be built, but build nothing.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Compile TensorRT engines from a bundle's graphs and add them to it."""
    from ..exporter.calls import build_engines, build_plan
    from ..exporter.tensorrt.engines import precision_notes

    options = replace(cached(given(context, EngineOptions)), expose_routing=expose_routing)
    request = BuildRequest(
        target=target, graph=graph, batch=batch, tokens=tokens, rebuild=rebuild, options=options
    )
    plans = build_plan(bundle, request)
    if dry_run:
        shown = [engine_plan_json(plan) for plan in plans]
        show(json_text(shown) if as_json else engine_plans_text(plans))
        return
    with Console(verbose=verbose, quiet=quiet) as console:
        made = build_engines(bundle, plans, rebuild=rebuild, progress=console)
    if as_json:
        show(json_text([asdict(engine.built) for engine in made]))
        return
    for plan in plans:
        for note in plan.notes:
            console.note(note)
    for engine in made:
        show(made_text(bundle, engine))
        for note in precision_notes(engine.built.file, engine.built.kernels):
            console.note(note)


def engine_plans_text(plans: Sequence[EnginePlan]) -> str:
    """Returns the output of `build --dry-run`."""
    rows = []
    for plan in plans:
        version = plan.backend.version()
        rows.append(f"{plan.file} from {plan.graph}, {plan.backend.title} {version}")
        if plan.cards:
            rows.append(f"  compute capability {', '.join(plan.cards)}")
        rows += [f"  profile {profile}" for profile in plan.profiles]
        rows += [f"  note: {note}" for note in plan.notes]
    rows.append("nothing was built (--dry-run)")
    return lines(*rows)


def engine_plan_json(plan: EnginePlan) -> dict[str, Any]:
    """Returns the plan of an engine as plain data."""
    return {
        "file": plan.file,
        "graph": plan.graph,
        "flavour": plan.backend.name,
        "version": plan.backend.version(),
        "compute_capabilities": list(plan.cards),
        "profiles": [profile.as_json() for profile in plan.profiles],
        "options": plan.options.as_json(),
    }


def made_text(bundle: Path, made: EnginePlan) -> str:
    """Returns a line about an engine that `build` added to a bundle, or found in it."""
    record = made.built
    counts = ", ".join(f"{number} in {name}" for name, number in record.precision.items())
    how = {
        "bundle": "already there",
        "cache": "taken from the cache",
        None: f"built in {record.seconds:.1f} s, {size(record.peak_memory_bytes)} at most",
    }[made.reused]
    place = bundle / record.file
    return f"{place}: {size(place.stat().st_size)}, {counts} products, {how}"
