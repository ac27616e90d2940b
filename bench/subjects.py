"""Makes what a benchmark measures from what a user names: models and bundles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast, get_args

from ..errors import CalibrationError, LoweringError, MoexportError, UsageError
from ..exporter.bundle import Bundle, selected_values
from ..exporter.edited import edited
from ..exporter.edits import Edits
from ..exporter.engines.flavours import FLAVOURS
from ..exporter.engines.profiles import profile
from ..exporter.export import port_of, prepare, write_graphs
from ..exporter.hashing import hash_files
from ..exporter.load import load
from ..exporter.manifest import MANIFEST_FILE
from ..exporter.model import Model
from ..exporter.numbers import Numbers, Scope
from ..exporter.options import AUTO, DEFAULT_TOKENS, TUNE, AxisRange, ExportOptions, Kept
from ..exporter.plan import GraphPlan, plan_graph, resolve_k
from ..exporter.progress import Progress, Silent
from ..exporter.tables import table_for_export
from ..graphs.arithmetic import Precision
from ..graphs.moe import MoESpec
from ..graphs.target import Target
from .data import Array
from .engine_runner import BundleEngine, GraphEngine
from .engines import Graph, GraphSource, Subject
from .graph_runner import OnnxOpener
from .results import ONNXRUNTIME, PYTORCH_ALGORITHM_2

PROVIDERS: dict[str, tuple[str, Target]] = {
    "cpu": ("CPUExecutionProvider", "ort-cpu"),
    "cuda": ("CUDAExecutionProvider", "ort-cuda"),
    "tensorrt": ("TensorrtExecutionProvider", "onnx"),
}
"""ONNX Runtime's providers by the rows' name for them, and the target that graphs are made for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a sweep asks of one model: the lists of its options.

    `calibration` are the inputs [samples, …] from which INT8 takes its ranges, and `scope` is what
    it quantises.
    """

    ks: tuple[Kept, ...]
    lowerings: tuple[str, ...] = (AUTO,)
    batches: tuple[int, ...] = (1,)
    engines: tuple[str, ...] = (PYTORCH_ALGORITHM_2,)
    providers: tuple[str, ...] = ("cpu",)
    precisions: tuple[Precision, ...] = ("fp32",)
    calibration: Array | None = None
    scope: Scope = "experts"
    threads: int | None = None
    renormalize: bool = False

    @property
    def flavours(self) -> tuple[str, ...]:
        """The TensorRTs among the engines."""
        return tuple(name for name in self.engines if name in FLAVOURS)

    @property
    def runtimes(self) -> tuple[str, ...]:
        """The providers of ONNX Runtime, and the TensorRTs."""
        return (*self.providers, *self.flavours)

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
    asked: Asked,
    *,
    name: str | None = None,
    progress: Progress | None = None,
) -> Iterator[Subject]:
    """Yields a model with a graph per k and lowering, exported to a folder that goes after.

    The graphs for one provider share one weights file. `auto` stands for what the cost model
    chooses for each of the batch sizes.
    """
    progress = progress or Silent()
    graphs: list[GraphSource] = []
    specs = {layer: module.spec for layer, module in model.layers.items()}
    with TemporaryDirectory(prefix="moexport-bench-") as folder:
        for provider, precision in product(asked.runtimes, asked.precisions):
            place = Path(folder) / f"{provider}-{precision}"
            place.mkdir()
            progress.step(f"exporting {model.source.path} for {provider} in {precision}")
            try:
                graphs += _sources(model, asked, provider, precision, place)
            except (LoweringError, UsageError, CalibrationError) as error:
                if precision == "fp32" and provider in asked.providers:
                    raise
                # A precision that a model or target cannot take is a row that says so.
                graphs += _refused(asked, specs, provider, precision, error)
        yield Subject(
            name=name or Path(model.source.path).stem,
            model=model,
            ks=tuple(sorted({_largest(resolve_k(k, specs)) for k in asked.ks}, reverse=True)),
            graphs=tuple(graphs),
            renormalize=asked.renormalize,
            engines=asked.engines,
        )


@dataclass(frozen=True)
class Refused:
    """A graph that could not be exported: opening it tells why."""

    reason: MoexportError

    def __call__(self) -> Graph:
        """Raises the reason."""
        raise self.reason


def _refused(
    asked: Asked,
    specs: Mapping[str, MoESpec],
    provider: str,
    precision: Precision,
    reason: MoexportError,
) -> list[GraphSource]:
    """A graph for every k and lowering that were asked for, none of which can be opened."""
    ks = dict.fromkeys(_largest(resolve_k(k, specs)) for k in asked.ks)
    return [
        GraphSource(k, lowering, Refused(reason), provider, precision, _engine_of(provider))
        for k, lowering in product(ks, asked.lowerings)
    ]


def _sources(
    model: Model, asked: Asked, provider: str, precision: Precision, folder: Path
) -> list[GraphSource]:
    """Exports the graphs of a sweep for one runtime; a lowering twice the same is one graph."""
    target = PROVIDERS[provider][1] if provider in PROVIDERS else cast(Target, provider)
    numbers = Numbers(precision, scope=asked.scope if precision == "int8" else "experts")
    options = ExportOptions(target=target, renormalize=asked.renormalize, numbers=numbers)
    table = None
    if precision == "int8":
        table = table_for_export(model, options, data=asked.calibration)
    prepared = prepare(model, options, table)
    specs = {layer: module.spec for layer, module in model.layers.items()}
    graphs: dict[tuple[int, tuple[str, ...]], GraphPlan] = {}
    for k, lowering, batch in product(asked.ks, asked.lowerings, asked.batches):
        kept = resolve_k(k, specs)
        graph = plan_graph(
            model,
            prepared.portable,
            kept,
            replace(options, batch=AxisRange(1, batch, batch)),
            lowering_name=lowering,
            file=f"model-{len(graphs)}.onnx",
        )
        graphs.setdefault((_largest(kept), graph.lowerings), graph)
    largest = max(asked.batches)
    ranges = {"batch": AxisRange(1, largest, largest), "tokens": DEFAULT_TOKENS}
    sizes = profile(port_of(model.input, options), {}, ranges, None)
    plans = replace(prepared.plan, graphs=tuple(graphs.values()))
    lowered = write_graphs(replace(prepared, plan=plans), folder)
    return [
        GraphSource(
            k=k,
            lowering="+".join(sorted(set(names))),
            open=GraphEngine(folder / graph.file, provider, sizes)
            if provider in FLAVOURS
            else OnnxOpener(
                folder / graph.file,
                selected_values(lowered[graph.file].values),
                {n: spec.experts for n, spec in specs.items() if _has_sets(spec.kind)},
                threads=asked.threads,
                provider=PROVIDERS[provider][0],
            ),
            provider=provider,
            precision=precision,
            engine=_engine_of(provider),
            kept={layer.name: layer.work.kept for layer in graph.layers},
        )
        for (k, names), graph in graphs.items()
    ]


def _engine_of(runtime: str) -> str:
    """The rows' engine, for a provider of ONNX Runtime or a TensorRT."""
    return runtime if runtime in FLAVOURS else ONNXRUNTIME


def _largest(kept: Mapping[str, int | None]) -> int:
    return max(value for value in kept.values() if value is not None)


def from_bundle(bundle: Bundle, asked: Asked, *, model: Model | None = None) -> Subject:
    """Returns a bundle beside the PyTorch model it was made from.

    What is `asked` is measured where the bundle's k is a graph input; a baked k stays. Without
    `model` the checkpoint that the manifest names is loaded; `UsageError` when it is gone or
    another.
    """
    record = bundle.manifest
    edits = Edits.from_records(record.edits, str(bundle.path / MANIFEST_FILE))
    model = edited(model or _source_of(bundle), edits)
    takes_k = record.k == "input"
    numbers = {layer.name: layer.precision for layer in record.layers}
    if takes_k:
        specs = {name: layer.spec for name, layer in model.layers.items()}
        ks = [_largest(resolve_k(each, specs)) for each in asked.ks]
    else:
        ks = [max(layer.k for layer in record.layers if layer.k is not None)]
    return Subject(
        name=bundle.path.name,
        model=model,
        ks=tuple(ks),
        graphs=tuple(
            GraphSource(
                k=k,
                lowering="+".join(sorted(set(graph.lowerings.values()))),
                open=BundleEngine(bundle.path, provider, graph.file, k if takes_k else None)
                if provider in FLAVOURS
                else OnnxOpener(
                    bundle.path / graph.file,
                    graph.selected,
                    {m.name: m.experts for m in record.layers if _has_sets(m.kind)},
                    k if takes_k else None,
                    asked.threads,
                    PROVIDERS[provider][0],
                ),
                provider=provider,
                precision=record.precision,
                engine=_engine_of(provider),
                kept={layer.name: layer.k for layer in record.layers if layer.k is not None},
                floating=frozenset(n for n, each in numbers.items() if each != "int8"),
                int8_host=None in record.numbers.get("linears", {}).values(),
            )
            for graph in record.graphs
            for k in ks
            for provider in asked.runtimes
        ),
        renormalize=record.renormalize,
        engines=asked.engines,
    )


def _source_of(bundle: Bundle) -> Model:
    source = bundle.manifest.source
    path = Path(source.path)
    if ":" in source.path and not path.exists():
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
    if hash_files(model.source.files) != source.sha256:
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
            hint=f"choose from: {', '.join(get_args(Precision))}",
        )
    return tuple(dict.fromkeys(cast(Precision, name) for name in names))
