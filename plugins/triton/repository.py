"""Writes bundles as a model repository for Triton Inference Server.

A bundle becomes a model. If several bundles of one network have different k, an ensemble is added,
which returns the outputs of all their models for one request.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...common.console import Silent
from ...common.writing import (
    check_folder,
    made_folder,
    output_errors,
    replace_folder,
    temporary_folder,
)
from ...errors import BundleError, EngineError, OutputError, UsageError
from ...exporter.bundle.bundle import Bundle
from ...exporter.bundle.manifest import MAIN_GRAPH, MANIFEST_FILE, TensorSpec, external_files
from ...exporter.bundle.parity import PARITY_FILE, Reference
from ...exporter.bundle.runtimes import RUNTIMES
from ...exporter.tensorrt.records import EngineRecord, engines_of
from ...exporter.tensorrt.trust import find_plan
from ...graphs.names import K_INPUT, SELECTED
from ...graphs.targets import QDQ, TARGETS, runtime_of
from . import config
from .request import Device, ServingBackend, TritonRequest

CONFIG = "config.pbtxt"

DELAY_US = 100

BUNDLE = "bundle"
"""The subfolder of a version that contains the bundle for the Python backend."""

PROGRAM = Path(__file__).with_name("python_backend.py")

MAX_NAME_LENGTH = 255
"""The largest length of a folder's name in common file systems, in bytes."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of a repository.

    All versions share `interface`, and a user may edit `settings`. `files` are the files of a
    version, to be copied or written; `shared` are the files next to the versions.
    """

    name: str
    interface: Mapping[str, Any]
    settings: Mapping[str, Any]
    files: Mapping[str, Path | bytes]
    shared: Mapping[str, bytes]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns the model as plain data."""
        interface = self.interface
        return {
            "name": self.name,
            "backend": interface.get("backend", interface.get("platform")),
            "max_batch_size": interface["max_batch_size"],
            "inputs": [spec["name"] for spec in interface["input"]],
            "outputs": [spec["name"] for spec in interface["output"]],
            "files": [*self.files],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class _BackendModel:
    """What one backend needs to serve a bundle.

    If `optional`, requests may omit inputs with a default. `k` has additional fields of the input
    k. `file` is the model's file if its name is not the backend's usual one. `instance` has fields
    of the instances, and `parameters` has the backend's parameters.
    """

    max_batch: int
    files: Mapping[str, Path | bytes]
    outputs: Sequence[TensorSpec]
    k: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None
    optional: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    instance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def write_repository(
    bundles: Sequence[Bundle], repository: Path, options: TritonRequest | None = None
) -> list[ServedModel]:
    """Writes the models of bundles to a repository, each completely or not at all; returns them.

    Raises `UsageError` for bundles that cannot be served with these options, `BundleError` for a
    bundle that has changed, and `OutputError` for an existing model or version, unless `force`.
    """
    options = options or TritonRequest()
    progress = options.progress or Silent()
    models = list(plan_models(bundles, options))
    check_folder(repository)
    for model in models:
        _check_free(repository / model.name, model, options)
    progress.step(f"writing {', '.join(model.name for model in models)}")
    target = repository.resolve()
    with made_folder(target.parent), output_errors(repository), temporary_folder(target) as staged:
        for model in models:
            _stage(model, staged / model.name, target / model.name, options)
        if not target.exists():
            replace_folder(staged, target)
            return models
        for model in models:
            replace_folder(staged / model.name, target / model.name)
    return models


def plan_models(bundles: Sequence[Bundle], options: TritonRequest) -> Iterator[ServedModel]:
    """Yields the models of the bundles and then, if there are several, their ensemble."""
    name = options.name or _default_name(bundles[0])
    if len(bundles) == 1:
        yield _model(bundles[0], name, options)
        return
    members: dict[str, ServedModel] = {}
    for bundle in bundles:
        if bundle.manifest.k == "input":
            raise UsageError(
                f"{bundle.path}: k is an input of its graph, so an ensemble is not needed",
                hint="serve this bundle alone: each request can choose its k",
            )
        k = "-".join(dict.fromkeys(str(layer.k) for layer in bundle.manifest.layers))
        if k in members:
            raise UsageError(
                f"{bundle.path} has the same k as another of the bundles: {k}",
                hint="an ensemble needs bundles with different k; serve this one separately, with "
                "another --name",
            )
        members[k] = _model(bundle, f"{name}-k{k}", options)
    yield from members.values()
    yield _ensemble(name, members)


def _default_name(bundle: Bundle) -> str:
    """Returns the name of a bundle's checkpoint or factory."""
    stem = Path(bundle.manifest.source.path.rpartition(":")[2]).stem
    name = re.sub(r"[^\w.-]", "-", stem, flags=re.ASCII).lstrip("-.")
    return name or "model"


def _model(bundle: Bundle, name: str, options: TritonRequest) -> ServedModel:
    manifest, served = bundle.manifest, _backend_model(bundle, options)
    backend, device = _backend(bundle, options), _device(bundle, options)
    batched, batch = served.max_batch > 0, bundle.manifest.batches
    inputs = []
    for spec in manifest.inputs:
        if spec.name == K_INPUT:
            shape = ("batch", 1) if batched else (1,)
            spec = TensorSpec(K_INPUT, "int64", shape)  # noqa: PLW2901  as Triton batches it
            extra = served.k
        else:
            extra = {"optional": True} if served.optional and spec.default is not None else {}
        inputs.append(config.tensor_fields(spec, batched=batched, **extra))
    instance_kind = "KIND_GPU" if device == "gpu" else "KIND_CPU"
    settings: dict[str, Any] = {
        "instance_group": {
            "count": options.instances,
            "kind": config.Symbol(instance_kind),
            **served.instance,
        }
    }
    if batched:
        preferred = [batch.opt] if 1 < batch.opt <= served.max_batch else []
        settings["dynamic_batching"] = {
            **({"preferred_batch_size": preferred} if preferred else {}),
            "max_queue_delay_microseconds": DELAY_US
            if options.delay_us is None
            else options.delay_us,
        }
    elif options.delay_us is not None:
        raise UsageError(
            f"--delay-us {options.delay_us}: Triton does not batch requests to {bundle.path}",
            hint="omit --delay-us, or use --backend python; other backends can batch a graph that "
            "has a dynamic batch size and no input k",
        )
    if served.parameters:
        settings["parameters"] = config.entries(served.parameters)
    samples = _samples(bundle, options, batched=batched)
    notes = served.notes
    if samples:
        sizes = sorted({1, min(batch.opt, served.max_batch)}) if batched else [1]
        settings["model_warmup"] = config.warm_up(samples, sizes, batched=batched)
    else:
        notes = (*notes, f"{name}: no warm-up, because the bundle has no reference inputs")
    return ServedModel(
        name=name,
        interface={
            "name": name,
            "backend": backend,
            "max_batch_size": served.max_batch,
            **({} if served.file is None else {"default_model_filename": served.file}),
            "input": inputs,
            "output": [config.tensor_fields(output, batched=batched) for output in served.outputs],
        },
        settings=settings,
        files=served.files,
        shared={f"{config.WARM_UP}/{config.file_name(n)}": x.tobytes() for n, x in samples.items()},
        notes=notes,
    )


def _backend(bundle: Bundle, options: TritonRequest) -> ServingBackend:
    if options.backend is not None:
        return options.backend
    if any(record.flavour == "tensorrt" for record in engines_of(bundle.manifest)):
        return "tensorrt"
    # Triton's OpenVINO backend has no setting that keeps FP32, which the choice of experts needs.
    return "python" if runtime_of(bundle.manifest.target) == "openvino" else "onnxruntime"


def _device(bundle: Bundle, options: TritonRequest) -> Device:
    if _backend(bundle, options) == "tensorrt":
        return "gpu"
    on_cpu = TARGETS[bundle.manifest.target].on_cpu
    return options.device or ("cpu" if on_cpu else "gpu")


def _backend_model(bundle: Bundle, options: TritonRequest) -> _BackendModel:
    manifest, backend = bundle.manifest, _backend(bundle, options)
    if options.k is not None and manifest.k != "input":
        raise UsageError(
            f"--k {options.k}: the k of {bundle.path} is a constant of its graph",
            hint="export with --k input, so that requests can choose k",
        )
    if options.k is not None and not 1 <= options.k <= _experts(bundle):
        raise UsageError(
            f"--k {options.k}: the model has {_experts(bundle)} experts",
            hint=f"use 1 ≤ k ≤ {_experts(bundle)}",
        )
    match backend:
        case "tensorrt":
            return _tensorrt(bundle, options)
        case "python":
            return _python(bundle, options)
        case "openvino":
            return _openvino(bundle, options)
        case _:
            return _onnxruntime(bundle, options)


def _experts(bundle: Bundle) -> int:
    return min(layer.experts for layer in bundle.manifest.layers)


def _default_k(bundle: Bundle, options: TritonRequest) -> int:
    """Returns the k for requests that do not specify one."""
    return options.k or _experts(bundle)


def _max_batch(bundle: Bundle) -> int:
    """Returns the largest batch, or 0 if Triton cannot batch.

    Triton cannot batch if the batch size is a constant of the graph, or if inputs in a batch
    influence each other, because it would mix requests.
    """
    batches, spec = bundle.manifest.batches, bundle.manifest.inputs[0]
    return 0 if isinstance(spec.shape[0], int) or spec.groups_of else batches.max


def _onnxruntime(bundle: Bundle, options: TritonRequest) -> _BackendModel:
    import onnx

    manifest, takes_k = bundle.manifest, bundle.manifest.k == "input"
    target = TARGETS[manifest.target]
    if target.integers in QDQ and manifest.precision in ("int8", "fp8"):
        raise UsageError(
            f"--backend onnxruntime: {bundle.path} is quantized for {manifest.target}, which ONNX "
            "Runtime's fusions compute wrongly",
            hint="export with --target ort-cpu, or use --backend python, which disables fusion",
        )
    if manifest.precision == "bf16" and _device(bundle, options) == "cpu":
        raise UsageError(
            "--backend onnxruntime: ONNX Runtime does not support BF16 on a CPU",
            hint="use --device gpu, or --backend python, which emulates BF16",
        )
    notes = []
    if len(manifest.graphs) > 1:
        notes.append(f"{bundle.path.name}: of its graphs only {MAIN_GRAPH} is served")
    if any(spec.default is not None for spec in manifest.inputs):
        notes.append(f"{bundle.path.name}: requests must contain every input")
    file = bundle.graph_file()
    model = onnx.load(file, load_external_data=False)
    content: Path | bytes = file
    if takes_k:
        # An initializer with an input's name is its default, and Triton makes the input optional.
        default = np.array([_default_k(bundle, options)], np.int64)
        model.graph.initializer.append(onnx.numpy_helper.from_array(default, K_INPUT))
        content = model.SerializeToString()
    weights = sorted(external_files(model))
    files: dict[str, Path | bytes] = {MAIN_GRAPH: content}
    if weights:  # a model of several files is a folder of this name
        files = {f"{MAIN_GRAPH}/{MAIN_GRAPH}": content}
        files |= {f"{MAIN_GRAPH}/{name}": bundle.path / name for name in weights}
    threads = options.threads
    return _BackendModel(
        # Triton requires a batch axis in every input, but k has none.
        max_batch=0 if takes_k else _max_batch(bundle),
        files=files,
        outputs=manifest.outputs,
        k={"optional": True},
        parameters={} if threads is None else {"intra_op_thread_count": str(threads)},
        notes=tuple(notes),
    )


def _openvino(bundle: Bundle, options: TritonRequest) -> _BackendModel:
    import onnx

    RUNTIMES["openvino"].check_graphs(bundle.manifest, bundle.path)
    if bundle.manifest.k == "input":
        raise UsageError(
            f"--backend openvino: k is an input of {bundle.path}, but this backend does not "
            "support inputs without a batch axis",
            hint="use --backend python, or export with a fixed --k",
        )
    file = bundle.graph_file()
    weights = external_files(onnx.load(file, load_external_data=False))
    threads = options.threads
    parameters = {"PERFORMANCE_HINT": "LATENCY"}
    return _BackendModel(
        max_batch=_max_batch(bundle),
        files={MAIN_GRAPH: file, **{name: bundle.path / name for name in sorted(weights)}},
        outputs=bundle.manifest.outputs,
        file=MAIN_GRAPH,
        parameters=parameters
        if threads is None
        else parameters | {"INFERENCE_NUM_THREADS": str(threads)},
        notes=(
            f"{bundle.path.name}: on CPUs that support BF16, Triton's OpenVINO backend computes "
            "everything in it, including the choice of experts; --backend python keeps FP32",
        ),
    )


def _tensorrt(bundle: Bundle, options: TritonRequest) -> _BackendModel:
    record = bundle.engine_record("tensorrt")
    for option, applies in (
        ("--bind-weights", record.bound),
        ("--strip-plan", record.options.get("strip_plan")),
    ):
        if applies:
            raise EngineError(
                f"{bundle.path / record.file} was built with {option}, but Triton cannot add "
                "weights to an engine",
                hint=f"build the engine again without {option}",
            )
    unsupported = {"k": options.k, "threads": options.threads, "device": options.device}
    for name, value in unsupported.items():
        if value not in (None, "gpu"):
            raise UsageError(
                f"--{name} {value}: an engine runs on the GPU, with the k of the request",
                hint=f"omit --{name}",
            )
    plan = find_plan(bundle.path / record.file)
    min_batch = min(span.min[0] for span in record.ranges)
    max_batch = max(span.max[0] for span in record.ranges)
    takes_k = record.ranges[0].k is not None
    batched = not takes_k and min_batch == 1 and max_batch > 1
    return _BackendModel(
        max_batch=max_batch if batched else 0,
        files={"model.plan": plan.path},
        outputs=[*_engine_outputs(bundle, record)],
        k={"is_shape_tensor": True},
        instance={"profile": [str(index) for index in range(len(record.ranges))]},
        notes=(f"{record.file} needs a Triton with TensorRT {record.version}, which built it",),
    )


def _engine_outputs(bundle: Bundle, record: EngineRecord) -> Iterator[TensorSpec]:
    """Yields the engine's outputs: those of its graph and those of `--expose-routing`."""
    outputs = {spec.name: spec for spec in bundle.manifest.outputs}
    for name in record.settings.get("outputs", [*outputs]):
        if not isinstance(name, str):
            raise BundleError(f"{record.file}: the engine's outputs in the manifest are not names")
        is_selection = name.endswith(f"/{SELECTED}")
        shape = ("batch", "k") if is_selection else ("batch", "tokens", "experts")
        yield outputs.get(name) or TensorSpec(name, "int64" if is_selection else "float32", shape)


def _python(bundle: Bundle, options: TritonRequest) -> _BackendModel:
    import onnx

    manifest = bundle.manifest
    names = {MANIFEST_FILE}
    for graph in manifest.graphs:
        file = bundle.graph_file(graph.file)
        names |= {graph.file, *external_files(onnx.load(file, load_external_data=False))}
    parameters = {"provider": "cuda" if _device(bundle, options) == "gpu" else "cpu"}
    parameters |= {"runtime": runtime_of(manifest.target)}
    parameters |= {} if options.threads is None else {"threads": str(options.threads)}
    parameters |= {"k": str(_default_k(bundle, options))} if manifest.k == "input" else {}
    return _BackendModel(
        max_batch=_max_batch(bundle),
        files={"model.py": PROGRAM, **{f"{BUNDLE}/{n}": bundle.path / n for n in sorted(names)}},
        outputs=manifest.outputs,
        k={"optional": True},
        optional=True,
        parameters=parameters,
    )


def _samples(bundle: Bundle, options: TritonRequest, *, batched: bool) -> dict[str, np.ndarray]:
    """Returns an input of the parity check, or a batch if its size is fixed; empty without any."""
    manifest = bundle.manifest
    if PARITY_FILE not in manifest.files or manifest.inputs[0].dtype == "bfloat16":
        return {}
    feeds = Reference.load(bundle.path / PARITY_FILE).feeds(manifest.inputs[0].name)
    count = manifest.batches.opt if manifest.batches.fixed else manifest.group_size
    arrays = {
        spec.name: np.ascontiguousarray(feeds[spec.name][:count], dtype=spec.dtype)
        for spec in manifest.inputs
        if spec.name in feeds
    }
    if manifest.k == "input":
        k = np.array([_default_k(bundle, options)], np.int64)
        arrays[K_INPUT] = k[None] if batched else k
    return arrays


def _ensemble(name: str, members: Mapping[str, ServedModel]) -> ServedModel:
    """Returns a model that calls every member and returns their outputs as `OUTPUT_kK`."""
    first = next(iter(members.values()))
    inputs = first.interface["input"]
    outputs, steps = [], []
    for k, member in members.items():
        if member.interface["input"] != inputs:
            raise UsageError(
                f"the inputs of {member.name} differ from those of {first.name}",
                hint="an ensemble needs bundles of one network with different k",
            )
        named = {spec["name"]: f"{spec['name']}_k{k}" for spec in member.interface["output"]}
        outputs += [{**spec, "name": named[spec["name"]]} for spec in member.interface["output"]]
        steps.append(
            {
                "model_name": member.name,
                "model_version": -1,
                "input_map": [{"key": i["name"], "value": i["name"]} for i in inputs],
                "output_map": [{"key": key, "value": value} for key, value in named.items()],
            }
        )
    return ServedModel(
        name=name,
        interface={
            "name": name,
            "platform": "ensemble",
            "max_batch_size": min(m.interface["max_batch_size"] for m in members.values()),
            "input": inputs,
            "output": outputs,
        },
        settings={"ensemble_scheduling": {"step": steps}},
        files={},
        shared={},
        notes=(),
    )


def _check_free(folder: Path, model: ServedModel, options: TritonRequest) -> None:
    """Raises `OutputError` if a model's version exists or something else has its name.

    Raises `UsageError` for a name that no folder can have.
    """
    if len(model.name) > MAX_NAME_LENGTH:
        raise UsageError(
            f"{model.name[:40]}…: the model's name has {len(model.name)} characters, but a "
            f"folder's name can have at most {MAX_NAME_LENGTH}",
            hint="choose a shorter --name",
        )
    if not folder.exists() or options.force:
        return
    if not (folder / CONFIG).is_file():
        raise OutputError(
            f"{folder} exists but is not a model of a Triton repository; it was not changed",
            hint="choose another -o or --name",
        )
    if (folder / str(options.version)).exists():
        raise OutputError(
            f"{folder} already has a version {options.version}",
            hint=f"--version {options.version + 1} adds another; --force replaces the model",
        )
    if not (folder / CONFIG).read_bytes().startswith(config.text(model.interface).encode()):
        raise OutputError(
            f"{folder}: version {options.version} would differ from the others in backend, batch, "
            f"inputs or outputs, but all versions share {CONFIG}",
            hint="choose another --name, or --force to replace the model",
        )


def _stage(model: ServedModel, folder: Path, existing: Path, options: TritonRequest) -> None:
    """Writes a model's folder, including its existing versions.

    Existing files that all versions share stay unchanged, because a user may have edited them.
    """
    if existing.exists() and not options.force:
        shutil.copytree(existing, folder, copy_function=_link_or_copy)
    (folder / str(options.version)).mkdir(parents=True)
    text = config.text(model.interface) + config.text(model.settings)
    shared = {CONFIG: text.encode(), **model.shared}
    contents: dict[str, Path | bytes] = {
        **{name: content for name, content in shared.items() if not (folder / name).exists()},
        **{f"{options.version}/{name}": content for name, content in model.files.items()},
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_bytes(content)


def _link_or_copy(source: str, target: str) -> None:
    """Links a file of an existing version, or copies it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
