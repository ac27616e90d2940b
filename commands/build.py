"""The command `build`: compiles the graphs of a bundle to engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.console import show
from ..common.option import changed, declared, refuse_changed
from ..common.text import lines, size
from ..exporter.requests import SIZES, BuildRequest
from ..exporter.tensorrt.options import (
    EngineOptions,
    parsed_capabilities,
    parsed_profile,
    parsed_workspace,
)
from .options import BundleArgument, json_text, option_for, options_of
from .printing import Printing

if TYPE_CHECKING:
    from ..exporter.tensorrt.records import EnginePlan


def with_cache(options: EngineOptions) -> EngineOptions:
    """Returns options with the engine cache on, unless `--engine-cache off` was given."""
    from ..common.writing import check_folder
    from ..exporter.tensorrt.cache import default_cache

    if options.cache is None:
        return replace(options, cache=default_cache())
    if str(options.cache) == "off":
        return replace(options, cache=None)
    check_folder(options.cache, "--engine-cache")  # only a default cache may be unusable
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
    return with_cache(options) if engine or changed(options) else engine


Engines = Annotated[
    EngineOptions,
    options_of(
        EngineOptions,
        {
            "Engines": (
                *("profiles", "compute_capabilities", "timing_cache", "workspace"),
                *("optimization_level", "version_compatible", "hardware_compatible", "tf32"),
                "cache",
            ),
            "Weights of engines": ("strip_plan", "weight_streaming", "bind_weights"),
        },
        profiles={"metavar": "AXIS=MIN:OPT:MAX,…", "kind": list[Any], "parser": parsed_profile},
        compute_capabilities={"metavar": "8.9,12.0", "kind": Any, "parser": parsed_capabilities},
        timing_cache={"metavar": "FILE"},
        workspace={"metavar": "BYTES", "parser": parsed_workspace},
        hardware_compatible={"metavar": "LEVEL", "kind": str},  # `check` verifies it
        cache={"metavar": "DIR"},
        weight_streaming={"metavar": "auto|BYTES"},
    ),
]


def build(
    *,
    bundle: BundleArgument,
    request: Annotated[
        BuildRequest, options_of(BuildRequest, batch={"metavar": SIZES}, tokens={"metavar": SIZES})
    ],
    expose_routing: Annotated[bool, option_for(EngineOptions, "expose_routing")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be built, but build nothing.")
    ] = False,
    printing: Printing,
    engines: Engines,
) -> None:
    """Compile TensorRT engines from a bundle's graphs and add them to it."""
    from ..exporter.calls import build_engines, build_plan
    from ..exporter.tensorrt.engines import precision_notes

    options = replace(with_cache(engines), expose_routing=expose_routing)
    request = replace(request, options=options)
    plans = build_plan(bundle, request)
    if dry_run:
        records = [engine_plan_json(plan) for plan in plans]
        show(json_text(records) if printing.as_json else engine_plans_text(plans))
        return
    with printing.console() as console:
        built = build_engines(bundle, plans, rebuild=request.rebuild, progress=console)
    if printing.as_json:
        show(json_text([asdict(engine.built) for engine in built]))
        return
    for plan in plans:
        for note in plan.notes:
            console.note(note)
    for engine in built:
        show(built_text(bundle, engine))
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


def built_text(bundle: Path, engine: EnginePlan) -> str:
    """Returns a line about an engine that `build` added to a bundle, or found in it."""
    record = engine.built
    counts = ", ".join(f"{number} in {name}" for name, number in record.precision.items())
    how = {
        "bundle": "already there",
        "cache": "taken from the cache",
        None: f"built in {record.seconds:.1f} s with at most {size(record.peak_memory_bytes)}",
    }[engine.reused]
    path = bundle / record.file
    return f"{path}: {size(path.stat().st_size)}, {counts} products, {how}"
