"""What can be asked of moexport: each call takes a request and does the job.

The command line makes the requests from what is typed, `calls` from keywords. A call imports what
it needs, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common.libraries import check_pytorch
from .errors import UsageError
from .exporter.requests import (
    AnyPath,
    BuildRequest,
    CalibrateRequest,
    ExportRequest,
    InspectRequest,
    LoadRequest,
    RunRequest,
    SensitivityRequest,
    VerifyRequest,
)

if TYPE_CHECKING:
    from .calibration.table import CalibrationTable
    from .common.console import Progress
    from .data.feeds import Feed
    from .exporter.bundle.bundle import Bundle
    from .exporter.bundle.manifest import Check, Manifest
    from .exporter.bundle.run import Outputs
    from .exporter.doctor import Diagnosis
    from .exporter.inspect import ModelReport
    from .exporter.model import Model
    from .exporter.plan import Plan
    from .exporter.quantization.accuracy_search import LayerSensitivity
    from .exporter.tensorrt.build import EnginePlan
    from .exporter.tensorrt.records import Made

    AnyModel = Model | Callable[[], Model]


def load(source: AnyPath, request: LoadRequest) -> Model:
    """Returns the trained model that `source` names, ready to be exported.

    `source` is a checkpoint (a file, an index of shards, a folder, or the URL of one) or
    `package.module:factory`.

    Raises:
        CheckpointError: the file cannot be read, or is not a checkpoint.
        FamilyError: the family is unknown or ambiguous, or settings are missing.
        ParityError: a factory's network does not compute what its layers should.
        UsageError: an argument is invalid.
    """
    check_pytorch("loading a model")
    from .exporter.checkpoints.load import load_as

    _say(request.progress, f"loading {source}")
    return load_as(source, request)


def inspect(model: Model | AnyPath, request: InspectRequest) -> ModelReport:
    """Returns what a model is before it is exported: its layers, its sizes, what each k costs.

    `model` is a loaded model, or what `load` takes, of which the shapes alone are read.
    """
    check_pytorch("inspecting a model")
    from .exporter.checkpoints.load import load_as
    from .exporter.inspect import inspect as inspect_model

    data = request.data
    if isinstance(model, str | Path):
        _say(request.progress, f"loading {model}")
        # A factory's network is checked on the data, too.
        example = data if isinstance(data, str | Path) else None
        model = load_as(model, replace(request, values=data is not None, example=example))
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


def calibrate(model: AnyModel | AnyPath, data: Feed, request: CalibrateRequest) -> CalibrationTable:
    """Returns the ranges of a model's tensors over inputs; `.write(path)` keeps them.

    `model` is a loaded model, a function that loads it, or what `load` takes; `data` are its
    inputs, as in `export`. With `ray`, nodes of a cluster share the inputs: every node must have
    moexport, and read model and data by the same paths or URLs.

    Raises:
        UsageError: an option is invalid.
        FeedError: the inputs do not fit the model.
        CalibrationError: a tensor's values give no range, or the table at `out` is of another
            origin.
        ClusterError: the cluster cannot be reached, lacks the resource, or loses its nodes.
    """
    check_pytorch("calibration")
    from .bench.executors import executor_of
    from .exporter.checkpoints.load import load_as
    from .exporter.job import calibration_job
    from .exporter.quantization.calibrate import calibrate as run
    from .exporter.quantization.calibrate import calibrate_to

    progress, force = request.progress, request.force
    out = None if request.out is None else Path(request.out)
    executor = executor_of(request)
    if executor is not None:
        return executor.calibrate(model, data, request)
    if isinstance(model, str | Path):
        model = load_as(model, request.loading)
    job = calibration_job(model() if callable(model) else model, data, request)
    if out is not None:
        return calibrate_to(out, job, force=force, progress=progress)
    place = None if request.workspace is None else Path(request.workspace)
    return run(job, workspace=place, progress=progress)


def sensitivity(
    model: Model, table: CalibrationTable, data: Feed, request: SensitivityRequest
) -> tuple[LayerSensitivity, ...]:
    """Returns what INT8 does to each MoE layer alone, on a CPU, the most sensitive layer first.

    `table` is what `calibrate` returned for the model, and `data` are its inputs, as in `export`.
    """
    check_pytorch("calibration")
    from .exporter.options import parse_k
    from .exporter.quantization.accuracy_search import rank

    return rank(
        model,
        parse_k(request.k),
        table,
        data,
        request.samples,
        renormalize=request.renormalize,
        progress=request.progress,
    )


def export(model: AnyModel, destination: AnyPath, request: ExportRequest) -> Bundle:
    """Writes a verified bundle of a model (ONNX graphs, weights, a manifest) and returns it.

    `model` is a loaded model, or a function that loads it, called when what needs no model is
    checked; `destination` is the folder to write. Invalid requests are refused before the work
    begins, and no partial output is left.

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
    check_pytorch("export")
    from .exporter.export import export as run
    from .exporter.job import export_job, requested

    return run(export_job(model, requested(request, Path(destination))), request.progress)


def plan(model: AnyModel, destination: AnyPath, request: ExportRequest) -> Plan:
    """Returns what `export` would write with the same arguments; traces, but writes nothing.

    A bundle that is at `destination` does not matter; data that do not fit are told of.
    """
    check_pytorch("export")
    from .exporter.export import export_plan
    from .exporter.inputs import parity_batches
    from .exporter.job import export_job, requested

    job = export_job(model, requested(replace(request, force=True), Path(destination)))
    options = job.options
    if options.data is not None and options.verify:
        parity_batches(
            job.model, job.fixed, options.data, options.samples_to_verify, ranges=job.ranges
        )
    return export_plan(job, request.progress)


def build(bundle: Bundle | AnyPath, request: BuildRequest) -> Bundle:
    """Compiles the engines of a bundle's graphs into it; returns it with its new manifest.

    Raises:
        UsageError: before anything is built, if an option is invalid.
        MissingExtraError: before anything is built, if a package is missing.
        EngineError: a graph cannot be built, or its build fails.
    """
    from .exporter.bundle.bundle import Bundle

    plans = build_plan(bundle, request)
    build_engines(bundle, plans, rebuild=request.rebuild, progress=request.progress)
    return Bundle.open(_folder(bundle))


def build_plan(bundle: Bundle | AnyPath, request: BuildRequest) -> list[EnginePlan]:
    """Returns the engines that `build` would compile; builds nothing."""
    from .exporter.bundle.manifest import Manifest
    from .exporter.inputs import parse_range
    from .exporter.tensorrt.cache import default_cache
    from .exporter.tensorrt.engines import plan_engines
    from .exporter.tensorrt.options import EngineOptions

    folder = _folder(bundle)
    manifest = Manifest.read(folder)
    manifest.check_target(folder)
    sizes = {"batch": request.batch, "tokens": request.tokens}
    ranges = {
        axis: parse_range(str(size), f"--{axis}")
        for axis, size in sizes.items()
        if size is not None
    }
    options = request.options or EngineOptions(cache=default_cache())
    target = request.target or manifest.target
    return plan_engines(manifest, target, options, graph=request.graph, ranges=ranges)


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
    from .exporter.bundle.manifest import Manifest
    from .exporter.tensorrt.engines import add_engines

    if url_of(bundle) is not None:
        raise UsageError(
            f"{bundle}: engines are written into a bundle, and this one is read by a URL",
            hint="copy the bundle to this machine, build, and copy it back",
        )
    folder = _folder(bundle)
    return add_engines(folder, Manifest.read(folder), plans, progress, rebuild=rebuild)


def verify(bundle: Bundle | AnyPath, request: VerifyRequest) -> Iterator[Check]:
    """Yields the checks of a bundle as they are made: hashes, valid graphs, parity, engines."""
    from .exporter.bundle.bundle import Bundle

    opened = Bundle.open(_folder(bundle))
    for check in opened.verify(
        atol=request.atol, rtol=request.rtol, trust_engine=request.trust_engine
    ):
        _say(request.progress, check.name)
        yield check


def others_in(bundle: Bundle | AnyPath) -> list[str]:
    """Returns the names of what lies in a bundle's folder and is not of it: `verify` skips it."""
    from .exporter.bundle.destination import others_in as others
    from .exporter.bundle.manifest import Manifest

    return others(_folder(bundle), Manifest.read(_folder(bundle)).files)


def run(
    bundle: Bundle | AnyPath, inputs: AnyPath, outputs: AnyPath, request: RunRequest
) -> Outputs:
    """Writes a bundle's outputs for the inputs of a file; `Bundle.session` runs it on arrays.

    `inputs` is an `.npz` of inputs [b, ...] as the model takes them, `outputs` the one to write.

    Raises:
        UsageError: an argument is invalid.
        FeedError: the inputs do not fit the model.
    """
    from .common.locations import local
    from .exporter.bundle.run import run_file

    return run_file(_folder(bundle), local(inputs), Path(outputs), request)


def doctor(*, progress: Progress | None = None) -> Diagnosis:
    """Returns what this machine can build and run, and why not the rest; builds nothing."""
    from .bench.engines import requirements
    from .exporter.doctor import diagnose

    _say(progress, "looking at packages and hardware")
    return diagnose(requirements())


def _say(progress: Progress | None, step: str) -> None:
    if progress is not None:
        progress.step(step)


def _folder(bundle: Bundle | AnyPath) -> Path:
    from .exporter.bundle.manifest import local_bundle

    return local_bundle(bundle) if isinstance(bundle, str | Path) else bundle.path
