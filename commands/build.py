"""`build` and `triton`: make engines, or a model repository, from a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from .. import api
from ..common.console import show
from ..common.text import lines, listed, size
from ..errors import UsageError
from .options import (
    SIZES,
    AsJson,
    BundleArgument,
    CallOptions,
    Verbosity,
    json_text,
    output_option,
    typed_path,
)

if TYPE_CHECKING:
    from ..exporter.tensorrt.engines import EnginePlan
    from ..exporter.tensorrt.options import EngineOptions
    from ..exporter.tensorrt.records import Made
    from ..exporter.triton.repository import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFlags:
    """How engines are built."""

    HEADINGS: ClassVar = {"profiles": "Engines", "strip_plan": "Weights of engines"}

    profiles: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            metavar="AXIS=MIN:OPT:MAX,…",
            help="An engine profile: batch=1:8:32,k=1:4:16. Repeat it for several profiles.",
        ),
    ] = None
    compute_capability: Annotated[
        str | None,
        typer.Option(
            metavar="8.9,12.0",
            help="GPUs that a TensorRT-RTX engine supports, or current "
            "[default: 8.0,8.6,8.9,12.0].",
        ),
    ] = None
    timing_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Share TensorRT's kernel timings between builds."),
    ] = None
    workspace: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Limit on a kernel's scratch memory: 2GiB."),
    ] = None
    optimization_level: Annotated[
        int | None, typer.Option(help="How long to search for kernels: 0 to 5 [default: 3].")
    ] = None
    version_compatible: Annotated[
        bool,
        typer.Option("--version-compatible", help="Also run in later versions of TensorRT."),
    ] = False
    hardware_compatible: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL", help="Also run on other GPUs: ampere-plus or same-compute-capability."
        ),
    ] = None
    tf32: Annotated[
        bool,
        typer.Option("--tf32", help="Compute FP32 products in TF32: faster, 10-bit mantissa."),
    ] = False
    engine_cache: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The folder that caches finished engines; off disables it."
        ),
    ] = None
    strip_plan: Annotated[
        bool,
        typer.Option(
            "--strip-plan", help="Leave the weights out of the engine; load the bundle's."
        ),
    ] = False
    weight_streaming: Annotated[
        str | None,
        typer.Option(
            metavar="auto|BYTES", help="Keep weights in host memory, and this much on the GPU."
        ),
    ] = None
    bind_weights: Annotated[
        bool,
        typer.Option(
            "--bind-weights", help="Bind the experts' weights from the bundle's file as inputs."
        ),
    ] = False

    def options(self) -> EngineOptions:
        """Returns them parsed; `UsageError` for one that cannot be meant."""
        from ..common.writing import check_folder
        from ..exporter.tensorrt.cache import default_cache
        from ..exporter.tensorrt.options import EngineOptions, parse_bytes
        from ..exporter.tensorrt.profiles import parse_profile

        workspace, asked = self.workspace, self.engine_cache
        cache = default_cache() if asked is None else None if asked == "off" else Path(asked)
        if asked is not None and cache is not None:  # the default keeps nothing where it cannot
            check_folder(cache, "--engine-cache")
        return EngineOptions(
            profiles=tuple(parse_profile(each) for each in self.profiles or ()),
            compute_capabilities=tuple(listed(self.compute_capability or "")),
            timing_cache=self.timing_cache,
            workspace=None if workspace is None else parse_bytes(workspace, "--workspace"),
            optimization_level=self.optimization_level,
            version_compatible=self.version_compatible,
            hardware_compatible=self.hardware_compatible,  # type: ignore[arg-type]  # backend checks
            strip_plan=self.strip_plan,
            weight_streaming=self.weight_streaming,
            bind_weights=self.bind_weights,
            tf32=self.tf32,
            cache=cache,
        )


def wished(engine: bool | None, flags: BuildFlags) -> EngineOptions | bool | None:
    """Returns what an export shall do about engines: an option of theirs asks for them.

    Raises `UsageError` for such an option beside --no-engine.
    """
    from ..exporter.tensorrt.options import option_name

    options = flags.options()
    asked = options.asked() + ["engine_cache"] * (flags.engine_cache is not None)
    if engine is False and asked:
        raise UsageError(
            f"--no-engine and {option_name(asked[0])} exclude each other", hint="leave one out"
        )
    return options if engine or asked else engine


ENGINES = CallOptions(api.build, "target graph batch tokens", more=SIZES)
"""Which engines are built."""


def build(
    *,
    bundle: BundleArgument,
    given: Annotated[dict[str, Any], ENGINES],
    flags: BuildFlags,
    expose_routing: Annotated[
        bool, typer.Option("--expose-routing", help="The chosen experts are outputs of the engine.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be built and build nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Build what is there already.")] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Compile TensorRT engines from a bundle's graphs into it."""
    options = replace(flags.options(), expose_routing=expose_routing)
    plans = api.build_plan(bundle, **given, options=options)
    if dry_run:
        shown = [engine_plan_json(each) for each in plans]
        show(json_text(shown) if as_json else engine_plans_text(plans))
        return
    with verbosity.console() as console:
        made = api.build_engines(bundle, plans, rebuild=force, progress=console)
    if as_json:
        show(json_text([each.record.as_json() for each in made]))
        return
    for each in made:
        show(made_text(bundle, each))


def engine_plans_text(plans: Sequence[EnginePlan]) -> str:
    """What `build --dry-run` says."""
    rows = []
    for plan in plans:
        version = plan.backend.version()
        rows.append(f"{plan.file} from {plan.graph.file}, {plan.backend.title} {version}")
        if plan.cards:
            rows.append(f"  compute capability {', '.join(plan.cards)}")
        rows += [f"  profile {each}" for each in plan.profiles]
    rows.append("nothing was built (--dry-run)")
    return lines(*rows)


def engine_plan_json(plan: EnginePlan) -> dict[str, Any]:
    """An engine that is to be built as plain data."""
    return {
        "file": plan.file,
        "graph": plan.graph.file,
        "flavour": plan.backend.name,
        "version": plan.backend.version(),
        "compute_capabilities": list(plan.cards),
        "profiles": [each.as_json() for each in plan.profiles],
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


SERVING = CallOptions(
    api.triton,
    "name backend device k version instances threads delay_us",
    headings={"name": "Models", "instances": "Speed"},
)
"""What is served, and how."""


def triton(
    *,
    bundles: Annotated[
        list[Path],
        typer.Argument(metavar="BUNDLE…", parser=typed_path, help="Folders that export wrote."),
    ],
    output: Annotated[Path, output_option("REPOSITORY", "The model repository to write.")],
    given: Annotated[dict[str, Any], SERVING],
    force: Annotated[bool, typer.Option("--force", help="Replace a model that is there.")] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Write a model repository for Triton Inference Server.

    Several bundles of one network with different k are also combined into an ensemble.
    """
    with verbosity.console() as console:
        models = api.triton(bundles, output, **given, force=force, progress=console)
    if as_json:
        show(json_text([each.as_json() for each in models]))
        return
    for each in models:
        show(served_text(output, each))
        for note in each.notes:
            console.note(note)


def served_text(repository: Path, model: ServedModel) -> str:
    """One line about a model of a repository."""
    facts = model.as_json()
    batch = facts["max_batch_size"]
    batches = f"batches to {batch}" if batch else "not batched by Triton"
    inputs, outputs = ", ".join(facts["inputs"]), ", ".join(facts["outputs"])
    return lines(f"{repository / model.name}: {facts['backend']}, {batches}, {inputs} → {outputs}")
