"""The Python calls, in the words of the command line, which makes the same ones.

Each takes `progress` (`common.console.Progress`), which receives every step; without it, nothing is
printed. A call imports what it needs, so `import moexport` is quick.
"""

from __future__ import annotations

import inspect as introspection
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from .common.pytorch import check_pytorch

if TYPE_CHECKING:
    import numpy as np

    from .bench.data import Labelled, LabelledData
    from .bench.demo.demo import Outcome
    from .bench.report.compare import Comparison
    from .bench.results import Results
    from .bench.run import BenchRequest
    from .bench.specialise import Specialisation
    from .calibration.feeds import Feed
    from .calibration.table import CalibrationTable
    from .common.console import Progress
    from .exporter.bundle.bundle import Bundle
    from .exporter.bundle.manifest import Check, Manifest
    from .exporter.bundle.run import Outputs
    from .exporter.checkpoints.adapters import Adapter
    from .exporter.checkpoints.examples import Example
    from .exporter.doctor import Diagnosis
    from .exporter.inspect import ModelReport
    from .exporter.job import ExportJob
    from .exporter.model import Model
    from .exporter.plan import Plan
    from .exporter.quantization.accuracy_search import LayerSensitivity
    from .exporter.tensorrt.engines import EnginePlan
    from .exporter.tensorrt.options import EngineOptions
    from .exporter.tensorrt.records import Made
    from .exporter.triton.repository import ServedModel
    from .graphs.targets import FloatName, Method, Precision, Scope, Target
    from .tune.request import TuneRequest
    from .tune.tune import SearchPlan, Tuned

    K = int | float | str | Sequence[int]

AnyPath = str | Path

Engine = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
"""Who runs a bundle."""

Provider = Literal["cpu", "cuda", "tensorrt"]
"""Where ONNX Runtime runs a graph: the names of `exporter.session.PROVIDERS`."""

ServingBackend = Literal["onnxruntime", "tensorrt", "python"]
"""Who runs a model in Triton: the names of `exporter.triton.repository`."""

Device = Literal["cpu", "gpu"]
"""Where it runs there."""

CpuTarget = Literal["onnx", "ort-cpu"]
"""What graphs of a benchmark are exported for that ONNX Runtime runs on the CPU."""


def load(
    source: AnyPath,
    *,
    family: str | None = None,
    config: Mapping[str, Any] | None = None,
    weights: AnyPath | None = None,
    example: Example | None = None,
    adapter: Adapter | str | Sequence[Adapter | str] = (),
    values: bool = True,
    progress: Progress | None = None,
) -> Model:
    """Returns the trained model that `source` names, ready to be exported.

    Args:
        source: a checkpoint (a file, an index of shards, a folder, or the URL of one) or
            `package.module:factory`.
        family: the name of the published code (None: detected from keys and shapes).
        config: settings that the weights do not contain: arguments of the published constructor or
            of the factory (None).
        weights: a checkpoint for a factory's network (None: the weights of the factory).
        example: inputs [b, ...] to check a factory's network with, or a file of them (None).
        adapter: says what the factory's own MoE layers are (`moexport.adapts`): a function, its
            "package.module:adapt", or several (none).
        values: False does not read the weights, which is enough to inspect a model (True).
        progress: receives every step (None: no progress).

    Raises:
        CheckpointError: the file cannot be read, or is not a checkpoint.
        FamilyError: the family is unknown or ambiguous, or settings are missing.
        ParityError: a factory's network does not compute what its layers should.
        UsageError: an argument is invalid.
    """
    check_pytorch("reading a model")
    from .exporter.checkpoints.load import load as load_model

    if progress is not None:
        progress.step(f"loading {source}")
    return load_model(
        source,
        family=family,
        config=config,
        weights=weights,
        example=example,
        adapter=adapter,
        values=values,
    )


def inspect(
    model: Model | AnyPath,
    data: Feed | None = None,
    *,
    progress: Progress | None = None,
    **loading: Any,
) -> ModelReport:
    """Returns what a model is before it is exported: its layers, its sizes, what each k costs.

    Args:
        model: a loaded model, or what `load` takes, of which the shapes alone are read.
        data: inputs on which a muMoE's coefficients that are not zero are counted (None: not).
        progress: receives every step (None: no progress).
        **loading: `family`, `config` and `weights`, as `load` takes them.
    """
    check_pytorch("inspecting a model")
    from .exporter.inspect import inspect as inspect_model

    if isinstance(model, str | Path):
        # A factory's network is checked on the data, too.
        given = {"example": data if isinstance(data, str | Path) else None, **loading}
        model = load(model, values=data is not None, progress=progress, **given)
    return inspect_model(model, data)


def inspect_bundle(bundle: Bundle | AnyPath) -> Manifest:
    """Returns what a bundle's manifest says of it."""
    from .exporter.bundle.manifest import Manifest

    return Manifest.read(_folder(bundle))


def inspect_engine(plan_file: AnyPath, *, trust: bool = False) -> Mapping[str, Any]:
    """Returns what is known of an engine, by its `.plan` file.

    With `trust`, an unverified engine file is loaded too; it may execute code.
    """
    from .exporter.tensorrt.plan_file import engine_facts

    return engine_facts(Path(plan_file), trust=trust)


def calibrate(
    model: Model | Callable[[], Model],
    data: Feed,
    *,
    k: K = "n",
    method: Method = "percentile",
    percentile: float | None = None,
    samples: int | None = None,
    batch: int = 16,
    renormalize: bool = False,
    workspace: AnyPath | None = None,
    out: AnyPath | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> CalibrationTable:
    """Returns the ranges of a model's tensors over inputs; `.write(path)` keeps them.

    Args:
        model: a loaded model, or a function that loads it.
        data: its inputs, as in `export`.
        k: experts to compute, as in `export`; not input ("n").
        method: how to choose the ranges ("percentile").
        percentile: the percentage of values in range, for the method percentile (None: 99.99).
        samples: how many inputs to use (None: all).
        batch: how many inputs to run at once (16).
        renormalize: as in the export that will use the table (False).
        workspace: a folder for the weights while they are in use (None: that of `out`, or the
            system's temporary one).
        out: a file for the table; one of the same origin that is there is returned (None).
        force: replace a table of another origin (False).
        progress: receives every step (None: no progress).

    Raises:
        UsageError: an option is invalid.
        FeedError: the inputs do not fit the model.
        CalibrationError: a tensor's values give no range, or the table at `out` is of another
            origin.
    """
    check_pytorch("calibration")
    from .exporter.job import calibration_job
    from .exporter.options import parse_k
    from .exporter.quantization.calibrate import CalibrationOptions, calibrate_to
    from .exporter.quantization.calibrate import calibrate as run

    options = CalibrationOptions(parse_k(k), method, percentile, samples, batch, renormalize)
    job = calibration_job(model() if callable(model) else model, data, options)
    if out is not None:
        return calibrate_to(Path(out), job, force=force, progress=progress)
    place = None if workspace is None else Path(workspace)
    return run(job, workspace=place, progress=progress)


def calibrate_on_ray(
    model: AnyPath,
    data: AnyPath,
    *,
    ray: str = "auto",
    on: str = "CPU",
    k: K = "n",
    method: Method = "percentile",
    percentile: float | None = None,
    samples: int | None = None,
    batch: int = 16,
    renormalize: bool = False,
    out: AnyPath | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **loading: Any,
) -> CalibrationTable:
    """Returns the table of `calibrate`, with the inputs shared between the nodes of a Ray cluster.

    Every node must have moexport, and read model and data by the same paths or URLs.

    Args:
        model: what names the model, as in `load`.
        data: what names its inputs, as in `export`.
        ray: the address of the cluster; auto is that of this machine, local starts one ("auto").
        on: the resource of the nodes that take part: CPU, accelerator_type:L4, ... ("CPU").
        k: as in `calibrate` ("n").
        method: as in `calibrate` ("percentile").
        percentile: as in `calibrate` (None: 99.99).
        samples: as in `calibrate` (None: all).
        batch: as in `calibrate` (16).
        renormalize: as in `calibrate` (False).
        out: as in `calibrate` (None).
        force: as in `calibrate` (False).
        progress: receives every step (None: no progress).
        **loading: `family`, `config` and `weights`, as `load` takes them.

    Raises:
        ClusterError: the cluster cannot be reached, lacks the resource, or loses its nodes.
        CalibrationError: as `calibrate` raises it.
    """
    check_pytorch("calibration")
    from .exporter.options import parse_k
    from .exporter.quantization.calibrate import CalibrationOptions
    from .exporter.quantization.cluster import Source
    from .exporter.quantization.cluster import calibrate_on_ray as run

    options = CalibrationOptions(parse_k(k), method, percentile, samples, batch, renormalize)
    places = {name: _everywhere(each) for name, each in loading.items()}
    source = Source(str(_everywhere(model)), places, str(_everywhere(data)), options)
    place = None if out is None else Path(out)
    return run(source, address=ray, on=on, out=place, force=force, progress=progress)


def _everywhere(where: Any) -> Any:
    """A path as nodes with another working directory see it; all else as it is."""
    here = isinstance(where, str | Path) and Path(where).exists()
    return str(Path(where).absolute()) if here else where


def sensitivity(
    model: Model,
    table: CalibrationTable,
    data: Feed,
    *,
    k: K = "n",
    samples: int | None = None,
    renormalize: bool = False,
    progress: Progress | None = None,
) -> tuple[LayerSensitivity, ...]:
    """Returns what INT8 does to each MoE layer alone, on a CPU, the most sensitive layer first.

    Args:
        model: a loaded model.
        table: what `calibrate` returned for it.
        data: its inputs, as in `export`.
        k: as the table was made with ("n").
        samples: how many inputs are compared, at most 64 (None: 64).
        renormalize: as the table was made with (False).
        progress: receives every step (None: no progress).
    """
    check_pytorch("calibration")
    from .exporter.options import parse_k
    from .exporter.quantization.accuracy_search import rank

    places = (model, parse_k(k), table, data, samples)
    return rank(*places, renormalize=renormalize, progress=progress)


def export(
    model: Model | Callable[[], Model],
    destination: AnyPath,
    *,
    k: K = "n",
    target: Target = "onnx",
    lowering: str = "auto",
    batch: str | int = "1:1:32",
    tokens: str | int = "1:196:1024",
    opset: int | None = None,
    renormalize: bool = False,
    expose_routing: bool = False,
    precision: Precision = "fp32",
    quantize: Scope = "experts",
    rest: FloatName | None = None,
    weight_bits: int | None = None,
    io_precision: FloatName = "fp32",
    method: Method | None = None,
    calibration: CalibrationTable | AnyPath | None = None,
    keep_floating: Sequence[str] = (),
    min_retention: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    verify_samples: int | None = None,
    data: Feed | None = None,
    ablate: str | Sequence[str] = (),
    rewrite: AnyPath | Sequence[Mapping[str, Any]] | None = None,
    steer: str | Sequence[str] = (),
    verify: bool = True,
    engine: EngineOptions | bool | None = None,
    recipe: AnyPath | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Writes a verified bundle of a model (ONNX graphs, weights, a manifest) and returns it.

    Invalid requests are refused before the work begins, and no partial output is left.

    Args:
        model: a loaded model, or a function that loads it, called when what needs no model is
            checked.
        destination: the folder to write.
        k: experts to compute of the n of each layer: a number (4), a share (0.25, n/4), all (n),
            a number per layer (4,4,8), or input, which makes k an input of the graph. For
            token-routed models, n and shares refer to the k that the router was trained with
            ("n").
        target: the runtime of the graph: onnx (any; standard ops only), ort-cpu, ort-cuda,
            ort-web, tensorrt or tensorrt-rtx ("onnx").
        lowering: how to compute the experts: auto takes the one predicted to be fastest, tune
            measures them, or a name (dense, gather, grouped, ...); a,b writes one graph each
            ("auto").
        batch: the range of batch sizes, optimised for OPT; one number fixes the axis ("1:1:32").
        tokens: the same for the number of tokens, if that axis is dynamic ("1:196:1024").
        opset: the ONNX opset, 20 to 23 (None: 20; 23 for a language model for ort-cpu, whose
            attention and norms are then one op each).
        renormalize: divide C by its sum over the selected experts (False).
        expose_routing: add the selected experts of every layer as outputs of the graphs and their
            engines; for a muMoE layer, its coefficients (False).
        precision: the precision of the graph. int8 and fp8 (engines only) need data or a
            calibration; int4 quantises the weights only ("fp32").
        quantize: what to quantise: the experts, or all linear layers ("experts").
        rest: the float type of what is not quantised (None: fp32; for TensorRT fp16).
        weight_bits: bits of INT8 weights on CPUs: 7, or 8, which is slower without VNNI (None: 7;
            for TensorRT 8).
        io_precision: the type of the graph's float inputs and outputs ("fp32").
        method: how to choose INT8 ranges from the data (None: percentile).
        calibration: INT8 ranges from `calibrate`, or their file (None).
        keep_floating: names of MoE layers to keep in floating point (none).
        min_retention: the share of FP32's accuracy to keep, above 0 and up to 1; sensitive layers
            then stay in floating point (None: all are INT8).
        atol: the largest absolute difference from PyTorch (None: 0).
        rtol: the largest difference from PyTorch relative to max|y| (None: FP32 1e-4, FP16 0.01,
            BF16 0.05, INT8 0.1).
        verify_samples: the largest number of inputs to compare (None: 256).
        data: real inputs for ranges and comparison: an array [s, ...], an iterable of batches
            [b, ...], an .npz, a folder of .npy, or "package.module:iterable" (None: random ones are
            compared).
        ablate: experts to remove, counted from 0: LAYER:EXPERT or LAYER:3,5 (none).
        rewrite: outputs of muMoE layers to rewrite: a JSON file, or its entries (None).
        steer: experts of muMoE layers towards whose cluster centre every token of the layer is
            moved, LAYER:EXPERT:STRENGTH; with input among them the strengths are a graph input
            (none).
        verify: compare every graph with PyTorch; a miss is an error (True).
        engine: True compiles a TensorRT engine, `EngineOptions` says how, False writes graphs only
            (None: if the target has engines and this machine can build them).
        recipe: the recipe.yaml of `tune`: k, experts, precision and lowering of each layer (None).
        force: replace an existing bundle (False).
        progress: receives every step (None: no progress).

    Raises:
        UsageError: an argument is invalid.
        BundleError: the destination cannot be written.
        FeedError: the inputs do not fit the model.
        CalibrationError: the ranges belong to another model, or to fewer experts.
        LoweringError: no lowering supports a layer.
        TraceError: the network cannot be traced.
        ParityError: a graph differs too much from PyTorch.
        EngineError: the requested engine cannot be compiled.
    """
    asked = dict(locals())  # the parameters: nothing else is bound yet
    check_pytorch("export")
    from .exporter.export import export as run

    return run(_job(**asked), progress)


def plan(model: Model | Callable[[], Model], destination: AnyPath, **options: Any) -> Plan:
    """Returns what `export` would write with the same arguments; traces, but writes nothing.

    A bundle that is at `destination` does not matter; data that do not fit are told of.
    """
    check_pytorch("export")
    from .exporter.export import export_plan
    from .exporter.inputs import parity_batches

    given = introspection.signature(export).bind(model, destination, **{**options, "force": True})
    given.apply_defaults()
    job = _job(**given.arguments)
    asked = job.options
    if asked.data is not None and asked.verify:
        parity_batches(job.model, job.fixed, asked.data, asked.samples_to_verify)
    return export_plan(job, given.arguments["progress"])


def _job(**asked: Any) -> ExportJob:
    """The job that the parameters of `export` describe."""
    from .calibration.table import CALIBRATION_FILE
    from .exporter.bundle.recipe import file_beside, read_recipe
    from .exporter.bundle.substitutes import SUBSTITUTES_FILE, read_substitutes
    from .exporter.edits import read_edits
    from .exporter.inputs import parse_range
    from .exporter.job import export_job
    from .exporter.options import (
        MIN_OPSET,
        ExportOptions,
        PrecisionOptions,
        parse_k,
        parse_lowerings,
        recipe_options,
    )

    model, table, _ = (asked.pop(name) for name in ("model", "calibration", "progress"))
    recipe = asked.pop("recipe")
    if recipe is not None:
        _check_alone(asked | {"calibration": table})
    numbers = ("precision", "rest", "quantize", "io_precision", "weight_bits", "keep_floating")
    asked["keep_floating"] = frozenset(asked["keep_floating"])
    asked["exact_opset"] = asked["opset"] is not None
    if not asked["exact_opset"]:
        asked["opset"] = MIN_OPSET
    options = ExportOptions(
        k=parse_k(asked.pop("k")),
        lowerings=parse_lowerings(asked.pop("lowering")),
        batch=parse_range(str(asked.pop("batch")), "--batch"),
        tokens=parse_range(str(asked.pop("tokens")), "--tokens"),
        precision=PrecisionOptions(*(asked.pop(each) for each in (*numbers, "min_retention"))),
        edits=read_edits(*(asked.pop(each) for each in ("ablate", "rewrite", "steer"))),
        calibration=Path(table) if isinstance(table, str) else table,
        destination=Path(asked.pop("destination")),
        **asked,  # the others as they are
    )
    if recipe is not None:
        place = Path(recipe)
        found = read_recipe(place)
        ranges = file_beside(place, found.calibration, CALIBRATION_FILE)
        beside = file_beside(place, found.substitutes, SUBSTITUTES_FILE)
        substitutes = None if beside is None else read_substitutes(beside.parent)
        options = replace(recipe_options(found, options, substitutes), calibration=ranges)
    return export_job(model, options)


_OF_A_RECIPE = (
    *("k", "target", "lowering", "batch", "tokens", "opset", "renormalize", "precision"),
    *("quantize", "rest", "weight_bits", "io_precision", "method", "calibration"),
    *("keep_floating", "min_retention", "ablate", "rewrite"),
)
"""What a recipe says itself."""


def _check_alone(asked: Mapping[str, Any]) -> None:
    """Raises `UsageError` for an option that a recipe decides."""
    from .errors import UsageError

    usual = introspection.signature(export).parameters
    for name in _OF_A_RECIPE:
        if asked[name] != usual[name].default:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} with --recipe: the recipe says that itself", hint=f"leave {option} out"
            )


def build(
    bundle: Bundle | AnyPath,
    *,
    target: str | None = None,
    graph: str | None = None,
    batch: str | int | None = None,
    tokens: str | int | None = None,
    options: EngineOptions | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Compiles the engines of a bundle's graphs into it; returns it with its new manifest.

    Args:
        bundle: a bundle, or its folder.
        target: the runtime, tensorrt or tensorrt-rtx (None: the bundle's).
        graph: the file or lowering of a graph, if the bundle holds several (None: all).
        batch: the range of batch sizes, if no profile gives it (None: as exported).
        tokens: the same for the number of tokens (None: as exported).
        options: profiles, compute capabilities and other settings (None: the defaults).
        rebuild: build engines that exist already (False).
        progress: receives every step (None: no progress).

    Raises:
        UsageError: before anything is built, if an option is invalid.
        MissingExtraError: before anything is built, if a package is missing.
        EngineError: a graph cannot be built, or its build fails.
    """
    from .exporter.bundle.bundle import Bundle

    asked = {"target": target, "graph": graph, "batch": batch, "tokens": tokens}
    plans = build_plan(bundle, **asked, options=options)
    build_engines(bundle, plans, rebuild=rebuild, progress=progress)
    return Bundle.open(_folder(bundle))


def build_plan(bundle: Bundle | AnyPath, **asked: Any) -> list[EnginePlan]:
    """Returns the engines that `build` would compile with the same arguments; builds nothing."""
    from .exporter.bundle.manifest import Manifest
    from .exporter.inputs import parse_range
    from .exporter.tensorrt.cache import default_cache
    from .exporter.tensorrt.engines import plan_engines
    from .exporter.tensorrt.options import EngineOptions

    manifest = Manifest.read(_folder(bundle))
    ranges = {
        axis: parse_range(str(asked[axis]), f"--{axis}")
        for axis in ("batch", "tokens")
        if asked.get(axis) is not None
    }
    target = asked.get("target") or manifest.target
    options = asked.get("options") or EngineOptions(cache=default_cache())
    return plan_engines(manifest, target, options, graph=asked.get("graph"), ranges=ranges)


def build_engines(
    bundle: Bundle | AnyPath,
    plans: Sequence[EnginePlan],
    *,
    rebuild: bool = False,
    progress: Progress | None = None,
) -> list[Made]:
    """Compiles the engines of `build_plan` into a bundle; returns each, and whether it was there.

    Raises what `build` raises.
    """
    from .common.locations import url_of
    from .errors import UsageError
    from .exporter.bundle.manifest import Manifest
    from .exporter.tensorrt.engines import add_engines

    if url_of(bundle) is not None:
        raise UsageError(
            f"{bundle}: engines are written into a bundle, and this one is read by a URL",
            hint="copy the bundle to this machine, build, and copy it back",
        )
    folder = _folder(bundle)
    return add_engines(folder, Manifest.read(folder), plans, progress, rebuild=rebuild)


def verify(
    bundle: Bundle | AnyPath,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    trust_engine: bool = False,
    progress: Progress | None = None,
) -> Iterator[Check]:
    """Yields the checks of a bundle as they are made: hashes, valid graphs, parity, engines.

    Args:
        bundle: a bundle, or its folder.
        atol: the largest absolute difference from PyTorch (None: by precision).
        rtol: the largest difference from PyTorch relative to max|y| (None: by precision).
        trust_engine: run unverified engine files, built elsewhere; they may execute code (False).
        progress: receives every check (None: no progress).
    """
    from .exporter.bundle.bundle import Bundle

    opened = Bundle.open(_folder(bundle))
    for check in opened.verify(atol=atol, rtol=rtol, trust_engine=trust_engine):
        if progress is not None:
            progress.step(check.name)
        yield check


def others_in(bundle: Bundle | AnyPath) -> list[str]:
    """Returns the names of what lies in a bundle's folder and is not of it: `verify` skips it."""
    from .exporter.bundle.destination import others_in as others
    from .exporter.bundle.manifest import Manifest

    return others(_folder(bundle), Manifest.read(_folder(bundle)).files)


def run(
    bundle: Bundle | AnyPath,
    inputs: AnyPath,
    outputs: AnyPath,
    *,
    k: int | None = None,
    graph: str | None = None,
    threads: int | None = None,
    engine: Engine = "onnxruntime",
    provider: Provider = "cpu",
    trust_engine: bool = False,
    host_weights: bool = False,
    batch_size: int | None = None,
    check: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> Outputs:
    """Writes a bundle's outputs for the inputs of a file; `Bundle.session` runs it on arrays.

    Args:
        bundle: a bundle, or its folder.
        inputs: an `.npz` of inputs [b, ...] as the model takes them.
        outputs: the `.npz` to write.
        k: experts to compute, if k is an input of the graph (None).
        graph: the file or lowering of a graph, if the bundle holds several (None: the main one).
        threads: the number of ONNX Runtime's threads (None: its own choice).
        engine: the runtime ("onnxruntime").
        provider: ONNX Runtime's execution provider ("cpu").
        trust_engine: load an unverified engine file, built elsewhere; it may execute code (False).
        host_weights: keep an engine's bound experts in host memory (False).
        batch_size: how many inputs to run at once (None: the largest batch of the export).
        check: compare the files that are opened with the manifest's hashes (True).
        force: replace existing outputs (False).
        progress: receives every step (None: no progress).

    Raises:
        UsageError: an argument is invalid.
        FeedError: the inputs do not fit the model.
    """
    from .common.locations import local
    from .exporter.bundle.run import RunOptions, run_file

    options = RunOptions(
        *(graph, engine, provider, threads, trust_engine, batch_size, check, host_weights)
    )
    places = (_folder(bundle), local(inputs), Path(outputs))
    return run_file(*places, options, k=k, force=force, progress=progress)


def triton(
    bundles: Bundle | AnyPath | Sequence[Bundle | AnyPath],
    out: AnyPath,
    *,
    name: str | None = None,
    backend: ServingBackend | None = None,
    device: Device | None = None,
    k: int | None = None,
    version: int = 1,
    instances: int = 1,
    threads: int | None = None,
    delay_us: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> list[ServedModel]:
    """Writes bundles to a model repository of Triton Inference Server; returns its models.

    Bundles of one network with different k become a model each, and an ensemble of all.

    Args:
        bundles: a bundle, or its folder; or several.
        out: the repository: a new folder, or one that holds other models or versions.
        name: the name of the model, or of the ensemble (None: that of the checkpoint).
        backend: the Triton backend: onnxruntime, tensorrt (runs the engine) or python (moexport
            without PyTorch) (None: tensorrt if the bundle has such an engine, else onnxruntime).
        device: the device of the instances: cpu or gpu (None: that of the bundle's target).
        k: the k of requests without one, if k is an input of the graph (None: all experts).
        version: the version number to write (1).
        instances: the number of instances per model (1).
        threads: ONNX Runtime threads per instance (None: its own choice).
        delay_us: how long Triton waits to fill a batch, in microseconds (None: 100).
        force: replace a model that is there (False).
        progress: is told of every step (None: nobody).

    Raises:
        UsageError: a bundle cannot be served so.
        BundleError: a bundle's files have changed.
        OutputError: the repository holds that version.
    """
    from .exporter.bundle.bundle import Bundle
    from .exporter.triton.repository import ServingOptions, write_repository

    listed = [bundles] if isinstance(bundles, Bundle | str | Path) else bundles
    opened = [Bundle.open(_folder(each)) for each in listed]
    options = ServingOptions(
        *(name, backend, device, k, version, instances, threads, delay_us, force)
    )
    return write_repository(opened, Path(out), options, progress)


def bench(
    models: Model | Bundle | AnyPath | Sequence[Model | Bundle | AnyPath],
    *,
    data: AnyPath | Labelled | np.ndarray | None = None,
    k: str | Sequence[int | float | str] = "n,0.5,0.25,0.125",
    lowering: str = "auto",
    precision: str = "fp32",
    engine: str = "all",
    target: CpuTarget = "onnx",
    batch: str | Sequence[int] = "1",
    out: AnyPath | None = None,
    rounds: int = 5,
    round_s: float = 0.2,
    samples: int | None = None,
    threads: int | None = None,
    memory: bool = True,
    parts: bool = True,
    pixels: str | None = None,
    tokens: int | None = None,
    before: Results | None = None,
    analysis: str = "",
    max_subsets: int | None = None,
    group_by: str | None = None,
    command: str = "",
    progress: Progress | None = None,
    **loading: Any,
) -> Results:
    """Measures models and bundles against the untouched PyTorch model; returns every row.

    A bundle that follows the model it was made from is compared with that; alone it loads the
    checkpoint that its manifest names. A model is exported for every `k`, `lowering` and
    `precision`. A call that was interrupted goes on where it stopped, if `out` is the same.

    Args:
        models: loaded models, bundles, or what names them; one or a list.
        data: labelled inputs: an .npz, .tar or .parquet shards, a folder of images by class,
            package.module:iterable; for a language model a text file or token ids (None: random
            inputs, which tell latency and parity only; for a language model text of Python's own).
        k: a list of numbers of experts: n,0.5,0.25 or 16,8,4 ("n,0.5,0.25,0.125").
        lowering: a list of lowerings, or auto ("auto").
        precision: a list: fp32,fp16,bf16,int8,int4 (INT8 ranges from the data) ("fp32").
        engine: a list: pytorch-compile, onnxruntime, tensorrt-rtx, …, or all ("all").
        target: the target of graphs that ONNX Runtime runs on the CPU ("onnx").
        batch: a list of batch sizes: 1,16 ("1").
        out: a folder for results.json, report.html and figures (None: nothing is written).
        rounds: rounds; all engines take turns in each, 5 at least (5).
        round_s: seconds of each engine's turn (0.2).
        samples: number of inputs for the accuracy (None: all).
        threads: threads of every engine (None: PyTorch's).
        memory: measure the peak memory of each engine in its own process (True).
        parts: measure the time of the parts of a graph (True).
        pixels: pixel scale of images: unit, symmetric or imagenet (None: as the folder says).
        tokens: tokens of a language model's prompt (None: 128, fewer if it has fewer positions).
        before: earlier results to compare with in the report (None).
        analysis: analyse the experts, a list: retention, random, subsets, shares, or all; needs
            labels ("").
        max_subsets: try at most this many sets of experts in an analysis (None).
        group_by: compare subgroups: an array of the .npz with the labels (None).
        command: what the results say they were made by ("").
        progress: receives every step (None: no progress).
        **loading: `family`, `config` and `weights`, as `load` takes them.

    Raises:
        UsageError: before anything is measured, if an argument is invalid.
        FeedError: before anything is measured, if the data do not fit the model.
    """
    asked = dict(locals())  # the parameters: nothing else is bound yet
    check_pytorch("a benchmark")
    from .bench.run import opened, sweep
    from .exporter.bundle.bundle import Bundle
    from .exporter.model import Model

    request = _bench_request(**asked)
    listed = [models] if isinstance(models, Model | Bundle | str | Path) else models
    return sweep(opened(listed, data, pixels, loading, progress), request)


def _bench_request(**asked: Any) -> BenchRequest:
    """What the parameters of `bench` ask for, beside the models."""
    from .bench.run import BenchRequest
    from .bench.runners.candidates import parse_batches
    from .common.writing import check_folder

    del asked["models"], asked["loading"]
    asked["batch"] = parse_batches(asked["batch"])
    if asked["out"] is not None:
        asked["out"] = Path(asked["out"])
        check_folder(asked["out"])
    return BenchRequest(**asked)


def bench_on_ray(
    models: AnyPath | Sequence[AnyPath],
    *,
    ray: str = "auto",
    on: str | Sequence[str] = ("CPU",),
    out: AnyPath | None = None,
    before: Results | Mapping[str, Results] | None = None,
    **options: Any,
) -> dict[str, Results]:
    """Measures models and bundles on the nodes of a Ray cluster; returns results by kind of node.

    Every node must have moexport, and read models and data by the same paths or URLs.

    Args:
        models: what names models and bundles; one or a list.
        ray: the address of the cluster; auto is that of this machine, local starts one ("auto").
        on: the resources that tell the kinds of node to measure on: CPU, accelerator_type:L4, ...
            (("CPU",)).
        out: a folder for results and report; with several kinds of node one folder for each, and a
            table of all; a call that was interrupted goes on where it stopped, if it is the same
            (None: nothing is written).
        before: earlier results to compare with in the report, those of each kind of node where
            there are several (None).
        **options: those of `bench`.

    Raises:
        UsageError: before anything is measured, if an argument is invalid.
        ClusterError: the cluster cannot be reached, lacks a resource, or loses its nodes.
    """
    check_pytorch("a benchmark")
    from .bench.cluster import sweep_on_ray
    from .bench.report.compare import compare
    from .bench.report.kinds import folder_of, write_kinds
    from .bench.report.page import write_all
    from .bench.results import Results
    from .common.writing import make_folder

    listed = [models] if isinstance(models, str | Path) else models
    given = introspection.signature(bench).bind(listed, out=out, **options)
    given.apply_defaults()
    request = _bench_request(**given.arguments)
    kinds = list(dict.fromkeys([on] if isinstance(on, str) else on))
    place = request.out

    def keep(kind: str, results: Results) -> None:
        if place is not None:
            folder = place if len(kinds) == 1 else place / folder_of(kind)
            make_folder(folder)
            old = before if isinstance(before, Results | None) else before.get(kind)
            write_all(results, folder, None if old is None else compare(old, results))

    found = sweep_on_ray(
        [str(_everywhere(each)) for each in listed],
        replace(request, data=_everywhere(request.data)),
        {name: _everywhere(each) for name, each in given.arguments["loading"].items()},
        address=ray,
        on=kinds,
        keep=keep,
    )
    if place is not None and len(found) > 1:
        write_kinds(found, place)
    return found


def paper(
    name: str,
    out: AnyPath,
    *,
    threads: int | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> tuple[Results, str]:
    """Runs an experiment of the papers; returns its results and its tables beside the paper's.

    Args:
        name: mnist, mnist-normalised, latency, latency-whole or l2norm (Soft MoE), or mumoe.
        out: a folder for results, report and figures.
        threads: of every engine (None: the experiment's own choice).
        command: what the results say they were made by ("").
        progress: receives every step (None: no progress).
    """
    check_pytorch("a benchmark")
    from .bench.paper import run_paper
    from .common.console import Silent
    from .common.writing import check_folder

    check_folder(Path(out))
    return run_paper(name, Path(out), progress or Silent(), threads=threads, command=command)


def report(
    results: Results | AnyPath,
    output: AnyPath,
    *,
    compare: Results | AnyPath | None = None,
    progress: Progress | None = None,
) -> tuple[tuple[Path, ...], Comparison | None]:
    """Writes the report of results again; returns the files and what changed since `compare`.

    Args:
        results: what `bench` returned, or its results.json.
        output: the page, .html; Markdown, CSV and figures go beside it.
        compare: earlier results, or their file (None).
        progress: receives every step (None: no progress).
    """
    from .bench.report.compare import compare as compared
    from .bench.report.page import write_views
    from .bench.results import Results, read

    def known(each: Results | AnyPath) -> Results:
        return each if isinstance(each, Results) else read(Path(each))

    now = known(results)
    comparison = None if compare is None else compared(known(compare), now)
    if progress is not None:
        progress.step(f"writing {output}")
    return write_views(now, Path(output), comparison), comparison


def demo(
    out: AnyPath = "demo",
    *,
    family: str = "soft-moe",
    force: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Trains networks on handwritten digits or on text, exports, verifies and measures them.

    Args:
        out: the folder where everything goes ("demo").
        family: the kind of MoE layers: soft-moe, mumoe or experts ("soft-moe").
        force: write over an earlier demo (False).
        progress: receives every step (None: no progress).
    """
    check_pytorch("the demo")
    from .common.console import Silent

    watcher = progress or Silent()
    if family == "mumoe":
        from .bench.demo.mumoe import run_mumoe_demo

        return run_mumoe_demo(Path(out), watcher, force=force)
    if family == "experts":
        from .bench.demo.experts import run_experts_demo

        return run_experts_demo(Path(out), watcher, force=force)
    from .bench.demo.demo import run_demo
    from .tune.demo import tuned

    return run_demo(Path(out), watcher, force=force, last=partial(tuned, watcher))


def tune(
    model: Model | Callable[[], Model],
    data: AnyPath | Labelled | np.ndarray,
    destination: AnyPath,
    *,
    keep: str | float | None = None,
    max_latency: str | float | None = None,
    max_bytes: str | int | None = None,
    metric: str | None = None,
    target: Target = "ort-cpu",
    batch: str | int = "1:1:32",
    tokens: str | int = "1:196:1024",
    precision: str | None = None,
    all_experts: bool = False,
    time: str | float | None = None,
    threads: int | None = None,
    pixels: str | None = None,
    ray: str | None = None,
    on: str | None = None,
    report: AnyPath | None = None,
    command: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> Tuned:
    """Finds the fastest bundle that keeps an accuracy, confirms it on unseen data and writes it.

    Searched together: k of each layer, a fixed subset of its experts, the precision of each layer
    and of the network around, and the lowerings, by the time that they take on this machine. One
    half of the data serves the search, the other is read once, to confirm. A call that was
    interrupted goes on where it stopped, if `report` is the same.

    Args:
        model: a loaded model, or a function that loads it.
        data: labelled data, as in `bench`; half of them confirm.
        destination: the folder of the bundle.
        keep: the share of the untouched model's quality to keep, 99% or 0.99 (None: 99%, if there
            is no other requirement).
        max_latency: the largest latency of a batch of OPT, 5ms (None: any).
        max_bytes: the largest size of graph and weights, 20MB (None: any).
        metric: the measure of quality: accuracy, perplexity, agreement with the untouched model,
            or package.module:function of outputs and labels (None: what the data allow).
        target: the runtime of the graph: onnx, ort-cpu or ort-cuda ("ort-cpu").
        batch: the range of batch sizes, optimised for OPT ("1:1:32").
        tokens: the same for the number of tokens, if that axis is dynamic ("1:196:1024").
        precision: the precisions to try, as fp32,int8 (None: all that the target computes).
        all_experts: do not remove or merge experts (False).
        time: the time limit of the search, 10min (None: until no better candidate is expected).
        threads: the number of threads of every engine (None: PyTorch's own choice).
        pixels: the scale of images: unit, symmetric or imagenet (None: as the folder says).
        ray: the address of a Ray cluster whose nodes judge the graphs, auto (that of this machine)
            or local; times are measured on this machine (None: no cluster).
        on: the resource of these nodes, accelerator_type:L4 (None: CPU).
        report: a folder for results.json, report.html and figures (None: nothing is written).
        command: what the results say they were made by ("").
        force: replace an existing bundle (False).
        progress: receives every step (None: no progress).

    Raises:
        UsageError: before the search, if an argument is invalid.
        FeedError: before the search, where the data do not fit, or are too few to confirm.
        ContractError: nothing meets the bounds, or what was found is not confirmed.
        ClusterError: the cluster cannot be reached, lacks the resource, or loses its nodes.
    """
    asked = dict(locals())  # the parameters: nothing else is bound yet
    started = monotonic()  # to import PyTorch takes its part of the time
    check_pytorch("tune")
    from .common.console import Silent
    from .common.writing import check_folder
    from .errors import UsageError
    from .exporter.bundle.destination import check_destination
    from .tune.clock import Clock
    from .tune.findings import write_findings
    from .tune.shards import evaluate_here, evaluating_on_ray
    from .tune.tune import tune as run_it

    request = _tune_request(**asked)
    if on is not None and ray is None:
        raise UsageError(f"--on {on}: there is no cluster", hint="name one with --ray")
    clock = Clock(request.seconds, started=started)
    check_destination(Path(destination), force=force)
    place = None if report is None else Path(report)
    if place is not None:
        check_folder(place, "--report")
    loaded, given = _tune_data(**asked)
    with (
        nullcontext(evaluate_here)
        if ray is None
        else evaluating_on_ray(ray, on or "CPU", progress or Silent())
    ) as evaluate:
        found = run_it(
            *(loaded, given, Path(destination), request),
            work=place,
            force=force,
            progress=progress,
            clock=clock,
            evaluate=evaluate,
        )
    if place is not None:
        write_findings(found, place, command)
    return found


def tune_plan(
    model: Model | Callable[[], Model],
    data: AnyPath | Labelled | np.ndarray,
    destination: AnyPath,
    **options: Any,
) -> SearchPlan:
    """Returns how large the search of `tune` is with the same arguments; writes nothing."""
    check_pytorch("tune")
    from .tune.tune import plan_search

    given = introspection.signature(tune).bind(model, data, destination, **options)
    given.apply_defaults()
    request = _tune_request(**given.arguments)
    return plan_search(*_tune_data(**given.arguments), request, given.arguments["progress"])


def _tune_request(**asked: Any) -> TuneRequest:
    """What the parameters of `tune` ask for."""
    from .exporter.inputs import parse_range
    from .tune.request import (
        DEFAULT_KEEP,
        TuneRequest,
        parse_seconds,
        parse_share,
        parse_size,
        parse_tried,
    )

    keep, latency, most = asked["keep"], asked["max_latency"], asked["max_bytes"]
    only_keep = latency is None and most is None
    share = DEFAULT_KEEP if only_keep else None
    ms = None if latency is None else 1e3 * parse_seconds(latency, "--max-latency", "ms")
    time = asked["time"]
    return TuneRequest(
        keep=share if keep is None else parse_share(keep, "--keep"),
        latency_ms=ms,
        bytes=None if most is None else parse_size(most, "--max-bytes"),
        metric=asked["metric"],
        target=asked["target"],
        batch=parse_range(str(asked["batch"]), "--batch"),
        tokens=parse_range(str(asked["tokens"]), "--tokens"),
        precisions=parse_tried(asked["precision"] or ""),
        subsets=not asked["all_experts"],
        seconds=None if time is None else parse_seconds(time, "--time", "s"),
        threads=asked["threads"],
    )


def _tune_data(**asked: Any) -> tuple[Model, Labelled]:
    """The model of a search, and its data."""
    from .bench.data import LabelledData, Streamed, labelled
    from .bench.language import is_language_model, prompt_of, token_windows
    from .exporter.inputs import DEFAULT_TOKENS, parse_range

    model, data = asked["model"], asked["data"]
    loaded: Model = model() if callable(model) else model
    if is_language_model(loaded) and not isinstance(data, LabelledData | Streamed):
        tokens = parse_range(str(asked["tokens"]), "--tokens")
        prompt = prompt_of(loaded, None if tokens == DEFAULT_TOKENS else tokens.opt)
        return loaded, token_windows(data, loaded, prompt)
    return loaded, labelled(asked["data"], loaded, 1, asked["pixels"])


def specialise(
    model: Model,
    data: AnyPath | LabelledData,
    *,
    layer: str | None = None,
    group_by: str | Sequence[int | bool | str] | None = None,
    rewrite_class: int | None = None,
    rewrite_group: int | bool | str | None = None,
    strength: float | None = None,
    budget: float = 0.01,
    progress: Progress | None = None,
) -> Specialisation:
    """Removes each expert of a layer in turn; returns how the accuracy of every class changes.

    With subgroups, also how fairly each class is told in them, and the rewriting that is wanted.

    Args:
        model: a loaded model.
        data: labelled inputs, or an .npz that holds `input` and `label`.
        layer: the layer whose experts are removed (None: the last MoE layer).
        group_by: the subgroup of each input, or the name of an array of the .npz (None: mean
            coefficients are those of the classes, and nothing is compared).
        rewrite_class: the class whose output a rewriting changes (None: there is none).
        rewrite_group: the subgroup that it helps (None).
        strength: its |λ|; the sign follows from the wrong answers (None: that of the best max-min).
        budget: the share of the accuracy that the search for it may cost (0.01).
        progress: receives every step (None: no progress).

    Raises:
        UsageError: there is no such layer, class or subgroup, or no wrong answer to rewrite.
        FeedError: the data have no labels, or name one subgroup.
    """
    check_pytorch("specialise")
    from .bench.specialise import Favour
    from .bench.specialise import specialise as run_it
    from .errors import UsageError

    if (rewrite_class is None) != (rewrite_group is None):
        raise UsageError(
            "a rewriting needs both a class and a subgroup",
            hint="give rewrite_class and rewrite_group, or neither",
        )
    favour = None
    if rewrite_class is not None and rewrite_group is not None:
        favour = Favour(rewrite_class, rewrite_group, strength, budget)
    return run_it(model, data, layer=layer, group_by=group_by, favour=favour, progress=progress)


def doctor(*, progress: Progress | None = None) -> Diagnosis:
    """Returns what this machine can build and run, and why not the rest; builds nothing.

    Args:
        progress: receives every step (None: no progress).
    """
    from .exporter.doctor import diagnose

    if progress is not None:
        progress.step("looking at packages and hardware")
    return diagnose()


def _folder(bundle: Bundle | AnyPath) -> Path:
    from .exporter.bundle.manifest import local_bundle

    return local_bundle(bundle) if isinstance(bundle, str | Path) else bundle.path
