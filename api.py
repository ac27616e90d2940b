"""The Python calls, with the words of the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .bench.analyses.experts import Wanted, parse_analyses, studied
from .bench.cases import Candidate
from .bench.data import Labelled, LabelledData, load_groups, open_labelled
from .bench.plan import Settings
from .bench.results import Results
from .bench.run import bench as run_bench
from .bench.run import check_inputs
from .bench.runners.available import parse_engines, select
from .bench.runners.candidates import (
    Sweep,
    exported,
    from_bundle,
    parse_precisions,
    with_distinct_names,
)
from .bench.specialise import Specialisation
from .bench.specialise import specialise as run_specialise
from .calibration.feeds import Feed
from .calibration.methods import DEFAULT_METHOD, DEFAULT_PERCENTILE
from .calibration.table import CalibrationTable, Method
from .common.console import Progress, Silent
from .common.timing import Protocol
from .errors import UsageError
from .exporter.axes import DEFAULT_BATCH, DEFAULT_TOKENS, parse_range
from .exporter.bundle.bundle import Bundle
from .exporter.checkpoints.load import load
from .exporter.edits import read_edits
from .exporter.export import export as export_bundle
from .exporter.inputs import random_inputs, with_axes
from .exporter.model import Model
from .exporter.options import (
    ExportOptions,
    KOption,
    PrecisionOptions,
    Scope,
    parse_k,
    parse_lowerings,
)
from .exporter.quantization.accuracy_search import with_retention
from .exporter.quantization.calibrate import CalibrationOptions, ranges_for_export
from .exporter.quantization.calibrate import calibrate as run_calibration
from .exporter.tensorrt.cache import default_cache
from .exporter.tensorrt.engines import add_engines, plan_engines
from .exporter.tensorrt.options import EngineOptions
from .graphs.precision.types import FloatName, Precision
from .graphs.targets import Target

__all__ = ["bench", "build", "calibrate", "export", "load", "specialise"]


def calibrate(
    model: Model,
    data: Feed,
    *,
    k: int | float | str | Sequence[int] = "n",
    method: Method = DEFAULT_METHOD,
    percentile: float = DEFAULT_PERCENTILE,
    samples: int | None = None,
    batch: int = 16,
    renormalize: bool = False,
    workspace: str | Path | None = None,
    progress: Progress | None = None,
) -> CalibrationTable:
    """Returns the ranges of a model's tensors over the inputs of a feed; `.write(path)` keeps them.

    The arguments are the options of `moexport calibrate`. The weights are written to a temporary
    folder in `workspace`, the system's own by default. Raises whatever
    `exporter.quantization.calibrate.calibrate` raises.
    """
    options = CalibrationOptions(
        k=parse_k(_k_text(k)),
        method=method,
        percentile=percentile,
        samples=samples,
        batch=batch,
        renormalize=renormalize,
    )
    place = None if workspace is None else Path(workspace)
    return run_calibration(model, data, options, workspace=place, progress=progress)


def export(
    model: Model,
    destination: str | Path,
    *,
    k: int | float | str | Sequence[int] = "n",
    target: Target = "onnx",
    lowering: str = "auto",
    batch: str | int = str(DEFAULT_BATCH),
    tokens: str | int = str(DEFAULT_TOKENS),
    opset: int = 20,
    renormalize: bool = False,
    precision: Precision = "fp32",
    quantize: Scope = "experts",
    rest: FloatName | None = None,
    weight_bits: int | None = None,
    io_precision: FloatName = "fp32",
    method: Method = DEFAULT_METHOD,
    calibration: CalibrationTable | str | Path | None = None,
    keep_floating: Sequence[str] = (),
    min_retention: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    data: Feed | None = None,
    ablate: str | Sequence[str] = (),
    rewrite: str | Path | Sequence[Mapping[str, Any]] | None = None,
    verify: bool = True,
    engine: EngineOptions | bool | None = None,
    force: bool = False,
) -> Bundle:
    """Writes a verified bundle of a loaded model and returns it.

    `keep_floating` names MoE layers that INT8 leaves as they are.
    The arguments are the options of `moexport export`, those of engines together in `engine`;
    `rewrite` may also be the entries of such a file. Raises `UsageError` for one that cannot be
    meant, and whatever `exporter.export.export` raises.
    """
    options = ExportOptions(
        k=parse_k(_k_text(k)),
        target=target,
        lowerings=parse_lowerings(lowering),
        batch=parse_range(str(batch), "batch"),
        tokens=parse_range(str(tokens), "tokens"),
        opset=opset,
        renormalize=renormalize,
        atol=atol,
        rtol=rtol,
        verify=verify,
        edits=read_edits(ablate, rewrite),
        numbers=PrecisionOptions(
            precision,
            rest,
            quantize,
            io_precision,
            weight_bits,
            floating=frozenset(keep_floating),
            min_retention=min_retention,
        ),
    )
    table = calibration if isinstance(calibration, CalibrationTable) else None
    if table is None:
        path = None if calibration is None else Path(str(calibration))
        table = ranges_for_export(model, options, method=method, data=data, path=path)
    options = with_retention(model, options, table, data)
    return export_bundle(
        model,
        Path(destination),
        options,
        data=data,
        table=table,
        engine=engine,
        force=force,
    )


def build(
    bundle: Bundle,
    *,
    target: str | None = None,
    graph: str | None = None,
    options: EngineOptions | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Compiles the engines of a bundle's graphs into it and returns it with its new manifest.

    Raises what `exporter.tensorrt.engines.plan_engines` and `add_engines` raise.
    """
    wanted = options or EngineOptions(cache=default_cache())
    name = target or bundle.manifest.target
    plans = plan_engines(bundle.manifest, name, wanted, graph=graph)
    add_engines(bundle.path, bundle.manifest, plans, progress, rebuild=rebuild)
    return Bundle.open(bundle.path)


def bench(
    models: Model | Bundle | Sequence[Model | Bundle],
    *,
    data: str | Path | Labelled | np.ndarray | None = None,
    k: Sequence[int | float | str] = ("n", "1/2", "1/4", "1/8"),
    lowering: str = "auto",
    precision: str = "fp32",
    engine: str = "all",
    batch: Sequence[int] = (1,),
    out: str | Path | None = None,
    rounds: int = 5,
    round_s: float = 0.2,
    samples: int | None = None,
    threads: int | None = None,
    memory: bool = True,
    parts: bool = True,
    pixels: str | None = None,
    before: Results | None = None,
    analysis: str = "",
    max_subsets: int | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> Results:
    """Measures models and bundles against the untouched PyTorch model; returns every row.

    A bundle that follows the model it was made from is compared with that; alone it loads the
    checkpoint that its manifest names. A model is exported for every `k` and `lowering`. `data` is
    labelled data (`bench.data.open_labelled` says what can be, and `pixels`), an array of
    inputs, or None for random inputs, which tell latency and parity only. With `out`, results.json,
    report.html and figures are written there, and a call that was interrupted goes on where it
    stopped; the report tells what changed since `before`. `analysis` names what
    `bench.analyses` is to find out about the experts of classifiers: a list, or `all`.
    """
    listed = [models] if isinstance(models, Model | Bundle) else list(models)
    watcher = progress or Silent()
    engines = parse_engines(engine)
    selection = select(engines)
    for each in selection.absent:
        if each.engine in engines:
            watcher.step(f"not measured: {each.engine}: {each.reason}")
    wanted = Wanted(parse_analyses(analysis), max_subsets=max_subsets) if analysis else None
    # The same threads for every engine: PyTorch's own choice, unless told.
    threads = threads or torch.get_num_threads()
    asked = Sweep(
        ks=_swept(k),
        lowerings=parse_lowerings(lowering),
        batches=tuple(batch),
        engines=selection.names,
        precisions=parse_precisions(precision),
        threads=threads,
    )
    first = next((item for item in listed if isinstance(item, Model)), None)
    labelled = None if first is None else _labelled(data, first, max(batch), pixels)
    if labelled is not None:
        asked = replace(asked, shape=labelled.head(1).inputs.shape[1:])
        if "int8" in asked.precisions:
            asked = replace(asked, calibration=labelled.head(CALIBRATION_INPUTS).inputs)
    settings = Settings(
        batches=tuple(batch),
        protocol=Protocol(rounds=rounds, round_s=round_s, inputs=8),
        samples=samples,
        threads=threads,
        memory=memory,
        parts=parts,
    )
    with ExitStack() as stack:
        candidates = _candidates(listed, asked, stack, watcher)
        if labelled is None:
            labelled = _labelled(data, candidates[0].model, max(batch), pixels)
        analyses = studied(candidates, labelled, wanted, samples, watcher) if wanted else {}
        return run_bench(
            candidates,
            labelled,
            settings,
            out=None if out is None else Path(out),
            command=command,
            progress=watcher,
            absent=selection.absent,
            before=before,
            analyses=analyses,
        )


def specialise(
    model: Model,
    data: str | Path | LabelledData,
    *,
    layer: str | None = None,
    group_by: str | Sequence[int | bool | str] | None = None,
    progress: Progress | None = None,
) -> Specialisation:
    """Removes each expert of a layer in turn; returns how the accuracy of every class changes.

    `layer` is the last MoE layer where it is not said. `group_by` is the subgroup of each input, or
    names an array of the `.npz`: a re-write takes a subgroup's mean coefficients. The labels, where
    it is not said.
    """
    labelled = _labelled(data, model, 1).head(sys.maxsize)
    labelled = replace(labelled, inputs=with_axes(labelled.inputs, model.input))
    check_inputs(model.input, labelled, model.source.path)
    groups: np.ndarray | None = None
    if isinstance(group_by, str):
        if isinstance(data, LabelledData):
            raise UsageError(
                f"group_by={group_by!r} names an array of a file, and the data are none",
                hint="give the subgroup of each input as a sequence",
            )
        groups = load_groups(Path(data), group_by, len(labelled))
    elif group_by is not None:
        groups = np.asarray(group_by)
    return run_specialise(model, labelled, layer=layer, groups=groups, progress=progress)


def _candidates(
    listed: Sequence[Model | Bundle], asked: Sweep, stack: ExitStack, progress: Progress
) -> list[Candidate]:
    """A candidate per model; the bundles that follow a model are measured beside it."""
    candidates: list[Candidate] = []
    places: list[Path] = []
    model: Model | None = None
    for index, item in enumerate(listed):
        if isinstance(item, Bundle):
            candidates.append(from_bundle(item, asked, model=model))
            places.append(item.path)
            continue
        model = item
        followed = index + 1 < len(listed) and isinstance(listed[index + 1], Bundle)
        if not followed:
            candidates.append(stack.enter_context(exported(model, asked, progress=progress)))
            places.append(Path(model.source.path))
    return with_distinct_names(candidates, places)


RANDOM_INPUTS = 16
CALIBRATION_INPUTS = 256
"""INT8 takes its ranges from this many of the benchmark's inputs; their labels play no part."""


def _labelled(
    data: str | Path | Labelled | np.ndarray | None,
    model: Model,
    batch: int,
    pixels: str | None = None,
) -> Labelled:
    if isinstance(data, str | Path):
        return open_labelled(str(data), model.input, pixels)
    if pixels is not None:
        raise UsageError(
            f"--pixels {pixels}: there is no folder of images", hint="give one with --data"
        )
    if data is None:
        data = random_inputs(model, max(batch, RANDOM_INPUTS))
    if isinstance(data, np.ndarray):
        return LabelledData(data, None, model.input.name)
    return data


def _swept(k: Sequence[int | float | str]) -> tuple[KOption, ...]:
    """The k of a sweep: at least one, and none left to the run."""
    ks = tuple(parse_k(_k_text(each)) for each in k)
    if not ks or "input" in ks:
        raise UsageError(
            "--k input: a benchmark measures numbers of experts" if ks else "--k is empty",
            hint="for example --k n,0.5,0.25; a bundle whose k is an input is measured at each",
        )
    return ks


def _k_text(k: int | float | str | Sequence[int]) -> str:
    if isinstance(k, float):
        return f"{Fraction(k).limit_denominator(1 << 20)}" if not k.is_integer() else f"{k}"
    if isinstance(k, Sequence) and not isinstance(k, str):
        return ",".join(str(each) for each in k)
    return str(k)  # numpy's integers among them; what cannot be meant is refused as text
