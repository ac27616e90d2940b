"""Measures, on this machine, the lowerings that suit each layer (`--lowering tune`).

A layer is timed alone: its own weights in a graph of one layer, in ONNX Runtime, at the k and sizes
for which the export is optimised. The candidates take turns (`common.timing`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from ..common.console import Progress, Silent
from ..common.environment import cpu_model, versions
from ..common.latency import Latency, differs
from ..common.onnx_runtime import ort
from ..common.timing import IndexedCall, Protocol, measure
from ..common.writing import scratch_folder
from ..errors import LoweringError, MoexportError, UsageError
from ..graphs.builder import Builder
from ..graphs.lower import lower
from ..graphs.lowerings import lowerings_of
from ..graphs.lowerings.base import AnyLowering, AnyPlan
from ..graphs.lowerings.choice import exact_lowerings
from ..graphs.lowerings.cost import machine_for
from ..graphs.names import DOMAIN
from ..graphs.targets import TARGETS, Target
from .bundle.manifest import TimedLowering, TunedLayers, Tuning
from .bundle.runtimes import RUNTIMES, check_runs, open_graph, options_for
from .bundle.weights import WeightsWriter, layer_bytes, write_layer
from .job import ExportJob
from .quantization.precision import PrecisionPlan
from .session import Session, SessionOptions

PROTOCOL = Protocol(rounds=5, warmup=2, round_s=0.1, inputs=4)

COPY_LIMIT_BYTES = 2 << 30
"""A lowering that copies more weights than this for one batch is not measured."""

INPUTS = "random normal tokens, with a different direction for each input"
SEED = 1

IR_VERSION = 10
"""The version of the timed graphs' format; every supported ONNX Runtime accepts it."""


def with_fastest(tuned: TunedLayers, plan: AnyPlan, target: Target) -> AnyPlan:
    """Returns a plan with the lowering that was fastest; the measurements are its `reason`."""
    chosen = lowerings_of(plan.spec.kind)[tuned.chosen]
    predicted_us = chosen.predict_us(plan, machine_for(target, plan.precision))
    plan = replace(plan, chosen=chosen, predicted_us=predicted_us)
    if not tuned.candidates:
        reason = "the only lowering for this layer and target: nothing was measured"
        return replace(plan, reason=reason)
    best, *others = tuned.candidates
    listed = [
        f"{other.lowering} {other.latency_ms.median:.3g} ms"
        + ("" if differs(best.latency_ms, other.latency_ms) else ", no difference")
        for other in others
    ] + list(tuned.left_out)
    reason = (
        f"measured {best.latency_ms.median:.3g} ms, spread {best.latency_ms.spread:.0%}, for "
        f"k = {tuned.k} of {tuned.experts} at batch {tuned.batch}"
    )
    if listed:
        reason += f" (others: {'; '.join(listed)})"
    return replace(plan, reason=reason)


@dataclass(frozen=True)
class MeasurementOptions:
    """How layers are measured: for how long, and on what inputs (random ones if none are given).

    `inputs` are the inputs of layers in a real model, [s, m, d] by layer; s ≥ the batch size.
    With `alone`, a lowering without alternatives is also measured. A lowering is left out if it is
    predicted to take over `within` times as long as the fastest. `spin_ms`: see `SessionOptions`.
    """

    protocol: Protocol = PROTOCOL
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    alone: bool = False
    within: float = math.inf
    spin_ms: float | None = None


@dataclass(frozen=True)
class _Group:
    """Identical layers, of which the first is measured: its node, and the names of all."""

    node: ir.Node
    names: tuple[str, ...]
    plan: AnyPlan


def _machine(target: Target) -> str:
    """Returns the name of the machine on which a target's graphs run."""
    if TARGETS[target].on_cpu:
        return cpu_model()
    from .tensorrt.backends import first_gpu  # not needed for CPUs

    gpu = first_gpu()
    return cpu_model() if gpu is None else gpu.name


def measure_lowerings(
    job: ExportJob,
    traced: ir.Model,
    precision: PrecisionPlan,
    progress: Progress | None = None,
    measuring: MeasurementOptions | None = None,
) -> Tuning:
    """Returns the latency of every candidate for every layer of a traced model.

    Layers of the same shape and k are measured once. If k is an input of the export, it is one here
    as well: a quarter of the experts is timed. Raises `LoweringError` if no candidate runs,
    `UsageError` if the temporary folder has no space for a layer's weights, and `EngineError`
    if the target's provider does not run here.
    """
    measuring = measuring or MeasurementOptions()
    target, threads = job.options.target, torch.get_num_threads()
    check_runs(target)
    session = options_for(target, threads, measuring.spin_ms)
    name, device = session.runtime, "cpu" if TARGETS[target].on_cpu else "gpu"
    return Tuning(
        machine=_machine(target),
        provider=session.provider if "provider" in RUNTIMES[name].takes else device,
        runtime=f"{name} {versions((name,)).get(name, ort.__version__)}",
        threads=threads,
        rounds=measuring.protocol.rounds,
        inputs="real tokens" if measuring.inputs else INPUTS,
        measured=tuple(
            _measure_group(group, job, precision, session, progress or Silent(), measuring)
            for group in _groups(job, traced, precision)
        ),
    )


def _groups(job: ExportJob, traced: ir.Model, precision: PrecisionPlan) -> list[_Group]:
    layers = job.computed_in(precision.layers).traced_layers(traced)
    plans = {plan.name: plan for plan in layers}
    nodes = {
        node.attributes.get_string("layer"): node for node in traced.graph if node.domain == DOMAIN
    }
    groups: dict[object, list[str]] = {}
    for name, plan in plans.items():
        x = nodes[name].inputs[0]
        assert x is not None and x.shape is not None
        layer = precision.layers[name]
        key = (
            *(replace(plan.spec, name=""), plan.k, plan.tokens, str(x.shape), x.dtype),
            *(layer.precision, layer.inner),
        )
        groups.setdefault(key, []).append(name)
    return [_Group(nodes[names[0]], tuple(names), plans[names[0]]) for names in groups.values()]


def _measure_group(
    group: _Group,
    job: ExportJob,
    precision: PrecisionPlan,
    session: SessionOptions,
    progress: Progress,
    measuring: MeasurementOptions,
) -> TunedLayers:
    plan, name = group.plan, group.names[0]
    candidates = exact_lowerings(plan, job.options.target)
    machine = machine_for(job.options.target, plan.precision)
    predicted = {candidate.name: candidate.predict_us(plan, machine) for candidate in candidates}
    limit_us = measuring.within * min(predicted.values())
    candidates = [candidate for candidate in candidates if predicted[candidate.name] <= limit_us]
    latencies: dict[str, Latency] = {}
    left_out: dict[str, str] = {}
    if len(candidates) > 1 or measuring.alone:
        with scratch_folder("tune") as folder:
            paths = _write_candidates(group, job, precision, candidates, folder, left_out)
            latencies = _time(paths, group, session, progress, left_out, measuring)
        if not latencies:
            reasons = "; ".join(f"{lowering}: {reason}" for lowering, reason in left_out.items())
            raise LoweringError(
                f"layer {name}: no lowering could be measured: {reasons}",
                hint="--lowering auto chooses by prediction",
            )
    ranked = sorted(latencies, key=lambda name: latencies[name].median)
    return TunedLayers(
        layers=group.names,
        experts=plan.spec.experts,
        k=plan.typical_k,
        batch=plan.batch,
        tokens=plan.tokens,
        precision=precision.layers[name].precision,
        chosen=ranked[0] if ranked else candidates[0].name,
        candidates=tuple(TimedLowering(name, latencies[name]) for name in ranked),
        left_out=left_out,
    )


def _write_candidates(
    group: _Group,
    job: ExportJob,
    precision: PrecisionPlan,
    candidates: Sequence[AnyLowering],
    folder: Path,
    left_out: dict[str, str],
) -> dict[str, Path]:
    """Writes the layer's weights once and a graph per candidate; returns the graphs' files.

    Candidates that copy too much for one batch are added to `left_out`.
    """
    name, plan, options = group.names[0], group.plan, job.options
    layer, compute = job.model.layers[name], precision.layers[name]
    needed, free = layer_bytes(layer, compute), shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"--lowering tune: {folder.parent} has {free / 1e6:.0f} MB free, but the weights of "
            f"{name} take {needed / 1e6:.0f} MB",
            hint="free some space there, or set TMPDIR to a folder elsewhere",
        )
    with WeightsWriter(folder, reading=job.model.source.reading()) as writer:
        tensors = write_layer(writer, name, layer, compute)
    traced = _single_layer(group.node, options.least_opset, plan)
    paths = {}
    for candidate in candidates:
        copied = candidate.copied_bytes(plan)
        if copied > COPY_LIMIT_BYTES:
            left_out[candidate.name] = f"it would copy {copied / 1e9:.1f} GB of weights for a batch"
            continue
        built = replace(plan, chosen=candidate).to_layer(
            tensors,
            options.target,
            compute,
            renormalize=options.renormalize,
            scores=options.shown_routing == "scores",
        )
        paths[candidate.name] = folder / f"{candidate.name}.onnx"
        lowered = lower(traced, {name: built}, fp16_weights=options.fp16_weights)
        ir.save(lowered.model, paths[candidate.name])
    return paths


def _random_routing(b: Builder, tokens: ir.Value, plan: AnyPlan) -> list[ir.Value]:
    """Returns the routing inputs of a layer, as random projections of its tokens.

    These are the indices and weights of rows (token-routed), the coefficients of each level (muMoE)
    or the slots of a Soft MoE layer that is given C, whose logits are the tokens.
    """
    spec, random = plan.spec, np.random.default_rng(SEED)

    def weight(name: str, *shape: int) -> ir.Value:
        return b.weight(ir.tensor(random.standard_normal(shape).astype(np.float32)), name)

    if spec.chooses_sets:
        mean = b.op("ReduceMean", tokens, b.ints(1), keepdims=1, name="mean")
        transposed = b.op("Transpose", mean, perm=[0, 2, 1], name="turned")
        return [b.op("Mul", transposed, weight("row", 1, 1, spec.dim), name="slots")]
    if not spec.flat:
        logits = [
            b.op("MatMul", tokens, weight(f"level_{i}", spec.dim, n), name=f"logits_{i}")
            for i, n in enumerate(spec.levels)
        ]
        return [b.op("Softmax", x, axis=-1, name=f"shares_{i}") for i, x in enumerate(logits)]
    logit = b.op("MatMul", tokens, weight("router", spec.dim, spec.experts), name="logits")
    k = b.ints(plan.typical_k)
    scores, indices = b.ops("TopK", logit, k, names=("scores", "indices"), axis=-1)
    return [indices, b.op("Softmax", scores, axis=-1, name="weights")]


def _single_layer(node: ir.Node, opset: int, plan: AnyPlan) -> ir.Model:
    """Returns a traced layer as a separate graph, with FP32 tokens as its input and output.

    A layer whose experts are chosen outside it gets a random router, the same for all candidates.
    """
    (x, *routing), (y,) = node.inputs, node.outputs
    assert x is not None
    routed = [value for value in routing if value is not None]
    fp32, b = ir.DataType.FLOAT, Builder("alone")
    tokens = first = ir.Value(name="input", shape=x.shape, type=ir.TensorType(fp32))
    chosen = _random_routing(b, tokens, plan) if routed else []
    for value, traced in zip(chosen, routed, strict=True):
        value.shape, value.type = traced.shape, traced.type
    if routed and plan.spec.chooses_sets:
        first = b.op("Softmax", tokens, axis=-1, name="shares")
    inner = b.op("Cast", first, to=(x.dtype or fp32).value, name="tokens")
    inner.shape, inner.type = x.shape, x.type
    layer = ir.Node(node.domain, node.op_type, [inner, *chosen], node.attributes.values())
    b.nodes.append(layer)
    (result,) = layer.outputs
    result.name, result.shape, result.type = "outputs", y.shape, y.type
    output = b.op("Cast", result, to=fp32.value, name="output")
    output.shape, output.type = y.shape, ir.TensorType(fp32)
    graph = ir.Graph(
        [tokens],
        [output],
        nodes=b.nodes,
        initializers=b.initializers,
        opset_imports={"": opset, DOMAIN: 1},
    )
    return ir.Model(graph, ir_version=IR_VERSION)


def _time(
    paths: Mapping[str, Path],
    group: _Group,
    options: SessionOptions,
    progress: Progress,
    left_out: dict[str, str],
    measuring: MeasurementOptions,
) -> dict[str, Latency]:
    """Returns the latencies of the graphs that run, and adds the others to `left_out`."""
    real = measuring.inputs.get(group.names[0])
    if real is None or len(group.node.inputs) > 1:
        batches = _random_tokens(group.plan, group.node)
    else:
        rows = np.split(np.arange(PROTOCOL.inputs * group.plan.batch) % len(real), PROTOCOL.inputs)
        batches = [np.ascontiguousarray(real[indices]) for indices in rows]
    k = group.plan.typical_k if group.plan.k is None else None
    cases: dict[str, IndexedCall] = {}
    for name, path in paths.items():
        try:
            session = open_graph(path, options)
        except MoexportError as error:
            left_out[name] = error.message
        else:
            cases[name] = partial(_call, session, batches, k)
    others = f" and {len(group.names) - 1} like it" if len(group.names) > 1 else ""
    title = f"measuring {group.names[0]}{others}"
    timings = measure(cases, measuring.protocol, title=title, progress=progress)
    left_out |= timings.failures
    return timings.latencies


def _call(session: Session, batches: Sequence[np.ndarray], k: int | None, index: int) -> None:
    session(batches[index], k)


def _random_tokens(plan: AnyPlan, node: ir.Node) -> list[np.ndarray]:
    """Returns batches [b, m, d] or [t, d] to use in turn; the routing differs between inputs."""
    random, spec = np.random.default_rng(SEED), plan.spec
    # A layer that is given slots has C as its input.
    takes_slots = spec.chooses_sets and len(node.inputs) > 1
    width = spec.experts * spec.slots if takes_slots else spec.dim
    batches = []
    for _ in range(PROTOCOL.inputs):
        direction = random.standard_normal((plan.batch, 1, width), np.float32)
        x = direction + random.standard_normal((plan.batch, plan.tokens, width), np.float32)
        batches.append(x.reshape(-1, width) if spec.flat else x)
    return batches
