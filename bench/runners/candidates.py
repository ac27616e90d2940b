"""Makes what a benchmark measures from what a user names: models, exported for it, and bundles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product, zip_longest
from pathlib import Path

from ...common.console import Progress
from ...common.locations import url_of
from ...common.user_code import names_code
from ...data.feeds import Feed
from ...errors import UsageError
from ...exporter.bundle.bundle import Bundle
from ...exporter.bundle.manifest import MANIFEST_FILE
from ...exporter.bundle.substitutes import read_substitutes
from ...exporter.bundle.verify import missed_parity
from ...exporter.edits import Edits
from ...exporter.job import export_job
from ...exporter.model import Model
from ...exporter.options import AUTO, ExportOptions, KOption
from ...exporter.requests import LoadRequest
from ..measure.roofline import integer_linears
from ..plan import Candidate, whole_k
from ..request import BenchRequest
from .exported import exported, graph_engines, graph_source, largest_k, rounded_linears, told_apart
from .models import loaded_again
from .other_exporters import with_other_exporters


def from_bundle(bundle: Bundle, request: BenchRequest, *, model: Model | None = None) -> Candidate:
    """Returns a bundle beside the PyTorch model it was made from.

    The k of a request are measured where the bundle's k is a graph input; a baked k stays. Without
    `model` the checkpoint that the manifest names is loaded; `UsageError` when it is gone or
    another. `BundleError` for a graph or weights that are not as they were written.
    """
    record, only = bundle.manifest, only_batch(bundle)
    if only is not None:
        request = replace(request, batch=(only,))
    edits = Edits.from_records(record.edits, str(bundle.path / MANIFEST_FILE))
    edits = edits.with_substitutes(read_substitutes(bundle.path))
    takes_k = record.k == "input"
    baked = {layer.name: layer.k for layer in record.layers if layer.k is not None}
    loaded = model or _source_of(bundle)
    routed = any(layer.spec.flat for layer in loaded.layers.values())
    routed &= loaded.layers.keys() == baked.keys()
    # Of experts that a router chooses another k is another model.
    k: KOption = tuple(baked[name] for name in loaded.layers) if routed else "n"
    job = export_job(loaded, ExportOptions(edits=edits, k=k))
    model = job.model
    wanted = request.ks if takes_k else ()
    ks = [largest_k(whole_k(export_job(model, ExportOptions(k=k)))) for k in wanted]
    ks = ks or [largest_k(baked)]
    linears = rounded_linears(record.numbers.get("linears", {}))
    floating = frozenset(layer.name for layer in record.layers if layer.precision != "int8")
    graphs = []
    for graph in record.graphs:
        for_all = not graph.batches
        sizes = frozenset(b for b in request.batches if for_all or record.graph_for(b) is graph)
        file = bundle.graph_file(graph.file)
        integers = integer_linears(file, linears)
        # In INT8 the rows of a benchmark alone tell large differences only: this tells small ones.
        missed = missed_parity(bundle.path, record, graph)
        graphs += [
            graph_source(
                runtime,
                request.threads,
                model,
                file,
                k,
                graph.lowerings.values(),
                selected=graph.selected,
                given_k=k if takes_k else None,
                precision=record.precision,
                k_by_layer=baked,
                floating=floating,
                integers=integers,
                batches=sizes if len(request.batches) > 1 and runtime.backend is None else None,
                parity=graph.parity,
                missed=missed,
            )
            for k, runtime in product(ks, graph_engines(request))
            # Of graphs for some sizes of the batch each is timed at its own; an engine is the main.
            if (for_all or graph is record.graphs[0] if runtime.backend else sizes)
        ]
    return Candidate(
        name=bundle.path.name,
        model=model,
        ks=tuple(ks),
        graphs=told_apart(graphs),
        renormalize=record.renormalize,
        engines=request.engines,
        routed={largest_k(baked): job} if routed else {},
        only_batch=only,
    )


def only_batch(bundle: Bundle) -> int | None:
    """Returns the one batch size that a bundle is measured with; None where any will do.

    It is a constant of its graphs, or of the inputs that they compute together.
    """
    port = bundle.manifest.inputs[0]
    size = port.shape[0]
    return size if isinstance(size, int) else port.groups_of


def batch_sizes(listed: Sequence[Model | Bundle], request: BenchRequest) -> tuple[int, ...]:
    """Returns the batch sizes to measure: those of a request, else those that are all a bundle has.

    Raises `UsageError` for a bundle of one size that the request does not name, and for sizes of
    the request where all bundles have others.
    """
    held = [(item, only_batch(item)) for item in listed if isinstance(item, Bundle)]
    sizes = sorted({size for _, size in held if size is not None})
    for model in (item for item in listed if isinstance(item, Model) and item.batch_of > 1):
        sizes = sorted({*sizes, model.batch_of})
        if request.batch is not None and {*request.batches} != {model.batch_of}:
            raise UsageError(
                f"--batch {','.join(map(str, request.batches))}: {model.source.path} routes the "
                f"tokens of {model.batch_of} inputs together, and is measured with so many",
                hint=f"use --batch {model.batch_of}, or a group_size of one input",
            )
    if request.batch is None:
        return tuple(sizes) or request.batches
    fixed = len(held) > 0 and all(size is not None for _, size in held) and not _exports(listed)
    for bundle, size in held:
        if size is None or (size in request.batches and not fixed):
            continue
        if not {size} <= {*request.batches} <= {*sizes}:
            typed = ",".join(map(str, request.batches))
            raise UsageError(
                f"--batch {typed}: {bundle.path} was exported with --batch {size} and runs batches "
                "of that size alone",
                hint=f"use --batch {','.join(map(str, sizes))}, or export it with a range: "
                f"--batch 1:{size}:32",
            )
    return request.batches


def _exports(listed: Sequence[Model | Bundle]) -> bool:
    """Whether there is a model to export: one that no bundle follows."""
    pairs = zip(listed, (*listed[1:], None), strict=True)
    return any(isinstance(item, Model) and not isinstance(then, Bundle) for item, then in pairs)


def check_exported(listed: Sequence[Model | Bundle], request: BenchRequest) -> None:
    """Raises `UsageError` for what says how a model is exported where only bundles are."""
    if _exports(listed):
        return
    idle = {
        "--lowering": request.lowerings != (AUTO,),
        "--precision": request.precisions != ("fp32",),
        "--target": request.target != "onnx",
    }
    for option, changed in idle.items():
        if changed:
            raise UsageError(
                f"{option}: the bundles that were named are measured as they are",
                hint=f"leave {option} out, or name a model without its bundle",
            )


def with_sources(listed: Sequence[Model | Bundle]) -> list[Model | Bundle]:
    """Returns models and bundles, before the bundles of no model the one that they came from."""
    listing: list[Model | Bundle] = []
    came_from: str | None = None
    after_model = False
    for item in listed:
        if isinstance(item, Model):
            after_model = True
        elif not after_model and came_from != item.manifest.source.sha256:
            listing.append(_source_of(item))
            came_from = item.manifest.source.sha256
        listing.append(item)
    return listing


@contextmanager
def candidates_of(
    listed: Sequence[Model | Bundle],
    request: BenchRequest,
    progress: Progress,
    inputs: Feed | None = None,
) -> Iterator[list[Candidate]]:
    """Yields a candidate per model; the bundles that follow a model are measured beside it."""
    candidates: list[Candidate] = []
    places: list[Path] = []
    model: Model | None = None
    with ExitStack() as stack:
        for item, then in zip(listed, (*listed[1:], None), strict=True):
            if isinstance(item, Bundle):
                beside = from_bundle(item, request, model=model)
                candidates.append(
                    stack.enter_context(with_other_exporters(beside, request.threads))
                )
                places.append(item.path)
                continue
            model = item
            if not isinstance(then, Bundle):
                candidates.append(
                    stack.enter_context(exported(model, request, inputs=inputs, progress=progress))
                )
                places.append(Path(model.source.path))
        yield with_distinct_names(candidates, places)


def with_distinct_names(candidates: Sequence[Candidate], places: Sequence[Path]) -> list[Candidate]:
    """Returns candidates of one name with the folders before it that tell them apart.

    `places` are where they come from: `a/vit.pt` and `b/vit.pt` become `a/vit` and `b/vit`. One
    place named twice keeps its name, which a benchmark's plan refuses.
    """
    names = [candidate.name for candidate in candidates]
    folders = [place.absolute().parts[-2::-1] for place in places]  # from the last one upwards
    for above in zip_longest(*folders):  # at each depth the folder of every place
        repeated = {name for name in names if names.count(name) > 1}
        names = [
            f"{folder}/{name}" if name in repeated and folder is not None else name
            for name, folder in zip(names, above, strict=True)
        ]
    if len(set(names)) < len(names):
        return list(candidates)
    return [replace(one, name=name) for one, name in zip(candidates, names, strict=True)]


def _source_of(bundle: Bundle) -> Model:
    source = bundle.manifest.source
    path = Path(source.path)
    if names_code(source.path):
        raise UsageError(
            f"{bundle.path}: made from {source.path}, which every benchmark needs beside it",
            hint=f"name it before the bundle: moexport bench {source.path} {bundle.path}",
        )
    if url_of(source.path) is not None:
        raise UsageError(
            f"{bundle.path}: made from {source.path}, and what a manifest names is not downloaded",
            hint=f"name it before the bundle: moexport bench {source.path} {bundle.path}",
        )
    if not path.exists():
        raise UsageError(
            f"{bundle.path}: its checkpoint {path} is not here, and the untouched PyTorch model is "
            "part of every benchmark",
            hint=f"name the checkpoint before the bundle: moexport bench CHECKPOINT {bundle.path}",
        )
    request = LoadRequest(family=source.family, config=source.config)
    model = loaded_again(source.path, request)
    if model.source.sha256() != source.sha256:
        raise UsageError(
            f"{path}: is not the checkpoint that {bundle.path} was made from (SHA-256 differs)",
            hint="export again, or name the right checkpoint before the bundle",
        )
    return model
