"""Makes what a benchmark measures from what a user names: models and bundles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx

from ..errors import UsageError
from ..exporter.bundle import Bundle, hash_files, selected_values
from ..exporter.edited import edited
from ..exporter.edits import Edits
from ..exporter.export import prepare, write_graphs
from ..exporter.load import load
from ..exporter.manifest import MANIFEST_FILE
from ..exporter.model import Model
from ..exporter.options import AUTO, AxisRange, ExportOptions, Kept
from ..exporter.plan import GraphPlan, plan_graph, resolve_k
from ..exporter.session import Session, SessionOptions
from .data import Array
from .engines import GraphSource, Subject


@dataclass(frozen=True)
class OnnxGraph:
    """An exported graph as the benchmark runs it (`engines.Graph`)."""

    session: Session
    selected_values: Mapping[str, str]
    experts: Mapping[str, int]
    k: int | None

    def __call__(self, x: Array) -> Array:
        """Maps inputs [b, …] to outputs [b, …]."""
        return self.session(x, self.k)

    def selected(self, x: Array) -> dict[str, Array]:
        """Returns the chosen experts [b, k], ascending, of each layer: all n without a choice."""
        wanted = list(self.selected_values.values())
        values = self.session.run(x, self.k, wanted) if wanted else {}
        return {
            layer: np.sort(values[self.selected_values[layer]], axis=1)
            if layer in self.selected_values
            else np.tile(np.arange(n), (len(x), 1))
            for layer, n in self.experts.items()
        }


@contextmanager
def exported(
    model: Model,
    ks: Sequence[Kept],
    lowerings: Sequence[str] = (AUTO,),
    *,
    name: str | None = None,
    batches: Sequence[int] = (1,),
    threads: int | None = None,
    renormalize: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Subject]:
    """Yields a model with a graph per k and lowering, exported to a folder that goes after.

    The graphs share one weights file. `auto` stands for what the cost model chooses for each of the
    batch sizes.
    """
    progress(f"tracing {model.source.path}")
    options = ExportOptions(target="ort-cpu", renormalize=renormalize)
    prepared = prepare(model, options)
    specs = {layer: module.spec for layer, module in model.layers.items()}
    graphs: dict[tuple[int, tuple[str, ...]], GraphPlan] = {}
    for k, lowering, batch in product(ks, lowerings, batches):
        kept = resolve_k(k, specs)
        largest = max(value for value in kept.values() if value is not None)
        graph = plan_graph(
            model,
            prepared.portable,
            kept,
            replace(options, batch=AxisRange(1, batch, batch)),
            lowering_name=lowering,
            file=f"model-{len(graphs)}.onnx",
        )
        graphs.setdefault((largest, graph.lowerings), graph)
    with TemporaryDirectory(prefix="moexport-bench-") as folder:
        progress(f"writing {len(graphs)} graphs over one weights file")
        plans = replace(prepared.plan, graphs=tuple(graphs.values()))
        lowered = write_graphs(replace(prepared, plan=plans), Path(folder))
        yield Subject(
            name=name or Path(model.source.path).stem,
            model=model,
            ks=tuple(sorted({k for k, _ in graphs}, reverse=True)),
            graphs=tuple(
                GraphSource(
                    k=k,
                    lowering="+".join(sorted(set(names))),
                    open=_opener(
                        Path(folder) / graph.file,
                        selected_values(lowered[graph.file].values),
                        {n: spec.experts for n, spec in specs.items() if _has_sets(spec.kind)},
                        threads,
                    ),
                )
                for (k, names), graph in graphs.items()
            ),
            renormalize=renormalize,
        )


def from_bundle(
    bundle: Bundle,
    asked: Sequence[Kept],
    *,
    model: Model | None = None,
    threads: int | None = None,
) -> Subject:
    """Returns a bundle beside the PyTorch model it was made from.

    What is `asked` is measured where the bundle's k is a graph input; a baked k stays. Without
    `model` the checkpoint that the manifest names is loaded; `UsageError` when it is gone or
    another.
    """
    record = bundle.manifest
    edits = Edits.from_records(record.edits, str(bundle.path / MANIFEST_FILE))
    model = edited(model or _source_of(bundle), edits)
    takes_k = record.k == "input"
    if takes_k:
        specs = {name: layer.spec for name, layer in model.layers.items()}
        ks = [max(k for k in resolve_k(each, specs).values() if k is not None) for each in asked]
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
                open=_opener(
                    bundle.path / graph.file,
                    graph.selected,
                    {m.name: m.experts for m in record.layers if _has_sets(m.kind)},
                    threads,
                    k if takes_k else None,
                ),
            )
            for graph in record.graphs
            for k in ks
        ),
        renormalize=record.renormalize,
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


def _opener(
    path: Path,
    selected: Mapping[str, str],
    experts: Mapping[str, int],
    threads: int | None,
    k: int | None = None,
) -> Callable[[], OnnxGraph]:
    sets = {layer: value for layer, value in selected.items() if layer in experts}
    observe = dict.fromkeys(sets.values(), onnx.TensorProto.INT64)
    options = SessionOptions(threads=threads, observe=observe)
    return lambda: OnnxGraph(Session(path, options), sets, experts, k)
