"""Creates the candidates of a benchmark from bundles, and from models, which it exports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

from ...common.console import Progress
from ...common.locations import url_of
from ...data.user_code import names_code
from ...errors import UsageError
from ...exporter.bundle.bundle import Bundle
from ...exporter.bundle.manifest import MANIFEST_FILE, GraphRecord, Manifest
from ...exporter.bundle.substitutes import read_substitutes
from ...exporter.bundle.verify import missed_parity
from ...exporter.job import export_job
from ...exporter.model import IN_MEMORY, Model
from ...exporter.options import ExportOptions
from ...exporter.requests import LoadRequest
from ...graphs.edits import Edits
from ...graphs.k import KOption, parse_k
from ...graphs.targets import TARGETS
from ..engines import GraphEngine
from ..measure.roofline import integer_linears
from ..plan import Candidate, GraphSource, constant_k, has_token_routed_layer
from ..ranges import Ranges
from ..request import BenchRequest
from ..results import BundleInfo
from .exported import (
    exported,
    graph_engines,
    graph_source,
    largest_k,
    model_name,
    with_distinct_lowerings,
)
from .models import reload_model
from .other_exporters import with_other_exporters


def from_bundle(bundle: Bundle, request: BenchRequest, *, model: Model | None = None) -> Candidate:
    """Returns a candidate for a bundle and the PyTorch model it was made from.

    The request's values of k are measured if the bundle's k is a graph input; a constant k is kept.
    Without `model` the checkpoint in the manifest is loaded. Raises `UsageError` if that is missing
    or has changed, and `BundleError` if a graph or weights have changed since they were written.
    """
    record, only = bundle.manifest, only_batch(bundle)
    if only is not None:
        request = replace(request, batch=(only,))
    edits = Edits.from_records(record.edits, str(bundle.path / MANIFEST_FILE))
    edits = edits.with_substitutes(read_substitutes(bundle.path))
    takes_k = record.k == "input"
    constant_ks = {layer.name: layer.k for layer in record.layers if layer.k is not None}
    model = model or _source_of(bundle)
    k, differs = _k_of(record, constant_ks, model)
    job = export_job(model, ExportOptions(edits=edits, k=k))
    model = job.model
    wanted = request.ks if takes_k else ()
    ks = [largest_k(constant_k(export_job(model, ExportOptions(k=k)))) for k in wanted]
    ks = ks or [largest_k(constant_ks)]
    graphs = [
        source
        for graph in record.graphs
        for source in _sources_of(bundle, graph, model, ks, constant_ks, request)
    ]
    name = bundle.path.name
    return Candidate(
        name=name,
        bundle=BundleInfo(name, str(bundle.path), takes_k),
        model=model,
        ks=tuple(ks),
        graphs=tuple(replace(graph, bundle=name) for graph in with_distinct_lowerings(graphs)),
        renormalize=record.renormalize,
        engines=request.engines,
        jobs_by_k={largest_k(constant_ks): job} if differs else {},
        only_batch=only,
    )


def _k_of(record: Manifest, constant_ks: Mapping[str, int], model: Model) -> tuple[KOption, bool]:
    """Returns the k of a bundle's model, and whether that model differs from the loaded one.

    It differs if a router chooses the experts, or if k is a share of each level of a hierarchy.
    """
    if any(layer.k_levels for layer in record.layers):
        return parse_k(record.k), True
    if has_token_routed_layer(model) and model.layers.keys() == constant_ks.keys():
        return tuple(constant_ks[name] for name in model.layers), True
    return "n", False


def _sources_of(
    bundle: Bundle,
    graph: GraphRecord,
    model: Model,
    ks: Sequence[int],
    constant_ks: Mapping[str, int],
    request: BenchRequest,
) -> list[GraphSource]:
    """Returns a graph of a bundle for each k and engine with which it is measured."""
    record = bundle.manifest
    any_batch = not graph.batches
    sizes = frozenset(b for b in request.batches if any_batch or record.graph_for(b) is graph)
    file = bundle.graph_file(graph.file)
    integers = integer_linears(file, record.numbers.get("linears", {}))
    # The rows of INT8 graphs only show large differences; this shows small ones.
    missed = missed_parity(bundle.path, record, graph)
    return [
        graph_source(
            runtime,
            request.threads,
            model,
            file,
            k,
            graph.lowerings.values(),
            selected=graph.selected,
            given_k=k if record.k == "input" else None,
            precision=record.precision,
            k_by_layer=constant_ks,
            float_layers=frozenset(each.name for each in record.layers if each.precision != "int8"),
            integer_linears=integers,
            batches=sizes if len(request.batches) > 1 and runtime.backend is None else None,
            parity=graph.parity,
            missed=missed,
            deploy=_run_arguments(bundle, graph, runtime, k, request.threads),
        )
        for k, runtime in product(ks, graph_engines(request))
        # Graphs for some batch sizes are timed at those; an engine belongs to the main graph.
        if (any_batch or graph is record.graphs[0] if runtime.backend else sizes)
    ]


def _run_arguments(
    bundle: Bundle, graph: GraphRecord, runtime: GraphEngine, k: int, threads: int | None
) -> tuple[str, ...]:
    """Returns the command that runs a bundle's graph as measured, without the inputs."""
    arguments = ["run", str(bundle.path)]
    record = bundle.manifest
    arguments += ["--k", str(k)] if record.k == "input" else []
    needs_name = len(record.graphs) > 1 and not graph.batches
    arguments += ["--graph", graph.file] if needs_name else []
    if runtime.backend is not None:
        return (*arguments, "--engine", runtime.backend)
    if runtime.engine != TARGETS[record.target].runtime:
        arguments += ["--engine", runtime.engine]
    if runtime.provider != "cpu":
        arguments += ["--provider", runtime.provider]
    elif threads is not None:
        arguments += ["--threads", str(threads)]
    return tuple(arguments)


def only_batch(bundle: Bundle) -> int | None:
    """Returns the only batch size of a bundle; None if any works.

    It is a constant of its graphs, or the number of inputs that they compute together.
    """
    spec = bundle.manifest.inputs[0]
    size = spec.shape[0]
    return size if isinstance(size, int) else spec.groups_of


def batch_sizes(sources: Sequence[Model | Bundle], request: BenchRequest) -> tuple[int, ...]:
    """Returns the batch sizes to measure: requested ones, or the common size of all bundles.

    Raises `UsageError` for a bundle whose size the request does not name, and for requested sizes
    that no bundle has.
    """
    bundles = [(item, only_batch(item)) for item in sources if isinstance(item, Bundle)]
    sizes = sorted({size for _, size in bundles if size is not None})
    for model in (item for item in sources if isinstance(item, Model) and item.batch_of > 1):
        sizes = sorted({*sizes, model.batch_of})
        if request.batch is not None and {*request.batches} != {model.batch_of}:
            raise UsageError(
                f"--batch {','.join(map(str, request.batches))}: {model.source.path} routes the "
                f"tokens of {model.batch_of} inputs together and needs a batch of that size",
                hint=f"use --batch {model.batch_of}, or a group_size of one input",
            )
    if request.batch is None:
        return tuple(sizes) or request.batches
    fixed = not exports(sources) and all(size is not None for _, size in bundles)
    for bundle, size in bundles:
        if size is None or (size in request.batches and not fixed):
            continue
        if not {size} <= {*request.batches} <= {*sizes}:
            typed = ",".join(map(str, request.batches))
            raise UsageError(
                f"--batch {typed}: {bundle.path} was exported with --batch {size} and only runs "
                "batches of that size",
                hint=f"use --batch {','.join(map(str, sizes))}, or export the bundle with a range: "
                f"--batch 1:{size}:32",
            )
    return request.batches


def exports(sources: Sequence[Model | Bundle]) -> bool:
    """Returns whether there is a model to export: one that no bundle follows."""
    pairs = zip(sources, (*sources[1:], None), strict=True)
    return any(isinstance(item, Model) and not isinstance(after, Bundle) for item, after in pairs)


def check_exported(sources: Sequence[Model | Bundle], request: BenchRequest) -> None:
    """Raises `UsageError` for export options if there are only bundles."""
    if exports(sources):
        return
    bundles = [item for item in sources if isinstance(item, Bundle)]
    takes_k = any(bundle.manifest.k == "input" for bundle in bundles)
    if request.k is not None and not takes_k:
        ks = ", ".join(f"{bundle.path} (k = {bundle.manifest.k})" for bundle in bundles[:4])
        raise UsageError(
            f"--k: k is a constant of the given bundles: {ks}",
            hint="leave --k out, name a model without its bundle, or export a bundle with "
            "--k input, which is measured at every k",
        )
    options = {
        "--lowering": request.lowering is not None,
        "--precision": request.precision is not None,
        "--target": request.target is not None,
        "--quantize": request.quantize is not None,
        "renormalize": request.renormalize,
        "--calibrate-data": request.calibrate_data is not None,
        "--calibration": request.calibration is not None,
    }
    for option, given in options.items():
        if given:
            raise UsageError(
                f"{option}: the given bundles are measured unchanged",
                hint=f"leave {option} out, or name a model without its bundle",
            )


def with_sources(sources: Sequence[Model | Bundle]) -> list[tuple[Model, list[Bundle]]]:
    """Returns every model with its bundles, in the order in which they were first named.

    A bundle belongs to the model with the same weights and settings, wherever it is named;
    otherwise to its own source, if that exists, or to the model before the bundle. Raises
    `UsageError` if a bundle is named twice or its model is neither named nor available.
    """
    models: list[tuple[Model, str, list[Bundle]]] = []
    paths: set[Path] = set()
    previous: tuple[Model, str, list[Bundle]] | None = None
    for item in sources:
        if isinstance(item, Model):
            digest = item.source.sha256() if item.source.files else ""
            previous = (item, _model_key(digest, item.config), [])
            models.append(previous)
            continue
        if item.path.resolve() in paths:
            raise UsageError(f"{item.path}: the bundle is named twice", hint="name it once")
        paths.add(item.path.resolve())
        source = item.manifest.source
        key = _model_key(source.sha256, source.config)
        owner = next((each for each in models if each[1] == key), None)
        if owner is None:
            try:
                owner = (_source_of(item), key, [])
            except UsageError:
                if previous is None:
                    raise
                owner = previous
            else:
                models.append(owner)
        owner[2].append(item)
    return [(model, bundles) for model, _, bundles in models]


def _model_key(sha256: str, config: Mapping[str, Any]) -> str:
    return json.dumps([sha256, config], sort_keys=True, default=str)


@contextmanager
def candidates_of(
    models: Sequence[tuple[Model, list[Bundle]]],
    request: BenchRequest,
    progress: Progress,
    ranges: Ranges,
) -> Iterator[list[Candidate]]:
    """Yields the candidates: a model that is exported, or all bundles of a model together."""
    candidates: list[Candidate] = []
    paths: list[Path] = []
    with ExitStack() as stack:
        for model, bundles in models:
            if not bundles:
                candidate = exported(
                    model, request, inputs=ranges.inputs, table=ranges.table, progress=progress
                )
                candidates.append(stack.enter_context(candidate))
                paths.append(Path(model.source.path))
                continue
            joint = side_by_side(bundles, request, model)
            candidates += [
                stack.enter_context(with_other_exporters(each, request.threads)) for each in joint
            ]
            alone = len(bundles) == 1
            paths += [bundles[0].path if alone else Path(model.source.path)] * len(joint)
        yield with_distinct_names(candidates, paths)


def side_by_side(
    bundles: Sequence[Bundle], request: BenchRequest, model: Model, *, name: str | None = None
) -> list[Candidate]:
    """Returns the bundles of a model as one candidate: they are timed in turn and share a table.

    If some bundles run only one batch size, each size has a candidate with the bundles that run it.
    """
    running: dict[int, list[Bundle]] = {
        size: [bundle for bundle in bundles if only_batch(bundle) in (None, size)]
        for size in request.batches
    }
    running = {size: group for size, group in running.items() if group}
    if all(group == list(bundles) for group in running.values()):
        return [_joint_candidate(bundles, request, model, name)]
    candidates = []
    for size, group in running.items():
        candidate = _joint_candidate(group, replace(request, batch=(size,)), model, name)
        if candidate.only_batch is None or len(group) > 1:
            sized_name = f"{name or model_name(model.source.path)}, {size} at once"
            candidate = replace(candidate, name=sized_name, only_batch=size)
        candidates.append(candidate)
    return candidates


def _joint_candidate(
    bundles: Sequence[Bundle], request: BenchRequest, model: Model, name: str | None
) -> Candidate:
    """Returns the bundles as one candidate; a single bundle stays unchanged."""
    each = [from_bundle(bundle, request, model=model) for bundle in bundles]
    each = with_distinct_names(each, [bundle.path for bundle in bundles])
    return each[0] if len(each) == 1 else joined(each, model, name)


def joined(bundles: Sequence[Candidate], model: Model, name: str | None = None) -> Candidate:
    """Returns bundles of a model as one candidate, whose name the rows have."""
    first = bundles[0]
    sizes = (each.only_batch for each in bundles if each.only_batch is not None)
    joint = Candidate(
        name=name or model_name(model.source.path),
        model=model,
        renormalize=first.renormalize,
        engines=first.engines,
        only_batch=next(sizes, None),
        bundles=tuple(bundles),
    )
    distinct = {bundle.name for bundle in joint.distinct_bundles}
    unchanged = [each for each in bundles if each.name not in distinct]
    graphs = [graph for each in bundles for graph in each.graphs]
    rows = Counter(graph.row_key for graph in graphs)
    return replace(
        joint,
        ks=tuple(sorted({k for each in unchanged for k in each.ks}, reverse=True)),
        jobs_by_k={k: job for each in unchanged for k, job in each.jobs_by_k.items()},
        graphs=tuple(
            replace(graph, apart=rows[graph.row_key] > 1 or graph.bundle in distinct)
            for graph in graphs
        ),
    )


def with_distinct_names(candidates: Sequence[Candidate], paths: Sequence[Path]) -> list[Candidate]:
    """Returns candidates with distinct names, by adding the folders that distinguish them.

    `paths` are those of the candidates: `a/vit.pt` and `b/vit.pt` become `a/vit` and `b/vit`. A
    path that is given twice keeps its name, which the plan rejects.
    """
    names = [candidate.name for candidate in candidates]
    # from the innermost folder outwards
    folders = [path.absolute().parts[-2::-1] for path in paths]
    for parents in zip_longest(*folders):  # the folders of all paths at one depth
        repeated = {name for name in names if names.count(name) > 1}
        names = [
            f"{folder}/{name}" if name in repeated and folder is not None else name
            for name, folder in zip(names, parents, strict=True)
        ]
    if len(set(names)) < len(names):
        return list(candidates)
    return [_with_name(each, name) for each, name in zip(candidates, names, strict=True)]


def _with_name(candidate: Candidate, name: str) -> Candidate:
    """Returns a candidate with another name, also in the graphs of a single bundle."""
    if candidate.bundle is None:
        return replace(candidate, name=name)
    return replace(
        candidate,
        name=name,
        bundle=replace(candidate.bundle, name=name),
        graphs=tuple(replace(graph, bundle=name) for graph in candidate.graphs),
    )


def _source_of(bundle: Bundle) -> Model:
    source = bundle.manifest.source
    path = Path(source.path)
    if source.path.endswith(IN_MEMORY):
        raise UsageError(
            f"{bundle.path} was made from {source.path}: that network is not in a file, but the "
            "untouched PyTorch model is part of every benchmark",
            hint="give the network before the bundle, in Python: moexport.bench([model, bundle]); "
            "`moexport verify` compares a bundle alone with its recorded outputs",
        )
    if names_code(source.path):
        raise UsageError(
            f"{bundle.path} was made from {source.path}, which a benchmark also needs",
            hint="name it before the bundle, with the options that load it: moexport bench "
            f"{source.path} {bundle.path}",
        )
    if url_of(source.path) is not None:
        raise UsageError(
            f"{bundle.path} was made from {source.path}, which is a URL and is not downloaded",
            hint=f"name it before the bundle: moexport bench {source.path} {bundle.path}",
        )
    if not path.exists():
        raise UsageError(
            f"{bundle.path}: its checkpoint {path} does not exist, but the untouched PyTorch model "
            "is part of every benchmark",
            hint=f"name the checkpoint before the bundle: moexport bench CHECKPOINT {bundle.path}",
        )
    request = LoadRequest(family=source.family, config=source.config)
    model = reload_model(source.path, request)
    if model.source.sha256() != source.sha256:
        raise UsageError(
            f"{path} is not the checkpoint that {bundle.path} was made from (SHA-256 differs)",
            hint="export again, or name the correct checkpoint before the bundle",
        )
    return model
