"""Writes bundles as a model repository of Triton Inference Server.

A bundle becomes a model. Bundles of one network with different k each become a model, with an
ensemble that returns every model's outputs for one request.
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
"""The subfolder of a version with the bundle for the Python backend."""

PROGRAM = Path(__file__).with_name("python_backend.py")

LONGEST_NAME = 255
"""The longest name of a folder in common file systems, in bytes."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of a repository.

    All versions share `interface`, and a user may edit `settings`. `files` has the contents of a
    version, to copy or write; `beside` has the files next to the versions.
    """

    name: str
    interface: Mapping[str, Any]
    settings: Mapping[str, Any]
    files: Mapping[str, Path | bytes]
    beside: Mapping[str, bytes]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns the model as plain data."""
        interface = self.interface
        return {
            "name": self.name,
            "backend": interface.get("backend", interface.get("platform")),
            "max_batch_size": interface["max_batch_size"],
            "inputs": [port["name"] for port in interface["input"]],
            "outputs": [port["name"] for port in interface["output"]],
            "files": [*self.files],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class _BackendForm:
    """A bundle in the form for one backend.

    If `optional`, requests may omit inputs with a default. `k` describes the input k without its
    type. `file` is the model's file if its name is not the backend's usual one. `instance` has the
    fields of the instances, and `parameters` those of the backend.
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
    bundles: Sequence[Bundle],
    place: Path,
    options: TritonRequest | None = None,
) -> list[ServedModel]:
    """Writes the models of bundles to a repository, each completely or not at all; returns them.

    Raises `UsageError` for bundles that cannot be served with these options, `BundleError` for a
    bundle that has changed, and `OutputError` for an existing model or version, unless `force`.
    """
    options = options or TritonRequest()
    progress = options.progress or Silent()
    models = list(planned(bundles, options))
    check_folder(place)
    for model in models:
        _check_free(place / model.name, model, options)
    progress.step(f"writing {', '.join(model.name for model in models)}")
    target = place.resolve()
    with made_folder(target.parent), output_errors(place), temporary_folder(target) as staged:
        for model in models:
            _stage(model, staged / model.name, target / model.name, options)
        if not target.exists():
            replace_folder(staged, target)
            return models
        for model in models:
            replace_folder(staged / model.name, target / model.name)
    return models


def planned(bundles: Sequence[Bundle], options: TritonRequest) -> Iterator[ServedModel]:
    """Yields the models of bundles and then, if there are several, the ensemble."""
    name = options.name or _default_name(bundles[0])
    if len(bundles) == 1:
        yield _served(bundles[0], name, options)
        return
    members: dict[str, ServedModel] = {}
    for bundle in bundles:
        if bundle.manifest.k == "input":
            raise UsageError(
                f"{bundle.path}: k is an input of its graph, so it needs no other bundle",
                hint="serve it alone: each request can choose its k",
            )
        k = "-".join(dict.fromkeys(str(layer.k) for layer in bundle.manifest.layers))
        if k in members:
            raise UsageError(
                f"{bundle.path}: k = {k}, as in another of the bundles",
                hint="an ensemble needs bundles with different k; serve this one separately, with "
                "another --name",
            )
        members[k] = _served(bundle, f"{name}-k{k}", options)
    yield from members.values()
    yield _ensemble(name, members)


def _default_name(bundle: Bundle) -> str:
    """Returns the name of a bundle's checkpoint or factory."""
    stem = Path(bundle.manifest.source.path.rpartition(":")[2]).stem
    name = re.sub(r"[^\w.-]", "-", stem, flags=re.ASCII).lstrip("-.")
    return name or "model"


def _served(bundle: Bundle, name: str, options: TritonRequest) -> ServedModel:
    manifest, form = bundle.manifest, _form(bundle, options)
    backend, device = _backend(bundle, options), _device(bundle, options)
    batched, batch = form.max_batch > 0, bundle.manifest.batches
    inputs = []
    for port in manifest.inputs:
        if port.name == K_INPUT:
            shape = ("batch", 1) if batched else (1,)
            port = TensorSpec(K_INPUT, "int64", shape)  # noqa: PLW2901  as Triton batches it
            more = form.k
        else:
            more = {"optional": True} if form.optional and port.default is not None else {}
        inputs.append(config.port(port, batched=batched, **more))
    kind = "KIND_GPU" if device == "gpu" else "KIND_CPU"
    settings: dict[str, Any] = {
        "instance_group": {
            "count": options.instances,
            "kind": config.Word(kind),
            **form.instance,
        }
    }
    if batched:
        preferred = [batch.opt] if 1 < batch.opt <= form.max_batch else []
        settings["dynamic_batching"] = {
            **({"preferred_batch_size": preferred} if preferred else {}),
            "max_queue_delay_microseconds": DELAY_US
            if options.delay_us is None
            else options.delay_us,
        }
    elif options.delay_us is not None:
        raise UsageError(
            f"--delay-us {options.delay_us}: Triton does not batch requests to {bundle.path}",
            hint="omit --delay-us; Triton can batch a graph with a dynamic batch and without the "
            "input k, or --backend python",
        )
    if form.parameters:
        settings["parameters"] = config.entries(form.parameters)
    samples = _samples(bundle, options, batched=batched)
    notes = form.notes
    if samples:
        sizes = sorted({1, min(batch.opt, form.max_batch)}) if batched else [1]
        settings["model_warmup"] = config.warm_up(samples, sizes, batched=batched)
    else:
        notes = (*notes, f"{name}: no warm-up, because the bundle has no reference inputs")
    return ServedModel(
        name=name,
        interface={
            "name": name,
            "backend": backend,
            "max_batch_size": form.max_batch,
            **({} if form.file is None else {"default_model_filename": form.file}),
            "input": inputs,
            "output": [config.port(output, batched=batched) for output in form.outputs],
        },
        settings=settings,
        files=form.files,
        beside={f"{config.WARM_UP}/{config.file_name(n)}": x.tobytes() for n, x in samples.items()},
        notes=notes,
    )


def _backend(bundle: Bundle, options: TritonRequest) -> ServingBackend:
    if options.backend is not None:
        return options.backend
    if any(record.flavour == "tensorrt" for record in engines_of(bundle.manifest)):
        return "tensorrt"
    # Triton's OpenVINO backend has no setting to keep FP32, which the choice of experts needs.
    return "python" if runtime_of(bundle.manifest.target) == "openvino" else "onnxruntime"


def _device(bundle: Bundle, options: TritonRequest) -> Device:
    if _backend(bundle, options) == "tensorrt":
        return "gpu"
    on_cpu = TARGETS[bundle.manifest.target].on_cpu
    return options.device or ("cpu" if on_cpu else "gpu")


def _form(bundle: Bundle, options: TritonRequest) -> _BackendForm:
    manifest, backend = bundle.manifest, _backend(bundle, options)
    if options.k is not None and manifest.k != "input":
        raise UsageError(
            f"--k {options.k}: the k of {bundle.path} is part of its graph",
            hint="export with --k input for a model whose requests choose k",
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


def _k(bundle: Bundle, options: TritonRequest) -> int:
    """Returns the k for requests that have none."""
    return options.k or _experts(bundle)


def _most(bundle: Bundle) -> int:
    """Returns the largest batch, or 0 if Triton cannot batch.

    It cannot if the batch size is a constant of the graph, or if inputs in a batch influence each
    other, because Triton would mix requests.
    """
    batches, port = bundle.manifest.batches, bundle.manifest.inputs[0]
    return 0 if isinstance(port.shape[0], int) or port.groups_of else batches.max


def _onnxruntime(bundle: Bundle, options: TritonRequest) -> _BackendForm:
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
        notes.append(f"{bundle.path.name}: only {MAIN_GRAPH} of several graphs is served")
    if any(port.default is not None for port in manifest.inputs):
        notes.append(f"{bundle.path.name}: requests must give every input")
    file = bundle.graph_file()
    model = onnx.load(file, load_external_data=False)
    content: Path | bytes = file
    if takes_k:
        # An initializer with an input's name is its default; in Triton, such an input is optional.
        default = np.array([_k(bundle, options)], np.int64)
        model.graph.initializer.append(onnx.numpy_helper.from_array(default, K_INPUT))
        content = model.SerializeToString()
    weights = sorted(external_files(model))
    files: dict[str, Path | bytes] = {MAIN_GRAPH: content}
    if weights:  # a model of several files is a folder of that name
        files = {f"{MAIN_GRAPH}/{MAIN_GRAPH}": content}
        files |= {f"{MAIN_GRAPH}/{name}": bundle.path / name for name in weights}
    threads = options.threads
    return _BackendForm(
        # Triton requires a batch axis in every input, and k has none.
        max_batch=0 if takes_k else _most(bundle),
        files=files,
        outputs=manifest.outputs,
        k={"optional": True},
        parameters={} if threads is None else {"intra_op_thread_count": str(threads)},
        notes=tuple(notes),
    )


def _openvino(bundle: Bundle, options: TritonRequest) -> _BackendForm:
    import onnx

    RUNTIMES["openvino"].check_graphs(bundle.manifest, bundle.path)
    if bundle.manifest.k == "input":
        raise UsageError(
            f"--backend openvino: k is an input of {bundle.path}, and that backend does not "
            "support inputs without a batch axis",
            hint="use --backend python, or export with a fixed --k",
        )
    file = bundle.graph_file()
    weights = external_files(onnx.load(file, load_external_data=False))
    threads = options.threads
    parameters = {"PERFORMANCE_HINT": "LATENCY"}
    return _BackendForm(
        max_batch=_most(bundle),
        files={MAIN_GRAPH: file, **{name: bundle.path / name for name in sorted(weights)}},
        outputs=bundle.manifest.outputs,
        file=MAIN_GRAPH,
        parameters=parameters
        if threads is None
        else parameters | {"INFERENCE_NUM_THREADS": str(threads)},
        notes=(
            f"{bundle.path.name}: Triton's OpenVINO backend computes FP32, even the choice of "
            "experts, in BF16 on CPUs that support it; --backend python keeps FP32",
        ),
    )


def _tensorrt(bundle: Bundle, options: TritonRequest) -> _BackendForm:
    record = bundle.engine_record("tensorrt")
    for option, held in (
        ("--bind-weights", record.bound),
        ("--strip-plan", record.options.get("strip_plan")),
    ):
        if held:
            raise EngineError(
                f"{bundle.path / record.file} was built with {option}, but Triton cannot add "
                "weights to an engine",
                hint=f"build it again without {option}",
            )
    idle = {"k": options.k, "threads": options.threads, "device": options.device}
    for name, value in idle.items():
        if value not in (None, "gpu"):
            raise UsageError(
                f"--{name} {value}: an engine runs on the GPU, with the k of the request",
                hint=f"omit --{name}",
            )
    plan = find_plan(bundle.path / record.file)
    smallest = min(span.min[0] for span in record.ranges)
    largest = max(span.max[0] for span in record.ranges)
    takes_k = record.ranges[0].k is not None
    batched = not takes_k and smallest == 1 and largest > 1
    return _BackendForm(
        max_batch=largest if batched else 0,
        files={"model.plan": plan.path},
        outputs=[*_engine_outputs(bundle, record)],
        k={"is_shape_tensor": True},
        instance={"profile": [str(index) for index in range(len(record.ranges))]},
        notes=(f"{record.file} needs a Triton with TensorRT {record.version}, which built it",),
    )


def _engine_outputs(bundle: Bundle, record: EngineRecord) -> Iterator[TensorSpec]:
    """Yields the engine's outputs: those of its graph, and those of `--expose-routing`."""
    known = {port.name: port for port in bundle.manifest.outputs}
    for name in record.settings.get("outputs", [*known]):
        if not isinstance(name, str):
            raise BundleError(f"{record.file}: the engine's outputs in the manifest are not names")
        sets = name.endswith(f"/{SELECTED}")
        shape = ("batch", "k") if sets else ("batch", "tokens", "experts")
        yield known.get(name) or TensorSpec(name, "int64" if sets else "float32", shape)


def _python(bundle: Bundle, options: TritonRequest) -> _BackendForm:
    import onnx

    manifest = bundle.manifest
    names = {MANIFEST_FILE}
    for graph in manifest.graphs:
        file = bundle.graph_file(graph.file)
        names |= {graph.file, *external_files(onnx.load(file, load_external_data=False))}
    parameters = {"provider": "cuda" if _device(bundle, options) == "gpu" else "cpu"}
    parameters |= {"runtime": runtime_of(manifest.target)}
    parameters |= {} if options.threads is None else {"threads": str(options.threads)}
    parameters |= {"k": str(_k(bundle, options))} if manifest.k == "input" else {}
    return _BackendForm(
        max_batch=_most(bundle),
        files={"model.py": PROGRAM, **{f"{BUNDLE}/{n}": bundle.path / n for n in sorted(names)}},
        outputs=manifest.outputs,
        k={"optional": True},
        optional=True,
        parameters=parameters,
    )


def _samples(bundle: Bundle, options: TritonRequest, *, batched: bool) -> dict[str, np.ndarray]:
    """Returns an input of the parity check, or a batch if its size is fixed; may be empty."""
    manifest = bundle.manifest
    if PARITY_FILE not in manifest.files or manifest.inputs[0].dtype == "bfloat16":
        return {}
    feeds = Reference.load(bundle.path / PARITY_FILE).feeds(manifest.inputs[0].name)
    count = manifest.batches.opt if manifest.batches.fixed else manifest.group_size
    arrays = {
        port.name: np.ascontiguousarray(feeds[port.name][:count], dtype=port.dtype)
        for port in manifest.inputs
        if port.name in feeds
    }
    if manifest.k == "input":
        k = np.array([_k(bundle, options)], np.int64)
        arrays[K_INPUT] = k[None] if batched else k
    return arrays


def _ensemble(name: str, members: Mapping[str, ServedModel]) -> ServedModel:
    """Returns a model that calls every member, and returns its outputs as `OUTPUT_kK`."""
    first = next(iter(members.values()))
    inputs = first.interface["input"]
    outputs, steps = [], []
    for k, member in members.items():
        if member.interface["input"] != inputs:
            raise UsageError(
                f"the inputs of {member.name} differ from those of {first.name}",
                hint="an ensemble needs bundles of one network with different k",
            )
        named = {port["name"]: f"{port['name']}_k{k}" for port in member.interface["output"]}
        outputs += [{**port, "name": named[port["name"]]} for port in member.interface["output"]]
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
        beside={},
        notes=(),
    )


def _check_free(folder: Path, model: ServedModel, options: TritonRequest) -> None:
    """Raises `OutputError` if a model's version exists, or if another model has its name.

    Raises `UsageError` for a name that no folder can have.
    """
    if len(model.name) > LONGEST_NAME:
        raise UsageError(
            f"{model.name[:40]}…: the model's name has {len(model.name)} characters, more than "
            f"the {LONGEST_NAME} of a folder",
            hint="give a shorter --name",
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
            hint=f"--version {options.version + 1} adds one; --force replaces the model",
        )
    if not (folder / CONFIG).read_bytes().startswith(config.text(model.interface).encode()):
        raise OutputError(
            f"{folder}: version {options.version} would differ in backend, batch, inputs or "
            f"outputs, which all versions share in {CONFIG}",
            hint="choose another --name, or --force to replace the model",
        )


def _stage(model: ServedModel, folder: Path, existing: Path, options: TritonRequest) -> None:
    """Writes a model's folder, including its existing versions.

    Files that all versions share stay unchanged, because a user may have edited them.
    """
    if existing.exists() and not options.force:
        shutil.copytree(existing, folder, copy_function=_linked)
    (folder / str(options.version)).mkdir(parents=True)
    text = config.text(model.interface) + config.text(model.settings)
    shared = {CONFIG: text.encode(), **model.beside}
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


def _linked(source: str, target: str) -> None:
    """Links a file of an existing version, or copies it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
