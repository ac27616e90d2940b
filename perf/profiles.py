"""Measures the time of whole models by kind of op, in ONNX Runtime and in OpenVINO.

The time of a call is measured without a profile, which adds microseconds to every op; only the
shares are from the profile. A product of large FP32 matrices is also measured.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import moexport
import numpy as np
import torch
from moexport.common.console import Progress
from moexport.common.onnx_runtime import ort
from moexport.common.text import markdown
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.runtimes import RUNTIMES
from moexport.exporter.families.mumoe_gpt2 import GPT2Spec
from moexport.exporter.families.mumoe_mixer import MixerSpec
from moexport.exporter.model import Model
from moexport.graphs.targets import Precision, Runtime, Target
from moexport.plugins.demo.mumoe import save, trainable_gpt2, trainable_mixer
from moexport.plugins.openvino.session import openvino_package

from .measure import measured_on, threads
from .scale import vit_checkpoint

BATCHES = (1, 8, 32)
CALLS = 5
SQUARE = 2048
TARGETS: Mapping[Runtime, Target] = {"onnxruntime": "ort-cpu", "openvino": "openvino"}

KINDS: Mapping[str, tuple[str, ...]] = {
    "products": ("MatMul", "Gemm", "MoE", "Conv", "FullyConnected", "Einsum"),
    "attention": ("Attention", "MHA"),
    "activations": ("Gelu", "Softmax", "Erf", "Silu", "Sigmoid", "Tanh", "Exp"),
    "norms": ("Normalization", "MVN", "RMS"),
    "moves": (
        *("Transpose", "Reshape", "Split", "Concat", "Gather", "Slice", "Reorder", "Expand"),
        *("Scatter", "Pad", "Squeeze", "Broadcast", "Tile", "Memory"),
    ),
    "rounding": ("QuantizeLinear", "FakeQuantize", "Convert", "Cast"),
}
"""The parts of op names that identify each kind; the longest match counts, and `other` has none."""

REST = "other"


@dataclass(frozen=True, slots=True)
class Profiled:
    """A model to profile: `make` writes it to a folder and loads it, `feed` creates a batch."""

    name: str
    make: Callable[[Path], Model]
    feed: Callable[[Bundle, int], dict[str, np.ndarray]]
    k: str = "n"
    precisions: tuple[Precision, ...] = ("fp32",)


def vit(folder: Path, *, experts: int, hidden: int, dim: int, heads: int, depth: int = 12) -> Model:
    """Returns a Soft MoE ViT with random weights and experts in the second half of its blocks."""
    file = folder / "vit.pt"
    shape = {"experts": experts, "hidden": hidden, "dim": dim, "depth": depth}
    vit_checkpoint(file, moe_from=depth // 2, stacked=True, **shape)  # type: ignore[arg-type]
    return moexport.load(file, config={"num_heads": heads, "rest": "default"})


def mixer(folder: Path, spec: MixerSpec, experts: int, hidden: tuple[int, int], rank: int) -> Model:
    """Returns a muMoE MLP-Mixer with random weights."""
    file = folder / "mixer.pt"
    save(trainable_mixer(spec, experts, hidden, rank), file)
    return moexport.load(file, config={"patch_size": spec.patch, "act": "entmax15"})


def gpt2(folder: Path, spec: GPT2Spec, experts: int, hidden: int, rank: int) -> Model:
    """Returns a muMoE GPT-2 with a cache and random weights."""
    file = folder / "gpt2.pt"
    network = trainable_gpt2(spec, experts, hidden, rank)
    save(network, file, n_layer=spec.depth, n_head=spec.heads, n_embd=spec.dim)
    return moexport.load(file, config={"use_cache": True})


def images(bundle: Bundle, batch: int) -> dict[str, np.ndarray]:
    """Returns random images."""
    (spec,) = bundle.manifest.inputs
    shape = [batch, *(size for size in spec.shape[1:] if isinstance(size, int))]
    return {spec.name: np.random.default_rng(1).standard_normal(shape).astype(np.float32)}


def next_token(bundle: Bundle, batch: int, context: int = 128) -> dict[str, np.ndarray]:
    """Returns one token for each input, with a cache of `context` earlier ones."""
    ids, *past = bundle.manifest.inputs
    heads, width = past[0].shape[1], past[0].shape[3]
    assert isinstance(heads, int) and isinstance(width, int)
    cache = np.random.default_rng(0).standard_normal((batch, heads, context, width))
    feed = {spec.name: cache.astype(np.float32) for spec in past}
    return {ids.name: np.zeros((batch, 1), np.int64), **feed}


MIXER_SPEC = MixerSpec(grid=(14, 14), patch=16, channels=3, dim=512, depth=8, classes=1000)
GPT2_SPEC = GPT2Spec(1024, 50304, depth=12, heads=12, dim=768, bias=True)

MODELS = (
    Profiled(
        "ViT-S/16, 32 experts, k = 8",
        lambda folder: vit(folder, experts=32, hidden=1536, dim=384, heads=6),
        images,
        k="8",
        precisions=("fp32", "int8"),
    ),
    Profiled(
        "ViT-B/16, 128 experts of 384, k = 32",
        lambda folder: vit(folder, experts=128, hidden=384, dim=768, heads=12),
        images,
        k="32",
    ),
    Profiled(
        "muMoE MLP-Mixer S/16",
        lambda folder: mixer(folder, MIXER_SPEC, 64, (256, 2048), 384),
        images,
    ),
    Profiled(
        "muMoE GPT-2, a token after 128",
        lambda folder: gpt2(folder, GPT2_SPEC, 64, 3072, 512),
        next_token,
    ),
)


def measure(
    progress: Progress,
    models: tuple[Profiled, ...] = MODELS,
    batches: tuple[int, ...] = BATCHES,
    calls: int = CALLS,
) -> dict[str, object]:
    """Returns the milliseconds of each kind of op, by model, precision, runtime and batch."""
    count, rows = threads(), []
    for each in models:
        with tempfile.TemporaryDirectory(prefix="moexport-profile-") as directory:
            folder = Path(directory)
            progress.step(each.name)
            model = each.make(folder)
            for precision in each.precisions:
                for runtime, bundle in _exported(each, model, precision, folder):
                    opened = OPENED[runtime](bundle.path / "model.onnx", count)
                    for batch in batches:
                        progress.step(f"{each.name}, {precision}, {runtime}, batch {batch}")
                        row = _profiled(opened, each.feed(bundle, batch), calls)
                        identity = {"precision": precision, "runtime": runtime, "batch": batch}
                        rows.append({"model": each.name, **identity, **row})
    matrix = torch.randn(SQUARE, SQUARE)
    seconds = [_seconds(lambda: matrix @ matrix) for _ in range(calls + 1)]
    rate = 2 * SQUARE**3 / median(seconds[1:])
    return {"profiles": rows, "threads": count, "gflop_s": rate / 1e9}


def _exported(
    each: Profiled, model: Model, precision: Precision, folder: Path
) -> Iterator[tuple[Runtime, Bundle]]:
    for runtime, target in TARGETS.items():
        options: dict[str, Any] = {"target": target, "precision": precision, "verify": False}
        if precision == "int8":
            x = np.random.default_rng(0).standard_normal((8, 3, 224, 224)).astype(np.float32)
            np.savez(folder / "data.npz", **{model.input.name: x})  # type: ignore[arg-type]
            options |= {"quantize": "all", "data": folder / "data.npz"}
        destination = folder / f"{runtime}-{precision}"
        yield runtime, moexport.export(model, destination, k=each.k, **options)


Opened = tuple[Callable[[Mapping[str, np.ndarray]], object], Callable[..., dict[str, float]]]
"""A function that runs a graph, and one that returns the mean milliseconds of each op per call."""


def in_onnxruntime(file: Path, count: int) -> Opened:
    """Opens a graph in ONNX Runtime."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = count
    plain = ort.InferenceSession(file, settings, providers=["CPUExecutionProvider"])

    def profile(feed: Mapping[str, np.ndarray], calls: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            settings.enable_profiling = True
            settings.profile_file_prefix = str(Path(folder) / "profile")
            session = ort.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
            session.run(None, dict(feed))
            for _ in range(calls):
                session.run(None, dict(feed))
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        found: Counter[str] = Counter()
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                found[event["args"]["op_name"]] += event["dur"]
        return {op: us / 1e3 / (calls + 1) for op, us in found.items() if op != "If"}

    return lambda feed: plain.run(None, dict(feed)), profile


def in_openvino(file: Path, count: int) -> Opened:
    """Opens a graph in OpenVINO, without changing the graph's types."""
    core = openvino_package().Core()
    settings = {"INFERENCE_NUM_THREADS": count, "INFERENCE_PRECISION_HINT": "f32"}
    network = core.read_model(file)
    plain = core.compile_model(network, "CPU", settings)

    def profile(feed: Mapping[str, np.ndarray], calls: int) -> dict[str, float]:
        compiled = core.compile_model(network, "CPU", {**settings, "PERF_COUNT": True})
        request, found = compiled.create_infer_request(), Counter[str]()
        request.infer(dict(feed))
        for _ in range(calls):
            request.infer(dict(feed))
            for op in request.get_profiling_info():
                found[op.node_type] += op.real_time.total_seconds()
        return {op: 1e3 * seconds / calls for op, seconds in found.items()}

    return lambda feed: plain(dict(feed)), profile


OPENED: Mapping[Runtime, Callable[[Path, int], Opened]] = {
    "onnxruntime": in_onnxruntime,
    "openvino": in_openvino,
}


def _profiled(opened: Opened, feed: Mapping[str, np.ndarray], calls: int) -> dict[str, object]:
    run, profile = opened
    seconds = [_seconds(lambda: run(feed)) for _ in range(calls + 1)][1:]
    ops = {op: ms for op, ms in profile(feed, calls).items() if ms > 0}
    kinds: defaultdict[str, float] = defaultdict(float)
    for op, ms in ops.items():
        kinds[kind_of(op)] += ms
    return {"ms": 1e3 * median(seconds), "kinds": dict(kinds), "ops": ops}


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def kind_of(op: str) -> str:
    """Returns the kind of an op, by its name in either runtime."""
    by_length = sorted(
        ((part, kind) for kind, parts in KINDS.items() for part in parts if part in op),
        key=lambda found: -len(found[0]),
    )
    return by_length[0][1] if by_length else REST


def table(body: Any) -> str:
    """Returns the shares of each kind of op as Markdown."""
    kinds = (*KINDS, REST)
    rows = []
    for row in body["profiles"]:
        total = sum(row["kinds"].values())
        shares = (f"{row['kinds'].get(kind, 0) / total:.0%}" for kind in kinds)
        named = (row["model"], row["precision"].upper(), RUNTIMES[row["runtime"]].title)
        rows.append((*named, str(row["batch"]), f"{row['ms']:.1f}", *shares))
    head = (
        f"Measured on {measured_on(body)}, {body['threads']} threads; a product of large matrices "
        f"in FP32 reaches {body['gflop_s']:.0f} GFLOP/s."
    )
    heads = ("model", "precision", "runtime", "batch", "ms", *kinds)
    return f"{head}\n\n{markdown(heads, rows, words=3)}"
