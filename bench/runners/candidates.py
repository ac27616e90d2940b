"""Makes what a benchmark measures from what a user names: models and bundles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast, get_args

from ...calibration.feeds import Array
from ...common.console import Progress, Silent
from ...common.text import near_miss
from ...common.user_code import names_code
from ...errors import CalibrationError, LoweringError, MoexportError, UsageError
from ...exporter.bundle.bundle import Bundle
from ...exporter.bundle.manifest import MANIFEST_FILE
from ...exporter.bundle.verify import selected_values
from ...exporter.checkpoints.load import load
from ...exporter.edits import Edits
from ...exporter.export import export_plan
from ...exporter.inputs import AxisRange
from ...exporter.job import export_job
from ...exporter.model import Model, edited
from ...exporter.options import AUTO, TUNE, ExportOptions, KOption, PrecisionOptions, resolve_k
from ...exporter.plan import GraphPlan, Plan, plan_graph
from ...exporter.session import PROVIDERS
from ...exporter.tensorrt.backends import BACKENDS
from ...exporter.tensorrt.cache import default_cache
from ...exporter.tensorrt.options import CURRENT, EngineOptions
from ...exporter.write import manifest_of, write_graphs
from ...graphs.choices import Precision, Scope
from ...graphs.lower import Lowered
from ...graphs.targets import Target
from ..cases import Candidate, GraphSource
from ..measure.flops import integer_linears
from ..results import ONNXRUNTIME, PYTORCH_ALGORITHM_2
from .available import KINDS, EngineKind
from .base import Loader, Runner
from .onnxruntime import OnnxLoader
from .tensorrt import EngineLoader


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to measure of one model: the lists of its options.

    `engines` are names of `available.KINDS`. `calibration` are the inputs [samples, …] from which
    INT8 takes its ranges, and `scope` is what it quantises. `shape` is that of one input, for which
    engines are compiled; the export's own sizes without it. `cpu_target` is what graphs are
    exported for that ONNX Runtime runs on the CPU.
    """

    ks: tuple[KOption, ...]
    lowerings: tuple[str, ...] = (AUTO,)
    batches: tuple[int, ...] = (1,)
    engines: tuple[str, ...] = (PYTORCH_ALGORITHM_2, ONNXRUNTIME)
    precisions: tuple[Precision, ...] = ("fp32",)
    calibration: Array | None = None
    shape: tuple[int, ...] | None = None
    scope: Scope = "experts"
    threads: int | None = None
    renormalize: bool = False
    cpu_target: Target = "ort-cpu"

    @property
    def runtimes(self) -> tuple[EngineKind, ...]:
        """Those of the engines that run exported graphs."""
        kinds = [KINDS[name] for name in self.engines if KINDS[name].target is not None]
        return tuple(
            replace(kind, target=self.cpu_target) if kind.target == "ort-cpu" else kind
            for kind in kinds
        )

    def __post_init__(self) -> None:
        """Raises `UsageError` for `tune`: the sweep itself is the measurement."""
        if TUNE in self.lowerings:
            raise UsageError(
                "--lowering tune belongs to export: a benchmark measures what it is told",
                hint="name the lowerings to compare, as --lowering dense,gather,grouped",
            )


@contextmanager
def exported(
    model: Model,
    sweep: Sweep,
    *,
    name: str | None = None,
    progress: Progress | None = None,
) -> Iterator[Candidate]:
    """Yields a model with a graph per k and lowering, exported to a folder that goes after.

    The graphs for one engine and precision share one weights file. `auto` stands for what the cost
    model chooses for each of the batch sizes.
    """
    progress = progress or Silent()
    graphs: list[GraphSource] = []
    specs = {layer: module.spec for layer, module in model.layers.items()}
    with TemporaryDirectory(prefix="moexport-bench-") as folder:
        for runtime, precision in product(sweep.runtimes, sweep.precisions):
            place = Path(folder) / f"{runtime.name}-{precision}"
            place.mkdir()
            progress.step(f"exporting {model.source.path} for {runtime.name} in {precision}")
            try:
                graphs += _sources(model, sweep, runtime, precision, place)
            except (LoweringError, UsageError, CalibrationError) as error:
                if precision == "fp32" and not runtime.compiles:
                    raise
                # A precision that a model or target cannot take is a row that says so.
                every = product(sweep.ks, sweep.lowerings)
                reasons = {(_largest(resolve_k(k, specs)), name): error for k, name in every}
                graphs += _refused(reasons, runtime, precision)
        said = [each.loader.reason for each in graphs if isinstance(each.loader, Refused)]
        if graphs and len(said) == len(graphs):
            raise said[0]
        yield Candidate(
            name=name or _named(model.source.path),
            model=model,
            ks=tuple(sorted({_largest(resolve_k(k, specs)) for k in sweep.ks}, reverse=True)),
            graphs=tuple(graphs),
            renormalize=sweep.renormalize,
            engines=sweep.engines,
        )


@dataclass(frozen=True)
class Refused(Loader):
    """A graph that could not be exported: opening it tells why."""

    reason: MoexportError

    def __call__(self) -> Runner:
        """Raises the reason."""
        raise self.reason


def _refused(
    reasons: Mapping[tuple[int, str], MoexportError], runtime: EngineKind, precision: Precision
) -> list[GraphSource]:
    """A graph for every k and lowering that cannot be exported."""
    return [
        GraphSource(k, lowering, Refused(reason), runtime.provider, precision, runtime.engine)
        for (k, lowering), reason in reasons.items()
    ]


def _sources(
    model: Model, sweep: Sweep, runtime: EngineKind, precision: Precision, folder: Path
) -> list[GraphSource]:
    """Exports the graphs of a sweep for one runtime; a lowering twice the same is one graph.

    One that cannot serve a layer in this precision is refused by itself.
    """
    assert runtime.target is not None
    options = ExportOptions(
        target=runtime.target,
        renormalize=sweep.renormalize,
        precision=PrecisionOptions(
            precision, scope=sweep.scope if precision == "int8" else "experts"
        ),
        verify=False,
    )
    data = sweep.calibration if precision == "int8" else None
    planned = export_plan(export_job(model, options, data=data))
    integers = _integers({each.node: each.reason for each in planned.precision.linears})
    specs = {layer: module.spec for layer, module in model.layers.items()}
    graphs: dict[tuple[int, tuple[str, ...]], GraphPlan] = {}
    reasons: dict[tuple[int, str], MoexportError] = {}
    for k, lowering, batch in product(sweep.ks, sweep.lowerings, sweep.batches):
        ks = resolve_k(k, specs)
        try:
            sized = replace(options, batch=AxisRange(batch, batch, batch))
            job = replace(planned.job, options=sized, k=ks)
            graph = plan_graph(job, planned.traced, lowering, f"model-{len(graphs)}.onnx")
        except LoweringError as error:
            reasons[_largest(ks), lowering] = error
        else:
            graphs.setdefault((_largest(ks), graph.lowerings), graph)
    refused = _refused(reasons, runtime, precision)
    if not graphs:
        return refused
    planned = replace(planned, graphs=tuple(graphs.values()))
    lowered = write_graphs(planned, folder)
    if runtime.compiles:
        _write_manifest(planned, lowered, folder)
    engine = engine_options(model, sweep, runtime.engine) if runtime.compiles else None
    experts = {name: spec.experts for name, spec in specs.items() if _has_sets(spec.kind)}
    return refused + [
        GraphSource(
            k=k,
            lowering="+".join(sorted(set(names))),
            loader=_loader(
                *(runtime, sweep, folder / graph.file),
                *(selected_values(lowered[graph.file].values), experts),
                engine=engine,
            ),
            provider=runtime.provider,
            precision=precision,
            engine=runtime.engine,
            k_by_layer={layer.name: layer.work.k for layer in graph.layers},
            integers=integer_linears(folder / graph.file, integers),
        )
        for (k, names), graph in graphs.items()
    ]


def _loader(
    runtime: EngineKind,
    sweep: Sweep,
    file: Path,
    selected: Mapping[str, str],
    experts: Mapping[str, int],
    k: int | None = None,
    engine: EngineOptions | None = None,
) -> Loader:
    """What opens a graph's `file` in a runtime; `k` where it is an input of the graph."""
    if runtime.compiles:
        return EngineLoader(file.parent, runtime.engine, file.name, k, engine)
    return OnnxLoader(file, selected, experts, k, sweep.threads, PROVIDERS[runtime.provider])


def _write_manifest(planned: Plan, lowered: Mapping[str, Lowered], folder: Path) -> None:
    """Makes the folder a bundle, which is what engines are built into."""
    manifest = manifest_of(planned, lowered, {}, folder)
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")


def engine_options(model: Model, sweep: Sweep, backend: str) -> EngineOptions:
    """Returns how a sweep compiles: a profile for each batch size, of exactly the inputs' shape.

    Finished engines are kept where those of `export` are.
    """
    sizes: dict[str, AxisRange] = {}
    if sweep.shape is not None and len(sweep.shape) == len(model.input.shape) - 1:
        named = zip(model.input.shape[1:], sweep.shape, strict=True)
        sizes = {axis: _exactly(size) for axis, size in named if isinstance(axis, str)}
    return EngineOptions(
        profiles=tuple({"batch": _exactly(batch)} | sizes for batch in sorted({*sweep.batches})),
        compute_capabilities=(CURRENT,) if BACKENDS[backend].cards else (),
        cache=default_cache(),
    )


def _integers(linears: Mapping[str, str | None]) -> list[str]:
    """Those linear layers of a backbone that nothing kept in floats."""
    return [node for node, reason in linears.items() if reason is None]


def _exactly(size: int) -> AxisRange:
    return AxisRange(size, size, size)


def _largest(ks: Mapping[str, int | None]) -> int:
    return max(value for value in ks.values() if value is not None)


def from_bundle(bundle: Bundle, sweep: Sweep, *, model: Model | None = None) -> Candidate:
    """Returns a bundle beside the PyTorch model it was made from.

    The k of a sweep are measured where the bundle's k is a graph input; a baked k stays. Without
    `model` the checkpoint that the manifest names is loaded; `UsageError` when it is gone or
    another.
    """
    record = bundle.manifest
    edits = Edits.from_records(record.edits, str(bundle.path / MANIFEST_FILE))
    model = edited(model or _source_of(bundle), edits)
    takes_k = record.k == "input"
    experts = {m.name: m.experts for m in record.layers if _has_sets(m.kind)}
    if takes_k:
        specs = {name: layer.spec for name, layer in model.layers.items()}
        ks = [_largest(resolve_k(each, specs)) for each in sweep.ks]
    else:
        ks = [max(layer.k for layer in record.layers if layer.k is not None)]
    linears = _integers(record.numbers.get("linears", {}))
    integers = {
        graph.file: integer_linears(bundle.path / graph.file, linears) for graph in record.graphs
    }
    return Candidate(
        name=bundle.path.name,
        model=model,
        ks=tuple(ks),
        graphs=tuple(
            GraphSource(
                k=k,
                lowering="+".join(sorted(set(graph.lowerings.values()))),
                loader=_loader(
                    *(runtime, sweep, bundle.path / graph.file, graph.selected, experts),
                    k if takes_k else None,
                ),
                provider=runtime.provider,
                precision=record.precision,
                engine=runtime.engine,
                k_by_layer={layer.name: layer.k for layer in record.layers if layer.k is not None},
                floating=frozenset(m.name for m in record.layers if m.precision != "int8"),
                integers=integers[graph.file],
            )
            for graph in record.graphs
            for k in ks
            for runtime in sweep.runtimes
        ),
        renormalize=record.renormalize,
        engines=sweep.engines,
    )


def _named(source: str) -> str:
    """What a model is called in results: its file without the ending, or the code that makes it."""
    return source if names_code(source) else Path(source).stem


def with_distinct_names(candidates: Sequence[Candidate], places: Sequence[Path]) -> list[Candidate]:
    """Returns candidates of one name with the folders before it that tell them apart.

    `places` are where they come from: `a/vit.pt` and `b/vit.pt` become `a/vit` and `b/vit`. One
    place named twice keeps its name, which a benchmark's plan refuses.
    """
    names = [candidate.name for candidate in candidates]
    folders = [place.absolute().parts[-2::-1] for place in places]  # from the last one upwards
    for depth in range(max(map(len, folders), default=0) + 1):
        repeated = {name for name in names if names.count(name) > 1}
        if not repeated:
            break
        names = [
            f"{above[depth]}/{name}" if name in repeated and depth < len(above) else name
            for name, above in zip(names, folders, strict=True)
        ]
    else:
        names = [candidate.name for candidate in candidates]
    return [
        replace(candidate, name=name) for candidate, name in zip(candidates, names, strict=True)
    ]


def _source_of(bundle: Bundle) -> Model:
    source = bundle.manifest.source
    path = Path(source.path)
    if names_code(source.path):
        raise UsageError(
            f"{bundle.path}: made from {source.path}, which every benchmark needs beside it",
            hint=f"name it before the bundle: moexport bench {source.path} {bundle.path}",
        )
    if not path.exists():
        raise UsageError(
            f"{bundle.path}: its checkpoint {path} is not here, and the untouched PyTorch model is "
            "part of every benchmark",
            hint=f"name the checkpoint before the bundle: moexport bench CHECKPOINT {bundle.path}",
        )
    model = load(path, family=source.family, config=source.config)
    if model.source.sha256() != source.sha256:
        raise UsageError(
            f"{path}: is not the checkpoint that {bundle.path} was made from (SHA-256 differs)",
            hint="export again, or name the right checkpoint before the bundle",
        )
    return model


def _has_sets(kind: str) -> bool:
    """Whether layers of a kind choose a set of experts per input, which routing rows compare."""
    return kind == "soft-moe"


def parse_precisions(text: str) -> tuple[Precision, ...]:
    """Returns the precisions of a list; UsageError for a name that is none."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in get_args(Precision)]
    if unknown or not names:
        raise UsageError(
            f"--precision {text}: there is no such precision",
            hint=near_miss(next(iter(unknown), ""), get_args(Precision)),
        )
    return tuple(dict.fromkeys(cast(Precision, name) for name in names))
