"""Plans and builds the engines of a bundle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...common.console import Progress, Silent
from ...common.option import spelled
from ...common.writing import scratch_folder
from ...errors import EngineError, MissingExtraError, UsageError
from ...graphs.names import K_INPUT, part_of
from ...graphs.sizes import DEFAULT_TOKENS, AxisRange, parse_range
from ..bundle.manifest import MAIN_GRAPH, FileRecord, GraphRecord, Manifest, TensorSpec
from . import cache
from .backends import BACKENDS, Backend, backend_named, first_gpu, gpu_memory_bytes
from .bindings import BoundWeight, rewrite_graph
from .build import build_engine
from .cache import default_cache
from .onnx_support import check_graph
from .options import CURRENT, EngineOptions
from .profiles import AxisRanges, Profile, cap_k, max_copies, profile
from .records import (
    Describe,
    EnginePlan,
    EngineRecord,
    add_to_bundle,
    engines_of,
    is_as_listed,
    staging,
    with_engines,
)
from .trust import check_private, is_own, own_signature
from .worker import Compiled

DEFAULT_CARDS = ("8.6", "8.9", "12.0")
"""TensorRT-RTX's default in its support matrix; explicit, so that the engine's record has it."""

FP8_CARDS = ("8.9", "12.0")
"""The default cards that multiply 8-bit floats: Ada and newer."""


def plan_engines(
    manifest: Manifest,
    name: str,
    options: EngineOptions,
    *,
    graph: str | None = None,
    ranges: AxisRanges | None = None,
) -> list[EnginePlan]:
    """Returns the engines of a bundle for a backend: one per graph, or only that of `graph`.

    If a bundle has graphs for several batch sizes, only the main one is used, because an engine has
    profiles instead. `ranges` has the sizes of axes that no profile names; by default these are the
    sizes of the export. Raises `UsageError` or `MissingExtraError` before it reads or builds
    anything.
    """
    chosen = backend_named(name)
    options.check(chosen)
    _check_can_build(chosen)
    records = [
        record
        for record in manifest.graphs
        if (graph is None and (not record.batches or record is manifest.graphs[0]))
        or graph in (record.file, *record.lowerings.values())
    ]
    if not records:
        known = ", ".join(record.file for record in manifest.graphs)
        raise UsageError(f"the bundle has no graph '{graph}'", hint=f"it has {known}")
    defaults = exported_ranges(manifest) | dict(ranges or {})
    tensor = manifest.inputs[0]
    experts = min(layer.experts for layer in manifest.layers) if manifest.k == "input" else None
    requested = options.profiles or ({},)
    _check_axes(tensor, requested, ranges or {})
    profiles = tuple(profile(tensor, axes, defaults, experts) for axes in requested)
    if len(set(profiles)) < len(profiles):
        duplicate = next(profile for profile in profiles if profiles.count(profile) > 1)
        raise UsageError(
            f"--profile: two profiles are the same ({duplicate})",
            hint="give each once: every profile makes the engine larger",
        )
    default_cards = FP8_CARDS if manifest.precision == "fp8" else DEFAULT_CARDS
    cards = (options.compute_capabilities or default_cards) if chosen.cards else ()
    weights = sum(r.bytes for name, r in manifest.files.items() if name.endswith(".bin"))
    plans = []
    for record in records:
        capped_profiles, notes = cap_gather_copies(manifest, record, chosen, profiles, requested)
        plans.append(
            EnginePlan(
                graph=record.file,
                file=engine_file(chosen, record),
                backend=chosen,
                profiles=capped_profiles,
                cards=cards,
                options=options,
                weights_bytes=weights,
                on_gpu=first_gpu() is not None,
                notes=notes,
            )
        )
    return plans


def cap_gather_copies(
    manifest: Manifest,
    graph: GraphRecord,
    chosen: Backend,
    profiles: Sequence[Profile],
    requested: Sequence[AxisRanges],
) -> tuple[tuple[Profile, ...], tuple[str, ...]]:
    """Returns a graph's profiles, with k limited by what `gather` can copy, and notes on that.

    Raises `UsageError` if a requested k, or the graph's own, is too large.
    """
    memory = None if chosen.builds_without_gpu else gpu_memory_bytes()
    width = 4 if manifest.precision == "fp32" else 2  # INT8 is dequantised before it is copied
    new_profiles, notes = list(profiles), []
    for layer in manifest.layers:
        if graph.lowerings.get(layer.name) != "gather" or layer.k == layer.experts:
            continue
        matrix = layer.dim * (layer.hidden or layer.dim)
        copies = max_copies(matrix)
        fitting = min(copies, max_copies(matrix, 2 * matrix * width, memory))
        for index, (wanted, requested_axes) in enumerate(zip(new_profiles, requested, strict=True)):
            k = layer.k if wanted.k is None else wanted.k.max
            assert k is not None, "k belongs to the layer, or is an input of the graph"
            is_explicit = wanted.k is None or K_INPUT in requested_axes
            if is_explicit and wanted.max[0] * k > copies:
                raise UsageError(
                    f"{graph.file}: at --batch {wanted.max[0]} and --k {k} `gather` copies "
                    f"{wanted.max[0] * k} experts of layer {layer.name}, but at most {copies} fit "
                    "in a tensor with fewer than 2^31 elements",
                    hint="give smaller ones (--profile batch=MIN:OPT:MAX,k=MIN:OPT:MAX), or export "
                    "with --lowering dense or block-grouped",
                )
            if not is_explicit and wanted.max[0] * k > fitting:
                new_profiles[index] = cap_k(wanted, fitting)
                notes.append(
                    f"{graph.file}: at batch {wanted.max[0]} `gather` can copy at most {fitting} "
                    f"experts of layer {layer.name}, so its engine accepts k up to "
                    f"{fitting // wanted.max[0]} of {layer.experts}; a smaller batch in --profile "
                    "allows a larger k, and --lowering dense allows any k"
                )
    return tuple(new_profiles), tuple(notes)


def _check_axes(tensor: TensorSpec, profiles: Sequence[AxisRanges], ranges: AxisRanges) -> None:
    """Raises `UsageError` for a range that no profile uses."""
    for axis, wanted in ranges.items():
        if axis not in tensor.shape and not (axis == "tokens" and "height" in tensor.shape):
            dynamic = ", ".join(size for size in tensor.shape if isinstance(size, str))
            raise UsageError(
                f"--{axis} {wanted}: the graph's input '{tensor.name}' has no axis {axis}",
                hint=f"its dynamic axes are {dynamic or 'none'}; export again for others",
            )
        if all(axis in profile for profile in profiles):
            raise UsageError(
                f"--{axis} {wanted}: every --profile already names {axis}",
                hint=f"leave --{axis} out, or leave {axis} out of a --profile",
            )


def exported_ranges(manifest: Manifest) -> dict[str, AxisRange]:
    """Returns the sizes for which the bundle was exported, by axis."""
    tokens = parse_range(manifest.tokens or DEFAULT_TOKENS, "--tokens")
    return {"batch": manifest.batches, "tokens": tokens}


def engine_file(chosen: Backend, graph: GraphRecord) -> str:
    """Returns `engine-tensorrt-rtx.plan`, with the lowering if the graph's file name has one."""
    suffix = "" if graph.file == MAIN_GRAPH else "-" + Path(graph.file).stem.removeprefix("model-")
    return f"engine-{chosen.name}{suffix}.plan"


def add_engines(
    directory: Path,
    manifest: Manifest,
    plans: Sequence[EnginePlan],
    progress: Progress | None = None,
    *,
    rebuild: bool = False,
    describe: Describe | None = None,
) -> list[EnginePlan]:
    """Builds engines, adds them to a bundle and (with `describe`) its README, and returns them.

    Raises what `make_engines` raises, and `BundleError` for a folder that is not writable.
    """
    with staging(directory) as staged:
        built = list(make_engines(directory, manifest, plans, staged, progress, rebuild=rebuild))
        add_to_bundle(directory, built, staged, describe)
    return built


def check_for_export(target: str, engine: EngineOptions | bool) -> None:
    """Raises an error if the engine of an export could not be compiled."""
    names = engine.changed() if isinstance(engine, EngineOptions) else []
    if target not in BACKENDS and names:
        raise UsageError(
            f"{spelled(EngineOptions, names[0])}: --target {target} has no engines",
            hint=f"engines are built for --target {' and '.join(BACKENDS)}",
        )
    chosen = backend_named(target)
    if isinstance(engine, EngineOptions):
        engine.check(chosen)
    _check_can_build(chosen)


def build_for_export(
    directory: Path, manifest: Manifest, engine: EngineOptions | bool | None, progress: Progress
) -> Manifest:
    """Returns a new bundle's manifest with its engines, which are built into its folder.

    Without a request (`engine` None), a note explains why no engine can be built here.
    """
    options = engine if isinstance(engine, EngineOptions) else EngineOptions(cache=default_cache())
    if engine is None:
        try:
            _check_can_build(backend_named(manifest.target))
        except (MissingExtraError, EngineError) as error:
            note = f"no engine was built: {error.message}; {error.hint}"
            return replace(manifest, notes=[*manifest.notes, note])
    plans = plan_engines(manifest, manifest.target, options)
    built = list(make_engines(directory, manifest, plans, directory, progress))
    notes = [note for plan in plans for note in plan.notes]
    notes += [
        note for plan in built for note in precision_notes(plan.built.file, plan.built.kernels)
    ]
    return with_engines(replace(manifest, notes=[*manifest.notes, *notes]), built)


def _check_can_build(chosen: Backend) -> None:
    """Raises `MissingExtraError` or `EngineError` if the backend cannot build here."""
    chosen.check_installed()
    if chosen.builds_without_gpu:
        return
    gpu = first_gpu()
    if gpu is not None:
        chosen.check_serves(gpu, EngineError)
    else:
        raise EngineError(
            f"{chosen.title} compiles for this machine's GPU, but there is no NVIDIA GPU here",
            hint="copy the bundle to the machine with the GPU and run "
            f"`moexport build BUNDLE --target {chosen.name}` there",
        )


def make_engines(
    directory: Path,
    manifest: Manifest,
    plans: Sequence[EnginePlan],
    output: Path,
    progress: Progress | None = None,
    *,
    rebuild: bool = False,
) -> Iterator[EnginePlan]:
    """Yields the engines of a bundle's graphs, written to the folder `output`.

    An engine in the bundle or the cache is reused, unless `rebuild` is set. Raises `EngineError`
    for a graph that is refused or a build that fails.
    """
    progress = progress or Silent()
    for folder in {plan.options.cache for plan in plans if plan.options.cache is not None}:
        check_private(folder)
    weights = {n: r.sha256 for n, r in manifest.files.items() if n.endswith((".bin", ".onnx"))}
    for plan in plans:
        check_graph(directory / plan.graph, plan.backend, manifest.layers)
        key = _key(plan, weights)
        existing = None if rebuild else _existing_engine(directory, manifest, plan, key)
        if existing is not None:
            yield replace(plan, record=existing, reused="bundle")
            continue
        yield _fetch_or_build(plan, key, directory, manifest, output, progress, rebuild=rebuild)


def _key(plan: EnginePlan, weights: Mapping[str, str]) -> str:
    gpu = first_gpu()
    files = {n: h for n, h in weights.items() if n.endswith(".bin") or n == plan.graph}
    device = None if plan.backend.builds_without_gpu or gpu is None else asdict(gpu)
    current = asdict(gpu) if gpu is not None and CURRENT in plan.cards else None
    return cache.engine_key(
        {
            "files": files,
            "flavour": plan.backend.name,
            "version": plan.backend.version(),
            "profiles": [profile.as_json() for profile in plan.profiles],
            "cards": list(plan.cards),
            "options": plan.options.as_json(),
            "device": device or current,
        }
    )


def _existing_engine(
    directory: Path, manifest: Manifest, plan: EnginePlan, key: str
) -> EngineRecord | None:
    """Returns the bundle's own engine, if its key and its files match."""
    for record in engines_of(manifest):
        listed = manifest.files.get(record.file)
        trusted = listed is not None and is_own(record.signature, listed.sha256)
        if trusted and record.key == key and record.file == plan.file:
            names = (record.layers, record.file)
            if all(is_as_listed(directory, name, manifest) for name in names):
                return record
    return None


def _fetch_or_build(
    plan: EnginePlan,
    key: str,
    directory: Path,
    manifest: Manifest,
    output: Path,
    progress: Progress,
    *,
    rebuild: bool,
) -> EnginePlan:
    path = output / plan.file
    folder = plan.options.cache
    model, bound = _rewrite_graph(plan, directory, manifest)
    compiled = cache.fetch(folder, key, path) if folder is not None and not rebuild else None
    reused = None if compiled is None else "cache"
    if compiled is not None:
        progress.step(f"copied {plan.file} from the cache")
    else:
        with scratch_folder("build") as scratch:
            changed = None
            if model is not None:
                changed = scratch / plan.graph
                changed.write_bytes(model)
            compiled = build_engine(plan, directory, path, progress, changed)
    try:
        kernels = check_precision(manifest, plan.graph, compiled)
    except EngineError:
        path.unlink()
        raise
    listing = output / f"{path.stem}.layers.json"
    facts = {name: value for name, value in asdict(compiled).items() if name in LISTED}
    listing.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    files = {file.name: FileRecord.of(file) for file in (path, listing)}
    digest = files[path.name].sha256
    if reused is None and folder is not None:
        cache.store(folder, key, path, digest, compiled)
    gpu = first_gpu()
    device = None if plan.backend.builds_without_gpu or gpu is None else gpu
    cards = plan.cards
    if gpu is not None and (device is not None or CURRENT in cards):
        cards = (gpu.compute_capability,)
    record = EngineRecord(
        file=plan.file,
        graph=plan.graph,
        flavour=plan.backend.name,
        version=compiled.version,
        compute_capabilities=list(cards),
        device=None if device is None else device.name,
        precision=compiled.precision,
        profiles=[profile.as_json() for profile in plan.profiles],
        options=plan.options.as_json(),
        settings=compiled.settings,
        layers=listing.name,
        key=key,
        seconds=compiled.seconds,
        peak_memory_bytes=compiled.peak_memory_bytes,
        signature=own_signature(digest),
        kernels=kernels,
        bound=[asdict(weight) for weight in bound],
    )
    return replace(plan, record=record, files=files, reused=reused)


LISTED = ("layers", "inspector")
"""The fields of `Compiled` in the file next to an engine."""


def _rewrite_graph(
    plan: EnginePlan, directory: Path, manifest: Manifest
) -> tuple[bytes | None, list[BoundWeight]]:
    """Returns the graph as changed by the options, None if unchanged, and the bound weights."""
    options = plan.options
    if not options.bind_weights and not options.expose_routing:
        return None, []
    names = [layer.name for layer in manifest.layers]
    record = next(graph for graph in manifest.graphs if graph.file == plan.graph)
    outputs = list(record.selected.values()) if options.expose_routing else []
    if options.expose_routing and not outputs:
        raise EngineError(
            f"{plan.graph}: its layers use all experts, so there is no routing to expose",
            hint="leave --expose-routing out, or export with a k below n",
        )
    model, bound = rewrite_graph(
        directory / plan.graph, names, bind=options.bind_weights, outputs=outputs
    )
    return model.SerializeToString(), bound


EXPERTS = "experts"
"""The part of a layer (`graphs.names`) whose products have the layer's precision."""


def check_precision(manifest: Manifest, graph: str, compiled: Compiled) -> dict[str, list[str]]:
    """Raises `EngineError` if a MoE layer's experts do not compute in the bundle's precision.

    The router stays in FP32 at every precision, so only the experts' products are checked: in the
    network that was built and, if it could be inspected, in the engine. Returns the types that the
    engine's layers for the experts read and write, by MoE layer. They are empty if the inspector
    does not name these layers, or if other nodes were fused into them; then only the strongly typed
    network proves the precision.
    """
    kernels: dict[str, list[str]] = {}
    for layer in manifest.layers:
        # If no product is named after the experts, all products in their part of the layer count;
        # products of floats that mix the experts' results are ignored.
        named = [p for p in compiled.layers if f"{layer.name}/{EXPERTS}/" in p.name]
        products = named or [p for p in compiled.layers if part_of(p.name, layer.name) == EXPERTS]
        precisions = {product.precision for product in products}
        if layer.precision not in precisions or (named and len(precisions) > 1):
            names = ", ".join(sorted(precisions)) or "no product"
            raise EngineError(
                f"{graph}: the experts of layer {layer.name} were requested in "
                f"{layer.precision}, but built in {names}",
                hint="export again with this --target and --precision, or another --lowering",
            )
        if compiled.inspector is not None:
            nodes = [product.name for product in products]
            types = kernel_types(compiled.inspector, nodes)
            if types and layer.precision not in (*types, *QUANTISED):
                # A layer with a fused Cast reads and writes types other than that of its product.
                unfused = kernel_types(compiled.inspector, nodes, alone=True)
                if not unfused:
                    kernels[layer.name] = []
                    continue
                raise EngineError(
                    f"{graph}: the experts of layer {layer.name} were requested in "
                    f"{layer.precision}, but the engine computes them in "
                    f"{', '.join(sorted(unfused))}",
                    hint="try --lowering gather, or open an issue with the list of layers from "
                    "`trtexec --exportLayerInfo`",
                )
            kernels[layer.name] = sorted(types)
    return kernels


def precision_notes(file: str, kernels: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns notes for users on an engine's precision, given its `EngineRecord.kernels`."""
    untyped = [layer for layer, types in kernels.items() if not types]
    if not untyped:
        return []
    return [
        f"{file}: TensorRT's inspector does not show the types of the experts of "
        f"{', '.join(untyped)}: only the network's types prove that they have the bundle's "
        "precision"
    ]


QUANTISED = ("int8", "int4", "fp8")
"""Precisions whose kernels may read floats, because the factors were already dequantised."""

KERNEL_TYPES = {
    "fp32": r"float|fp32",
    "fp16": r"half|fp16",
    "bf16": r"bfloat16|bf16",
    "int8": r"int8",
    "fp8": r"fp8|e4m3|float8e4m3(fn)?",
    "int4": r"int4",
}
"""The inspector's names of types, which differ between versions."""

TYPE_KEYS = ("datatype", "format/datatype", "format")
"""Keys of a tensor's type in the inspector's output, in lower case, the most reliable first:
`Format/Datatype` in TensorRT 10, `Datatype` and `Format` since 11 (NVIDIA's page "Migrating
IEngineInspector Usage from TensorRT 10.x to 11.x")."""


def kernel_types(
    inspector: Mapping[str, Any], products: Sequence[str], *, alone: bool = False
) -> set[str]:
    """Returns the types of tensors around an engine's layers that compute these ONNX nodes.

    The metadata of an engine's layer names the nodes that were fused into it ("Engine Inspector",
    TensorRT 10.16.1). With `alone`, a layer that also contains other nodes does not count.
    """
    layers = [layer for layer in inspector.get("Layers", ()) if isinstance(layer, dict)]
    if alone:
        layers = [layer for layer in layers if {*_nodes_of(layer)} <= {*products}]
    texts = [
        _type_text(tensor)
        for layer in layers
        if not {*_nodes_of(layer)}.isdisjoint(products)
        for tensor in (*layer.get("Inputs", ()), *layer.get("Outputs", ()))
    ]
    return {
        name
        for name, pattern in KERNEL_TYPES.items()
        if any(re.search(rf"\b({pattern})\b", text, re.IGNORECASE) for text in texts)
    }


def _nodes_of(layer: Mapping[str, Any]) -> list[str]:
    return re.findall(r"\[ONNX Layer: ([^\]]*)\]", str(layer.get("Metadata")))


def _type_text(tensor: Mapping[str, Any]) -> str:
    texts = {key.lower(): str(value) for key, value in tensor.items()}
    return next((texts[key] for key in TYPE_KEYS if texts.get(key)), "")
