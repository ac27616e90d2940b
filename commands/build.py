"""`build`: engines of a bundle's graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import api
from ..common.console import show
from ..common.option import changed, declared, refuse_changed
from ..common.text import lines, size
from ..exporter.requests import BuildRequest
from ..exporter.tensorrt.options import EngineOptions
from .options import AsJson, BundleArgument, Verbosity, json_text

if TYPE_CHECKING:
    from ..exporter.tensorrt.build import EnginePlan
    from ..exporter.tensorrt.records import Made


def cached(options: EngineOptions) -> EngineOptions:
    """Returns options of a shell, where engines are cached unless `--engine-cache off` is typed."""
    from ..common.writing import check_folder
    from ..exporter.tensorrt.cache import default_cache

    if options.cache is None:
        return replace(options, cache=default_cache())
    if str(options.cache) == "off":
        return replace(options, cache=None)
    check_folder(options.cache, "--engine-cache")  # the default keeps nothing where it cannot
    return options


def wished(
    engine: EngineOptions | bool | None, options: EngineOptions
) -> EngineOptions | bool | None:
    """Returns what an export shall do about engines: an option of theirs asks for them.

    Raises `UsageError` for such an option beside --no-engine.
    """
    if engine is False:
        names = declared(EngineOptions).keys()
        refuse_changed(options, names, " and --no-engine exclude each other")
    return cached(options) if engine or changed(options) else engine


def build(
    *,
    bundle: BundleArgument,
    request: BuildRequest,
    options: EngineOptions,
    expose_routing: Annotated[
        bool, typer.Option("--expose-routing", help="The chosen experts are outputs of the engine.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be built and build nothing.")
    ] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Compile TensorRT engines from a bundle's graphs into it."""
    from ..exporter.tensorrt.engines import precision_notes

    options = replace(cached(options), expose_routing=expose_routing)
    plans = api.build_plan(bundle, replace(request, options=options))
    if dry_run:
        shown = [engine_plan_json(plan) for plan in plans]
        show(json_text(shown) if as_json else engine_plans_text(plans))
        return
    with verbosity.console() as console:
        made = api.build_engines(bundle, plans, rebuild=request.rebuild, progress=console)
    if as_json:
        show(json_text([engine.record.as_json() for engine in made]))
        return
    for plan in plans:
        for note in plan.notes:
            console.note(note)
    for engine in made:
        show(made_text(bundle, engine))
        for note in precision_notes(engine.record.file, engine.record.kernels):
            console.note(note)


def engine_plans_text(plans: Sequence[EnginePlan]) -> str:
    """What `build --dry-run` says."""
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
    """An engine that is to be built as plain data."""
    return {
        "file": plan.file,
        "graph": plan.graph,
        "flavour": plan.backend.name,
        "version": plan.backend.version(),
        "compute_capabilities": list(plan.cards),
        "profiles": [profile.as_json() for profile in plan.profiles],
        "options": plan.options.as_json(),
    }


def made_text(bundle: Path, made: Made) -> str:
    """One line about an engine that `build` has put into a bundle, or found there."""
    record = made.record
    counts = ", ".join(f"{number} in {name}" for name, number in record.precision.items())
    how = {
        "bundle": "there already",
        "cache": "taken from the cache",
        None: f"built in {record.seconds:.1f} s, {size(record.peak_memory_bytes)} at the most",
    }[made.reused]
    place = bundle / record.file
    return f"{place}: {size(place.stat().st_size)}, {counts} products, {how}"
